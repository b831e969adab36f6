"""The control of all calls of the control plane: reading, rights, places in pools, and the audit log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from runtime.errors import (
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from runtime.observe.audit import AuditLog
from runtime.rpc import rpc
from runtime.rpc.rpc import ClientCheck, Handler
from runtime.server.calls import METHODS, CallRules
from runtime.server.pools import CallPools
from runtime.trust import roles
from runtime.trust.roles import OBSERVER, Identity
from runtime.trust.security import RefusalLog


@dataclass(frozen=True)
class CallControl(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """The interceptor that applies the rules of ``METHODS`` to each call.

    1. A request that is too long for its method, or is no message, is refused.
    2. A call for which the client's role has no right is refused, logged and audited.
    3. The call takes a place in its pool, waits for a place, or is refused.
    4. A call that changes or leads the task is audited before its begin, and again with its
        outcome.

    Streams are not served. The only stream, a method of the health service, would hold a thread for
    each call.

    Args:
        task: Name of the task.
        own: Identity in the task's own certificate; ANYBODY without a certificate.
        certificates: True if clients show certificates.
        clients: Check that recognises observers by their token.
        pools: Pools of the task.
        audit: Audit log of the task.
        refusals: Log of refused clients.
    """

    task: str
    own: Identity
    certificates: bool
    clients: ClientCheck
    pools: CallPools
    audit: AuditLog
    refusals: RefusalLog

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the handler of a call; None for a stream or an unknown method."""
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None or handler.request_deserializer is None:
            return None
        call, parse = handler.unary_unary, handler.request_deserializer
        method = METHODS.get(handler_call_details.method)
        observer = self.clients.is_observer(handler_call_details)

        # For an exception here gRPC writes a traceback into the log and never ends the stream.
        # After some hundreds of such calls the connection takes no more. So an error is returned in
        # the place of the request.
        def read(data: bytes) -> Any:
            most = None if method is None else method.most_bytes
            if most is not None and len(data) > most:
                return ResourceExhaustedError(
                    f"the request has {len(data):,} bytes, this method takes {most:,}"
                )
            try:
                return parse(data)
            except DecodeError:
                return InvalidArgumentError("the request is no message of this method")

        def controlled(request: Any, context: grpc.ServicerContext) -> Message:
            if isinstance(request, OpError):
                rpc.abort(context, request)
            # Only gRPC's own health service has methods that are not in the table.
            if method is None:
                return call(request, context)
            try:
                # With the full token alone, every client may do everything.
                if self.certificates or observer:
                    self._check_rights(method, request, context, observer)
                with self.pools.place(method.pool(request), context):
                    return self._record_call(method, request, context, call)
            except OpError as error:
                if isinstance(error, ResourceExhaustedError) and error.limit:
                    self.refusals.tell(rpc.host_of(context.peer()), error.message, "limit")
                rpc.abort(context, error)

        return grpc.unary_unary_rpc_method_handler(
            controlled if method else rpc.for_strangers(controlled),
            request_deserializer=read,
            response_serializer=handler.response_serializer,
        )

    def _check_rights(
        self, method: CallRules, request: Any, context: grpc.ServicerContext, observer: bool
    ) -> None:
        """Checks that the client may make a call. A refusal is logged and audited.

        Raises:
            PermissionDeniedError: The run, the role or the task in the client's certificate does
                not fit.
        """
        order = method.order(request)
        try:
            who = OBSERVER if observer else rpc.identity(context)
            roles.check_run(self.own, who)
            roles.check(order, who)
            sender = method.sender(request)
            if who.task and sender is not None:
                roles.check_is_task(who, sender or self.task, "")
            # A worker takes stages from itself and the chief, so that no other worker runs programs
            # in it.
            if order in ("register", "quorum"):
                roles.check_registers(self.own, who)
        except PermissionDeniedError as error:
            self.refusals.tell(
                rpc.host_of(context.peer()), error.message, order, rpc.names(context)
            )
            raise

    def _record_call(
        self,
        method: CallRules,
        request: Any,
        context: grpc.ServicerContext,
        call: Callable[[Any, grpc.ServicerContext], Message],
    ) -> Message:
        """Makes the call, and writes its entries into the audit log."""
        entry = method.entry(request)
        if entry is None:
            return call(request, context)
        action, what = entry
        peer, who = context.peer(), " ".join(rpc.names(context))
        # The call may end the process, so the log needs an entry before.
        self.audit.write(action, peer=peer, who=who, what=what, outcome="begun")
        outcome = "failed"
        try:
            reply = call(request, context)
            outcome = "ok"
            return reply
        except OpError as error:
            outcome = type(error).__name__
            raise
        finally:
            self.audit.write(action, peer=peer, who=who, what=what, outcome=outcome)
