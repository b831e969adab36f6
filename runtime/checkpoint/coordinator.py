"""The coordinator's side of checkpoints: orders to all tasks at once, under one epoch.

One process coordinates at a time (the chief). It claims the tasks under an epoch larger than any before, after which
they refuse the orders of earlier coordinators.
"""

from __future__ import annotations

import contextlib
import functools
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
from runtime.checkpoint.participant import EPOCHS_AT_ONCE
from runtime.checkpoint.snapshot import CheckpointFile, Snapshot, VariableSlice, by_task, half_done_steps
from runtime.checkpoint.storage import write_store
from runtime.errors import (
    AbortedError,
    DataLossError,
    NotFoundError,
    OpError,
    SnapshotError,
    UnavailableError,
)
from runtime.proto import services_pb2 as pb
from runtime.state.write_gate import PAUSE_SECS

ORDER_SECS = 120.0
"""Time limit of an order that should take milliseconds, but for a claim that waits for an old chief's writes."""
DROP_SECS = 5.0
STATES_SECS = 2.0
CLAIM_TRIES = 10
SNAPSHOT_TRIES = 3
"""How often a snapshot is begun that turns out not to be of one instant."""

Order = pb.CheckpointOrder

_owner = secrets.randbits(63) | 1
"""This process among the coordinators."""
_snapshotting = threading.Lock()
"""Held during a snapshot: a task is paused for one at a time, and two of this process would end each other's pauses."""
_T = TypeVar("_T")


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
    """

    def __init__(self, carrier: Carrier) -> None:
        self._send = carrier.send_order
        self._stream = carrier.stream
        self._lock = threading.Lock()
        self._epoch = 0
        self._claimed: set[str] = set()

    @property
    def epoch(self) -> int:
        """The epoch under which this process coordinates; 0 before ``claim``."""
        return self._epoch

    def claim(self, tasks: Sequence[str]) -> int:
        """Becomes the coordinator of some tasks, unless this session is it already; earlier ones' jobs have ended then.

        Args:
            tasks: names of the tasks.

        Returns:
            The epoch, larger than that of any coordinator before.

        Raises:
            AbortedError: another process keeps claiming the same tasks.
        """
        with self._lock:
            if self._claimed.issuperset(tasks):
                return self._epoch
            wanted = sorted(self._claimed.union(tasks))
            query = Order(query=Order.Query())
            replies = [(r.query.epoch, r.query.owner) for r in self._ask(dict.fromkeys(wanted, query))]
            if len(set(replies)) == 1 and replies[0][0] and replies[0][1] == _owner:
                self._epoch = replies[0][0]
                self._claimed.update(wanted)
                return self._epoch
            wait = threading.Event()  # never set: two chiefs that start together step aside for random times
            for attempt in range(CLAIM_TRIES):
                epoch = max(e for e, _ in replies) + 1
                before = {t: e for t, (e, _) in zip(wanted, replies, strict=True)}
                replies = self._each(wanted, functools.partial(self._raise_epoch, before, epoch))
                if all(t == (epoch, _owner) for t in replies):
                    self._epoch = epoch
                    self._claimed.update(wanted)
                    logging.info("this task leads the saving of checkpoints now, as chief number %d of the run", epoch)
                    return epoch
                wait.wait(random.uniform(0.0, 0.05 * 2**attempt))
            raise AbortedError("another chief keeps claiming the same tasks: run one chief only")

    def _raise_epoch(self, before: Mapping[str, int], epoch: int, task: str) -> tuple[int, int]:
        """Claims a task; one that is far behind the others takes a large epoch in several steps only."""
        now = before[task]
        while now < epoch:
            now = min(epoch, now + EPOCHS_AT_ONCE - 1)
            obeys = self._request(task, Order(epoch=now, claim=Order.Claim())).claim
        return obeys.epoch, obeys.owner

    def snapshot(self, slices: Sequence[VariableSlice], number_of: str = "") -> Snapshot:
        """Takes references to variables of all tasks as of one instant, at which no step has half its writes done.

        Args:
            slices: what to save.
            number_of: key of the slice whose value is wanted as an int.

        Raises:
            FailedPreconditionError: a variable is not initialised; names it.
            AbortedError: another coordinator has taken over, or a task restarted.
            DeadlineExceededError: the tasks could not be held still together until all had taken their references.
        """
        held = by_task(slices)
        self.claim(list(held))
        for left in reversed(range(SNAPSHOT_TRIES)):
            try:
                with _snapshotting:
                    return self._snapshot(slices, held, number_of)
            except SnapshotError as error:
                if not left:
                    raise
                logging.info("begins the checkpoint again: %s", error)
        raise AssertionError("the last try gives a snapshot or raises")

    def _snapshot(
        self, slices: Sequence[VariableSlice], held: Mapping[str, Sequence[VariableSlice]], number_of: str
    ) -> Snapshot:
        job = secrets.randbits(63) | 1
        tasks = list(held)
        started = time.monotonic()
        try:
            self._pause(job, tasks)
            takes = {t: Order.Take(job=job, slices=_messages(s), report=number_of) for t, s in held.items()}
            replies = [r.take for r in self._ask({t: Order(take=take) for t, take in takes.items()})]
        except BaseException:
            self.drop(job, tasks)
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
        return Snapshot(job, tuple(encoded), number, paused, cores)

    def _pause(self, job: int, tasks: Sequence[str]) -> None:
        replies = self._ask(dict.fromkeys(tasks, Order(pause=Order.Pause(job=job, seconds=PAUSE_SECS))))
        waiting = half_done_steps({t: list(r.pause.steps) for t, r in zip(tasks, replies, strict=True)})
        if not waiting:
            return
        rest = {t: Order(let_through=Order.LetThrough(job=job, steps=steps)) for t, steps in waiting.items()}
        lost = {(s.session, s.step) for reply in self._ask(rest) for s in reply.let_through.steps}
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
            return any(r.changed for r in self._ask({t: Order(changed=q) for t, q in questions.items()}))
        except NotFoundError:
            return None

    def write(self, snapshot: Snapshot, directory: str, *, stream: bool = False) -> list[CheckpointFile]:
        """Has every task write what it holds of a snapshot into a directory that all share.

        Each writes a store of its own, ``ocdbt.process_<id>``; see ``process_ids``.

        Args:
            snapshot: what to write.
            directory: where.
            stream: the tasks do not share the directory: they send what this process writes into it, a few blocks at
                a time over the tensor channel.

        Returns:
            The files that were written; checksums of those on file systems only.

        Raises:
            ResourceExhaustedError: the disk is full.
            FailedPreconditionError: a task does not see the directory.
            UnavailableError: a task died.
            AbortedError: another coordinator has taken over.
        """
        ids = self.process_ids(snapshot, stream=stream)
        if stream:
            return self._write_stream(snapshot, f"{directory}/ocdbt.process_{ids['']}")
        writes = {t: Order.Write(job=snapshot.job, directory=directory, process_id=i) for t, i in ids.items()}
        replies = self._ask({t: Order(write=write) for t, write in writes.items()}, None)
        return [CheckpointFile(f.path, f.size, f.crc32) for r in replies for f in r.write.files]

    def _write_stream(self, snapshot: Snapshot, directory: str) -> list[CheckpointFile]:
        def write() -> list[tuple[str, int, int]]:
            with streaming.Streams(self._stream) as streams:
                # The tasks send when they are asked: when this process rests, so do they.
                cores = min(snapshot.cores, os.cpu_count() or 1)
                pace = Pace(lambda: streams.updates, threading.Event().wait, cores)
                blocks = streaming.blocks(snapshot, streams, self._byte_range(snapshot.job))
                return write_store(directory, blocks, group_bytes=streaming.BLOCK_BYTES, in_flight=1, pace=pace)

        return [CheckpointFile(*file) for file in in_background(write, "checkpoint-writer")]

    def _byte_range(self, job: int) -> ByteRange:
        return ByteRange(self._epoch, _owner, job)

    def process_ids(self, snapshot: Snapshot, *, stream: bool = False) -> dict[str, str]:
        """By task, the id of the store it writes: tells the epochs apart, so that a late writer is recognised."""
        if stream:
            return {"": f"{self._epoch}stream"}
        return {t: f"{self._epoch}{''.join(c for c in t if c.isalnum())}" for t in snapshot.tasks}

    def progress(self, snapshot: Snapshot) -> int:
        """Bytes of a snapshot that are written so far."""
        order = Order(progress=Order.Progress(job=snapshot.job))
        return sum(r.progress for r in self._ask(dict.fromkeys(snapshot.tasks, order)))

    def verify(self, tasks: Sequence[str], directory: str, files: Sequence[CheckpointFile]) -> list[str]:
        """Has tasks compare files with their checksums, each a share of them.

        Args:
            tasks: names of the tasks.
            directory: that they share.
            files: what should be there.

        Returns:
            What is wrong, one line for each file; empty when all is well.
        """
        self.claim(tasks)
        shares = {t: Order.Verify(directory=directory) for t in tasks}
        load = dict.fromkeys(tasks, 0)
        for file in sorted(files, key=lambda f: -f.size):
            task = min(load, key=lambda t: load[t])
            shares[task].files.add(path=file.path, size=file.size, crc32=file.crc32)
            load[task] += file.size + 1
        replies = self._ask({t: Order(verify=share) for t, share in shares.items() if share.files}, None)
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
            ocdbt: whether they lie in an OCDBT store.
            zarr3: whether they are of zarr's third version.
            stream: the tasks do not share the directory: this process reads it and sends them what they need.
            check: called first, reads the files as a whole; when it gives problems, no variable changes.
            origin: ``Snapshot.job`` of the save; 0 when it is not known. See ``changed``.

        Returns:
            Bytes read.

        Raises:
            DataLossError: an array is damaged; no variable has changed.
            AbortedError: another coordinator has taken over.
        """
        held = by_task(slices)
        tasks = list(held)
        self.claim(tasks)
        job = secrets.randbits(63) | 1
        served = threading.Semaphore(streaming.TASKS_AT_ONCE)
        mapped = check is not None

        def read(task: str) -> int:
            messages = _messages(held[task])
            if not stream:
                order = Order.Read(
                    job=job, slices=messages, directory=directory, ocdbt=ocdbt, zarr3=zarr3, mapped=mapped
                )
                return self._request(task, Order(read=order), None).read
            with served, contextlib.closing(self._stream(task)) as way:
                self._request(task, Order(receive=Order.Receive(job=job, slices=messages)))
                return streaming.send(
                    held[task],
                    directory,
                    ocdbt=ocdbt,
                    zarr3=zarr3,
                    mapped=mapped,
                    stream=way,
                    common=self._byte_range(job),
                )

        try:
            problems = check() if check is not None else ()
            if problems:
                raise DataLossError("; ".join(problems))
            sizes = self._each(tasks, read)
            self._ask(dict.fromkeys(tasks, Order(commit=Order.Commit(job=job, origin=origin))))
        except BaseException:
            self.drop(job, tasks)
            raise
        return sum(sizes)

    def drop(self, job: int, tasks: Sequence[str]) -> None:
        """Forgets a job on its tasks; one that does not answer has forgotten it, or will."""

        def drop(task: str) -> None:
            try:
                self._request(task, Order(drop=Order.Drop(job=job)), DROP_SECS)
            except OpError as error:
                logging.info("dropping a checkpoint job: %s", error)

        self._each(tasks, drop)

    def release(self, snapshot: Snapshot) -> None:
        """Gives back the references of a snapshot."""
        self.drop(snapshot.job, snapshot.tasks)

    def states(self) -> dict[str, dict[str, bytes]]:
        """By task, the states registered there (``runtime.register_state``); tasks that do not answer have none."""
        reply = self._request("", Order(states=Order.States()), STATES_SECS).states
        found: dict[str, dict[str, bytes]] = {}
        for key, value in reply.states.items():
            task, _, name = key.partition(" ")
            found.setdefault(task, {})[name] = value
        return found

    # -- sending -----------------------------------------------------------------------------------------------

    def _request(self, task: str, order: Order, timeout: float | None = ORDER_SECS) -> pb.CheckpointReply:
        signed = Order(epoch=self._epoch, owner=_owner)
        signed.MergeFrom(order)
        return self._send(task, signed, timeout)

    def _ask(self, orders: Mapping[str, Order], timeout: float | None = ORDER_SECS) -> list[pb.CheckpointReply]:
        """Gives each task its order, all at the same time; the replies come in the same order."""
        return self._each(list(orders), lambda task: self._request(task, orders[task], timeout))

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
