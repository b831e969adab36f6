"""The coordinator's side of checkpoints: orders to all tasks at once.

Every order goes under the leadership that its task obeys (``runtime/session/lead.py``). A task that another chief
claims meanwhile refuses the rest of a save or restore.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from absl import logging

from runtime.checkpoint import streaming
from runtime.checkpoint.byte_ranges import ByteRange
from runtime.checkpoint.pacing import Pace, in_background
from runtime.checkpoint.snapshot import (
    CheckpointFile,
    Snapshot,
    VariableSlice,
    WrittenArrays,
    by_task,
    half_done_steps,
)
from runtime.checkpoint.storage import WrittenStore, write_store
from runtime.errors import (
    DataLossError,
    NotFoundError,
    OpError,
    SnapshotError,
    UnavailableError,
)
from runtime.limits import Limits
from runtime.proto import services_pb2 as pb
from runtime.state.leadership import NOBODY, Leadership

PAUSE_SECS = Limits.pause_secs
"""For how long a snapshot holds updates back at most, should its coordinator die."""
ORDER_SECS = 120.0
"""Time limit of an order that should take milliseconds; the first of a chief waits for the writes of the one before."""
DROP_SECS = 5.0
STATES_SECS = 2.0
SNAPSHOT_TRIES = 5
"""How often a snapshot is begun that turns out not to be of one instant."""
ASIDE_SECS = 0.05
"""Before the second try; two processes that take snapshots at once step aside for random times, twice as long each."""

Order = pb.CheckpointOrder

_snapshotting = threading.Lock()
"""Held during a snapshot: a task is paused for one at a time, and two of this process would end each other's pauses."""
_T = TypeVar("_T")
Leaderships = Mapping[str, Leadership]
"""By task, under which it is ordered."""


class Carrier(Protocol):
    """What reaches the tasks: an open session."""

    def send_order(self, task: str, order: pb.CheckpointOrder, timeout: float | None) -> pb.CheckpointReply:
        """Has a task carry out an order; ``timeout`` is in seconds."""

    def stream(self, task: str) -> streaming.Stream:
        """Opens a way for byte ranges of variables."""


class CheckpointCoordinator:
    """Saves and restores variables where they live. Get it from ``Session.checkpoint_coordinator``.

    Args:
        carrier: takes orders and byte ranges to the tasks.
        leaderships: tells by task under whose leadership to order; called before each save and restore.
    """

    def __init__(self, carrier: Carrier, leaderships: Callable[[Sequence[str]], Leaderships]) -> None:
        self._send = carrier.send_order
        self._stream = carrier.stream
        self._leaderships = leaderships

    def snapshot(
        self, slices: Sequence[VariableSlice], number_of: str = "", *, when_paused: Callable[[], object] = lambda: None
    ) -> Snapshot:
        """Takes references to variables of all tasks as of one instant, at which no step has half its writes done.

        Args:
            slices: what to save.
            number_of: key of the slice whose value is wanted as an int.
            when_paused: called while updates wait for that instant, so it must not wait itself; at each try anew.

        Raises:
            FailedPreconditionError: a variable is not initialised; names it.
            AbortedError: another chief has taken the lead, or a task restarted.
            DeadlineExceededError: the tasks could not be held still together until all had taken their references.
        """
        held = by_task(slices)
        under = self._leaderships(list(held))
        aside = threading.Event()  # never set
        for tried in range(SNAPSHOT_TRIES):
            try:
                with _snapshotting:
                    return self._snapshot(slices, held, number_of, under, when_paused)
            except SnapshotError as error:
                if tried == SNAPSHOT_TRIES - 1:
                    raise
                logging.info("begins the checkpoint again: %s", error)
                aside.wait(random.uniform(0.0, ASIDE_SECS * 2**tried))
        raise AssertionError("the last try gives a snapshot or raises")

    def _snapshot(
        self,
        slices: Sequence[VariableSlice],
        held: Mapping[str, Sequence[VariableSlice]],
        number_of: str,
        under: Leaderships,
        when_paused: Callable[[], object],
    ) -> Snapshot:
        job = secrets.randbits(63) | 1
        tasks = list(held)
        started = time.monotonic()
        try:
            self._pause(job, tasks, under)
            when_paused()
            takes = {t: Order.Take(job=job, slices=_messages(s), report=number_of) for t, s in held.items()}
            replies = [r.take for r in self._ask({t: Order(take=take) for t, take in takes.items()}, under)]
        except BaseException:
            self._drop(job, tasks, under)
            raise
        paused = time.monotonic() - started
        number = None
        sizes: dict[VariableSlice, int] = {}
        for task, reply in zip(tasks, replies, strict=True):
            sizes.update((s, n) for s, n in zip(held[task], reply.sizes, strict=True) if s.spec.is_string)
            if any(s.array.key == number_of for s in held[task]):
                number = reply.number
        encoded = [replace(s, encoded=sizes[s]) if s.spec.is_string else s for s in slices]
        cores = min(max(r.cores, 1) for r in replies) if replies else 1
        return Snapshot(job, tuple(encoded), number, paused, under, cores)

    def _pause(self, job: int, tasks: Sequence[str], under: Leaderships) -> None:
        replies = self._ask(dict.fromkeys(tasks, Order(pause=Order.Pause(job=job, seconds=PAUSE_SECS))), under)
        waiting = half_done_steps({t: list(r.pause.steps) for t, r in zip(tasks, replies, strict=True)})
        if not waiting:
            return
        rest = {t: Order(let_through=Order.LetThrough(job=job, steps=steps)) for t, steps in waiting.items()}
        lost = {(s.session, s.step) for reply in self._ask(rest, under) for s in reply.let_through.steps}
        if lost:
            logging.warning(
                "%d steps lost their worker half-way: the checkpoint holds what they have written", len(lost)
            )

    def changed(self, slices: Sequence[VariableSlice], job: int) -> bool | None:
        """Whether variables have changed since a save took them, or since they were restored from what it had saved.

        Args:
            slices: the variables.
            job: ``Snapshot.job`` of the save.

        Returns:
            None where a task does not know: it has restarted since, or there were many saves.
        """
        questions = {t: Order.Changed(job=job, slices=_messages(s)) for t, s in by_task(slices).items()}
        try:
            return any(r.changed for r in self._ask({t: Order(changed=q) for t, q in questions.items()}, {}))
        except NotFoundError:
            return None

    def write(self, snapshot: Snapshot, directory: str, *, stream: bool = False) -> WrittenArrays:
        """Has every task write what it holds of a snapshot into a directory that all share.

        Each writes a store of its own, ``ocdbt.process_<id>``; see ``process_ids``.

        Args:
            snapshot: what to write.
            directory: where.
            stream: the tasks do not share the directory: they send what this process writes into it, a few blocks at
                a time over the tensor channel.

        Returns:
            What they have written.

        Raises:
            ResourceExhaustedError: the disk is full.
            FailedPreconditionError: a task does not see the directory.
            UnavailableError: a task died.
            AbortedError: another chief has taken the lead.
        """
        ids = self.process_ids(snapshot, stream=stream)
        if stream:
            return self._write_stream(snapshot, f"{directory}/ocdbt.process_{ids['']}")
        writes = {t: Order.Write(job=snapshot.job, directory=directory, process_id=i) for t, i in ids.items()}
        replies = self._ask({t: Order(write=write) for t, write in writes.items()}, snapshot.leaderships, None)
        files = [CheckpointFile(f.path, f.size, f.crc32) for r in replies for f in r.write.files]
        return WrittenArrays(files, frozenset(key for r in replies for key in r.write.with_nan))

    def _write_stream(self, snapshot: Snapshot, directory: str) -> WrittenArrays:
        def write() -> WrittenStore:
            with streaming.Streams(self._stream) as streams:
                # The tasks send when they are asked: when this process rests, so do they.
                cores = min(snapshot.cores, os.cpu_count() or 1)
                pace = Pace(lambda: streams.updates, threading.Event().wait, cores)
                blocks = streaming.blocks(snapshot, streams)
                return write_store(directory, blocks, group_bytes=streaming.BLOCK_BYTES, in_flight=1, pace=pace)

        written = in_background(write, "checkpoint-writer")
        return WrittenArrays([CheckpointFile(*file) for file in written.files], frozenset(written.with_nan))

    def process_ids(self, snapshot: Snapshot, *, stream: bool = False) -> dict[str, str]:
        """By task, the id of the store it writes: tells saves apart, so that a late writer is recognised."""
        if stream:
            return {"": f"{snapshot.job:x}stream"}
        return {t: f"{snapshot.job:x}{''.join(c for c in t if c.isalnum())}" for t in snapshot.tasks}

    def progress(self, snapshot: Snapshot) -> int:
        """Bytes of a snapshot that are written so far."""
        order = Order(progress=Order.Progress(job=snapshot.job))
        return sum(r.progress for r in self._ask(dict.fromkeys(snapshot.tasks, order), snapshot.leaderships))

    def verify(self, tasks: Sequence[str], directory: str, files: Sequence[CheckpointFile]) -> list[str]:
        """Has tasks compare files with their checksums, each a share of them.

        Args:
            tasks: names of the tasks.
            directory: that they share.
            files: what should be there.

        Returns:
            What is wrong, one line for each file; empty when all is well.
        """
        under = self._leaderships(tasks)
        shares = {t: Order.Verify(directory=directory) for t in tasks}
        load = dict.fromkeys(tasks, 0)
        for file in sorted(files, key=lambda f: -f.size):
            task = min(load, key=lambda t: load[t])
            shares[task].files.add(path=file.path, size=file.size, crc32=file.crc32)
            load[task] += file.size + 1
        replies = self._ask({t: Order(verify=share) for t, share in shares.items() if share.files}, under, None)
        return [problem for reply in replies for problem in reply.verify.problems]

    def restore(
        self,
        slices: Sequence[VariableSlice],
        directory: str,
        *,
        ocdbt: bool,
        zarr3: bool,
        stream: bool = False,
        check: Callable[[], Sequence[str]] | None = None,
        origin: int = 0,
    ) -> int:
        """Restores variables: every task reads what it needs, and only when all have, all change their variables.

        Args:
            slices: what to restore.
            directory: of the arrays, shared by all tasks.
            ocdbt: with ``stream``: whether they lie in an OCDBT store.
            zarr3: with ``stream``: whether they are of zarr's third version.
            stream: this process reads the arrays and sends the tasks what they need: the tasks do not share the
                directory, or another program has written it, whose arrays may be packed.
            check: called first, reads the files as a whole; when it gives problems, no variable changes.
            origin: ``Snapshot.job`` of the save; 0 when it is not known. See ``changed``.

        Returns:
            Bytes read.

        Raises:
            DataLossError: an array is damaged; no variable has changed.
            AbortedError: another chief has taken the lead.
        """
        held = by_task(slices)
        tasks = list(held)
        under = self._leaderships(tasks)
        job = secrets.randbits(63) | 1
        served = threading.Semaphore(streaming.TASKS_AT_ONCE)
        mapped = check is not None

        def read(task: str) -> int:
            messages = _messages(held[task])
            if not stream:
                order = Order.Read(job=job, slices=messages, directory=directory, ocdbt=True, mapped=mapped)
                return self._request(task, Order(read=order), under, None).read
            with served, contextlib.closing(self._stream(task)) as way:
                self._request(task, Order(receive=Order.Receive(job=job, slices=messages)), under)
                return streaming.send(
                    held[task],
                    directory,
                    ocdbt=ocdbt,
                    zarr3=zarr3,
                    mapped=mapped,
                    stream=way,
                    common=ByteRange.of_job(under[task], job),
                )

        try:
            problems = check() if check is not None else ()
            if problems:
                raise DataLossError("; ".join(problems))
            sizes = self._each(tasks, read)
            self._ask(dict.fromkeys(tasks, Order(commit=Order.Commit(job=job, origin=origin))), under)
        except BaseException:
            self._drop(job, tasks, under)
            raise
        return sum(sizes)

    def _drop(self, job: int, tasks: Sequence[str], under: Leaderships) -> None:
        """Forgets a job on its tasks; one that does not answer has forgotten it, or will."""

        def drop(task: str) -> None:
            try:
                self._request(task, Order(drop=Order.Drop(job=job)), under, DROP_SECS)
            except OpError as error:
                logging.info("dropping a checkpoint job: %s", error)

        self._each(tasks, drop)

    def release(self, snapshot: Snapshot) -> None:
        """Gives back the references of a snapshot."""
        self._drop(snapshot.job, snapshot.tasks, snapshot.leaderships)

    def states(self) -> dict[str, dict[str, bytes]]:
        """By task, the states registered there (``runtime.register_state``), or those told when it was done."""
        reply = self._request("", Order(states=Order.States()), {}, STATES_SECS).states
        found: dict[str, dict[str, bytes]] = {}
        for key, value in reply.states.items():
            task, _, name = key.partition(" ")
            found.setdefault(task, {})[name] = value
        return found

    # -- sending -----------------------------------------------------------------------------------------------

    def _request(
        self, task: str, order: Order, under: Leaderships, timeout: float | None = ORDER_SECS
    ) -> pb.CheckpointReply:
        signed = Order(leadership=under.get(task, NOBODY).to_proto())
        signed.MergeFrom(order)
        return self._send(task, signed, timeout)

    def _ask(
        self, orders: Mapping[str, Order], under: Leaderships, timeout: float | None = ORDER_SECS
    ) -> list[pb.CheckpointReply]:
        """Gives each task its order, all at the same time; the replies come in the same order."""
        return self._each(list(orders), lambda task: self._request(task, orders[task], under, timeout))

    def _each(self, tasks: Sequence[str], fn: Callable[[str], _T]) -> list[_T]:
        """Calls ``fn`` for each task at the same time and waits for all; raises the first error, if any."""
        if len(tasks) == 1:
            return [fn(tasks[0])]
        with ThreadPoolExecutor(max(len(tasks), 1), "checkpoint-orders") as pool:
            futures = [pool.submit(fn, t) for t in tasks]
        errors = [e for f in futures if (e := f.exception()) is not None]
        if errors:  # what somebody refuses says more than that somebody is gone
            raise next((e for e in errors if not isinstance(e, UnavailableError)), errors[0])
        return [f.result() for f in futures]


def _messages(slices: Sequence[VariableSlice]) -> list[pb.SliceDef]:
    return [s.to_proto() for s in slices]
