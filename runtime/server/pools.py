"""Pools of calls: what waits on the control plane takes nothing that status, orders and registrations need."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message

from runtime.errors import OpError, ResourceExhaustedError
from runtime.limits import Limits
from runtime.state.cancellation import HUNG_UP, Cancellation
from runtime.state.run_record import wait_secs
from runtime.transport import rpc
from runtime.transport.security import Refusals

Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"
"""What answers the calls of one method."""
CALLS: Final = "calls"
ORDERS: Final = "orders"
CHECKPOINT_ORDERS: Final = "checkpoint_orders"
REGISTRATIONS: Final = "registrations"
WAITING: Final = "waiting_calls"
CLIENT_WAITING: Final = "client_waiting_calls"
"""The pools, by the limits that they have; a connection has half of one of the first four at most."""

_POOLS: Final = (CALLS, ORDERS, CHECKPOINT_ORDERS, REGISTRATIONS, WAITING)
_SHORT_ORDERS: Final = frozenset(("progress", "receive", "drop", "states", "changed"))
_OURS: Final = "/bellwether."


def _checkpoint(request: Any) -> str:
    return ORDERS if request.WhichOneof("order") in _SHORT_ORDERS else CHECKPOINT_ORDERS


def _run(request: Any) -> str:
    return WAITING if wait_secs(request) else ORDERS


def _waits(request: Any) -> str:
    return WAITING


POOLS: Final[Mapping[str, Callable[[Any], str]]] = {
    "/bellwether.WorkerService/Register": lambda request: REGISTRATIONS,
    "/bellwether.WorkerService/Checkpoint": _checkpoint,
    "/bellwether.WorkerService/Run": _run,
    "/bellwether.WorkerService/Clear": lambda request: ORDERS,
    # A master's calls ask other tasks, which may be asking this one: none of them waits for a place in a pool.
    "/bellwether.MasterService/CreateSession": _waits,
    "/bellwether.MasterService/RegisterPlan": _waits,
    "/bellwether.MasterService/RunStep": _waits,
    "/bellwether.MasterService/ForwardCheckpoint": _waits,
    "/bellwether.MasterService/ForwardBytes": _waits,
    "/bellwether.MasterService/ForwardRunOrder": _waits,
    "/bellwether.MasterService/Reset": _waits,
}
"""By method, the pool of a request; those that are not here are answered at once and are in CALLS."""


class CallPools(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Lets so many calls of each kind run at once.

    Every call has a thread of its own. One that may wait is refused where there are too many: others may be waiting for
    what it would do, so it must not wait for its turn unheard. Any other waits its turn, which soon comes, or until its
    client goes away.

    Args:
        limits: how many calls there may be of each kind.
        refusals: tells of calls that are over a limit.
    """

    def __init__(self, limits: Limits, refusals: Refusals) -> None:
        self._limits = limits
        self._refusals = refusals
        self._changed = threading.Condition()
        self._running: dict[str, Counter[str]] = {pool: Counter() for pool in _POOLS}

    def running(self, pool: str) -> int:
        """How many calls of a pool run now."""
        with self._changed:
            return self._running[pool].total()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, which takes a place in its pool first."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.unary_unary is None or not method.startswith(_OURS):
            return handler
        pool_of, call = POOLS.get(method, lambda request: CALLS), handler.unary_unary

        def pooled(request: Message, context: grpc.ServicerContext) -> Message:
            try:
                with self._place(pool_of(request), context):
                    return call(request, context)
            except OpError as error:
                self._tell(error, context)
                rpc.abort(context, error)
            except Exception as error:  # what gRPC raises to end a call that has failed: while handling why it has
                self._tell(error.__context__, context)
                raise

        return grpc.unary_unary_rpc_method_handler(
            pooled, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def _tell(self, error: BaseException | None, context: grpc.ServicerContext) -> None:
        if isinstance(error, ResourceExhaustedError) and error.limit:
            self._refusals.tell(rpc.host_of(context.peer()), error.message, "limit")

    @contextlib.contextmanager
    def _place(self, pool: str, context: grpc.ServicerContext) -> Iterator[None]:
        running, peer, limits = self._running[pool], context.peer(), self._limits
        most = getattr(limits, pool)
        with self._changed:
            if pool != WAITING:
                free = Cancellation()
                if not context.add_callback(lambda: free.set(HUNG_UP)):
                    free.set(HUNG_UP)
                half = max(1, most // 2)
                free.wait_for(
                    self._changed, lambda: running.total() < most and running[peer] < half, "waiting for its turn"
                )
            elif running[peer] >= limits.client_waiting_calls:
                what = f"{running[peer]} calls of this connection wait here"
                raise limits.exceeded(CLIENT_WAITING, what)
            elif running.total() >= most:
                raise limits.exceeded(WAITING, f"{running.total()} calls wait here")
            running[peer] += 1
        try:
            yield
        finally:
            with self._changed:
                running[peer] -= 1
                if not running[peer]:
                    del running[peer]
                if pool != WAITING:
                    self._changed.notify_all()
