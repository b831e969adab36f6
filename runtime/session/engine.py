"""Engines: the client's side of a master, in this process or over gRPC.

Both have the same methods for a Session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from absl import logging

from runtime import concurrency, timeouts
from runtime.checkpoint.byte_ranges import ByteRange
from runtime.checkpoint.streaming import CHUNK_BYTES, ByteStream
from runtime.cluster.spec import EVALUATOR, ClusterSpec, agree, split_address
from runtime.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
)
from runtime.master.config import SessionConfig
from runtime.master.master import MasterSession
from runtime.master.times import ANSWER_SECS
from runtime.plan.plan import Plan
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc, step_stats_pb2
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.rpc import rpc
from runtime.server.services import options_to_proto
from runtime.session import times
from runtime.state.forks import HomeProcess
from runtime.tensor_spec import AnyArray, Array, aligned_buffer
from runtime.trust.security import Security
from runtime.wire.messages import device_from_proto, pack, plan_to_proto, unpack

PlanHandle: TypeAlias = Any
"""The result of ``prepare`` for ``run``, of another type for each kind of engine."""
Engine: TypeAlias = "MasterSession | RemoteEngine"
"""The session of a master in this process or in another process."""


def sign_errors(engine: Engine) -> Engine:
    """Adds the session's id to each error of its tasks, so that ``Session.raised`` can recognise these errors."""
    # A session that is dropped without close must not live on in a cycle, so the wrappers refer
    # weakly.
    number, kind, this = engine.id, type(engine), weakref.ref(engine)

    def signed(call: Callable[..., Any], of: Callable[[], Any]) -> Callable[..., Any]:
        def signing(*arguments: Any) -> Any:
            try:
                return call(of(), *arguments)
            except OpError as error:
                error.session = number
                raise

        return signing

    # A stream belongs to one save or restore, which closes the stream. So a cycle does no harm.
    def stream(task: str) -> ByteStream:
        opened: Any = open_stream(task)
        for name in ("pull", "push"):
            setattr(opened, name, signed(getattr(type(opened), name), lambda: opened))
        return cast(ByteStream, opened)

    open_stream = signed(kind.stream, this)
    for name in (
        "run",
        "run_traced",
        "prepare",
        "send_order",
        "send_run_order",
        "adopt_generations",
    ):
        setattr(engine, name, signed(getattr(kind, name), this))
    engine.stream = stream  # type: ignore[method-assign]
    return engine


class RelayedStream:
    """A stream to a task by way of a master in another process, in gRPC messages of a few MiB.

    Args:
        request: the function that sends one message and returns the reply.
    """

    def __init__(self, request: Callable[[ByteRange, bytes], pb.ForwardBytesReply]) -> None:
        self._request = request

    def pull(self, byte_range: ByteRange) -> tuple[Array, int]:
        """Returns the bytes of a byte range and the number of the task's updates."""
        whole, updates = aligned_buffer(byte_range.size), 0
        for at in range(0, byte_range.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, byte_range.size - at)
            answer = self._request(
                byte_range._replace(offset=byte_range.offset + at, size=size), b""
            )
            whole[at : at + size] = np.frombuffer(answer.data, np.uint8)
            updates = answer.updates
        return whole, updates

    def push(self, byte_range: ByteRange, data: Array) -> None:
        """Sends the bytes of a byte range."""
        self._request(byte_range, data.tobytes())

    def close(self) -> None:
        """Does nothing."""


class RemoteEngine:
    """A session of a master in another process.

    Args:
        target: ``grpc://host:port``.
        options: options of the session.
        security: as of ``runtime.Session``.

    Raises:
        UnauthenticatedError: the master refuses this client's credential, or this client refuses
            the master's.
        DeadlineExceededError: no master answers at the target, or tasks did not join in time.
    """

    def __init__(
        self, target: str, options: SessionConfig, security: Security | None = None
    ) -> None:
        self._target = target
        self._home = HomeProcess("the session")
        address = target.removeprefix("grpc://")
        split_address(address)
        self._channel = rpc.open_channel(address, security)
        self._stub = services_pb2_grpc.MasterServiceStub(self._channel)
        self._timeout = options.operation_timeout_secs
        self._waits: dict[object, tuple[str, float]] = {}
        """By call under way, the work of the master in words, and the begin of the wait."""
        self._looked_at = concurrency.monotonic()
        # A failed start leaves no open channel behind.
        try:
            answer = self._create_session(options)
        except BaseException:
            self._channel.close()
            raise
        self.id = answer.session
        try:
            self._renewal = concurrency.every(timeouts.RENEW_SECS, self._renew_session, blocks=True)
        except BaseException:
            self._end_session()
            raise
        self.devices = tuple(device_from_proto(d) for d in answer.devices)
        self.target = (answer.target_job, answer.target_task)
        self.home = (answer.home_job, answer.home_task)
        self.value_ids = dict(answer.value_ids)

    def _create_session(self, options: SessionConfig) -> pb.CreateSessionResponse:
        """Waits for a master, and opens a session.

        The client waits, not the master: each request has a limit of some seconds. So no master
        waits for tasks on behalf of a client that has died.
        """
        started = concurrency.monotonic()
        limit = options.start_timeout_secs
        # Session 0 does not exist. The probe changes nothing, and its reply shows that a master
        # listens.
        probe = pb.CloseSessionRequest(session=0)
        listens = False
        while True:
            waited = concurrency.monotonic() - started
            secs = (
                timeouts.LOG_EVERY_SECS
                if limit is None
                else max(0.05, min(timeouts.LOG_EVERY_SECS, limit - waited))
            )
            part = dataclasses.replace(options, start_timeout_secs=secs)
            request = pb.CreateSessionRequest(options=options_to_proto(part))
            try:
                if not listens:
                    rpc.call(
                        self._stub.CloseSession,
                        probe,
                        timeout=secs,
                        task=self._target,
                        wait_for_ready=True,
                    )
                    listens = True
                    continue
                return rpc.call(
                    self._stub.CreateSession,
                    request,
                    timeout=secs + times.LATE_SECS,
                    task=self._target,
                )
            except DeadlineExceededError as error:
                waited = concurrency.monotonic() - started
                # The last attempt may end a little before the limit.
                if limit is not None and waited >= limit - 0.01:
                    if listens:
                        raise
                    raise DeadlineExceededError(
                        f"after {waited:.0f} s nobody listens at the session's target "
                        f"{self._target}"
                    ) from None
                if listens:
                    logging.warning(
                        "opening a session at %s, for %.0f s now: %s", self._target, waited, error
                    )
                else:
                    logging.warning(
                        "still waiting for a server at the session's target %s", self._target
                    )

    @contextlib.contextmanager
    def _note_wait(self, what: str) -> Iterator[None]:
        """Has the renewals of the session log the wait for a call within the block."""
        call = object()
        # Each call has a key of its own, because several threads may run steps.
        self._waits[call] = what, concurrency.monotonic()
        try:
            yield
        finally:
            del self._waits[call]

    def log_waits(self) -> None:
        """Logs the calls that have waited for another ``LOG_EVERY_SECS`` since the last renewal."""
        # The renewals come at fixed times, so each multiple of the period is logged once.
        before, self._looked_at = self._looked_at, concurrency.monotonic()
        for what, since in list(self._waits.values()):
            waited = self._looked_at - since
            if (
                waited // timeouts.LOG_EVERY_SECS
                > max(0.0, before - since) // timeouts.LOG_EVERY_SECS
            ):
                logging.warning(
                    "Waiting for the master at %s to %s, for %.0f s now", self._target, what, waited
                )

    def prepare(self, plan: Plan) -> tuple[int, Plan]:
        """Registers a plan with the master."""
        request = pb.RegisterPlanRequest(session=self.id, plan=plan_to_proto(plan))
        with self._note_wait("register the stages of a step"):
            return rpc.call(
                self._stub.RegisterPlan, request, timeout=self._timeout, task=self._target
            ).plan, plan

    def run(
        self, prepared: tuple[int, Plan], feeds: Sequence[AnyArray], timeout: float | None = None
    ) -> list[AnyArray | None]:
        """Runs one step of a registered plan."""
        return self._run_step(prepared, feeds, timeout, False)[0]

    def run_traced(
        self, prepared: tuple[int, Plan], feeds: Sequence[AnyArray], timeout: float | None = None
    ) -> tuple[list[AnyArray | None], step_stats_pb2.StepStats]:
        """Runs one step of a registered plan, and returns also the StepStats."""
        return self._run_step(prepared, feeds, timeout, True)

    def _run_step(
        self,
        prepared: tuple[int, Plan],
        feeds: Sequence[AnyArray],
        timeout: float | None,
        traced: bool,
    ) -> tuple[list[AnyArray | None], step_stats_pb2.StepStats]:
        number, plan = prepared
        limit = self._timeout if timeout is None else timeout
        request = pb.RunStepRequest(
            session=self.id,
            plan=number,
            feeds=pack([np.asarray(value) for value in feeds]),
            timeout_secs=limit or 0.0,
            traced=traced,
        )
        # The master itself keeps the limit, and its error names the task. The client waits a little
        # longer.
        allowed = None if limit is None else limit + times.RELAY_SECS
        with self._note_wait("run a step"):
            answer = rpc.call(self._stub.RunStep, request, timeout=allowed, task=self._target)
        # The reply has no value for an operation.
        values = iter(unpack(answer.values))
        return [None if slot < 0 else next(values) for slot in plan.fetches], answer.step_stats

    def send_order(
        self, task: str, order: pb.CheckpointOrder, timeout: float | None
    ) -> pb.CheckpointReply:
        """Sends an order of a checkpoint coordinator to a task, and returns the reply."""
        request = pb.ForwardCheckpointRequest(
            session=self.id, task=task, order=order, timeout_secs=timeout or 0.0
        )
        limit = None if timeout is None else timeout + times.RELAY_SECS
        return rpc.call(self._stub.ForwardCheckpoint, request, timeout=limit, task=self._target)

    def send_run_order(self, task: str, order: RunOrder) -> RunReply:
        """Sends an order without a wait to the run record of a task, and returns the reply."""
        request = pb.ForwardRunOrderRequest(
            session=self.id, task=task, order=order, answer_secs=ANSWER_SECS
        )
        limit = ANSWER_SECS + times.LATE_SECS
        return rpc.call(
            self._stub.ForwardRunOrder, request, timeout=limit, task=self._target
        ).replies[task]

    def stream(self, task: str) -> ByteStream:
        """Opens a stream to a task for byte ranges of variables, by gRPC messages to the master."""

        def request(byte_range: ByteRange, data: bytes) -> pb.ForwardBytesReply:
            request = pb.ForwardBytesRequest(
                session=self.id, task=task, byte_range=byte_range, data=data
            )
            return rpc.call(
                self._stub.ForwardBytes, request, timeout=times.FORWARD_SECS, task=self._target
            )

        return RelayedStream(request)

    def adopt_generations(self, generations: Mapping[str, int]) -> bool:
        """Continues under generations that the client has begun.

        Returns True if a generation is new to the session.
        """
        request = pb.AdoptGenerationsRequest(session=self.id, generations=generations)
        before = self.value_ids
        answer = rpc.call(
            self._stub.AdoptGenerations, request, timeout=times.FORWARD_SECS, task=self._target
        )
        self.value_ids = dict(answer.value_ids)
        return self.value_ids != before

    def silent_secs(self) -> float | None:
        """Returns None: only the master, in another process, knows."""
        return None

    def left(self) -> list[str]:
        """Returns an empty list: only the master, in another process, knows."""
        return []

    def cancel_steps(self) -> None:
        """Ends the session, and with it the steps under way."""
        self.close()

    def close(self) -> None:
        """Ends the session, and waits for no dead master. Does nothing in a forked child."""
        if self._home.was_left:
            return
        # The renewal stops first, or it would report the end of the session as a loss.
        self._renewal.stop()
        self._end_session()

    def _end_session(self) -> None:
        try:
            request = pb.CloseSessionRequest(session=self.id)
            rpc.call(self._stub.CloseSession, request, timeout=times.CLOSE_SECS, task=self._target)
        except OpError as error:
            logging.info("closing the session at %s: %s", self._target, error)
        finally:
            self._channel.close()

    def _renew_session(self) -> None:
        """Renews the session once."""
        self.log_waits()
        try:
            request = pb.RenewSessionRequest(session=self.id)
            rpc.call(
                self._stub.RenewSession, request, timeout=timeouts.RENEW_SECS, task=self._target
            )
        except AbortedError as error:
            # The next step of the client fails with the same error.
            logging.warning("the session at %s is gone: %s", self._target, error)
            self._renewal.stop()
        except OpError as error:
            logging.debug("the session at %s was not renewed: %s", self._target, error)


def reset(target: str, containers: Sequence[str] | None, timeout: float) -> None:
    """Clears containers on all tasks of the target's cluster, and closes the sessions of the target's master.

    This process sends the orders to the tasks itself, because the role of the master may not allow
    the orders.

    Raises:
        NotFoundError: the target is not a gRPC target.
        DeadlineExceededError: a task did not answer in time; nothing is cleared.
        InvalidArgumentError: a task of another cluster answers at an address; nothing is cleared.
    """
    if not target.startswith("grpc://"):
        raise NotFoundError(
            f"{target!r} is not a session target: it needs the form grpc://host:port"
        )
    clear, ask = (
        pb.ClearRequest(containers=containers or (), all=containers is None),
        pb.MetricsRequest(),
    )
    with contextlib.ExitStack() as channels:
        # The channels close in any case, also after a task that does not answer.
        channel = channels.enter_context(
            contextlib.closing(rpc.open_channel(target.removeprefix("grpc://")))
        )
        worker = services_pb2_grpc.WorkerServiceStub(channel)
        # This process may know no cluster, so the target describes the cluster.
        cluster = ClusterSpec(rpc.call(worker.Metrics, ask, timeout=timeout, task=target).cluster)
        stubs: dict[str, services_pb2_grpc.WorkerServiceStub] = {}
        for task, address in cluster.tasks().items():
            if task.job != EVALUATOR:
                name = str(task)
                to_task = channels.enter_context(
                    contextlib.closing(rpc.open_channel(address, task=name))
                )
                stub = stubs[name] = services_pb2_grpc.WorkerServiceStub(to_task)
                # All tasks are met before the first is cleared.
                there = rpc.call(stub.Metrics, ask, timeout=timeout, task=name, wait_for_ready=True)
                if there.task != name or not agree(cluster, ClusterSpec(there.cluster)):
                    raise InvalidArgumentError(
                        f"at {address} {there.task} of another cluster answers", task=name
                    )
        for name, stub in stubs.items():
            rpc.call(stub.Clear, clear, timeout=timeout, task=name)
        master = services_pb2_grpc.MasterServiceStub(channel)
        rpc.call(master.Reset, pb.ResetRequest(), timeout=timeout, task=target)
