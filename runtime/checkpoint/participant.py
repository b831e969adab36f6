"""A task's part in checkpoints: it takes references to its variables, writes them, reads them, swaps them in.

It obeys orders under the leadership that its task obeys, and refuses all others. The first order under another one
waits until the jobs of the one before have ended, so that a dead chief's late order can spoil nothing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from absl import logging
from google.protobuf.message import Message

from runtime import timeouts
from runtime.checkpoint import storage
from runtime.checkpoint.byte_ranges import ByteRange, Incoming, bytes_of
from runtime.checkpoint.pacing import Pace, in_background
from runtime.checkpoint.roots import Roots, check_process_id, file_below
from runtime.checkpoint.snapshot import VariableSlice
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
"""How long the first order under another leadership waits for the jobs of the one before."""
QUIET_SECS = 2.0
"""How long a snapshot waits for stages that are under way, and for the rest of half-done steps."""
UNUSED_SECS = 600.0
"""How long what was taken for a save is kept when nobody asks for it."""
_LOOK_SECS = 0.25
"""How often an order that waits for another looks whether anybody still wants it."""
MAX_ARRAY_BYTES = 2**62
VALUES_OF_JOBS = 8
"""Of how many saves and restores a task can tell whether its variables have changed since."""

_NOTHING = np.empty((0,), np.uint8)

UNFENCED = frozenset(("states", "changed"))
"""Orders that anybody may give: they only ask."""

Order = pb.CheckpointOrder
Reply = pb.CheckpointReply


@dataclass
class Job:
    """One save or restore on this task.

    Attributes:
        leadership: under which it was begun.
        slices: what it is about.
        arrays: what was taken, or read, for each slice.
        done: bytes written, or sent to who writes them.
        incoming: for each slice, what has come of it so far, when it comes in byte ranges.
        first: index of the first slice whose array is still held; the arrays of those before it were sent.
        before: bytes of the arrays that were sent.
        client: who asks for byte ranges over the tensor channel, or gives them; 0 when nobody does.
        used_at: when somebody asked for it last (``time.monotonic``).
        given_up: why it has ended before its time; empty while it has not.
        cancelled: set when it is over, or another chief wants it gone.
        lock: held while an order works on it.
        orders: those that write or read it, or wait to.
        left_at: since when nobody has waited for any of them (``time.monotonic``); None while somebody does.
        taken: the reply to the order that began it; an order whose reply got lost comes again.
        written: the reply to the order to write it.
    """

    leadership: Leadership
    slices: list[VariableSlice]
    arrays: list[Any]
    done: int = 0
    incoming: list[Incoming] = field(default_factory=list)
    first: int = 0
    before: int = 0
    client: int = 0
    used_at: float = field(default_factory=time.monotonic)
    given_up: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    orders: list[Cancellation] = field(default_factory=list)
    left_at: float | None = None
    taken: Reply.Taken | None = None
    written: Reply.Written | None = None

    def unwanted(self) -> bool:
        """Whether what is written or read is not wanted: by another chief, or nobody waits for it.

        Who waited may have lost its connection, and orders the same again: it has as long as a call has to connect.
        """
        if not all(order.over for order in list(self.orders)):
            self.left_at = None
        elif self.left_at is None:
            self.left_at = time.monotonic()
        return self.cancelled.is_set() or (
            self.left_at is not None and time.monotonic() - self.left_at >= timeouts.RECONNECT_SECS
        )

    @contextmanager
    def worked_on(self, order: Cancellation, what: str) -> Iterator[None]:
        """While an order writes or reads: waits until no other works on it, or the order is over."""
        self.orders.append(order)
        while not self.lock.acquire(timeout=_LOOK_SECS):
            order.check(what)
        try:
            yield
        finally:
            self.lock.release()


class CheckpointParticipant:
    """Carries out a coordinator's orders on one task.

    Args:
        store: the task's variables.
        task: its name, for errors.
        gate: holds its writing stages.
        devices: its devices by (type, index): where restored values go.
        limits: how long orders hold updates back, and how many saves and restores are under way at once.
    """

    def __init__(
        self,
        store: Store,
        task: str,
        gate: Gate,
        devices: Mapping[tuple[str, int], jax.Device],
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._store = store
        self._task = task
        self._gate = gate
        self._devices = devices
        self._lock = threading.Lock()
        self._served = NOBODY  # the leadership of the last order
        self._jobs: dict[int, Job] = {}
        self._committed = 0  # the last restore: its order may come again
        self._taking = threading.Lock()
        self._values: OrderedDict[int, Values] = OrderedDict()
        self._resumed = False
        self.cores: int | None = None
        """Of this machine, for this task: by them its writing is paced; None asks the operating system."""
        self.roots = Roots()
        """Where orders may have it write and read."""
        self._table: dict[str, Callable[..., Message | int | None]] = {
            "pause": self._pause,
            "let_through": self._let_through,
            "take": self._take,
            "write": self._write,
            "progress": self._progress,
            "verify": self._verify,
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
            cancelled: set when nobody waits for the reply any more; its deadline is that of the order.

        Raises:
            AbortedError: it comes under another leadership than the task obeys.
            InvalidArgumentError: this version knows no such order.
            CancelledError: ``cancelled`` was set.
            DeadlineExceededError: its deadline has passed.
            OpError: what went wrong, by class.
        """
        name = order.WhichOneof("order")
        cancelled = cancelled or Cancellation()
        try:
            if name is None:
                raise InvalidArgumentError("an order about checkpoints that this version does not know")
            leadership = Leadership.from_proto(order.leadership)
            if name not in UNFENCED:
                self._serve(leadership, cancelled)
            answer = self._table[name](leadership, getattr(order, name), cancelled)
        except OpError as error:
            error.task = error.task or self._task
            raise
        return Reply() if answer is None else Reply(**{name: answer})  # type: ignore[arg-type]

    def resume(self) -> None:
        """Goes on, in another process, as the task that earlier orders were given to. The jobs it had are lost."""
        self._resumed = True

    def _check(self, leadership: Leadership) -> None:
        self._store.run.check(leadership, "save or restore", self._task, deposed=AbortedError)

    def _serve(self, leadership: Leadership, cancelled: Cancellation) -> None:
        """Sees that an order comes under the leadership that the task obeys; jobs of earlier ones have ended then."""
        with self._lock:
            self._check(leadership)
            first, self._served = leadership != self._served, leadership
            old = {number: job for number, job in self._jobs.items() if job.leadership != leadership}
        if first:
            self._gate.open()  # who has paused it will never take anything
        for job in old.values():
            job.cancelled.set()
        until = time.monotonic() + JOIN_SECS
        for number, job in old.items():
            while not job.lock.acquire(timeout=max(0.0, min(_LOOK_SECS, until - time.monotonic()))):
                cancelled.check("waiting for an earlier chief's job")
                if time.monotonic() >= until:
                    raise UnavailableError(
                        f"an earlier chief's job still writes after {JOIN_SECS:.0f} s", task=self._task
                    )
            job.lock.release()
            with self._lock:
                self._jobs.pop(number, None)

    # -- the snapshot ------------------------------------------------------------------------------------------

    def _pause(self, leadership: Leadership, order: Order.Pause, cancelled: Cancellation) -> Reply.Steps:
        self._resumed = False
        if not order.seconds >= 0:
            raise InvalidArgumentError(f"a pause of {order.seconds:g} s")
        if order.seconds > self._limits.pause_secs:
            raise self._limits.exceeded("pause_secs", f"a pause of {order.seconds:g} s")
        self._gate.pause(order.job, order.seconds, QUIET_SECS)
        try:
            self._check(leadership)
        except AbortedError:  # another chief has come meanwhile: its first order may have opened the gate just before
            self._gate.resume(order.job)
            raise
        now = time.monotonic()
        return Reply.Steps(
            steps=[
                pb.StepWrites(
                    session=session, step=step, done=writes.done, expected=writes.expected, age_secs=now - writes.at
                )
                for (session, step), writes in self._gate.recent()
            ]
        )

    def _let_through(self, leadership: Leadership, order: Order.LetThrough, cancelled: Cancellation) -> Reply.Steps:
        self._resumed = False
        wanted = {(s.session, s.step): s.expected[self._task] for s in order.steps}
        lost = self._gate.let_through(order.job, wanted, QUIET_SECS)
        return Reply.Steps(steps=[pb.StepWrites(session=s, step=n) for s, n in lost])

    def _take(self, leadership: Leadership, order: Order.Take, cancelled: Cancellation) -> Reply.Taken:
        if self._resumed:
            raise TakeoverError(
                "the task goes on from its backup: the checkpoint that was under way is none", task=self._task
            )
        with self._taking:
            with self._lock:
                known = self._jobs.get(order.job)
            if known is not None and known.taken is not None:
                return known.taken
            return self._take_once(leadership, order)

    def _take_once(self, leadership: Leadership, order: Order.Take) -> Reply.Taken:
        held = False
        try:
            slices = [VariableSlice.from_proto(s) for s in order.slices]
            keys = [s.slot for s in slices]
            self._store.check_initialized(keys, self._task)
            taken = self._store.snapshot(keys)
            values = self._store.values(keys)
        finally:
            held = self._gate.resume(order.job)
        if not held:  # something was written since the tasks were paused: each has taken another instant
            raise lapsed(self._task)
        arrays = []
        number = 0
        for index, s in enumerate(slices):
            value = taken[s.slot]
            if TensorSpec.of(value) != s.spec:
                raise InvalidArgumentError(
                    f"variable {s.variable.name!r} is {TensorSpec.of(value)} here, but the graph to be saved has it as "
                    f"{s.spec}",
                    task=self._task,
                )
            if s.array.key == order.report:
                number = int(value)
            if s.spec.is_string:
                value = storage.encode_strings(value)
                slices[index] = replace(s, encoded=value.nbytes)
            arrays.append(value)
        job = Job(leadership, slices, arrays)
        job.taken = Reply.Taken(number=number, sizes=[a.nbytes for a in arrays], cores=os.cpu_count() or 1)
        self._add(leadership, order.job, job)
        self._note_values(order.job, values)
        threading.Thread(target=self._watch, args=(job,), name="checkpoint-watch", daemon=True).start()
        return job.taken

    def _note_values(self, job: int, values: Values) -> None:
        with self._lock:
            self._values[job] = values
            while len(self._values) > VALUES_OF_JOBS:
                self._values.popitem(last=False)

    def _changed(self, leadership: Leadership, order: Order.Changed, cancelled: Cancellation) -> int:
        with self._lock:
            values = self._values.get(order.job)
        if values is None:
            raise NotFoundError(f"no such checkpoint job: {order.job:x}", task=self._task)
        keys = [(s.container, s.name) for s in order.slices]
        now = self._store.values(keys)
        same = [
            key in values and key in now and (value := values[key]()) is not None and value is now[key]()
            for key in keys
        ]
        return same.count(False)

    def _add(self, leadership: Leadership, number: int, job: Job) -> None:
        with self._lock:
            self._check(leadership)
            for old in [n for n, j in self._jobs.items() if j.given_up]:  # kept until now to tell why
                del self._jobs[old]
            if number not in self._jobs and len(self._jobs) >= self._limits.checkpoint_jobs:
                raise self._limits.exceeded("checkpoint_jobs", f"{len(self._jobs)} saves and restores are under way")
            self._jobs[number] = job

    def _job(self, number: int) -> Job:
        with self._lock:
            job = self._jobs.get(number)
        if job is None and self._resumed:
            raise TakeoverError(
                "the task goes on from its backup: the checkpoint job that was under way is lost", task=self._task
            )
        if job is None:
            raise NotFoundError(f"no such checkpoint job: {number:x}", task=self._task)
        self._check_alive(job)
        return job

    # -- saving ------------------------------------------------------------------------------------------------

    def _write(self, leadership: Leadership, order: Order.Write, cancelled: Cancellation) -> Reply.Written:
        job = self._job(order.job)
        with job.worked_on(cancelled, "writing a checkpoint"):
            self._check_alive(job)
            if job.written is not None:
                return job.written
            for s in job.slices:
                _check_chunks(s)
            directory = self._to_write(order)
            arrays = [(s.stored, a) for s, a in zip(job.slices, job.arrays, strict=True)]

            pace = Pace(lambda: self._gate.entered, job.cancelled.wait, self.cores)

            def wrote(size: int) -> None:
                job.done += size

            def write() -> storage.WrittenStore:
                return storage.write_store(directory, arrays, cancelled=job.unwanted, wrote=wrote, pace=pace)

            written = in_background(write, "checkpoint-writer")
            job.arrays = []  # the next updates may work in place again
            self._check_wanted(job, cancelled, "writing a checkpoint")
            if job.cancelled.is_set():
                raise AbortedError("another chief has taken the lead: the save was cancelled", task=self._task)
            files = [pb.FileDef(path=f, size=n, crc32=c) for f, n, c in written.files]
            job.written = Reply.Written(files=files, with_nan=written.with_nan)
            return job.written

    def _to_write(self, order: Order.Write) -> str:
        """Where an order wants a save; what is finished is not written again."""
        check_process_id(order.process_id)
        self.roots.check(order.directory)
        self._check_there(order.directory)
        directory = f"{order.directory}/ocdbt.process_{order.process_id}"
        free = not storage.is_store(directory) and not storage.is_store(order.directory)
        if free and storage.is_local(directory):
            try:
                os.mkdir(directory)  # of two orders one makes it, and no link is followed
            except FileExistsError:
                free = False
            except OSError as error:
                raise storage.barred(error, directory) or storage.write_error(directory, error) from None
        if not free:
            raise AlreadyExistsError(
                f"{directory} is not written: there is a checkpoint already, finished or begun by somebody else",
                task=self._task,
            )
        self.roots.check_inside(directory)  # as it is now, wherever links on the way led before
        return directory

    def _progress(self, leadership: Leadership, order: Order.Progress, cancelled: Cancellation) -> int:
        job = self._job(order.job)
        job.used_at = time.monotonic()
        return job.done

    # -- restoring ---------------------------------------------------------------------------------------------

    def _check_there(self, path: str, part: str = "") -> None:
        """Raises FailedPreconditionError unless this task sees what its coordinator sees: that is no damage."""
        whole = os.path.join(path, part) if part else path
        if not storage.is_local(path):
            return
        try:
            os.stat(whole)
        except OSError as error:
            if error.errno not in storage.NOTHING_THERE:
                return  # whoever reads it tells
            raise FailedPreconditionError(
                f"the checkpoint {'file' if part else 'directory'} {whole} is not there on this machine: put it on a "
                "file system that all ps tasks share, under the same path, or use transfer='stream'",
                task=self._task,
            ) from None

    def _verify(self, leadership: Leadership, order: Order.Verify, cancelled: Cancellation) -> Reply.Verified:
        self.roots.check(order.directory)
        self._check_there(order.directory)
        problems = []

        def check() -> None:
            cancelled.check("comparing files with their checksums")

        for file in order.files:
            check()
            path = file_below(order.directory, file.path)
            self.roots.check_inside(path)
            self._check_there(order.directory, storage.MANIFEST_FILE)  # of no other directory anything is compared
            self._check(leadership)
            try:
                same = storage.is_as_saved(path, file.size, file.crc32, self.roots.check_inside, check)
            except OpError:  # some are OSErrors, too
                raise
            except OSError as error:
                if error.errno in storage.NOTHING_THERE:
                    self._check_there(order.directory, file.path)
                other = storage.barred(error, path)
                if other is not None:
                    raise type(other)(other.message, task=self._task) from None
                problems.append(f"{file.path}: {error.strerror}")
                continue
            if not same:
                problems.append(f"{file.path}: it does not match its checksum")
        return Reply.Verified(problems=problems)

    def _read(self, leadership: Leadership, order: Order.Read, cancelled: Cancellation) -> int:
        self.roots.check(order.directory)
        self._check_there(order.directory)
        keys = [file_below(order.directory, s.key) for s in order.slices]
        if storage.is_local(order.directory):
            for path in [order.directory] if order.ocdbt else keys:
                if storage.has_arrays(path, ocdbt=order.ocdbt):  # else nothing in there is read
                    self.roots.check_tree(path)
        job = Job(leadership, [VariableSlice.from_proto(s) for s in order.slices], [])
        with job.worked_on(cancelled, "reading a checkpoint"):
            self._add(leadership, order.job, job)
            arrays = storage.read_each(
                order.directory,
                [s.stored for s in job.slices],
                ocdbt=order.ocdbt,
                zarr3=order.zarr3,
                mapped=order.mapped,
                cancelled=job.unwanted,
            )
            for s, array in zip(job.slices, arrays, strict=False):  # the next ones are read meanwhile
                job.done += array.nbytes
                job.arrays.append(self._placed_on_device(s, array))
            self._check_wanted(job, cancelled, "reading a checkpoint")
            if job.cancelled.is_set():
                raise AbortedError("another chief has taken the lead: the restore was cancelled", task=self._task)
        return job.done

    def _placed_on_device(self, s: VariableSlice, array: Any) -> Any:
        if s.spec.is_string:
            return storage.decode_strings(array, s.spec.shape)
        device = self._devices.get((s.device.type, s.device.index))
        if device is None:
            raise InvalidArgumentError(
                f"no device {s.device.type}:{s.device.index} here for {s.variable.name!r}", task=self._task
            )
        with jax.enable_x64(True):  # else 64-bit arrays are narrowed
            return jax.device_put(array, device).block_until_ready()

    def _commit(self, leadership: Leadership, order: Order.Commit, cancelled: Cancellation) -> None:
        with self._lock:
            if order.job == self._committed:
                return
        job = self._job(order.job)
        with job.lock:
            self._check_alive(job)
            if self._committed == order.job:  # by an earlier try of the same order, meanwhile
                return
            if len(job.arrays) != len(job.slices) or any(a is None for a in job.arrays):
                raise FailedPreconditionError("the restore to commit has not read everything", task=self._task)
            values = {s.slot: (array, s.spec) for s, array in zip(job.slices, job.arrays, strict=True)}
            given = self._store.replace(values, lambda: self._check(leadership))
            self._gate.forget()  # what dead workers left half done is overwritten
            if order.origin:
                self._note_values(order.origin, given)
            with self._lock:
                self._committed = order.job
        self._end(order.job)

    def _drop(self, leadership: Leadership, order: Order.Drop, cancelled: Cancellation) -> None:
        self._end(order.job)

    def _end(self, number: int) -> None:
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is not None:
            job.cancelled.set()
        self._gate.resume(number)

    # -- without a shared directory --------------------------------------------------------------------------

    def pull(self, byte_range: ByteRange, client: int) -> tuple[Array, int]:
        """Gives a piece of what a job has taken; the coordinator asks for slices one after the other.

        Args:
            byte_range: which.
            client: by whom it is asked for: the job ends when it is ``gone``.

        Returns:
            The bytes, uint8 [size], not copied, and how many writing stages have come so far.

        Raises:
            AbortedError: another chief has claimed the task since, or the job was given up.
            NotFoundError: there is no such job.
        """
        with self._job_of(byte_range, client) as job:
            raw = bytes_of(job.arrays[byte_range.part], byte_range)
            for index in range(job.first, byte_range.part):  # they were sent: the next updates may work in place again
                job.arrays[index] = _NOTHING
                job.before += job.slices[index].stored.nbytes
            job.first = max(job.first, byte_range.part)
            job.done = max(job.done, job.before + byte_range.offset + byte_range.size)
        return raw, self._gate.entered

    def push(self, byte_range: ByteRange, data: Array, client: int) -> None:
        """Takes a piece of what a job will commit; the pieces of a slice come from its first byte to its last.

        Args:
            byte_range: which.
            data: uint8 [size], copied.
            client: as in ``pull``.

        Raises:
            DataLossError: the piece before it did not come.
            AbortedError, NotFoundError: as ``pull``.
        """
        with self._job_of(byte_range, client) as job:
            whole = job.incoming[byte_range.part].put(byte_range.offset, data)
            if whole is not None:
                job.arrays[byte_range.part] = self._from_bytes(job.slices[byte_range.part], whole)
                job.done += whole.size

    def gone(self, client: int, why: str) -> None:
        """Ends what a client has under way that is not expected back: what it took and gave is free."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.client == client]
        for job in jobs:
            self._give_up(job, why)

    def close(self) -> None:
        """Ends all that is under way, as the task does; waits for nothing."""
        with self._lock:
            for job in self._jobs.values():
                job.given_up = job.given_up or "its server has stopped"
                job.cancelled.set()

    @contextmanager
    def _job_of(self, byte_range: ByteRange, client: int) -> Iterator[Job]:
        """The job of a piece, locked."""
        self._check(byte_range.leadership)
        job = self._job(byte_range.job)
        if byte_range.part >= len(job.slices):
            raise InvalidArgumentError(f"no slice {byte_range.part} in a checkpoint job of {len(job.slices)}")
        job.client, job.used_at = client, time.monotonic()
        with job.lock:
            self._check_alive(job)
            yield job

    def _check_wanted(self, job: Job, order: Cancellation, what: str) -> None:
        """After an order wrote or read, holding the job: one that has ended for want of anybody is not whole."""
        if job.unwanted() and not job.cancelled.is_set():
            job.given_up = "whoever ordered it has gone"
            job.cancelled.set()
            job.arrays, job.incoming = [], []
            order.check(what)

    def _check_alive(self, job: Job) -> None:
        if job.given_up:
            raise AbortedError(f"this checkpoint job has ended: {job.given_up}", task=self._task)

    def _give_up(self, job: Job, why: str) -> None:
        with job.lock:
            logging.warning("%s: a checkpoint job ends: %s", self._task, why)
            job.given_up = why
            job.cancelled.set()
            job.arrays, job.incoming = [], []

    def _watch(self, job: Job) -> None:
        """Gives a job up that nobody uses: its coordinator died before it wrote anything."""
        while not job.cancelled.wait(UNUSED_SECS):
            if not job.lock.locked() and time.monotonic() - job.used_at >= UNUSED_SECS:
                self._give_up(job, f"nobody has asked for it in {UNUSED_SECS:.0f} s")

    def _receive(self, leadership: Leadership, order: Order.Receive, cancelled: Cancellation) -> None:
        slices = [VariableSlice.from_proto(s) for s in order.slices]
        job = Job(leadership, slices, [None] * len(slices))
        job.incoming = [Incoming(s.stored.nbytes) for s in slices]
        for index, s in enumerate(slices):
            if not s.stored.nbytes:
                job.arrays[index] = self._from_bytes(s, aligned_buffer(0))
        self._add(leadership, order.job, job)

    def _from_bytes(self, s: VariableSlice, raw: Array) -> Any:
        return self._placed_on_device(s, raw.view(s.stored.dtype).reshape(s.stored.shape))

    def _states(self, leadership: Leadership, order: Order.States, cancelled: Cancellation) -> Reply.States:
        told = self._store.run.states_of_done().items()
        of_done = {f"{task} {name}": state for task, states in told for name, state in states.items()}
        return Reply.States(states=task_states(self._task), of_done=of_done)


def _check_chunks(s: VariableSlice) -> None:
    """Raises InvalidArgumentError unless a slice can be written where it is said to lie."""
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
