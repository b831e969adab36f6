"""A task's part in checkpoints: the task takes references to its variables, and writes, reads or replaces them.

The server calls ``CheckpointParticipant.obey`` for each order of a coordinator. The participant obeys only the
leadership that its task obeys. The first order under a new leadership waits until no order works on the jobs of the
leadership before. So a late order of a dead chief can spoil nothing.

A save or restore is a job, and a job belongs to a session. Whatever ends a job ends it by ``_end``: an order that drops
or commits it, another leadership, the end of its session, the stop of the task. An ended job accepts no order, and its
arrays are free as soon as no order works on them.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from google.protobuf.message import Message

from runtime import concurrency
from runtime.checkpoint import durability, storage, string_arrays
from runtime.checkpoint.byte_ranges import ByteRange, Incoming, bytes_of
from runtime.checkpoint.pacing import Pace, in_background
from runtime.checkpoint.roots import Roots, file_below
from runtime.checkpoint.snapshot import VariableSlice, store_name
from runtime.checkpoint.states import task_states
from runtime.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    TakeoverError,
    UnavailableError,
)
from runtime.limits import Limits
from runtime.proto import services_pb2 as pb
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import NOBODY, Leadership
from runtime.state.store import Store, Values
from runtime.state.write_gate import Gate, lapsed
from runtime.tensor_spec import Array, TensorSpec, aligned_buffer

JOIN_SECS = 60.0
"""The longest time that the first order under a new leadership waits for orders under the leadership before."""
QUIET_SECS = 2.0
"""The longest time that a snapshot waits for stages under way, and for the rest of half-done steps."""
UNUSED_SECS = 600.0
"""A job unnamed for this time is ended by the next order of another job: the order to drop the job was lost."""
MAX_ARRAY_BYTES = 2**62
VALUES_OF_JOBS = 8
"""Number of saves and restores of which a task remembers the values, to answer the order ``changed``."""

_NOTHING = np.empty((0,), np.uint8)

UNFENCED = frozenset(("states", "changed"))
"""Orders that are obeyed under any leadership, because they only ask."""

NEEDS_SESSION = frozenset(("pause", "take", "read", "receive"))
"""Orders that begin a job or its snapshot. The session that sends the order owns the job."""

Order = pb.CheckpointOrder
Reply = pb.CheckpointReply


class Sender(NamedTuple):
    """The leadership under which an order comes, and the session that sends the order."""

    leadership: Leadership
    session: int


@dataclass
class Job:
    """A save or restore on this task, from the order that begins it to its end.

    Attributes:
        sender: sender of the order that began the job. The job ends with this session, and under another leadership.
        slices: parts of variables that are saved or restored.
        arrays: for each slice, the value that was taken or read.
        incoming: for each slice, the bytes received so far; empty if the task reads files itself.
        first: index of the first slice whose array is still held; earlier arrays were sent.
        used_at: ``time.monotonic()`` of the last order that named the job.
        why: reason of the end; empty while the job is under way.
        ended: event that is set together with ``why``.
        at_work: True while an order writes, reads or commits it.
        taken: the reply to the order to take, for the same order again after its reply was lost.
        written: the reply to the order to write.
    """

    sender: Sender
    slices: list[VariableSlice]
    arrays: list[Any] = field(default_factory=list)
    incoming: list[Incoming] = field(default_factory=list)
    first: int = 0
    used_at: float = field(default_factory=concurrency.monotonic)
    why: str = ""
    ended: concurrency.Event = field(default_factory=concurrency.Event)
    at_work: bool = False
    taken: Reply.Taken | None = None
    written: Reply.Written | None = None


class CheckpointParticipant:
    """Carries out a coordinator's orders on one task.

    Args:
        store: the task's variables.
        task: name of the task, for errors.
        gate: gate that holds writing stages of the task back.
        devices: devices of the task by (type, index); restored values go there.
        limits: bounds of the time that orders hold updates back, and of the number of jobs.
        connected: returns True while a session has a connection to this task. A session without a connection owns no
            job, because the task would not notice the end of the session.
    """

    def __init__(
        self,
        store: Store,
        task: str,
        gate: Gate,
        devices: Mapping[tuple[str, int], jax.Device],
        limits: Limits | None = None,
        connected: Callable[[int], bool] = lambda session: True,
    ) -> None:
        self._limits = limits or Limits()
        self._connected = connected
        self._store = store
        self._task = task
        self._gate = gate
        self._devices = devices
        self._jobs_changed = concurrency.Condition()
        # Leadership of the last order; jobs of earlier leaderships are ended.
        self._served = NOBODY
        self._jobs: dict[int, Job] = {}
        """Jobs under way, and ended jobs while an order works on them."""
        self._why_ended: OrderedDict[int, str] = OrderedDict()
        """Reason of the end by number of a job, for orders that come late."""
        # Job of the last restore, whose order comes again if the reply was lost.
        self._committed = 0
        self._taking = concurrency.Lock()
        self._values: OrderedDict[int, Values] = OrderedDict()
        self._resumed = False
        self.cores: int | None = None
        """Cores of this machine for this task, by which writing is paced; None asks the operating system."""
        self.roots = Roots()
        """Directories below which orders may have the task write and read."""
        self._table: dict[str, Callable[..., Message | int | None]] = {
            "pause": self._pause,
            "let_through": self._let_through,
            "take": self._take,
            "write": self._write,
            "confirm": self._confirm,
            "read": self._read,
            "receive": self._receive,
            "commit": self._commit,
            "drop": self._drop,
            "states": self._states,
            "changed": self._changed,
        }

    def obey(self, order: Order, cancelled: Cancellation | None = None) -> Reply:
        """Carries out one order.

        Args:
            order: the order.
            cancelled: set when no caller waits for the reply any more; has the deadline of the order.

        Raises:
            AbortedError: The order comes under another leadership than the task obeys.
            InvalidArgumentError: This version knows no such order.
            CancelledError: ``cancelled`` was set.
            DeadlineExceededError: The deadline of the order has passed.
            OpError: The order failed; the class says how.
        """
        name = order.WhichOneof("order")
        cancelled = cancelled or Cancellation()
        try:
            if name is None:
                raise InvalidArgumentError("an order about checkpoints that this version does not know")
            sender = Sender(Leadership.from_proto(order.leadership), order.session)
            if name not in UNFENCED:
                self._serve(sender.leadership, getattr(getattr(order, name), "job", 0), cancelled)
            answer = self._table[name](sender, getattr(order, name), cancelled)
        except OpError as error:
            error.task = error.task or self._task
            raise
        return Reply() if answer is None else Reply(**{name: answer})  # type: ignore[arg-type]

    def resume(self) -> None:
        """Continues as the task of another process, whose jobs are lost."""
        self._resumed = True

    def _check(self, leadership: Leadership) -> None:
        self._store.run.check(leadership, "save or restore", self._task, deposed=AbortedError)

    def _serve(self, leadership: Leadership, named: int, cancelled: Cancellation) -> None:
        """Checks the leadership of an order and ends lost jobs, but for the named job, and those of earlier chiefs."""
        with self._jobs_changed:
            self._check(leadership)
            if leadership != self._served:
                # A chief that paused the gate and lost the lead takes nothing any more.
                self._gate.open()
            self._served = leadership
            # The order to drop a job may get lost while its session lives, so that no other end comes. A task that has
            # written its part long before the others hears of the job again at the end of the save only.
            unused = concurrency.monotonic() - UNUSED_SECS
            lost = [n for n, job in self._jobs.items() if job.used_at < unused and not job.at_work and n != named]
            self._end(lost, f"no order has named it in {UNUSED_SECS:.0f} s")
            earlier = [n for n, job in self._jobs.items() if job.sender.leadership != leadership]
            self._end(earlier, "another chief has taken the lead")
            what, until = "waiting for an earlier chief's job", concurrency.monotonic() + JOIN_SECS
            if not cancelled.wait_for(self._jobs_changed, lambda: self._jobs.keys().isdisjoint(earlier), what, until):
                raise UnavailableError(f"an earlier chief's job still writes after {JOIN_SECS:.0f} s", task=self._task)

    def _check_connected(self, session: int) -> None:
        if not self._connected(session):
            raise UnavailableError(
                f"session {session:x} has no connection here, by which its end would be noticed", task=self._task
            )

    # -- the life of a job -------------------------------------------------------------------------------------

    def _begin(self, number: int, job: Job) -> Job:
        """Adds a job; returns the existing job of that number if the order comes again."""
        with self._jobs_changed:
            self._check(job.sender.leadership)
            # The order comes again after its reply was lost, or comes after the order to drop the job.
            if number in self._why_ended or number in self._jobs:
                return self._job(number)
            self._check_connected(job.sender.session)
            if len(self._jobs) >= self._limits.checkpoint_jobs:
                raise self._limits.exceeded("checkpoint_jobs", f"{len(self._jobs)} saves and restores are under way")
            self._jobs[number] = job
            return job

    def _job(self, number: int) -> Job:
        """Returns the job of a number and notes the time of use."""
        with self._jobs_changed:
            job, why = self._jobs.get(number), self._why_ended.get(number)
        if why is not None:
            raise self._has_ended(why)
        if job is None and self._resumed:
            raise TakeoverError(
                "the task goes on from its backup: the checkpoint job that was under way is lost", task=self._task
            )
        if job is None:
            raise NotFoundError(f"no such checkpoint job: {number:x}", task=self._task)
        job.used_at = concurrency.monotonic()
        return job

    @contextmanager
    def _worked_on(self, job: Job, order: Cancellation, what: str) -> Iterator[None]:
        """Waits until no other order works on a job, then reserves the job for the block."""
        with self._jobs_changed:
            order.wait_for(self._jobs_changed, lambda: not job.at_work, what)
            self._check_alive(job)
            job.at_work = True
        try:
            yield
        finally:
            with self._jobs_changed:
                job.at_work = False
                job.used_at = concurrency.monotonic()
                self._forget_ended()

    def _check_alive(self, job: Job) -> None:
        if job.why:
            raise self._has_ended(job.why)

    def _has_ended(self, why: str) -> AbortedError:
        return AbortedError(f"this checkpoint job has ended: {why}", task=self._task)

    def _end(self, numbers: Iterable[int], why: str, *, ordered: bool = False) -> None:
        """Ends jobs; every end of a job comes by this method.

        Args:
            numbers: numbers of the jobs. A number without a job is noted for late orders, too.
            why: reason of the end, for orders that come later.
            ordered: True if the job's own client ends the job, as every save ends. Only other ends are logged.
        """
        with self._jobs_changed:
            for number in numbers:
                # An order to drop may overtake the order that begins the job. That order must begin nothing then.
                self._why_ended.setdefault(number, why)
                job = self._jobs.get(number)
                if job is not None and not job.why:
                    if not ordered:
                        logging.info("%s: checkpoint job %x ends: %s", self._task, number, why)
                    job.why = why
                    job.ended.set()
                self._gate.resume(number)
            while len(self._why_ended) > self._limits.checkpoint_jobs:
                self._why_ended.popitem(last=False)
            self._forget_ended()

    def _forget_ended(self) -> None:
        self._jobs = {number: job for number, job in self._jobs.items() if job.at_work or not job.why}
        self._jobs_changed.notify_all()

    def gone(self, session: int, why: str) -> None:
        """Ends the jobs of a session that is not expected back.

        Args:
            session: owner of the jobs.
            why: reason of the end, for late orders of the session.
        """
        with self._jobs_changed:
            numbers = [number for number, job in self._jobs.items() if job.sender.session == session]
        self._end(numbers, why)

    def close(self) -> None:
        """Ends all jobs because the task stops; waits for nothing."""
        self._end(list(self._jobs), "its server has stopped")

    # -- the snapshot ------------------------------------------------------------------------------------------

    def _pause(self, sender: Sender, order: Order.Pause, cancelled: Cancellation) -> Reply.Steps:
        self._resumed = False
        if not order.seconds >= 0:
            raise InvalidArgumentError(f"a pause of {order.seconds:g} s")
        if order.seconds > self._limits.pause_secs:
            raise self._limits.exceeded("pause_secs", f"a pause of {order.seconds:g} s")
        # The snapshot would be refused without a connection, and a repeated order would find its pause used up.
        self._check_connected(sender.session)
        self._gate.pause(order.job, order.seconds, QUIET_SECS)
        try:
            self._check(sender.leadership)
        except AbortedError:
            # Another chief has taken the lead. Its first order may have opened the gate before this order paused it.
            self._gate.resume(order.job)
            raise
        now = concurrency.monotonic()
        return Reply.Steps(
            steps=[
                pb.StepWrites(
                    session=session, step=step, done=writes.done, expected=writes.expected, age_secs=now - writes.at
                )
                for (session, step), writes in self._gate.recent()
            ]
        )

    def _let_through(self, sender: Sender, order: Order.LetThrough, cancelled: Cancellation) -> Reply.Steps:
        self._resumed = False
        wanted = {(s.session, s.step): s.expected[self._task] for s in order.steps}
        lost = self._gate.let_through(order.job, wanted, QUIET_SECS)
        return Reply.Steps(steps=[pb.StepWrites(session=s, step=n) for s, n in lost])

    def _take(self, sender: Sender, order: Order.Take, cancelled: Cancellation) -> Reply.Taken:
        if self._resumed:
            raise TakeoverError(
                "the task goes on from its backup: the checkpoint that was under way is none", task=self._task
            )
        # The same order may arrive twice at once. The second one must wait for the reply of the first.
        with self._taking:
            known = self._jobs.get(order.job)
            if known is not None and known.taken is not None:
                return known.taken
            return self._take_once(sender, order)

    def _take_once(self, sender: Sender, order: Order.Take) -> Reply.Taken:
        held = False
        try:
            slices = [VariableSlice.from_proto(s) for s in order.slices]
            keys = [s.slot for s in slices]
            self._store.check_initialized(keys, self._task)
            found = self._store.snapshot(keys)
            values = self._store.values(keys)
        finally:
            # Updates wait until this line. The checks and the encoding below happen while training continues.
            held = self._gate.resume(order.job)
        # Without the pause until now, a step may have written here after another task took its references.
        if not held:
            raise lapsed(self._task)
        arrays = []
        number = 0
        for index, s in enumerate(slices):
            value = found[s.slot]
            if TensorSpec.of(value) != s.spec:
                raise InvalidArgumentError(
                    f"variable {s.variable.name!r} is {TensorSpec.of(value)} here, but the graph to be saved has it as "
                    f"{s.spec}",
                    task=self._task,
                )
            if s.array.key == order.report:
                number = int(value)
            if s.spec.is_string:
                value = string_arrays.encode_strings(value)
                slices[index] = replace(s, encoded=value.nbytes)
            arrays.append(value)
        taken = Reply.Taken(number=number, sizes=[a.nbytes for a in arrays])
        self._begin(order.job, Job(sender, slices, arrays, taken=taken))
        self._note_values(order.job, values)
        return taken

    def _note_values(self, job: int, values: Values) -> None:
        with self._jobs_changed:
            self._values[job] = values
            while len(self._values) > VALUES_OF_JOBS:
                self._values.popitem(last=False)

    def _changed(self, sender: Sender, order: Order.Changed, cancelled: Cancellation) -> int:
        with self._jobs_changed:
            values = self._values.get(order.job)
        if values is None:
            raise NotFoundError(f"no such checkpoint job: {order.job:x}", task=self._task)
        keys = [(s.container, s.name) for s in order.slices]
        now = self._store.values(keys)
        # Values are compared by identity: an update replaces the array, whatever the numbers are.
        same = [
            key in values and key in now and (value := values[key]()) is not None and value is now[key]()
            for key in keys
        ]
        return same.count(False)

    # -- saving ------------------------------------------------------------------------------------------------

    def _write(self, sender: Sender, order: Order.Write, cancelled: Cancellation) -> Reply.Written:
        job = self._job(order.job)
        with self._worked_on(job, cancelled, "writing a checkpoint"):
            if job.written is not None:
                return job.written
            for s in job.slices:
                _check_chunks(s)
            directory = self._to_write(order)
            arrays = [(s.stored, a) for s, a in zip(job.slices, job.arrays, strict=True)]

            pace = Pace(lambda: self._gate.entered, job.ended.wait, self.cores)

            def write() -> storage.WrittenStore:
                return storage.write_store(directory, arrays, cancelled=job.ended.is_set, pace=pace)

            # The priority of a thread cannot be raised again, so the thread of this order does not write itself.
            written = in_background(write, "checkpoint-writer")
            # Without these references, updates may work in place again.
            job.arrays = []
            self._check_alive(job)
            files = [pb.FileDef(path=f, size=n, crc32=c) for f, n, c in written.files]
            job.written = Reply.Written(files=files, with_nan=written.with_nan)
            return job.written

    def _to_write(self, order: Order.Write) -> str:
        """Makes the directory that an order names and returns its path.

        Raises:
            AlreadyExistsError: A checkpoint is there, finished or begun.
            PermissionDeniedError: The directory is not below a root.
        """
        self.roots.check(order.directory)
        self._check_there(order.directory)
        directory = f"{order.directory}/{store_name(order.job, self._task)}"
        free = not storage.is_store(directory) and not storage.is_store(order.directory)
        if free and storage.is_local(directory):
            try:
                # Of two orders only one makes the directory. A link at the end of the path is not followed.
                os.mkdir(directory)
            except FileExistsError:
                free = False
            except OSError as error:
                raise durability.barred(error, directory) or storage.write_error(directory, error) from None
        if not free:
            raise AlreadyExistsError(
                f"{directory} is not written: there is a checkpoint already, finished or begun by somebody else",
                task=self._task,
            )
        # Links on the way may have changed since the first check.
        self.roots.check_inside(directory)
        return directory

    def _confirm(self, sender: Sender, order: Order.Confirm, cancelled: Cancellation) -> None:
        self._job(order.job)

    # -- restoring ---------------------------------------------------------------------------------------------

    def _check_there(self, path: str) -> None:
        """Raises FailedPreconditionError if a path is missing on this machine.

        The coordinator sees the path, so the tasks do not share the directory. The checkpoint is not damaged.
        """
        if not storage.is_local(path):
            return
        try:
            os.stat(path)
        except OSError as error:
            if error.errno not in durability.NOTHING_THERE:
                # The read that follows reports every other error.
                return
            raise FailedPreconditionError(
                f"the checkpoint's {path} is not there on this machine: put it on a file system that all ps tasks "
                "share, under the same path, or use transfer='stream'",
                task=self._task,
            ) from None

    def _read(self, sender: Sender, order: Order.Read, cancelled: Cancellation) -> None:
        self.roots.check(order.directory)
        self._check_there(os.path.join(order.directory, storage.STORE_FILE))
        for stored in order.slices:
            file_below(order.directory, stored.key)
        if storage.is_local(order.directory):
            self.roots.check_tree(order.directory)
        job = self._begin(order.job, Job(sender, [VariableSlice.from_proto(s) for s in order.slices]))
        with self._worked_on(job, cancelled, "reading a checkpoint"):
            # The same order has come before, and its reply was lost.
            if job.arrays:
                return
            read: list[Any] = []
            arrays = storage.read_each(
                storage.Source(order.directory),
                [s.stored for s in job.slices],
                only_plain=True,
                cancelled=job.ended.is_set,
            )
            # The next arrays are read while one is placed. A job that ends stops the reading, so there may be fewer.
            for s, array in zip(job.slices, arrays, strict=False):
                read.append(self._placed_on_device(s, array))
            self._check_alive(job)
            job.arrays = read

    def _placed_on_device(self, s: VariableSlice, array: Any) -> Any:
        if s.spec.is_string:
            return string_arrays.decode_strings(array, s.spec.shape)
        device = self._devices.get((s.device.type, s.device.index))
        if device is None:
            raise InvalidArgumentError(
                f"no device {s.device.type}:{s.device.index} here for {s.variable.name!r}", task=self._task
            )
        # Without x64, JAX would narrow arrays of 64 bits.
        with jax.enable_x64(True):
            return jax.device_put(array, device).block_until_ready()

    def _commit(self, sender: Sender, order: Order.Commit, cancelled: Cancellation) -> None:
        if order.job == self._committed:
            return
        try:
            job = self._job(order.job)
            with self._worked_on(job, cancelled, "changing variables"):
                if len(job.arrays) != len(job.slices) or any(a is None for a in job.arrays):
                    raise FailedPreconditionError("the restore to commit has not read everything", task=self._task)
                values = {s.slot: (array, s.spec) for s, array in zip(job.slices, job.arrays, strict=True)}
                # The claim of the variables may wait for updates, so the leadership is checked again before the change.
                given = self._store.replace(values, lambda: self._check(sender.leadership))
                # The restore has overwritten the writes of steps that dead workers left half done.
                self._gate.forget()
                if order.origin:
                    self._note_values(order.origin, given)
                self._committed = order.job
                self._end([order.job], "it was committed", ordered=True)
        except AbortedError:
            # While this order waited, the same order may have committed the job before.
            if order.job != self._committed:
                raise

    def _drop(self, sender: Sender, order: Order.Drop, cancelled: Cancellation) -> None:
        self._end([order.job], "it was dropped", ordered=True)

    # -- without a shared directory --------------------------------------------------------------------------

    def pull(self, byte_range: ByteRange, client: int) -> tuple[Array, int]:
        """Returns bytes that a job has taken; the coordinator asks for slices in order.

        Args:
            byte_range: place of the bytes.
            client: session that asks, which must own the job.

        Returns:
            The bytes, uint8 [size], not copied, and the number of writing stages so far.

        Raises:
            AbortedError: Another chief has claimed the task since, or the job has ended.
            NotFoundError: The session has no such job.
        """
        with self._job_of(byte_range, client) as job:
            raw = bytes_of(job.arrays[byte_range.part], byte_range)
            # Earlier slices were sent. Without these references, updates may work in place again.
            for index in range(job.first, byte_range.part):
                job.arrays[index] = _NOTHING
            job.first = max(job.first, byte_range.part)
        return raw, self._gate.entered

    def push(self, byte_range: ByteRange, data: Array, client: int) -> None:
        """Stores bytes that a job will commit; the bytes of a slice come in order.

        Args:
            byte_range: place of the bytes.
            data: uint8 [size], copied.
            client: as in ``pull``.

        Raises:
            DataLossError: Earlier bytes of the slice did not come.
            AbortedError, NotFoundError: as ``pull``.
        """
        with self._job_of(byte_range, client) as job:
            whole = job.incoming[byte_range.part].put(byte_range.offset, data)
            if whole is not None:
                job.arrays[byte_range.part] = self._from_bytes(job.slices[byte_range.part], whole)

    @contextmanager
    def _job_of(self, byte_range: ByteRange, client: int) -> Iterator[Job]:
        """Reserves the job of a byte range for the block."""
        self._check(byte_range.leadership)
        job = self._job(byte_range.job)
        # The number of a job is no secret from other clients, so the session must be that of the owner.
        if job.sender.session != client:
            raise NotFoundError(f"no such checkpoint job of this session: {byte_range.job:x}", task=self._task)
        if byte_range.part >= len(job.slices):
            raise InvalidArgumentError(f"no slice {byte_range.part} in a checkpoint job of {len(job.slices)}")
        with self._worked_on(job, Cancellation(), "a byte range"):
            yield job

    def _receive(self, sender: Sender, order: Order.Receive, cancelled: Cancellation) -> None:
        slices = [VariableSlice.from_proto(s) for s in order.slices]
        arrays = [None if s.stored.nbytes else self._from_bytes(s, aligned_buffer(0)) for s in slices]
        incoming = [Incoming(s.stored.nbytes) for s in slices]
        self._begin(order.job, Job(sender, slices, arrays, incoming=incoming))

    def _from_bytes(self, s: VariableSlice, raw: Array) -> Any:
        return self._placed_on_device(s, raw.view(s.stored.dtype).reshape(s.stored.shape))

    def _states(self, sender: Sender, order: Order.States, cancelled: Cancellation) -> Reply.States:
        told = self._store.run.states_of_done().items()
        of_done = {f"{task} {name}": state for task, states in told for name, state in states.items()}
        return Reply.States(states=task_states(self._task, self._store.run.environment.address), of_done=of_done)


def _check_chunks(s: VariableSlice) -> None:
    """Raises InvalidArgumentError unless a slice fits its array and its chunks."""
    full, offset, chunk, shape = s.array.full_shape, s.array.offset, s.array.chunk, s.array.shape
    if s.spec.is_string or (
        len(full) == len(offset) == len(chunk) == len(shape)
        and all(0 <= o and o + n <= f for o, n, f in zip(offset, shape, full, strict=True))
        and math.prod(full) * s.array.dtype.itemsize < MAX_ARRAY_BYTES
        # of an empty slice nothing is written, and its chunks are those of the others
        and all(1 <= c <= max(n if s.array.nbytes else f, 1) for c, n, f in zip(chunk, shape, full, strict=True))
    ):
        return
    raise InvalidArgumentError(
        f"variable {s.variable.name!r} of shape {list(shape)} cannot be written in chunks of {list(chunk)} at "
        f"{list(offset)} of an array of shape {list(full)}"
    )
