"""The coordinator's side of checkpoints: orders to all tasks at once.

A session makes one coordinator, and the Saver calls it. Every order goes under the leadership that
its task obeys (``runtime/session/lead.py``). A task that another chief claims meanwhile refuses the
rest of a save or restore.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from absl import logging

from runtime import concurrency
from runtime.checkpoint import streaming, times
from runtime.checkpoint.byte_ranges import ByteRange
from runtime.checkpoint.pacing import Pace, in_background
from runtime.checkpoint.snapshot import (
    Snapshot,
    VariableSlice,
    by_task,
    half_done_steps,
)
from runtime.checkpoint.storage import CheckpointFile, Source, WrittenArrays, write_store
from runtime.errors import (
    DataLossError,
    NotFoundError,
    OpError,
    SnapshotError,
    UnavailableError,
)
from runtime.proto import services_pb2 as pb
from runtime.state.leadership import NOBODY, Leadership

SNAPSHOT_TRIES = 5
"""Number of attempts at a snapshot whose tasks cannot be held still together."""

Order = pb.CheckpointOrder

_snapshotting = concurrency.Lock()
"""Lock held during a snapshot: a second snapshot of this process would end the pause of the first."""
_T = TypeVar("_T")
Leaderships = Mapping[str, Leadership]
"""The leadership under which each task is ordered, by name of the task."""


class OrderCarrier(Protocol):
    """The way to the tasks, which an open session is."""

    def send_order(
        self, task: str, order: pb.CheckpointOrder, timeout: float | None
    ) -> pb.CheckpointReply:
        """Sends an order to a task and returns the reply; ``timeout`` is in seconds."""

    def stream(self, task: str) -> streaming.ByteStream:
        """Opens a stream for byte ranges of variables."""


class CheckpointCoordinator:
    """Saves and restores variables where they live. Get it from ``Session.checkpoint_coordinator``.

    Args:
        carrier: way of orders and byte ranges to the tasks.
        leaderships: returns the leadership for each task; called before each save and restore.
    """

    def __init__(
        self, carrier: OrderCarrier, leaderships: Callable[[Sequence[str]], Leaderships]
    ) -> None:
        self._send = carrier.send_order
        self._stream = carrier.stream
        self._leaderships = leaderships

    def snapshot(
        self,
        slices: Sequence[VariableSlice],
        number_of: str = "",
        *,
        when_paused: Callable[[], object] = lambda: None,
    ) -> Snapshot:
        """Takes references to variables of all tasks as of one instant.

        At that instant no step has done only some of its writes.

        Args:
            slices: parts of variables to save.
            number_of: key of the slice whose value is returned as ``Snapshot.number``; empty for
                none.
            when_paused: called at each attempt while updates are held back, so the function must
                not wait.

        Raises:
            FailedPreconditionError: A variable is not initialised; the message names the variable.
            AbortedError: Another chief has taken the lead, or a task restarted.
            DeadlineExceededError: The tasks could not be held still until all had taken their
                references.
        """
        held = by_task(slices)
        under = self._leaderships(list(held))
        # This event is never set: the wait only takes time.
        aside = concurrency.Event()
        for tried in range(SNAPSHOT_TRIES):
            try:
                with _snapshotting:
                    return self._take_snapshot(slices, held, number_of, under, when_paused)
            except SnapshotError as error:
                if tried == SNAPSHOT_TRIES - 1:
                    raise
                logging.info("begins the checkpoint again: %s", error)
                aside.wait(concurrency.uniform(0.0, times.ASIDE_SECS * 2**tried))
        raise AssertionError("the last try gives a snapshot or raises")

    def _take_snapshot(
        self,
        slices: Sequence[VariableSlice],
        held: Mapping[str, Sequence[VariableSlice]],
        number_of: str,
        under: Leaderships,
        when_paused: Callable[[], object],
    ) -> Snapshot:
        assert _snapshotting.locked()
        job = concurrency.random_id(63) | 1
        tasks = list(held)
        started = concurrency.monotonic()
        try:
            self._pause(job, tasks, under)
            when_paused()
            takes = {
                t: Order(take=Order.Take(job=job, slices=_to_messages(s), report=number_of))
                for t, s in held.items()
            }
            replies = [reply.take for reply in self._ask_tasks(takes, under)]
        except BaseException:
            # Tasks that are paused would hold updates back until the pause lapses.
            self._drop_job(job, tasks, under)
            raise
        paused = concurrency.monotonic() - started
        number = None
        sizes: dict[VariableSlice, int] = {}
        for task, reply in zip(tasks, replies, strict=True):
            sizes.update(
                (s, n) for s, n in zip(held[task], reply.sizes, strict=True) if s.spec.is_string
            )
            if any(s.array.key == number_of for s in held[task]):
                number = reply.number
        encoded = [replace(s, encoded=sizes[s]) if s.spec.is_string else s for s in slices]
        return Snapshot(job, tuple(encoded), number, paused, under)

    def _pause(self, job: int, tasks: Sequence[str], under: Leaderships) -> None:
        replies = self._ask_tasks(
            dict.fromkeys(tasks, Order(pause=Order.Pause(job=job, seconds=times.PAUSE_SECS))), under
        )
        waiting = half_done_steps(
            {t: list(r.pause.steps) for t, r in zip(tasks, replies, strict=True)}
        )
        # A step with writes on several tasks may have been cut by the pauses. Its other writes are
        # let through, so that the snapshot holds all writes of the step.
        if not waiting:
            return
        rest = {
            t: Order(let_through=Order.LetThrough(job=job, steps=steps))
            for t, steps in waiting.items()
        }
        lost = {
            (s.session, s.step)
            for reply in self._ask_tasks(rest, under)
            for s in reply.let_through.steps
        }
        # The rest of such a step never comes, so the checkpoint holds the half that was written.
        if lost:
            logging.warning(
                "%d steps lost their worker half-way: the checkpoint holds what they have written",
                len(lost),
            )

    def changed(self, slices: Sequence[VariableSlice], job: int) -> bool | None:
        """Returns True if variables have changed since a save, or since their restore from that save.

        Args:
            slices: the variables.
            job: ``Snapshot.job`` of the save.

        Returns:
            None if a task does not know, after a restart or many further saves.
        """
        questions = {
            t: Order(changed=Order.Changed(job=job, slices=_to_messages(s)))
            for t, s in by_task(slices).items()
        }
        try:
            return any(reply.changed for reply in self._ask_tasks(questions, {}))
        except NotFoundError:
            return None

    def write(self, snapshot: Snapshot, directory: str, *, stream: bool = False) -> WrittenArrays:
        """Writes a snapshot: every task its part, into a directory that all tasks share.

        Each task writes a store of its own; see ``Snapshot.stores``.

        Args:
            snapshot: the snapshot.
            directory: directory of the stores.
            stream: True if the tasks do not share the directory. This process then writes, and the
                tasks send a few blocks at a time over the tensor channel.

        Returns:
            The files, and the arrays with a NaN.

        Raises:
            ResourceExhaustedError: The disk is full.
            FailedPreconditionError: A task does not see the directory.
            UnavailableError: A task died.
            AbortedError: Another chief has taken the lead.
        """
        if stream:
            return self._write_stream(snapshot, f"{directory}/{snapshot.stores(stream=True)[0]}")
        order = Order(write=Order.Write(job=snapshot.job, directory=directory))
        replies = self._ask_tasks(dict.fromkeys(snapshot.tasks, order), snapshot.leaderships, None)
        # The tasks have summed their files while writing, so the chief reads none of them.
        files = [CheckpointFile(f.path, f.size, f.crc32) for r in replies for f in r.write.files]
        return WrittenArrays(files, frozenset(key for r in replies for key in r.write.with_nan))

    def _write_stream(self, snapshot: Snapshot, directory: str) -> WrittenArrays:
        def write() -> WrittenArrays:
            with streaming.TaskStreams(self._stream) as streams:
                # The tasks send on request, so they rest while this process rests.
                pace = Pace(lambda: streams.updates, concurrency.Event().wait)
                blocks = streaming.blocks(snapshot, streams)
                return write_store(directory, blocks, group_bytes=streaming.BLOCK_BYTES, pace=pace)

        return in_background(write, "checkpoint-writer")

    def confirm(self, snapshot: Snapshot) -> None:
        """Raises AbortedError if a task has ended the job of a snapshot, or obeys another chief."""
        order = Order(confirm=Order.Confirm(job=snapshot.job))
        self._ask_tasks(dict.fromkeys(snapshot.tasks, order), snapshot.leaderships)

    def restore(
        self,
        slices: Sequence[VariableSlice],
        source: Source,
        *,
        stream: bool = False,
        check: Callable[[], Sequence[str]] | None = None,
        origin: int = 0,
    ) -> None:
        """Restores variables, of which none changes before all tasks have read their arrays.

        Args:
            slices: parts of variables to restore.
            source: store of the arrays; without ``stream``, a store of a Saver.
            stream: True if this process reads the arrays and sends each task its part. That is so
                if the tasks do not share the directory, or if another program wrote the arrays,
                which may be packed.
            check: called first, reads the files as a whole and returns problems, which end the
                restore.
            origin: ``Snapshot.job`` of the save; 0 if unknown. See ``changed``.

        Raises:
            DataLossError: An array is damaged. No variable has changed.
            AbortedError: Another chief has taken the lead.
        """
        held = by_task(slices)
        tasks = list(held)
        under = self._leaderships(tasks)
        job = concurrency.random_id(63) | 1
        served = concurrency.Semaphore(streaming.TASKS_AT_ONCE)

        def read(task: str) -> None:
            messages = _to_messages(held[task])
            if not stream:
                order = Order.Read(job=job, slices=messages, directory=source.directory)
                self._request(task, Order(read=order), under, None)
                return
            with served, contextlib.closing(self._stream(task)) as way:
                self._request(task, Order(receive=Order.Receive(job=job, slices=messages)), under)
                streaming.send(held[task], source, way, ByteRange.of_job(under[task], job))

        try:
            problems = check() if check is not None else ()
            if problems:
                raise DataLossError("; ".join(problems))
            # No task changes a variable before every task has read its arrays without error.
            self._call_each(tasks, read)
            self._ask_tasks(
                dict.fromkeys(tasks, Order(commit=Order.Commit(job=job, origin=origin))), under
            )
        except BaseException:
            self._drop_job(job, tasks, under)
            raise

    def _drop_job(self, job: int, tasks: Sequence[str], under: Leaderships) -> None:
        """Ends a job on its tasks.

        A task that does not answer has restarted without the job, or ends the job with the session.
        """

        def drop(task: str) -> None:
            try:
                self._request(task, Order(drop=Order.Drop(job=job)), under, times.DROP_SECS)
            except OpError as error:
                logging.info("dropping a checkpoint job: %s", error)

        self._call_each(tasks, drop)

    def release(self, snapshot: Snapshot) -> None:
        """Releases the references of a snapshot."""
        self._drop_job(snapshot.job, snapshot.tasks, snapshot.leaderships)

    def states(self) -> dict[str, dict[str, bytes]]:
        """Returns the states of each task by name: registered ones, or the last ones of a finished task.

        Programs register states with ``runtime.register_state``.
        """
        reply = self._request("", Order(states=Order.States()), {}, times.STATES_SECS).states
        found: dict[str, dict[str, bytes]] = {}
        for key, value in reply.states.items():
            task, _, name = key.partition(" ")
            found.setdefault(task, {})[name] = value
        return found

    # -- sending -----------------------------------------------------------------------------------------------

    def _request(
        self, task: str, order: Order, under: Leaderships, timeout: float | None = times.ORDER_SECS
    ) -> pb.CheckpointReply:
        signed = Order(leadership=under.get(task, NOBODY).to_proto())
        signed.MergeFrom(order)
        return self._send(task, signed, timeout)

    def _ask_tasks(
        self,
        orders: Mapping[str, Order],
        under: Leaderships,
        timeout: float | None = times.ORDER_SECS,
    ) -> list[pb.CheckpointReply]:
        """Sends each task its order, all at the same time; returns the replies in the same order."""
        return self._call_each(
            list(orders), lambda task: self._request(task, orders[task], under, timeout)
        )

    def _call_each(self, tasks: Sequence[str], fn: Callable[[str], _T]) -> list[_T]:
        """Calls ``fn`` for each task at the same time and waits for all; raises the first error, if any."""
        # A thread for a single task would only cost time.
        if len(tasks) == 1:
            return [fn(tasks[0])]
        replies = concurrency.call_all(fn, tasks, "checkpoint order to").values()
        errors = [error for reply in replies if (error := reply.exception()) is not None]
        # A refusal tells the reason better than the loss of another task.
        if errors:
            raise next((e for e in errors if not isinstance(e, UnavailableError)), errors[0])
        return [reply.result() for reply in replies]


def _to_messages(slices: Sequence[VariableSlice]) -> list[pb.SliceDef]:
    return [s.to_proto() for s in slices]
