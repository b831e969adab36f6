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
from typing import Protocol, TypeVar

from absl import logging

from runtime.checkpoint import streaming
from runtime.checkpoint.byte_ranges import ByteRange
from runtime.checkpoint.pacing import Pace, in_background
from runtime.checkpoint.participant import EPOCHS_AT_ONCE
from runtime.checkpoint.snapshot import CheckpointFile, Snapshot, VariableSlice, half_done_steps
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
STATES_SECS = 2.0
CLAIM_TRIES = 10
SNAPSHOT_TRIES = 3
"""How often a snapshot is begun that turns out not to be of one instant."""

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
            send = pb.CheckpointOrder(kind=pb.CheckpointOrder.QUERY)
            replies = [(r.epoch, r.owner) for r in self._each(wanted, lambda t: self._request(t, send, ORDER_SECS))]
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
            reply = self._request(
                task, pb.CheckpointOrder(kind=pb.CheckpointOrder.CLAIM, epoch=now, owner=_owner), ORDER_SECS
            )
        return reply.epoch, reply.owner

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
        by_task: dict[str, list[VariableSlice]] = {}
        for s in slices:
            by_task.setdefault(s.task, []).append(s)
        self.claim(list(by_task))
        for left in reversed(range(SNAPSHOT_TRIES)):
            try:
                with _snapshotting:
                    return self._snapshot(by_task, number_of)
            except SnapshotError as error:
                if not left:
                    raise
                logging.info("begins the checkpoint again: %s", error)
        raise AssertionError("the last try gives a snapshot or raises")

    def _snapshot(self, by_task: dict[str, list[VariableSlice]], number_of: str) -> Snapshot:
        job = secrets.randbits(63) | 1
        tasks = list(by_task)
        started = time.monotonic()
        try:
            self._pause(job, tasks)
            order = self._order(pb.CheckpointOrder.TAKE, job, report=number_of)
            replies = self._each(
                tasks, lambda t: self._request(t, _with_slices(order, [s.to_proto() for s in by_task[t]]), ORDER_SECS)
            )
        except BaseException:
            self.drop(job, tasks)
            raise
        paused = time.monotonic() - started
        number = None
        for task, reply in zip(tasks, replies, strict=True):
            if any(s.key == number_of for s in by_task[task]):
                number = reply.number
        return Snapshot(
            job,
            {t: tuple(s) for t, s in by_task.items()},
            {t: tuple(r.sizes) for t, r in zip(tasks, replies, strict=True)},
            number,
            paused,
            min(max(r.cores, 1) for r in replies) if replies else 1,
        )

    def _pause(self, job: int, tasks: Sequence[str]) -> None:
        order = self._order(pb.CheckpointOrder.PAUSE, job, seconds=PAUSE_SECS)
        replies = self._each(tasks, lambda t: self._request(t, order, ORDER_SECS))
        waiting = half_done_steps({t: list(r.steps) for t, r in zip(tasks, replies, strict=True)})
        if not waiting:
            return
        finished = self._each(
            list(waiting),
            lambda t: self._request(t, self._order(pb.CheckpointOrder.PAUSE, job, steps=waiting[t]), ORDER_SECS),
        )
        lost = {(s.session, s.step) for reply in finished for s in reply.steps}
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
        by_task: dict[str, list[pb.SliceDef]] = {}
        for s in slices:
            by_task.setdefault(s.task, []).append(s.to_proto())
        order = self._order(pb.CheckpointOrder.CHANGED, job)
        try:
            replies = self._each(list(by_task), lambda t: self._request(t, _with_slices(order, by_task[t]), ORDER_SECS))
        except NotFoundError:
            return None
        return any(reply.number for reply in replies)

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
        tasks = list(snapshot.slices)
        ids = self.process_ids(snapshot, stream=stream)
        if stream:
            return self._write_stream(snapshot, f"{directory}/ocdbt.process_{ids['']}")
        replies = self._each(
            tasks,
            lambda t: self._request(
                t, self._order(pb.CheckpointOrder.WRITE, snapshot.job, directory=directory, process_id=ids[t]), None
            ),
        )
        return [CheckpointFile(f.path, f.size, f.crc32) for r in replies for f in r.files]

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
        return {t: f"{self._epoch}{''.join(c for c in t if c.isalnum())}" for t in snapshot.slices}

    def progress(self, snapshot: Snapshot) -> int:
        """Bytes of a snapshot that are written so far."""
        order = self._order(pb.CheckpointOrder.PROGRESS, snapshot.job)
        return sum(
            r.done_bytes for r in self._each(list(snapshot.slices), lambda t: self._request(t, order, ORDER_SECS))
        )

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
        shares: dict[str, list[CheckpointFile]] = {t: [] for t in tasks}
        load = dict.fromkeys(tasks, 0)
        for file in sorted(files, key=lambda f: -f.size):
            task = min(load, key=lambda t: load[t])
            shares[task].append(file)
            load[task] += file.size + 1
        busy = [t for t in tasks if shares[t]]

        def request(task: str) -> pb.CheckpointReply:
            files = [pb.FileDef(path=f.path, size=f.size, crc32=f.crc32) for f in shares[task]]
            return self._request(task, self._order(pb.CheckpointOrder.VERIFY, directory=directory, files=files), None)

        return [p for reply in self._each(busy, request) for p in reply.problems]

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
        by_task: dict[str, list[pb.SliceDef]] = {}
        for s in slices:
            by_task.setdefault(s.task, []).append(s.to_proto())
        self.claim(list(by_task))
        job = secrets.randbits(63) | 1
        tasks = list(by_task)
        order = self._order(
            pb.CheckpointOrder.READ, job, directory=directory, ocdbt=ocdbt, zarr3=zarr3, mapped=check is not None
        )

        served = threading.Semaphore(streaming.TASKS_AT_ONCE)

        def read(task: str) -> int:
            if not stream:
                return self._request(task, _with_slices(order, by_task[task]), None).total_bytes
            of_task = [s for s in slices if s.task == task]
            with served, contextlib.closing(self._stream(task)) as way:
                self._request(
                    task, _with_slices(self._order(pb.CheckpointOrder.RECEIVE, job), by_task[task]), ORDER_SECS
                )
                return streaming.send(
                    of_task,
                    directory,
                    ocdbt=ocdbt,
                    zarr3=zarr3,
                    mapped=check is not None,
                    stream=way,
                    common=self._byte_range(job),
                )

        try:
            problems = check() if check is not None else ()
            if problems:
                raise DataLossError("; ".join(problems))
            sizes = self._each(tasks, read)
            commit = self._order(pb.CheckpointOrder.COMMIT, job, origin=origin)
            self._each(tasks, lambda t: self._request(t, commit, ORDER_SECS))
        except BaseException:
            self.drop(job, tasks)
            raise
        return sum(sizes)

    def drop(self, job: int, tasks: Sequence[str]) -> None:
        """Forgets a job on its tasks; one that does not answer has forgotten it, or will."""
        order = self._order(pb.CheckpointOrder.DROP, job)

        def request(task: str) -> None:
            try:
                self._request(task, order, 5.0)
            except OpError as error:
                logging.info("dropping a checkpoint job: %s", error)

        self._each(tasks, request)

    def release(self, snapshot: Snapshot) -> None:
        """Gives back the references of a snapshot."""
        self.drop(snapshot.job, list(snapshot.slices))

    def states(self) -> dict[str, dict[str, bytes]]:
        """By task, the states registered there (``runtime.register_state``); tasks that do not answer have none."""
        reply = self._send("", pb.CheckpointOrder(kind=pb.CheckpointOrder.STATES), STATES_SECS)
        found: dict[str, dict[str, bytes]] = {}
        for key, value in reply.states.items():
            task, _, name = key.partition(" ")
            found.setdefault(task, {})[name] = value
        return found

    # -- sending -----------------------------------------------------------------------------------------------

    def _order(self, kind: pb.CheckpointOrder.Kind.ValueType, job: int = 0, **fields: object) -> pb.CheckpointOrder:
        return pb.CheckpointOrder(kind=kind, epoch=self._epoch, owner=_owner, job=job, **fields)  # type: ignore[arg-type]

    def _request(self, task: str, order: pb.CheckpointOrder, timeout: float | None) -> pb.CheckpointReply:
        copy = pb.CheckpointOrder()
        copy.CopyFrom(order)
        return self._send(task, copy, timeout)

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


def _with_slices(order: pb.CheckpointOrder, slices: Sequence[pb.SliceDef]) -> pb.CheckpointOrder:
    copy = pb.CheckpointOrder()
    copy.CopyFrom(order)
    copy.slices.extend(slices)
    return copy
