"""The worker of a task: registers and runs stages for masters in this process and over the tensor channel."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from runtime import concurrency
from runtime.checkpoint.byte_ranges import BYTE_RANGE_SPEC, ByteRange
from runtime.checkpoint.pacing import step_aside
from runtime.checkpoint.participant import CheckpointParticipant
from runtime.checkpoint.roots import Roots
from runtime.errors import (
    FailedPreconditionError,
    HungUpError,
    InvalidArgumentError,
)
from runtime.observe import device_report
from runtime.observe.audit import AuditLog
from runtime.observe.counters import TaskCounters
from runtime.observe.trace import Tracer
from runtime.proto import run_record_pb2
from runtime.state.cancellation import Cancellation
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import Ledger
from runtime.state.participants import TaskEnvironment
from runtime.state.store import Store
from runtime.state.write_gate import WriteGate
from runtime.task.bundle import answer_bundle, open_bundle
from runtime.task.call_waits import CallWaits
from runtime.task.devices import local_devices
from runtime.task.executor import Executor
from runtime.task.presence import TaskPresence
from runtime.task.program_watch import ProgramWatch
from runtime.task.registrar import StageRegistrar
from runtime.task.registry import CallRegistry, RegisteredCall
from runtime.task.rendezvous import Rendezvous
from runtime.task.replication import BackupMessages, Replicator
from runtime.task.traced_stage import FetchFrom
from runtime.tensor_spec import AnyArray, Array
from runtime.wire.codec import TensorLayout
from runtime.wire.connection import (
    Reply,
    call_memory,
    caller_has_hung_up,
    caller_is_gone,
    current_lane,
)
from runtime.wire.handles import BACKUP, BUNDLE, FETCH, ORDERS, PULL, PUSH

_FIXED: Mapping[int, TensorLayout | None] = {
    FETCH: None,
    BACKUP: None,
    PULL: TensorLayout([BYTE_RANGE_SPEC]),
    PUSH: None,
    BUNDLE: None,
}
"""The input layouts of the fixed handles, which are not registered."""
assert _FIXED.keys() == ORDERS.keys(), "a fixed handle has no layout, or gives no order"
_thread = concurrency.local()


class Worker:
    """The state and the stages of one task; the handler behind its tensor channel.

    Args:
        job: Name of the job.
        index: Index of the task.
        fetch_from: Fetches a tensor from another task, in this process or over the tensor channel.
        environment: Sessions and limits of the task, and the task's part in a run.
        audit: Audit log for programs that run for too long, and for clients above their share.
        roots: Directories below which checkpoints may lie; any directory by default.
        cores: Cores of this machine for the writing of checkpoints; all by default.
        check_is_one_of: Raises PermissionDeniedError if the caller on the tensor channel is none of
            the named tasks.
        backups: Backups of other tasks; None if this task keeps no backups.
    """

    def __init__(
        self,
        job: str,
        index: int,
        fetch_from: FetchFrom,
        environment: TaskEnvironment | None = None,
        *,
        audit: AuditLog | None = None,
        roots: Roots | None = None,
        cores: int | None = None,
        check_is_one_of: Callable[[frozenset[str]], None] = lambda tasks: None,
        backups: BackupMessages | None = None,
    ) -> None:
        environment = environment or TaskEnvironment()
        self.limits = limits = environment.limits
        self.task = f"/job:{job}/task:{index}"
        self.presence = TaskPresence(self.task)
        self.devices = local_devices(job, index)
        self.computes_on = device_report.describe(self.devices, os.environ)
        self.ledger = Ledger(limits, self.task)
        self.store = Store(self.ledger, environment)
        self.rendezvous = Rendezvous(self.ledger)
        by_name = {(d.type, d.index): device for d, device in self.devices.items()}
        self.gate = WriteGate(self.task)
        self.program_watch = ProgramWatch(self.task, limits, audit)
        self.executor = Executor(self.store, self.task, by_name, self.gate, self.program_watch)
        self._fetch_from = fetch_from
        self.registry = CallRegistry(self.task, limits, self.ledger, environment.connected)
        self.checkpoint_participant = CheckpointParticipant(
            self.store,
            self.task,
            self.gate,
            by_name,
            limits,
            environment.connected,
            roots or Roots(),
            cores,
        )
        self.waits = CallWaits(self.task)
        self.tracer = Tracer()
        self.registrar = StageRegistrar(
            self.executor, self.registry, self.waits, self.tracer, fetch_from, self.presence
        )
        self.counters = TaskCounters()
        self._check_is_one_of = check_is_one_of
        self._backups = backups
        self.primary: Replicator | None = None
        """Sends what this task does to the task that holds its backup; None without a backup, or before its begin."""

    def begin_backup(self, primary: Replicator) -> None:
        """Has all later changes of this task sent to the task that holds its backup."""
        assert self.primary is None
        self.primary = primary

    def leave(self, *, replaced: bool = False) -> None:
        """Refuses all later calls, also those of sessions in this process.

        Args:
            replaced: True if another server has taken the place of this task's server.
        """
        gone = self.presence.end(replaced=replaced)
        # The calls that wait end now, and later calls find the error.
        self.checkpoint_participant.jobs.close()
        self.program_watch.close()
        self.store.run.close(gone)

    # -- the run record ---------------------------------------------------------------------------

    def obey_run_order(
        self, order: run_record_pb2.RunOrder, cancelled: Cancellation
    ) -> run_record_pb2.RunReply:
        """Carries out an order to the run record.

        Args:
            order: The order.
            cancelled: Set when the caller has stopped waiting for the reply.

        Returns:
            The reply, when the backup has all changes of the order.

        Raises:
            OpError: The run record refuses the order, as in ``RunRecord.obey``.
        """
        reply = self.store.run.obey(order, self.task, cancelled)
        kind = order.WhichOneof("order")
        index = order.sender.rpartition(":")[2]
        for resource in self.store.resources():
            # No call may wait for workers that have left.
            resource.set_finished(reply.phase == reply.FINISHED)
            if kind in ("rest", "done"):
                resource.retire(
                    getattr(order, kind).session, int(index) if index.isdecimal() else -1
                )
        self.replicate_now()
        return reply

    def replicate_now(self) -> None:
        """Waits until the backup, if there is one, has all changes but updates.

        Other tasks count on those changes.
        """
        if self.primary is not None:
            self.primary.count()
            self.primary.settle()

    # -- running ----------------------------------------------------------------------------------

    def execute(
        self,
        registered: RegisteredCall,
        session: int,
        step: int,
        inline: Sequence[AnyArray],
        deadline: float | None = None,
        cancelled: Cancellation | None = None,
    ) -> tuple[list[AnyArray], jax.Array | None]:
        """Runs a registered stage.

        Fetches the inputs that other tasks hold, and holds the outputs that other tasks will fetch.

        Args:
            registered: The stage.
            session: Session of the run.
            step: Number of the step.
            inline: Inputs that come with the call.
            deadline: ``monotonic()`` at which a host kernel that waits gives up.
            cancelled: End of the caller's waits; made from the deadline by default.

        Returns:
            All outputs, and the argument of ``PreparedStage.wait``.
        """
        self.presence.check()
        call = registered.call
        # Sessions of this process may use their own task without limits.
        if not registered.registration.foreign:
            self.ledger.own.add(session)
        if call.holds:
            self.ledger.check(session)
        inputs = self._with_remote(registered, session, step, inline) if call.remote else inline
        if call.stage.host and not registered.gated:
            cancelled = cancelled or Cancellation(deadline, caller_has_hung_up, call_memory())
            with self.waits.hold(session, current_lane(), cancelled):
                outputs, done = registered.prepared.run(inputs, session, cancelled)
        elif registered.gated:
            outputs, done = self._run_gated(registered, inputs, session, step)
        else:
            if registered.reads:
                self.counters.read(session)
            outputs, done = registered.prepared.run(inputs, session)
        for i, hold in call.holds.items():
            self.rendezvous.put((session, step, call.outputs[i]), outputs[i], hold)
        # The session may have ended during the run; the tensors held before were dropped then.
        if call.holds and self.waits.has_ended(session):
            self.rendezvous.drop_session(session)
        return outputs, done

    def _with_remote(
        self, registered: RegisteredCall, session: int, step: int, inline: Sequence[AnyArray]
    ) -> list[AnyArray]:
        """Returns the inputs of a stage, with those that other tasks hold for the stage.

        A task hands out a held tensor once. So a fetched tensor stays with the call until the reply
        is sent: a run that was cut off is repeated with the same tensor.
        """
        call = registered.call
        filled = dict(zip(registered.inline, inline, strict=True))
        fetch, memory = registered.fetch or self._fetch_from, call_memory()
        for i, source in call.remote.items():
            key = f"input {i} of {registered.handle}"
            if key not in memory:
                memory[key] = fetch(source.task, session, step, source.slot)
            filled[i] = memory[key]
        return [filled[i] for i in range(len(call.inputs))]

    @uninterrupted
    def _run_gated(
        self, registered: RegisteredCall, inputs: Sequence[AnyArray], session: int, step: int
    ) -> tuple[list[AnyArray], jax.Array | None]:
        """Runs a stage that writes variables, which a checkpoint may hold back for an instant."""
        key = (session, step)
        self.gate.enter(key)
        writes = None
        try:
            result = registered.prepared.run(inputs, session)
            if registered.pushes:
                self.counters.updated(session)
            if registered.reads:
                self.counters.read(session)
            # Only a run that has succeeded counts as a part of its step.
            writes = registered.writes
            return result
        finally:
            self.gate.leave(key, writes)
            if self.primary is not None:
                self.primary.count()

    def gone(self, session: int, goodbye: bool = True) -> None:
        """Ends the lease of a session: drops all that the session has left on this task, and cancels its calls.

        A session ends on a task here and nowhere else. All state of a client has the session as its
        key, and a call from here drops each kind of state. Master sessions of this process end in
        the same way.

        Args:
            session: The session.
            goodbye: True if the session was closed. Later calls are refused then. False if the
                client had no connection for so long that the client must be dead. A client that
                comes back finds its stages while there is room.
        """
        if goodbye:
            self.waits.end_session(session)
            self.store.run.session_ended(session)
        else:
            self.store.run.lost_contact()
        why = "its session was closed" if goodbye else "its client has been gone for too long"
        self.checkpoint_participant.jobs.end_session(session, why)
        self.cancel(session, why)
        if goodbye and self.primary is not None:
            self.primary.forget(session)
        self.counters.forget(session)
        # Last: an observer that finds no registrations of the session finds all else gone, too.
        self.registry.release(session)

    def cancel(self, session: int, reason: str) -> None:
        """Cancels the calls of a session and drops its held tensors. The session may continue."""
        self.waits.cancel(session, reason)
        for resource in self.store.resources():
            resource.end_client(session)
        self.rendezvous.drop_session(session)
        self.tracer.take(session)

    # -- the tensor channel's handler -------------------------------------------------------------

    def input_layout(self, handle: int) -> TensorLayout | None:
        """Returns the layout of a call's payload; None for a payload that describes itself."""
        if handle in _FIXED:
            return _FIXED[handle]
        return self.registry.get(handle).input_layout

    def permit(self, handle: int, client: int) -> None:
        """Raises PermissionDeniedError if a handle is a stage that only other sessions have registered."""
        if handle not in _FIXED:
            self.registry.check_holder(handle, client)

    def call(self, handle: int, client: int, step: int, inputs: list[Array]) -> Reply:
        """Answers one call of the tensor channel."""
        if handle == FETCH:
            session, of_step, slot = (int(n) for n in inputs[0])
            held = self.rendezvous.take((session, of_step, slot), self._check_is_one_of)
            return Reply([np.asarray(held)], remember=True, dynamic=True)
        if handle in (PULL, PUSH):
            return self._byte_range(handle, client, inputs)
        if handle == BACKUP:
            return Reply(self.about_backup(inputs), dynamic=True)
        if handle == BUNDLE:
            calls = open_bundle(self.registry, client, inputs)
            gated = any(registered.gated for registered, _ in calls)
            changes = any(registered.call.stage.writes_state for registered, _ in calls)
            answers = [functools.partial(self._answer, *call, client, step) for call in calls]
            run = functools.partial(answer_bundle, answers)
        else:
            registered = self.registry.get(handle)
            gated, changes = registered.gated, registered.call.stage.writes_state
            run = functools.partial(self._answer, registered, inputs, client, step)
        began = self.counters.begin()
        failed = True
        try:
            if self.primary is None or not changes:
                reply = run()
            else:
                reply = self.primary.carry_out(run, client, gated=gated)
            failed = False
            return reply
        finally:
            self.counters.end(began, gated, failed)

    def about_backup(self, message: Sequence[Array]) -> list[Array]:
        """Answers a message about another task's backup."""
        if self._backups is None:
            raise FailedPreconditionError(
                "it holds no backups of others: start all ps with the same --ps_backups",
                task=self.task,
            )
        return self._backups.answer_message(message)

    def _byte_range(self, handle: int, client: int, inputs: list[Array]) -> Reply:
        """Sends or receives a byte range of a checkpoint.

        No reply is kept, because a repeated call is harmless.
        """
        self.presence.check()
        # The client of a checkpoint closes its connection afterwards, so this thread serves nothing
        # else.
        if not getattr(_thread, "steps_aside", False):
            step_aside()
            _thread.steps_aside = True
        if handle == PULL:
            data, updates = self.checkpoint_participant.pull(
                ByteRange.from_array(inputs[0]), client
            )
            return Reply([data, np.array([updates], np.uint64)])
        if len(inputs) != 2 or inputs[1].dtype != np.uint8 or inputs[1].ndim != 1:
            raise InvalidArgumentError(
                "a byte range of a checkpoint is one array of bytes", task=self.task
            )
        self.checkpoint_participant.push(ByteRange.from_array(inputs[0]), inputs[1], client)
        return Reply([])

    def _answer(
        self, registered: RegisteredCall, inputs: list[Array], client: int, step: int
    ) -> Reply:
        while True:
            try:
                outputs, done = self.execute(registered, client, step, inputs)
                break
            except HungUpError:
                # The news may be of an older connection of the lane.
                if caller_is_gone():
                    raise
        # The inputs lie in the connection's buffer, which the next call overwrites.
        registered.prepared.wait(done)
        buffers = [np.asarray(outputs[i]) for i in registered.call.replies]
        return Reply(buffers, remember=registered.remember, dynamic=registered.dynamic)

    def disconnected(self, client: int, lane: int) -> None:
        """Ends the waits of a lane's call: its connection broke while the call was running.

        A kernel that waits has done nothing yet, or has noted it in the call's memory. If the
        client connects again, the lane repeats its call.
        """
        self.waits.hang_up(client, lane)
