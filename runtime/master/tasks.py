"""Tasks as a master reaches them: directly in this process, or by gRPC and the tensor channel."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from absl import logging

from runtime import concurrency, timeouts
from runtime.checkpoint.participant import NEEDS_SESSION
from runtime.checkpoint.streaming import ByteStream, ChannelStream, LocalStream
from runtime.cluster.addresses import settled
from runtime.cluster.endpoint import Endpoint, host_id
from runtime.cluster.spec import ClusterSpec, agree, difference, split_address
from runtime.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    UnimplementedError,
)
from runtime.master import times
from runtime.master.calls import RemoteCall, ReplyBuffers
from runtime.master.config import SessionConfig
from runtime.observe.trace import shifted, step_stats
from runtime.plan.place import Device
from runtime.plan.plan import StageCall
from runtime.proto import run_record_pb2, services_pb2, services_pb2_grpc, step_stats_pb2
from runtime.rpc import rpc
from runtime.rpc.unreached import why_not
from runtime.state.cancellation import Cancellation
from runtime.task.registry import RegisteredCall
from runtime.task.traced_stage import FetchFrom
from runtime.task.worker import Worker
from runtime.tensor_spec import AnyArray, Array
from runtime.trust.security import Security, find_token, in_force
from runtime.wire.channel import Lane
from runtime.wire.codec import TensorLayout
from runtime.wire.dial import ChannelOptions
from runtime.wire.handles import BACKUP, FETCH
from runtime.wire.messages import call_to_proto, device_from_proto
from runtime.wire.peer import Peer

_T = TypeVar("_T")


class LocalMaster(Protocol):
    """The face of the master of a server in this process."""

    def cluster(self) -> ClusterSpec:
        """Returns the cluster, from the view of the server's task."""

    def has_session(self, session: int) -> bool:
        """Returns True if a session of this number is open."""

    def send_run_order(
        self,
        order: run_record_pb2.RunOrder,
        device_filters: Sequence[str],
        answer_secs: float,
        cancelled: Cancellation,
    ) -> dict[str, run_record_pb2.RunReply]:
        """Sends an order to the run records of tasks with variables, and returns the replies by task."""


class LocalServer(Protocol):
    """The face of a server in this process."""

    worker: Worker
    config: SessionConfig | None

    @property
    def incarnation(self) -> int:
        """The random id of this process of the task."""

    @property
    def master(self) -> LocalMaster:
        """The master that makes the server's sessions."""


_servers: dict[str, LocalServer] = {}
_stopped: weakref.WeakValueDictionary[str, Worker] = weakref.WeakValueDictionary()
"""By address, the worker of the last stopped server of this process."""
_servers_lock = concurrency.Lock()


def publish(address: str, server: LocalServer) -> None:
    """Publishes a server of this process under its address."""
    with _servers_lock:
        _servers[address] = server
        before = _stopped.pop(address, None)
    # The lock is free here, because the worker takes locks of its own.
    if before is not None:
        before.leave(replaced=True)


def withdraw(address: str, server: LocalServer) -> None:
    """Forgets a server. New sessions of this process reach the server by sockets."""
    with _servers_lock:
        if _servers.get(address) is server:
            del _servers[address]


def leave(address: str, server: LocalServer) -> None:
    """Forgets a stopped server. Its task refuses the remaining sessions of this process."""
    withdraw(address, server)
    server.worker.leave()
    with _servers_lock:
        _stopped[address] = server.worker


def find_local(address: str) -> LocalServer | None:
    """Returns the server of this process that listens on ``address``, or None."""
    # A single lookup needs no lock.
    return _servers.get(address)


def is_local_session(session: int) -> bool:
    """Returns True if a session belongs to a master of this process."""
    # Another thread may publish a server meanwhile, so the loop runs over a copy.
    return any(server.master.has_session(session) for server in list(_servers.values()))


class LocalTask:
    """A task in this process."""

    def __init__(self, name: str, server: LocalServer) -> None:
        self.name = name
        self.server = server
        self.incarnation = server.incarnation
        self.generation = server.worker.store.run.generation
        self.devices: tuple[Device, ...] = tuple(server.worker.devices)

    def register(
        self,
        call: StageCall,
        writes: Mapping[str, int] | None = None,
        traced: bool = False,
        foreign: bool = False,
    ) -> RegisteredCall:
        """Prepares a stage call on the task.

        Args:
            call: the stage call.
            writes: as in ``StageRegistrar.register``.
            traced: True to time the runs.
            foreign: True if the client is another process.
        """
        found = self.server.worker.registrar.register(
            call, self.generation, traced=traced, writes=writes, foreign=foreign
        )
        assert found is not None
        return found

    def send_order(
        self, order: services_pb2.CheckpointOrder, timeout: float | None
    ) -> services_pb2.CheckpointReply:
        """Sends an order of a checkpoint coordinator to the task, and returns the reply."""
        return self.server.worker.checkpoint_participant.obey(order)

    def send_run_order(
        self, order: run_record_pb2.RunOrder, cancelled: Cancellation
    ) -> run_record_pb2.RunReply:
        """Sends an order to the task's run record, and returns the reply.

        ``cancelled`` ends the order.
        """
        return self.server.worker.obey_run_order(order, cancelled)

    def stream(self, client: int) -> ByteStream:
        """Opens a stream for byte ranges of a client's checkpoint."""
        return LocalStream(self.server.worker.checkpoint_participant, client)

    def trace(self, session: int) -> step_stats_pb2.StepStats:
        """Returns the session's new spans on the task."""
        return step_stats(self.server.worker.tracer.take(session))

    def about_backup(self, message: Sequence[Array]) -> list[Array]:
        """Sends a message about the task's backup, and returns the answer."""
        return self.server.worker.about_backup(message)

    def cancel(self, session: int) -> None:
        """Ends the waits of a session on the task."""
        self.server.worker.cancel(session, "the step was cancelled")

    def close(self, session: int) -> None:
        """Ends a session on the task."""
        self.server.worker.gone(session)


class RemoteTask:
    """A task in another process.

    Args:
        name: ``/job:ps/task:0``.
        address: gRPC address of the task.
        client: random id of the caller, a session or a task.
        options: limits of the tensor channel.
        security: certificates of the caller, or a token for a task that has left no token for this
            user; by default from ``BELLWETHER_SECURITY``.
    """

    def __init__(
        self,
        name: str,
        address: str,
        client: int,
        options: ChannelOptions,
        security: Security | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.incarnation = 0
        self.host_id = ""
        self.generation = 0
        self.devices: tuple[Device, ...] = ()
        self.has_backup = False
        """True if the task has a backup.

        After its death another process takes over, and callers wait.
        """
        self._takeovers = 0
        self._options = options
        self._closed = concurrency.Event()
        self._buffers: weakref.WeakValueDictionary[int, ReplyBuffers] = (
            weakref.WeakValueDictionary()
        )
        self._client = client
        given = in_force(security, os.environ)
        self._channel = rpc.open_channel(address, given, name)
        self._stub = services_pb2_grpc.WorkerServiceStub(self._channel)
        self.peer = Peer(
            name,
            self._find_endpoint,
            client,
            lambda timeout: find_token(address, given, timeout),
            options=options,
            certificates=given.tls() if given else None,
        )

    def status(
        self, cluster: ClusterSpec | None, sender: str, timeout: float
    ) -> services_pb2.StatusResponse:
        """Returns the status of the task. Compares cluster definitions if ``cluster`` is given.

        Raises:
            InvalidArgumentError: the two tasks know different clusters, or another task answers at
                this address.
        """
        request = services_pb2.StatusRequest(sender=sender)
        if cluster is not None:
            request.cluster.CopyFrom(cluster.as_cluster_def())
        try:
            found = rpc.call(self._stub.Status, request, timeout=timeout, task=self.name)
        # A gRPC server of another program does not know the method.
        except UnimplementedError as error:
            raise UnimplementedError(f"at {self.address} {why_not(error)}", task=sender) from None
        if found.task != self.name:
            raise InvalidArgumentError(
                f"at {self.address} answers {found.task}, not {self.name}", task=sender
            )
        if cluster is not None:
            _check_cluster(self.name, ClusterSpec(found.cluster), sender, cluster)
        return found

    def meet(self, status: services_pb2.StatusResponse) -> None:
        """Notes the incarnation and the devices of the task at first contact."""
        self.incarnation = status.incarnation
        self.host_id = status.host_id
        self.generation = status.generation
        self.has_backup, self._takeovers = status.has_backup, status.takeovers
        self.devices = tuple(device_from_proto(d) for d in status.devices)

    def _find_endpoint(self, timeout: float) -> Endpoint:
        try:
            found = self.status(None, "", timeout)
        except UnavailableError as error:
            if not self.has_backup:
                raise
            raise DeadlineExceededError(
                f"{why_not(error)}; waiting for it to go on from its backup"
            ) from None
        # A restarted task has lost its variables, so no call of this session may reach it.
        if self.incarnation and found.incarnation != self.incarnation:
            raise AbortedError(
                "restarted since the session began, its state is gone", task=self.name
            )
        # A takeover keeps the incarnation, since the values live on in the backup.
        if self.has_backup and found.takeovers != self._takeovers:
            self._takeovers = found.takeovers
            logging.warning(
                "%s was restarted and goes on from its backup: %s",
                self.name,
                describe_loss(found.backup_lag),
            )
        host, _ = split_address(self.address)
        return Endpoint(
            settled(host),
            found.data_port,
            found.unix_path or None,
            found.host_id,
            found.incarnation,
        )

    def send_order(
        self, order: services_pb2.CheckpointOrder, timeout: float | None
    ) -> services_pb2.CheckpointReply:
        """Sends an order of a checkpoint coordinator to the task, and returns the reply."""
        order.incarnation = self.incarnation

        def send_once() -> services_pb2.CheckpointReply:
            # Each try connects: a restarted task knows no connection of the session yet.
            if order.WhichOneof("order") in NEEDS_SESSION:
                self._connect_peer(timeout)
            return rpc.call(self._stub.Checkpoint, order, timeout=timeout, task=self.name)

        return self._retry_call(send_once)

    def send_run_order(
        self, order: run_record_pb2.RunOrder, deadline: float
    ) -> run_record_pb2.RunReply:
        """Sends an order to the task's run record, and returns the reply.

        The order is sent twice if the task recovers from its backup meanwhile.

        Args:
            order: the order. ``close`` ends the wait for the reply, here and on the task.
            deadline: monotonic time at which the order fails.
        """
        # The same order goes to other tasks, which have other incarnations.
        sent = run_record_pb2.RunOrder()
        sent.CopyFrom(order)
        sent.incarnation = self.incarnation

        def send_once() -> run_record_pb2.RunReply:
            left = max(times.LEAST_SECS, deadline - concurrency.monotonic())
            return rpc.call(self._stub.Run, sent, timeout=left, task=self.name)

        return self._retry_call(send_once)

    def stream(self, client: int) -> ByteStream:
        """Opens a stream for byte ranges of a checkpoint of this object's client."""
        return ChannelStream(self.peer.acquire(), self.peer.release)

    def _retry_call(self, call: Callable[[], _T]) -> _T:
        """Makes an idempotent call, and repeats the call while a task with a backup does not answer."""
        # A takeover needs some seconds, in which nothing listens at the address.
        limit = concurrency.monotonic() + self._options.reconnect_secs
        while True:
            try:
                return call()
            except UnavailableError:
                if (
                    not self.has_backup
                    or concurrency.monotonic() >= limit
                    or self._closed.wait(times.AGAIN_SECS)
                ):
                    raise

    def register(
        self,
        call: StageCall,
        fetched: frozenset[int],
        timeout: float | None,
        writes: Mapping[str, int] | None = None,
        traced: bool = False,
    ) -> RemoteCall:
        """Registers a stage call on the task.

        Args:
            call: the stage call.
            fetched: slots whose values a user may keep. Their memory is not reused.
            timeout: seconds.
            writes: by task, the number of writing stages of the plan; None if the plan has one at
                most.
            traced: True to time the runs.
        """
        request = services_pb2.RegisterRequest(
            call=call_to_proto(call, with_blob=False),
            incarnation=self.incarnation,
            generation=self.generation,
            writes=writes,
            traced=traced,
            session=self._client,
        )

        self._connect_peer(timeout)

        def register_once() -> services_pb2.RegisterResponse:
            return self._retry_call(
                lambda: rpc.call(self._stub.Register, request, timeout=timeout, task=self.name)
            )

        answer = register_once()
        # The task may know the program already, so the program is sent on request only.
        if answer.need_program:
            request.call.CopyFrom(call_to_proto(call))
            answer = register_once()
        stage = call.stage
        layout = (
            None
            if stage.output_specs is None
            else TensorLayout([stage.output_specs[i] for i in call.replies])
        )
        # Outputs that other tasks fetch directly are no replies to the master.
        slots = tuple(call.outputs[i] for i in call.replies)
        return RemoteCall(
            self.peer,
            self.name,
            call.wave,
            answer.handle,
            tuple(s for i, s in enumerate(call.inputs) if i not in call.remote),
            layout,
            slots,
            stage.inputs is None,
            self._buffers.setdefault(answer.handle, ReplyBuffers()),
            layout is not None and bool(slots) and not fetched.intersection(slots),
            stage.writes_state,
            stage.may_wait,
        )

    def _connect_peer(self, timeout: float | None) -> None:
        """Connects to the task before the task keeps anything for the session.

        The task learns of the end of a session by the end of its connections.
        """
        if self.peer.incarnation is None:
            deadline = None if timeout is None else concurrency.monotonic() + timeout
            self.peer.release(self.peer.acquire(deadline=deadline))

    def unregister(self, session: int, handles: Sequence[int]) -> None:
        """Reports to the task that the plan of these handles is gone. The report may be lost."""
        # The task drops all handles of a closed session anyway.
        if self._closed.is_set():
            return
        request = services_pb2.UnregisterRequest(session=session, handles=handles)
        try:
            rpc.call(
                self._stub.Unregister, request, timeout=timeouts.LOG_EVERY_SECS, task=self.name
            )
        except OpError as error:
            logging.debug("%s keeps stages of a plan until the session ends: %s", self.name, error)

    def trace(self, session: int) -> step_stats_pb2.StepStats:
        """Returns the session's new spans on the task, by this host's clock."""
        # The clocks of two hosts differ: the answer is taken for the middle of the call.
        before = concurrency.wall_time_ns()
        request = services_pb2.TraceRequest(session=session)
        answer = rpc.call(
            self._stub.Trace, request, timeout=timeouts.LOG_EVERY_SECS, task=self.name
        )
        ahead = (
            0
            if self.host_id == host_id()
            else answer.now_unix_nanos - (before + concurrency.wall_time_ns()) // 2
        )
        return shifted(answer.step_stats, ahead)

    def fetch(self, session: int, step: int, slot: int) -> Array:
        """Fetches a held tensor from the task."""
        return self._exchange_arrays(FETCH, [np.array([session, step, slot], np.uint64)], step)[0]

    def about_backup(self, message: Sequence[Array]) -> list[Array]:
        """Sends a message about the task's backup, and returns the answer."""
        return self._exchange_arrays(BACKUP, message)

    def _exchange_arrays(self, handle: int, arrays: Sequence[Array], step: int = 0) -> list[Array]:
        lane: Lane = self.peer.acquire()
        try:
            lane.send(handle, step, arrays, dynamic=True)
            return lane.receive(None)
        finally:
            self.peer.release(lane)

    def cancel(self, session: int) -> None:
        """Ends the calls under way. The task notices the end of the connections."""
        self.peer.cancel_calls()

    def close(self, session: int) -> None:
        """Closes the connections. The task then cancels the waits of this session."""
        # A call that waits for another try gives up first.
        self._closed.set()
        self.peer.close()
        self._channel.close()


Task = LocalTask | RemoteTask


def meet_tasks(
    tasks: Sequence[tuple[str, str]],
    *,
    cluster: ClusterSpec,
    sender: str,
    client: int,
    options: ChannelOptions,
    timeout: float | None,
    cancelled: Cancellation,
    security: Security | None = None,
) -> dict[str, Task]:
    """Meets every task.

    Waits for tasks that have not joined yet, and logs the names of these tasks every 10 s.

    Args:
        tasks: (name, address) of each task.
        cluster: this task's view of the cluster, compared with the view of each task.
        sender: name of this task.
        client: id of the session.
        options: limits of the tensor channel.
        timeout: seconds until the wait fails; None for no limit.
        cancelled: ends the wait, from another thread.
        security: as of ``RemoteTask``.

    Raises:
        UnauthenticatedError: a task has another token, or this process has none.
        CancelledError: ``cancelled`` was set.
        DeadlineExceededError: tasks did not answer. The message names the tasks and their
            addresses.
        InvalidArgumentError: a task knows another cluster.
    """
    met: dict[str, Task] = {}
    absent: dict[str, RemoteTask] = {}
    for name, address in tasks:
        local = find_local(address)
        # A task of another name is met by gRPC, whose status check reports the difference.
        if local is not None and local.worker.task == name:
            _check_cluster(name, local.master.cluster(), sender, cluster)
            met[name] = LocalTask(name, local)
        else:
            absent[name] = RemoteTask(name, address, client, options, security)
    wait = _JoinWait(sender, timeout)
    try:
        while absent:
            for name, task in list(absent.items()):
                cancelled.check(f"waiting for {name}")
                try:
                    task.meet(task.status(cluster, sender, wait.attempt_secs()))
                except (UnavailableError, DeadlineExceededError) as error:
                    wait.reasons[name] = why_not(error)
                    continue
                met[name] = absent.pop(name)
            if absent:
                wait.report(absent.values())
                # gRPC does not report that a listener has appeared.
                cancelled.wait(timeouts.JOIN_PAUSE_SECS)
    except BaseException:
        for known in (*absent.values(), *met.values()):
            known.close(client)
        raise
    return met


class _JoinWait:
    """A wait for tasks to join: its limit, its log lines, and by task the reason of the last failed attempt."""

    def __init__(self, sender: str, timeout: float | None) -> None:
        self._sender = sender
        self._started = concurrency.monotonic()
        self._deadline = None if timeout is None else self._started + timeout
        self._log_at = self._started + timeouts.LOG_EVERY_SECS
        self.reasons: dict[str, str] = {}

    def attempt_secs(self) -> float:
        """Returns the seconds for the next attempt."""
        longest = timeouts.ATTEMPT_SECS
        if self._deadline is None:
            return longest
        return min(longest, max(times.LEAST_SECS, self._deadline - concurrency.monotonic()))

    def report(self, absent: Iterable[RemoteTask]) -> None:
        """Logs the tasks that are absent, now and then.

        Raises:
            DeadlineExceededError: the time is up.
        """
        now = concurrency.monotonic()
        peers = ", ".join(
            f"{task.name} at {task.address} ({self.reasons[task.name]})" for task in absent
        )
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineExceededError(f"still waiting for {peers}", task=self._sender)
        if now >= self._log_at:
            logging.warning("%s: still waiting for %s", self._sender, peers)
            self._log_at = now + timeouts.LOG_EVERY_SECS


def _check_cluster(name: str, there: ClusterSpec, sender: str, here: ClusterSpec) -> None:
    if there != here and not agree(here, there):
        raise InvalidArgumentError(
            f"the cluster definition of {name} differs from that of {sender}: "
            f"{difference(here, there)}; "
            "start all tasks with the same --ps_hosts and --worker_hosts",
            task=sender,
        )


def describe_loss(lag: int) -> str:
    """Returns the loss of updates by a takeover, in words for the log."""
    return (
        f"at most {lag} of its last updates are lost"
        if lag
        else "no update that was answered is lost"
    )


def make_fetcher(find: Callable[[str], Task]) -> FetchFrom:
    """Makes the function by which a task fetches tensors from other tasks.

    Args:
        find: the function that returns a task by its name.
    """

    def fetch(name: str, session: int, step: int, slot: int) -> AnyArray:
        task = find(name)
        if isinstance(task, LocalTask):
            return task.server.worker.rendezvous.take((session, step, slot))
        return task.fetch(session, step, slot)

    return fetch
