"""The gRPC services of a server: WorkerService for masters, MasterService for clients in other processes."""

import contextlib
from collections.abc import Iterator

import numpy as np

from runtime import concurrency
from runtime.checkpoint.byte_ranges import ByteRange
from runtime.cluster.endpoint import host_id
from runtime.cluster.spec import ClusterSpec
from runtime.errors import AbortedError, InvalidArgumentError, OpError
from runtime.limits import Limits
from runtime.master.config import SessionConfig
from runtime.master.master import Master
from runtime.observe.trace import nbytes, step_stats
from runtime.proto import run_record_pb2, services_pb2_grpc
from runtime.proto import services_pb2 as pb
from runtime.rpc.rpc import caller, servicer_method, when_abandoned
from runtime.server.assembly import TaskParts
from runtime.server.remote_sessions import RemoteSessions
from runtime.server.report import report
from runtime.state.cancellation import HUNG_UP, Cancellation
from runtime.task.ending import StepEnding
from runtime.task.fitting import check_plan
from runtime.task.worker import Worker
from runtime.wire.messages import call_from_proto, device_to_proto, pack, plan_from_proto, unpack


@contextlib.contextmanager
def _until_abandoned(deadline: float | None = None) -> Iterator[Cancellation]:
    """Yields a cancellation for the block, which is set when the caller hangs up.

    Args:
        deadline: End of the waits in the block, ``time.monotonic()``; None for no end.
    """
    cancelled = Cancellation(deadline)
    with when_abandoned(lambda: cancelled.set(HUNG_UP)):
        yield cancelled


class WorkerServicer(services_pb2_grpc.WorkerServiceServicer):
    """The service for masters: identity, registration, checkpoints, run record and figures of a task."""

    def __init__(self, parts: TaskParts) -> None:
        self._parts = parts

    def _find_worker(self, incarnation: int) -> Worker:
        """Returns the worker for a request to a process of the task.

        Args:
            incarnation: Incarnation of the process; 0 for any.

        Raises:
            AbortedError: The process of the request has ended, and this process has replaced it.
            UnavailableError: The server is starting.
        """
        parts = self._parts
        parts.life.check_open()
        if incarnation not in (0, parts.life.incarnation):
            raise AbortedError(
                "restarted since the session began, its state is gone", task=parts.worker.task
            )
        return parts.worker

    def _check_session(self, session: int) -> None:
        """Checks that a session belongs to the client of the present call.

        Raises:
            PermissionDeniedError: The session belongs to another client.
        """
        # Without certificates all clients have the same token, so there is nothing to compare.
        if self._parts.credential.certificates is not None:
            self._parts.tensors.lanes.check_client(session, caller())

    @servicer_method
    def Status(self, request: pb.StatusRequest) -> pb.StatusResponse:
        """Returns the identity, the cluster and the tensor address of the task."""
        parts, worker, life = self._parts, self._parts.worker, self._parts.life
        life.check_open()
        primary = worker.primary
        if request.HasField("cluster"):
            parts.peers.learn_addresses(ClusterSpec(request.cluster))
        return pb.StatusResponse(
            cluster=parts.peers.cluster.as_cluster_def(),
            task=worker.task,
            incarnation=life.incarnation,
            data_port=parts.tensors.port,
            unix_path=parts.tensors.unix_path or "",
            host_id=host_id(),
            devices=[device_to_proto(d) for d in worker.devices],
            started_unix_secs=life.started_unix_secs,
            generation=worker.store.run.generation,
            has_backup=primary is not None,
            backup_lag=0 if primary is None else primary.lag,
            takeovers=life.takeovers,
        )

    @servicer_method
    def Register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Registers a stage call and returns its handle, or requests the stage's program from the client."""
        worker = self._find_worker(request.incarnation)
        self._check_session(request.session)
        found = worker.registrar.register(
            call_from_proto(request.call),
            request.generation,
            traced=request.traced,
            writes=dict(request.writes),
            session=request.session,
            foreign=True,
        )
        # Many sessions share a program, so the client sends the program only to a task that does
        # not know it yet.
        if found is None:
            return pb.RegisterResponse(need_program=True)
        # The client counts on the registration, so the stage must survive a restart from the
        # backup.
        worker.replicate_now()
        return pb.RegisterResponse(handle=found.handle)

    @servicer_method
    def Unregister(self, request: pb.UnregisterRequest) -> pb.UnregisterResponse:
        """Releases handles of a session. Stages without a session may be dropped."""
        self._check_session(request.session)
        self._parts.worker.registry.unregister(request.session, request.handles)
        return pb.UnregisterResponse()

    @servicer_method
    def Trace(self, request: pb.TraceRequest) -> pb.TraceResponse:
        """Returns and forgets the spans of a session's traced calls."""
        self._check_session(request.session)
        spans = self._parts.worker.tracer.take(request.session)
        return pb.TraceResponse(
            step_stats=step_stats(spans), now_unix_nanos=concurrency.wall_time_ns()
        )

    @servicer_method
    def Checkpoint(self, request: pb.CheckpointOrder) -> pb.CheckpointReply:
        """Executes an order of a checkpoint coordinator."""
        worker = self._find_worker(request.incarnation)
        self._check_session(request.session)
        with _until_abandoned(concurrency.monotonic() + worker.limits.order_secs) as cancelled:
            reply = worker.checkpoint_participant.obey(request, cancelled)
        # The client counts on the restored values, so the values must survive a restart from the
        # backup.
        if request.WhichOneof("order") == "commit":
            worker.replicate_now()
        return reply

    @servicer_method
    def Run(self, request: run_record_pb2.RunOrder) -> run_record_pb2.RunReply:
        """Executes an order to the run record. A waiting order ends when the caller hangs up."""
        worker = self._find_worker(request.incarnation)
        with _until_abandoned() as cancelled:
            return worker.obey_run_order(request, cancelled)

    @servicer_method
    def Metrics(self, request: pb.MetricsRequest) -> pb.MetricsResponse:
        """Returns the figures of this task."""
        return report(self._parts, variables=request.variables, threads=request.threads)

    @servicer_method
    def Clear(self, request: pb.ClearRequest) -> pb.ClearResponse:
        """Clears the variables and resources of some containers, or of all."""
        self._parts.worker.store.clear(None if request.all else list(request.containers))
        self._parts.worker.replicate_now()
        return pb.ClearResponse()


class MasterServicer(services_pb2_grpc.MasterServiceServicer):
    """The service for clients in other processes: sessions, plans, steps, and orders to forward."""

    def __init__(self, master: Master, sessions: RemoteSessions, limits: Limits) -> None:
        self._master = master
        self._sessions = sessions
        self._limits = limits

    @servicer_method
    def CreateSession(self, request: pb.CreateSessionRequest) -> pb.CreateSessionResponse:
        """Opens a session."""
        with _until_abandoned() as cancelled:
            # The wait for other tasks may be long, so a client over the limit is refused before the
            # wait.
            options = options_from_proto(request.options)
            self._sessions.check_room()
            session = self._master.create_session(options, cancelled, foreign=True)
        # A client that has hung up does not know the session's id, so nobody else would close the
        # session.
        try:
            cancelled.check("opening a session")
            self._sessions.add(session)
        except OpError:
            session.close()
            raise
        return pb.CreateSessionResponse(
            session=session.id,
            devices=[device_to_proto(d) for d in session.devices],
            target_job=session.target[0],
            target_task=session.target[1],
            home_job=session.home[0],
            home_task=session.home[1],
            value_ids=session.value_ids,
        )

    @servicer_method
    def RenewSession(self, request: pb.RenewSessionRequest) -> pb.RenewSessionResponse:
        """Renews the lease of a session."""
        self._sessions.renewed(request.session)
        return pb.RenewSessionResponse()

    @servicer_method
    def CloseSession(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Closes a session."""
        self._sessions.end(request.session)
        return pb.CloseSessionResponse()

    @servicer_method
    def RegisterPlan(self, request: pb.RegisterPlanRequest) -> pb.RegisterPlanResponse:
        """Registers the stages of a plan on their tasks, and returns the number of the plan."""
        remote = self._sessions.renewed(request.session)
        plan = plan_from_proto(request.plan, self._limits)
        check_plan(plan)
        sizes = {
            slot: spec.nbytes
            for call in plan.stages
            for slot, spec in zip(call.outputs, call.stage.output_specs or (), strict=False)
        }
        # As far as sizes are known, a plan with too large an answer fails here and not after its
        # first step.
        self._check_answer(sum(sizes.get(slot, 0) for slot in plan.fetches))
        return pb.RegisterPlanResponse(plan=remote.add(remote.session.prepare(plan)))

    def _check_answer(self, count: int) -> None:
        if count > self._limits.request_bytes:
            what = f"the fetched values have {count:,} bytes: fetch less at once, or open the session in this process"
            raise self._limits.exceeded("request_bytes", what)

    @servicer_method
    def RunStep(self, request: pb.RunStepRequest) -> pb.RunStepResponse:
        """Runs one step of a registered plan. The step ends early when the caller hangs up."""
        remote = self._sessions.renewed(request.session)
        feeds, timeout = unpack(request.feeds), request.timeout_secs or None
        prepared = remote.plan(request.plan)
        stats = None
        ending = StepEnding()
        with when_abandoned(ending.set):
            if request.traced:
                values, stats = remote.session.run_traced(prepared, feeds, timeout, ending)
            else:
                values = remote.session.run(prepared, feeds, timeout, ending)
        fetched = [value for value in values if value is not None]
        self._check_answer(nbytes(fetched))
        return pb.RunStepResponse(values=pack([np.asarray(v) for v in fetched]), step_stats=stats)

    @servicer_method
    def ForwardCheckpoint(self, request: pb.ForwardCheckpointRequest) -> pb.CheckpointReply:
        """Forwards an order of a checkpoint coordinator to a task."""
        session = self._sessions.renewed(request.session).session
        return session.send_order(request.task, request.order, request.timeout_secs or None)

    @servicer_method
    def ForwardBytes(self, request: pb.ForwardBytesRequest) -> pb.ForwardBytesReply:
        """Carries a byte range of a checkpoint to or from a task.

        The client has no tensor channel.
        """
        session = self._sessions.renewed(request.session).session
        byte_range = ByteRange.from_array(np.array(request.byte_range, np.uint64))
        with contextlib.closing(session.stream(request.task)) as stream:
            if request.data:
                stream.push(byte_range, np.frombuffer(request.data, np.uint8))
                return pb.ForwardBytesReply()
            data, updates = stream.pull(byte_range)
            return pb.ForwardBytesReply(data=data.tobytes(), updates=updates)

    @servicer_method
    def ForwardRunOrder(self, request: pb.ForwardRunOrderRequest) -> pb.ForwardRunOrderReply:
        """Forwards an order to a run record, or to those of all tasks with variables.

        A waiting order ends when the caller hangs up.
        """
        # The comparison is negated because it must refuse NaN as well.
        if not request.answer_secs > 0:
            raise InvalidArgumentError(
                f"an order to run records with {request.answer_secs} s for its answer"
            )
        if request.answer_secs > self._limits.run_order_secs:
            what = f"an order to run records with {request.answer_secs:g} s for its answer"
            raise self._limits.exceeded("run_order_secs", what)
        with _until_abandoned() as cancelled:
            if request.session:
                session = self._sessions.renewed(request.session).session
                reply = session.send_run_order(
                    request.task, request.order, request.answer_secs, cancelled
                )
                return pb.ForwardRunOrderReply(
                    sender=request.order.sender, replies={request.task: reply}
                )
            replies = self._master.send_run_order(
                request.order, request.device_filters, request.answer_secs, cancelled
            )
        return pb.ForwardRunOrderReply(sender=request.order.sender, replies=replies)

    @servicer_method
    def AdoptGenerations(self, request: pb.AdoptGenerationsRequest) -> pb.AdoptGenerationsResponse:
        """Continues a session under the generations begun by the client."""
        session = self._sessions.renewed(request.session).session
        session.adopt_generations(request.generations)
        return pb.AdoptGenerationsResponse(value_ids=session.value_ids)

    @servicer_method
    def Reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        """Closes all sessions. The client then clears the tasks itself."""
        self._master.close_all()
        self._sessions.end_all()
        return pb.ResetResponse()


def options_from_proto(message: pb.SessionOptions) -> SessionConfig:
    """Returns session options from a message. A zero in the message means the default."""
    given = {field.name: value for field, value in message.ListFields()}
    return SessionConfig(**given | {"device_filters": tuple(message.device_filters)})


def options_to_proto(options: SessionConfig) -> pb.SessionOptions:
    """Returns session options as a message."""
    return pb.SessionOptions(
        **{name: getattr(options, name) for name in pb.SessionOptions.DESCRIPTOR.fields_by_name}
    )


def add_services(parts: TaskParts) -> None:
    """Adds both services to the gRPC server of a task.

    Args:
        parts: Parts of the task.
    """
    server = parts.control.grpc
    services_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(parts), server)
    master = MasterServicer(parts.master, parts.remote_sessions, parts.limits)
    services_pb2_grpc.add_MasterServiceServicer_to_server(master, server)
