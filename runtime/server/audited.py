"""What of the calls of the control plane goes to the audit log: what changes the task, and who may lead it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message

from runtime.errors import OpError
from runtime.observe.audit import AuditLog
from runtime.proto import services_pb2
from runtime.transport import rpc

Entry = tuple[str, str]
"""An action, and its object."""
Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"
"""What answers the calls of one method."""

_ORDERS: Final[Mapping[str, str]] = {
    "take": "",
    "write": "directory",
    "read": "directory",
    "receive": "",
    "commit": "",
    "verify": "directory",
}
_RUN_ORDERS: Final[Mapping[str, str]] = {"claim": "", "load": "", "open": "logdir", "finish": "", "done": ""}


def _checkpoint(request: Message) -> Entry | None:
    return _order("checkpoint", _ORDERS, request)


def _run(request: Message) -> Entry | None:
    return _order("run", _RUN_ORDERS, request)


def _order(plane: str, told: Mapping[str, str], request: Message) -> Entry | None:
    order = request.WhichOneof("order")
    if order not in told:
        return None
    field = told[order]
    return f"{plane}.{order}", str(getattr(getattr(request, order), field)) if field else ""


def _program(request: services_pb2.RegisterRequest) -> Entry | None:
    program = request.call.stage.program
    return ("program", program.sha256.hex()) if program.blob else None


AUDITED: Final[Mapping[str, Callable[[Any], Entry | None]]] = {
    "/bellwether.WorkerService/Checkpoint": _checkpoint,
    "/bellwether.WorkerService/Run": _run,
    "/bellwether.WorkerService/Register": _program,
    "/bellwether.WorkerService/Clear": lambda request: ("clear", " ".join(request.containers) or "all"),
    "/bellwether.MasterService/Reset": lambda request: ("reset", " ".join(request.containers)),
    "/bellwether.MasterService/CreateSession": lambda request: ("session.open", ""),
    "/bellwether.MasterService/ForwardCheckpoint": lambda request: _checkpoint(request.order),
    "/bellwether.MasterService/ForwardRunOrder": lambda request: _run(request.order),
}
"""The calls that are written down, and what is written; None for one of their kinds that is not."""


class Audit(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Writes down the calls of ``AUDITED`` with their outcome.

    Args:
        log: of the task.
    """

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, which writes it down if it is one that is."""
        handler = continuation(handler_call_details)
        entry_of = AUDITED.get(handler_call_details.method)
        if entry_of is None or handler is None or handler.unary_unary is None:
            return handler

        call = handler.unary_unary

        def audited(request: Message, context: grpc.ServicerContext) -> Message:
            entry = entry_of(request)
            if entry is None:
                return call(request, context)
            outcome = "failed"
            try:
                reply = call(request, context)
                outcome = "ok"
                return reply
            except OpError as error:
                outcome = type(error).__name__
                raise
            finally:
                code = context.code()  # type: ignore[attr-defined]  # its stubs do not know it
                if outcome == "failed" and code is not None:
                    outcome = code.name
                who = " ".join(rpc.names(context))
                self._log.write(entry[0], peer=context.peer(), who=who, what=entry[1], outcome=outcome)

        return grpc.unary_unary_rpc_method_handler(
            audited, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
