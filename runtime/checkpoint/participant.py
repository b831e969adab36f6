"""A task's part in checkpoints: the task takes references to its variables, and writes, reads or replaces them.

The server calls ``CheckpointParticipant.obey`` for each order of a coordinator. The participant
obeys only the leadership that its task obeys. The first order under a new leadership waits until no
order works on the jobs of the leadership before. So a late order of a dead chief can spoil nothing.
A save or restore is a job (``jobs``).
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
from google.protobuf.message import Message

from runtime import concurrency
from runtime.checkpoint import durability, storage, string_arrays, times
from runtime.checkpoint.byte_ranges import ByteRange, IncomingArray, bytes_of
from runtime.checkpoint.jobs import CheckpointJob, JobTable, Sender
from runtime.checkpoint.pacing import Pace, in_background
from runtime.checkpoint.placement import ArrayPlacement, ValueMemory
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
)
from runtime.limits import Limits
from runtime.proto import services_pb2 as pb
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import Leadership
from runtime.state.store import Key, Store
from runtime.state.write_gate import WriteGate, lapsed
from runtime.tensor_spec import Array, TensorSpec, aligned_buffer

MAX_ARRAY_BYTES = 2**62

_NOTHING = np.empty((0,), np.uint8)

UNFENCED = frozenset(("states", "changed"))
"""Orders that are obeyed under any leadership, because they only ask."""

NEEDS_SESSION = frozenset(("pause", "take", "read", "receive"))
"""Orders that begin a job or its snapshot. The session that sends the order owns the job."""

Order = pb.CheckpointOrder
Reply = pb.CheckpointReply


class CheckpointParticipant:
    """Carries out a coordinator's orders on one task.

    Args:
        store: the task's variables.
        task: name of the task, for errors.
        gate: gate that holds writing stages of the task back.
        devices: devices of the task by (type, index); restored values go there.
        limits: bounds of the time that orders hold updates back, and of the number of jobs.
        connected: returns True while a session has a connection to this task.
        roots: directories below which orders may have the task write and read.
        cores: cores of this machine for this task, by which writing is paced; None asks the
            operating system.

    Attributes:
        jobs: the saves and restores under way.
    """

    def __init__(
        self,
        store: Store,
        task: str,
        gate: WriteGate,
        devices: Mapping[tuple[str, int], jax.Device],
        limits: Limits,
        connected: Callable[[int], bool],
        roots: Roots,
        cores: int | None = None,
    ) -> None:
        self._limits = limits
        self._store = store
        self._task = task
        self._gate = gate
        self._placement = ArrayPlacement(task, devices)
        self.jobs = JobTable(task, gate, self._check_leadership, self._limits, connected)
        # Job of the last restore, whose order comes again if the reply was lost.
        self._committed = 0
        self._taking = concurrency.Lock()
        self._values = ValueMemory()
        self._cores = cores
        self.roots = roots
        self._table: dict[str, Callable[..., Message | int | None]] = {
            "pause": self._obey_pause,
            "let_through": self._let_through,
            "take": self._obey_take,
            "write": self._obey_write,
            "confirm": self._obey_confirm,
            "read": self._obey_read,
            "receive": self._obey_receive,
            "commit": self._obey_commit,
            "drop": self._obey_drop,
            "states": self._obey_states,
            "changed": self._obey_changed,
        }
        assert self._table.keys() >= UNFENCED | NEEDS_SESSION

    def obey(self, order: Order, cancelled: Cancellation | None = None) -> Reply:
        """Carries out one order.

        Args:
            order: the order.
            cancelled: set when no caller waits for the reply any more; has the deadline of the
                order.

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
                raise InvalidArgumentError(
                    "an order about checkpoints that this version does not know"
                )
            sender = Sender(Leadership.from_proto(order.leadership), order.session)
            given = getattr(order, name)
            if name not in UNFENCED:
                self.jobs.serve(sender.leadership, getattr(given, "job", 0), cancelled)
            answer = self._table[name](sender, given, cancelled)
        except OpError as error:
            error.task = error.task or self._task
            raise
        return Reply() if answer is None else Reply(**{name: answer})  # type: ignore[arg-type]

    def _check_leadership(self, leadership: Leadership) -> None:
        self._store.run.leader.check(
            leadership, "save or restore", self._task, deposed=AbortedError
        )

    # -- the snapshot ------------------------------------------------------------------------------------------

    def _obey_pause(
        self, sender: Sender, order: Order.Pause, cancelled: Cancellation
    ) -> Reply.Steps:
        self.jobs.resumed = False
        if not order.seconds >= 0:
            raise InvalidArgumentError(f"a pause of {order.seconds:g} s")
        # A chief that dies in the pause holds training up for so long.
        if order.seconds > self._limits.pause_secs:
            raise self._limits.exceeded("pause_secs", f"a pause of {order.seconds:g} s")
        # The snapshot would be refused without a connection, and a repeated order would find its
        # pause used up.
        self.jobs.check_connected(sender.session)
        self._gate.pause(order.job, order.seconds, times.QUIET_SECS)
        try:
            self._check_leadership(sender.leadership)
        except AbortedError:
            # Another chief has taken the lead. Its first order may have opened the gate before this
            # order paused it.
            self._gate.resume(order.job)
            raise
        return _recent_steps(self._gate)

    def _let_through(
        self, sender: Sender, order: Order.LetThrough, cancelled: Cancellation
    ) -> Reply.Steps:
        self.jobs.resumed = False
        wanted = {(s.session, s.step): s.expected[self._task] for s in order.steps}
        # The chief logs the steps without their writes in time: the worker has died half-way.
        lost = self._gate.let_through(order.job, wanted, times.QUIET_SECS)
        return Reply.Steps(steps=[pb.StepWrites(session=s, step=n) for s, n in lost])

    def _obey_take(self, sender: Sender, order: Order.Take, cancelled: Cancellation) -> Reply.Taken:
        if self.jobs.resumed:
            raise TakeoverError(
                "the task goes on from its backup: the checkpoint that was under way is none",
                task=self._task,
            )
        # The same order may arrive twice at once. The second one must wait for the reply of the
        # first.
        with self._taking:
            known = self.jobs.get(order.job)
            if known is not None and known.taken is not None:
                return known.taken
            return self._take_once(sender, order)

    def _take_once(self, sender: Sender, order: Order.Take) -> Reply.Taken:
        try:
            slices = [VariableSlice.from_proto(s) for s in order.slices]
            keys = [s.slot for s in slices]
            self._store.check_initialized(keys, self._task)
            found = self._store.snapshot(keys)
            values = self._store.values(keys)
        finally:
            # Updates wait until this line. The checks and the encoding below happen while training
            # continues.
            held = self._gate.resume(order.job)
        # Without the pause until now, a step may have written here after another task took its
        # references.
        if not held:
            raise lapsed(self._task)
        slices, arrays = _encode_slices(slices, found, self._task)
        # The chief names the checkpoint by the global step of the snapshot, not by a later one.
        number = next((int(found[s.slot]) for s in slices if s.array.key == order.report), 0)
        taken = Reply.Taken(number=number, sizes=[a.nbytes for a in arrays])
        # The job begins with the references, so that a failed snapshot leaves no job.
        self.jobs.begin(order.job, CheckpointJob(sender, slices, arrays, taken=taken))
        self._values.note(order.job, values)
        return taken

    def _obey_changed(self, sender: Sender, order: Order.Changed, cancelled: Cancellation) -> int:
        # A variable may be saved under two names.
        keys = {(s.container, s.name) for s in order.slices}
        changed = self._values.count_changed(order.job, len(keys), self._store.values(keys))
        if changed is None:
            raise NotFoundError(f"no such checkpoint job: {order.job:x}", task=self._task)
        return changed

    # -- saving ------------------------------------------------------------------------------------------------

    def _obey_write(
        self, sender: Sender, order: Order.Write, cancelled: Cancellation
    ) -> Reply.Written:
        job = self.jobs.find(order.job)
        with self.jobs.reserve(job, cancelled, "writing a checkpoint"):
            # The reply to the first order was lost.
            if job.written is not None:
                return job.written
            for s in job.slices:
                _check_chunks(s)
            directory = _directory_to_write(self.roots, order, self._task)
            arrays = [(s.stored, a) for s, a in zip(job.slices, job.arrays, strict=True)]
            # A job that ends wakes the writer from a rest.
            pace = Pace(lambda: self._gate.entered, job.ended.wait, self._cores)

            def write() -> storage.WrittenArrays:
                return storage.write_store(directory, arrays, cancelled=job.ended.is_set, pace=pace)

            # The priority of a thread cannot be raised again, so the thread of this order does not
            # write itself.
            written = in_background(write, "checkpoint-writer")
            # Without these references, updates may work in place again.
            job.arrays = []
            self.jobs.check_alive(job)
            files = [pb.FileDef(path=f.path, size=f.size, crc32=f.crc32) for f in written.files]
            job.written = Reply.Written(files=files, with_nan=sorted(written.with_nan))
            return job.written

    def _obey_confirm(self, sender: Sender, order: Order.Confirm, cancelled: Cancellation) -> None:
        self.jobs.find(order.job)

    # -- restoring ---------------------------------------------------------------------------------------------

    def _obey_read(self, sender: Sender, order: Order.Read, cancelled: Cancellation) -> None:
        self.roots.check(order.directory)
        _check_there(os.path.join(order.directory, storage.STORE_FILE), self._task)
        for stored in order.slices:
            # Keys come from the client, and must not lead out of the directory.
            file_below(order.directory, stored.key)
        if storage.is_local(order.directory):
            self.roots.check_tree(order.directory)
        job = self.jobs.begin(
            order.job, CheckpointJob(sender, [VariableSlice.from_proto(s) for s in order.slices])
        )
        with self.jobs.reserve(job, cancelled, "reading a checkpoint"):
            # The same order has come before, and its reply was lost.
            if job.arrays:
                return
            arrays = storage.read_each(
                storage.Source(order.directory),
                [s.stored for s in job.slices],
                only_plain=True,
                cancelled=job.ended.is_set,
            )
            # The next arrays are read while one is placed. A job that ends stops the reading, so
            # there may be fewer.
            read = list(map(self._placement.place, job.slices, arrays))
            self.jobs.check_alive(job)
            assert len(read) == len(job.slices), "the reading ended before its job"
            job.arrays = read

    def _obey_commit(self, sender: Sender, order: Order.Commit, cancelled: Cancellation) -> None:
        # The reply to the first order was lost, and the job has ended with the commit.
        if order.job == self._committed:
            return
        try:
            job = self.jobs.find(order.job)
            with self.jobs.reserve(job, cancelled, "changing variables"):
                # A commit of half of the arrays would mix two models.
                if len(job.arrays) != len(job.slices) or any(a is None for a in job.arrays):
                    raise FailedPreconditionError(
                        "the restore to commit has not read everything", task=self._task
                    )
                values = {
                    s.slot: (array, s.spec) for s, array in zip(job.slices, job.arrays, strict=True)
                }
                # The claim of the variables may wait for updates, so the leadership is checked
                # again before the change.
                given = self._store.replace(
                    values, lambda: self._check_leadership(sender.leadership)
                )
                # The restore has overwritten the writes of steps that dead workers left half done.
                self._gate.forget()
                if order.origin:
                    self._values.note(order.origin, given)
                self._committed = order.job
                self.jobs.end([order.job], "it was committed", ordered=True)
        except AbortedError:
            # While this order waited, the same order may have committed the job before.
            if order.job != self._committed:
                raise

    def _obey_drop(self, sender: Sender, order: Order.Drop, cancelled: Cancellation) -> None:
        self.jobs.end([order.job], "it was dropped", ordered=True)

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
            # The array is placed on its device as soon as its last byte has come, while the next
            # slice is on its way.
            whole = job.incoming[byte_range.part].put(byte_range.offset, data)
            if whole is not None:
                job.arrays[byte_range.part] = self._placement.place_bytes(
                    job.slices[byte_range.part], whole
                )

    @contextmanager
    def _job_of(self, byte_range: ByteRange, client: int) -> Iterator[CheckpointJob]:
        """Reserves the job of a byte range for the block."""
        self._check_leadership(byte_range.leadership)
        job = self.jobs.find(byte_range.job)
        # The number of a job is no secret from other clients, so the session must be that of the
        # owner.
        if job.sender.session != client:
            raise NotFoundError(
                f"no such checkpoint job of this session: {byte_range.job:x}", task=self._task
            )
        if byte_range.part >= len(job.slices):
            raise InvalidArgumentError(
                f"no slice {byte_range.part} in a checkpoint job of {len(job.slices)}"
            )
        with self.jobs.reserve(job, Cancellation(), "a byte range"):
            yield job

    def _obey_receive(self, sender: Sender, order: Order.Receive, cancelled: Cancellation) -> None:
        slices = [VariableSlice.from_proto(s) for s in order.slices]
        arrays = [
            None if s.stored.nbytes else self._placement.place_bytes(s, aligned_buffer(0))
            for s in slices
        ]
        incoming = [IncomingArray(s.stored.nbytes) for s in slices]
        self.jobs.begin(order.job, CheckpointJob(sender, slices, arrays, incoming=incoming))

    def _obey_states(
        self, sender: Sender, order: Order.States, cancelled: Cancellation
    ) -> Reply.States:
        run = self._store.run
        # A worker that is done does not answer any more, so the states that it left here ride
        # along.
        return Reply.States(
            states=task_states(self._task, run.environment.address()), of_done=run.states_of_done()
        )


def _recent_steps(gate: WriteGate) -> Reply.Steps:
    now = concurrency.monotonic()
    return Reply.Steps(
        steps=[
            pb.StepWrites(
                session=session,
                step=step,
                done=writes.done,
                expected=writes.expected,
                age_secs=now - writes.at,
            )
            for (session, step), writes in gate.recent()
        ]
    )


def _encode_slices(
    slices: Sequence[VariableSlice], found: Mapping[Key, Array], task: str
) -> tuple[list[VariableSlice], list[Array]]:
    """Returns slices and their values as they lie on disk, with strings as bytes.

    Args:
        slices: slices of a snapshot.
        found: values of the variables.
        task: this task's name, for the error.

    Raises:
        InvalidArgumentError: A variable has another shape or dtype than its slice.
    """
    encoded, arrays = [], []
    for s in slices:
        value = found[s.slot]
        if TensorSpec.of(value) != s.spec:
            raise InvalidArgumentError(
                f"variable {s.variable.name!r} is {TensorSpec.of(value)} here, but the graph "
                f"to be saved has it as {s.spec}",
                task=task,
            )
        if s.spec.is_string:
            value = string_arrays.encode_strings(value)
            s = replace(s, encoded=value.nbytes)
        assert value.nbytes == s.stored.nbytes, "a slice does not have its size"
        encoded.append(s)
        arrays.append(value)
    return encoded, arrays


def _directory_to_write(roots: Roots, order: Order.Write, task: str) -> str:
    """Makes the directory that an order names and returns its path.

    Raises:
        AlreadyExistsError: A checkpoint is there, finished or begun.
        PermissionDeniedError: The directory is not below a root.
    """
    roots.check(order.directory)
    _check_there(order.directory, task)
    directory = f"{order.directory}/{store_name(order.job, task)}"
    free = not storage.is_store(directory) and not storage.is_store(order.directory)
    if free and storage.is_local(directory):
        try:
            # Of two orders only one makes the directory. A link at the end of the path is not
            # followed.
            os.mkdir(directory)
        except FileExistsError:
            free = False
        except OSError as error:
            raise durability.barred(error, directory) or storage.write_error(
                directory, error
            ) from None
    if not free:
        raise AlreadyExistsError(
            f"{directory} is not written: there is a checkpoint already, finished or begun by "
            "somebody else",
            task=task,
        )
    # Links on the way may have changed since the first check.
    roots.check_inside(directory)
    return directory


def _check_there(path: str, task: str) -> None:
    """Raises FailedPreconditionError if a path is missing on this machine.

    The coordinator sees the path, so the tasks do not share the directory. The checkpoint is not
    damaged.
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
            f"the checkpoint's {path} is not there on this machine: put it on a file system that "
            "all ps tasks share, under the same path, or use transfer='stream'",
            task=task,
        ) from None


def _check_chunks(s: VariableSlice) -> None:
    """Raises InvalidArgumentError unless a slice fits its array and its chunks."""
    full, offset, chunk, shape = s.array.full_shape, s.array.offset, s.array.chunk, s.array.shape
    if s.spec.is_string or (
        len(full) == len(offset) == len(chunk) == len(shape)
        and all(0 <= o and o + n <= f for o, n, f in zip(offset, shape, full, strict=True))
        and math.prod(full) * s.array.dtype.itemsize < MAX_ARRAY_BYTES
        # Of an empty slice nothing is written, and its chunks are those of the other slices. The last
        # slice may be shorter than a chunk, and the slices before have a chunk at least.
        and all(
            1 <= c <= max(n if s.array.nbytes else f, o if o + n == f and o % c == 0 else 1, 1)
            for c, n, f, o in zip(chunk, shape, full, offset, strict=True)
        )
    ):
        return
    raise InvalidArgumentError(
        f"variable {s.variable.name!r} of shape {list(shape)} cannot be written in chunks of "
        f"{list(chunk)} at {list(offset)} of an array of shape {list(full)}"
    )
