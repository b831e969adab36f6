"""Whether a call of the control plane is made: by what it orders, who its client is, and what `roles.MAY` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from runtime.errors import PermissionDeniedError
from runtime.proto import run_record_pb2, services_pb2, stage_pb2
from runtime.transport import roles, rpc
from runtime.transport.roles import OBSERVER, Identity
from runtime.transport.rpc import TokenCheck
from runtime.transport.security import Refusals

Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"

CHIEFS_KERNELS: Final = frozenset(("quorum/claim", "quorum/gather", "quorum/commit"))
"""Kernels by which a chief decides on a step: to register a stage with one is an order of its own."""
OF_THE_SENDER: Final = frozenset(("claim", "load", "open", "finish", "join", "rest", "done"))
"""Orders to a run record that speak for the task that sends them."""


def _checkpoint(order: services_pb2.CheckpointOrder) -> str:
    return _known(f"checkpoint.{order.WhichOneof('order')}")


def _run(order: run_record_pb2.RunOrder) -> str:
    return _known(f"run.{order.WhichOneof('order')}")


def _known(order: str) -> str:
    return order if order in roles.MAY else "unknown"


def _stage(*calls: stage_pb2.StageCallDef) -> str:
    kernels = (host.kernel.rpartition("when/")[2] for call in calls for host in call.stage.host)
    return "quorum" if any(kernel in CHIEFS_KERNELS for kernel in kernels) else "register"


ORDERS: Final[Mapping[str, Callable[[Any], str]]] = {
    "/bellwether.WorkerService/Status": lambda request: "status",
    "/bellwether.WorkerService/Metrics": lambda request: "metrics",
    "/bellwether.WorkerService/Register": lambda request: _stage(request.call),
    "/bellwether.WorkerService/Unregister": lambda request: "unregister",
    "/bellwether.WorkerService/Trace": lambda request: "trace",
    "/bellwether.WorkerService/Clear": lambda request: "clear",
    "/bellwether.WorkerService/Checkpoint": _checkpoint,
    "/bellwether.WorkerService/Run": _run,
    "/bellwether.MasterService/CreateSession": lambda request: "session",
    "/bellwether.MasterService/RenewSession": lambda request: "session",
    "/bellwether.MasterService/CloseSession": lambda request: "session",
    "/bellwether.MasterService/RegisterPlan": lambda request: _stage(*request.plan.stages),
    "/bellwether.MasterService/RunStep": lambda request: "step",
    "/bellwether.MasterService/ForwardCheckpoint": lambda request: _checkpoint(request.order),
    "/bellwether.MasterService/ForwardBytes": lambda request: "checkpoint.bytes",
    "/bellwether.MasterService/ForwardRunOrder": lambda request: _run(request.order),
    "/bellwether.MasterService/AdoptGenerations": lambda request: "session",
    "/bellwether.MasterService/Reset": lambda request: "clear",
}
"""By method, the order that a request of it is."""
_RUN: Final = "/bellwether.WorkerService/Run"


class _Unreadable:
    """In the place of a request that is no message."""


class ReadableRequests(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses requests that are no messages.

    gRPC itself writes a traceback for each into the log, and never ends the stream: after some hundreds the connection
    takes no more calls.
    """

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, which is given messages only."""
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None or handler.request_deserializer is None:
            return handler
        call, parse = handler.unary_unary, handler.request_deserializer

        def read(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return _Unreadable()

        def answered(request: Any, context: grpc.ServicerContext) -> Message:
            if isinstance(request, _Unreadable):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this method")
            return call(request, context)

        return grpc.unary_unary_rpc_method_handler(
            answered, request_deserializer=read, response_serializer=handler.response_serializer
        )


class AccessControl(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses what a client's role does not allow; tells it, the log and the audit log.

    Args:
        own: what the task's own certificate says that it is; ANYBODY without one.
        certificates: whether clients show certificates.
        tokens: what asks for tokens, if anything does.
        refusals: tells of those who are refused.
    """

    def __init__(self, own: Identity, certificates: bool, tokens: TokenCheck | None, refusals: Refusals) -> None:
        self._own = own
        self._certificates = certificates
        self._tokens = tokens
        self._refusals = refusals

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, which looks at the request and its client first where these may be told apart."""
        handler = continuation(handler_call_details)
        order_of = ORDERS.get(handler_call_details.method)
        observer = self._tokens is not None and self._tokens.is_observer(handler_call_details)
        if handler is None or order_of is None or not (self._certificates or observer):
            return handler
        call = handler.unary_unary
        assert call is not None  # there are no streams

        def checked(request: Message, context: grpc.ServicerContext) -> Message:
            order = order_of(request)
            try:
                who = OBSERVER if observer else rpc.identity(context)
                roles.check_run(self._own, who)
                roles.check(order, who)
                if handler_call_details.method == _RUN and order.partition(".")[2] in OF_THE_SENDER and who.task:
                    roles.check_is_task(who, request.sender, "")  # type: ignore[attr-defined]  # it is a RunOrder
            except PermissionDeniedError as error:
                self._refusals.deny(rpc.host_of(context.peer()), rpc.names(context), order, error.message)
                rpc.abort(context, error)
            return call(request, context)

        return grpc.unary_unary_rpc_method_handler(
            checked, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
