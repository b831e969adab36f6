"""gRPC the way this runtime uses it: channel options, errors that keep their name and task across the wire."""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import grpc

from runtime import timeouts
from runtime.cluster.spec import split_address
from runtime.errors import (
    CancelledError,
    OpError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    error_from_code,
    wire_code,
)
from runtime.limits import VARIABLE, Limits
from runtime.transport import addresses, diagnosis, http_proxy, security, versions
from runtime.transport.certificates import Certificates, Credential
from runtime.transport.roles import ANYBODY, Identity, identity_of
from runtime.transport.security import Refusals, Security, call_proof, find_token, observer_key

_TASK = "bellwether-task"
_TYPE = "bellwether-error"
"""Metadata of a failed call: the task that failed, and the number of its error's type."""
_NONCE = "bellwether-nonce"
"""Metadata of a call that was refused for want of a proof: what the proof is to be about."""
_PROOF = "bellwether-proof"
"""Metadata of a call: the nonce and the proof with a dot between them; a bare dot asks for the nonce."""
_WIRE = "bellwether-wire"
"""Metadata of a call: the version of its client (``versions.spoken``)."""
_ASK = "."
_MOST_PROOFS = 3
"""How often one call is made at most: the task may restart, and ask again, between two of them."""
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_MAX_MESSAGE = 2**31 - 1
_NO_CONTACT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_CLOSED_HERE = "Channel closed!"
"""What gRPC says of a call under way whose channel this process has closed; only this text tells it."""


def _ms(secs: float) -> int:
    return round(secs * 1000)


CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment must not take local traffic
    ("grpc.initial_reconnect_backoff_ms", _ms(timeouts.GRPC_BACKOFF_SECS)),
    ("grpc.min_reconnect_backoff_ms", _ms(timeouts.ATTEMPT_SECS)),  # after a refusal the next comes sooner
    ("grpc.max_reconnect_backoff_ms", _ms(timeouts.GRPC_BACKOFF_SECS)),  # everybody waits for a restarted ps
    ("grpc.dns_min_time_between_resolutions_ms", _ms(timeouts.GRPC_DNS_SECS)),  # a restarted task may have moved
    ("grpc.keepalive_time_ms", _ms(timeouts.GRPC_IDLE_SECS)),
    ("grpc.keepalive_timeout_ms", _ms(timeouts.GRPC_PING_SECS)),
    ("grpc.keepalive_permit_without_calls", 0),
    (
        "grpc.http2.max_pings_without_data",
        0,
    ),  # by itself it pings a silent call twice, then once a minute
    ("grpc.http2.ping_timeout_ms", _ms(timeouts.GRPC_PING_SECS)),  # a frozen peer would go unseen for a minute
]
_TOO_LONG = "larger than max"

_T = TypeVar("_T")


def server_options(limits: Limits) -> list[tuple[str, str | int]]:
    """Channel options of a server with these limits. Messages come as they are: a compressed one may be of any length.

    Tensors go over the tensor channel; what is long here is what a client in another process feeds, and the constants
    of its graph.
    """
    return [
        ("grpc.max_send_message_length", _MAX_MESSAGE),
        ("grpc.max_receive_message_length", limits.request_bytes),
        ("grpc.max_concurrent_streams", limits.client_waiting_calls + limits.calls + limits.orders),  # then they queue
        ("grpc.max_allowed_incoming_connections", limits.rpc_connections),
        ("grpc.server_handshake_timeout_ms", _ms(limits.hello_secs)),  # also of one that sends no settings
        ("grpc.max_connection_idle_ms", _ms(limits.rpc_idle_secs)),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # bit 0: none
        ("grpc.so_reuseport", 0),  # a second server on one port must fail, not share it
        # Without it a client that pings every GRPC_IDLE_SECS is cut off as a nuisance in a call of minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(timeouts.GRPC_LEAST_IDLE_SECS)),
    ]


def open_channel(address: str, given: Security | None = None) -> grpc.Channel:
    """A channel to ``host:port``; connects when it is used.

    Args:
        address: of the control plane; another name that gRPC knows (``dns://...``) for a task without a token.
        given: the certificates, or the token of a task that has left none for this user; what ``BELLWETHER_SECURITY``
            says by default.

    Raises:
        UnauthenticatedError: the certificates cannot be used.
    """
    host, _, port = address.rpartition(":")
    target = f"{addresses.settled(host)}:{port}"
    given = security.in_force(given, os.environ)
    certificates = given.tls() if given else None
    if certificates is None:
        channel = grpc.insecure_channel(target, options=_options())
    else:
        certificates.check()
        channel = cast(grpc.Channel, _TlsChannel(target, certificates))
    return grpc.intercept_channel(channel, _Prover(address, given), _Diagnosis(target, certificates))


def _options() -> list[tuple[str, str | int]]:
    return list(dict([*CHANNEL_OPTIONS, *http_proxy.grpc_options()]).items())


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials of a server that takes clients with a certificate of its CA, by what the files hold at the time."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        held = certificates.current
        return grpc.ssl_server_certificate_configuration([(held.key, held.certificate)], held.authorities)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)


class _TlsChannel:
    """A channel that calls by another connection when the files of its certificate have changed.

    Calls that are under way then end on the connection that they have. The interceptors ask for the method of each call
    anew, so that it goes to the newest.
    """

    def __init__(self, target: str, certificates: Certificates) -> None:
        self._target = target
        self._certificates = certificates
        self._lock = threading.Lock()
        self._held: Credential | None = None
        self._channel: grpc.Channel | None = None
        self._closed = False

    def _newest(self) -> grpc.Channel:
        held = self._certificates.current
        with self._lock:
            if self._channel is None or (held is not self._held and not self._closed):
                credentials = grpc.ssl_channel_credentials(held.authorities, held.key, held.certificate)
                # What it replaces goes when the last call on it has ended.
                self._channel, self._held = grpc.secure_channel(self._target, credentials, _options()), held
                if self._closed:
                    self._channel.close()
            return self._channel

    def __getattr__(self, name: str) -> Any:
        """What a channel has: as the newest connection's."""
        return getattr(self._newest(), name)

    def close(self) -> None:
        """Ends all calls on the newest connection, and those to come."""
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()


class _Diagnosis(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Finds out why nobody can be reached: gRPC says the same of a task that is gone and of one that refuses us."""

    def __init__(self, target: str, certificates: Certificates | None) -> None:
        self._target = target
        self._certificates = certificates
        self._reached = False

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call; one that would wait for a task that refuses us fails at once."""
        if client_call_details.wait_for_ready and not self._reached:
            self._look()
        answer = continuation(client_call_details, request)
        if isinstance(answer, grpc.Future) and not answer.done():
            return answer
        code = answer.code() if isinstance(answer, grpc.RpcError) else grpc.StatusCode.OK
        if code is grpc.StatusCode.UNAVAILABLE and not (self._reached and self._certificates is None):
            self._look()
        self._reached |= code not in _NO_CONTACT
        return answer

    def _look(self) -> None:
        if problem := diagnosis.problem(self._target, self._certificates):
            raise UnauthenticatedError(problem)


class _CallDetails(NamedTuple):
    """What grpc takes for the details of a call; it looks at these attributes only."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Prover(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Shows a server with each call that this process has its token, and says of which version it is.

    A call that is refused for want of a proof, the first to each process of a task, is made again with one. (Not one
    that is made by ``future``, for which nobody waits here.)
    """

    def __init__(self, address: str, given: Security | None) -> None:
        self._address = address
        self._given = given
        self._speaks = (_WIRE, versions.spoken())
        self._metadata: tuple[tuple[str, str], ...] = ((_PROOF, _ASK),)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call, twice if need be."""
        told = client_call_details
        details = _CallDetails(
            told.method, told.timeout, told.metadata, told.credentials, told.wait_for_ready, told.compression
        )
        metadata, token, about = self._metadata, None, ""
        for _ in range(_MOST_PROOFS):
            answer = continuation(
                details._replace(metadata=(*(details.metadata or ()), self._speaks, *metadata)), request
            )
            nonce = _nonce_of(answer)
            if nonce is None:
                self._metadata = metadata
                break
            if nonce == about:
                raise UnauthenticatedError(security.none_found() if token is None else security.wrong(token))
            # Looked for now: whoever has refused us has left its token before.
            token, about = find_token(self._address, self._given, timeouts.ATTEMPT_SECS), nonce
            proof = "" if token is None else call_proof(token.key, nonce, split_address(self._address)[1])
            metadata = ((_PROOF, f"{nonce}.{proof}"),)
        return answer


def _nonce_of(answer: Any) -> str | None:
    """What a proof is to be about, when that is why a call was refused."""
    if not isinstance(answer, grpc.RpcError) or (isinstance(answer, grpc.Future) and not answer.done()):
        return None
    if answer.code() is not grpc.StatusCode.UNAUTHENTICATED:
        return None
    return next((str(entry.value) for entry in answer.trailing_metadata() or () if entry.key == _NONCE), None)


class VersionCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses the calls of clients that speak another wire version, before anything of them is read.

    Calls of the health service pass.

    Args:
        task: whose server it is.
    """

    def __init__(self, task: str) -> None:
        self._task = task

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        said = next((value for name, value in handler_call_details.invocation_metadata if name == _WIRE), "")
        problem = versions.why_not_understood(str(said))
        if not problem or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return continuation(handler_call_details)
        error = UnimplementedError(problem, task=self._task)
        return grpc.stream_unary_rpc_method_handler(lambda requests, context: abort(context, error))


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses the calls of clients that do not show that they have the token, before anything of them is read.

    Calls of the health service pass: they say whether the task serves, and nothing else.

    Args:
        task: whose server it is.
        key: the token.
        refusals: tells of those who are refused.

    Attributes:
        port: of the control plane; set before the server starts.
    """

    def __init__(self, task: str, key: bytes, refusals: Refusals) -> None:
        self.port = 0
        self._task = task
        self._key = key
        self._refusals = refusals
        self._nonce = secrets.token_hex(16)
        # A method that takes a stream reads none of it unless it asks.
        self._asked = grpc.stream_unary_rpc_method_handler(self._ask)
        self._refused = grpc.stream_unary_rpc_method_handler(self._refuse)

    @functools.cached_property
    def _expected(self) -> bytes:
        return f"{self._nonce}.{call_proof(self._key, self._nonce, self.port)}".encode()

    @functools.cached_property
    def _of_observer(self) -> bytes:
        return f"{self._nonce}.{call_proof(observer_key(self._key), self._nonce, self.port)}".encode()

    def is_observer(self, handler_call_details: Any) -> bool:
        """Whether a call comes from somebody who has the observer's token."""
        return hmac.compare_digest(_shown(handler_call_details), self._of_observer)

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        shown = _shown(handler_call_details)
        if hmac.compare_digest(shown, self._expected) or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return continuation(handler_call_details)
        if hmac.compare_digest(shown, self._of_observer):
            return continuation(handler_call_details)  # what it may order is looked at next
        # One who asks, or has the nonce of an earlier process, comes again.
        about_us = not shown or shown.startswith(f"{self._nonce}.".encode())
        return self._refused if about_us else self._asked

    def _ask(self, requests: Any, context: grpc.ServicerContext) -> None:
        error = UnauthenticatedError("it asks for a token")
        trailing = (_TASK, self._task), (_TYPE, str(wire_code(error))), (_NONCE, self._nonce)
        context.set_trailing_metadata(trailing)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)

    def _refuse(self, requests: Any, context: grpc.ServicerContext) -> None:
        self._refusals.tell(host_of(context.peer()), "it has not shown that it has the token (calls)")
        self._ask(requests, context)


def _shown(handler_call_details: Any) -> bytes:
    """The proof that comes with a call."""
    told = next((value for name, value in handler_call_details.invocation_metadata if name == _PROOF), "")
    return told if isinstance(told, bytes) else told.encode(errors="replace")


def identity(context: grpc.ServicerContext) -> Identity:
    """Who the client of a call is, by its certificate.

    Raises:
        PermissionDeniedError: the certificate names a role that is none.
    """
    return identity_of(names(context))


def names(context: grpc.ServicerContext) -> tuple[str, ...]:
    """The names in the certificate of a call's client; none without one."""
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]  # its stubs are wrong
    found = shown.get("x509_subject_alternative_name") or shown.get("x509_common_name") or ()
    return tuple(name.decode(errors="backslashreplace") for name in found)


def host_of(peer: str) -> str:
    """The address in what grpc says of a peer, ``ipv4:1.2.3.4:567`` or ``ipv6:%5B::1%5D:567``."""
    return peer.partition(":")[2].rpartition(":")[0].removeprefix("%5B").removesuffix("%5D")


def call(
    method: Callable[..., _T], request: Any, *, timeout: float | None, task: str, wait_for_ready: bool = False
) -> _T:
    """Calls a stub method; gRPC's errors become ours.

    Raises:
        OpError: of the class that the code says, naming ``task`` unless the other side named another.
        CancelledError: this side has closed the channel, or the task has said so.
        UnavailableError: no contact, also where the task's server stops meanwhile.
    """
    try:
        return method(request, timeout=timeout, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise _from_grpc(error, task) from None
    except UnauthenticatedError as error:
        error.task = error.task or task
        raise
    except ValueError as error:  # what grpc raises when another thread has closed the channel; only its text tells
        if "closed" not in str(error):
            raise
        raise CancelledError(f"the connection was closed: {error}", task=task) from None


def _from_grpc(error: grpc.RpcError, task: str) -> OpError:
    told = {entry.key: str(entry.value) for entry in error.trailing_metadata() or ()}
    code, number = error.code().value[0], told.get(_TYPE, "")
    if number.isdecimal() and int(number) & 0xFF == code:
        code = int(number)
    text = error.details() or error.code().name
    if error.code() is grpc.StatusCode.CANCELLED and not number and text != _CLOSED_HERE:
        # No task of ours has said so: gRPC says it of calls that come while their server stops.
        return UnavailableError("its server has cut the call off", task=told.get(_TASK, task))
    if _TOO_LONG in text:
        text += f"; the limit request_bytes of the task (--limit_request_bytes, Server(limits=), {VARIABLE})"
    return error_from_code(code, text, told.get(_TASK, task))


class _Running(threading.local):
    context: grpc.ServicerContext | None = None


_running = _Running()


@contextlib.contextmanager
def when_abandoned(action: Callable[[], None]) -> Iterator[None]:
    """In a servicer method: has ``action`` called, from another thread, if the caller goes before the block ends."""
    inside = True

    def ended() -> None:
        if inside:
            action()

    if _running.context is not None and not _running.context.add_callback(ended):
        action()  # gone already
    try:
        yield
    finally:
        inside = False


def peer() -> str:
    """In a servicer method: the connection that the call came by, as gRPC names it; empty outside of one."""
    return "" if _running.context is None else str(_running.context.peer())


def servicer_method(method: Callable[[Any, Any], _T]) -> Callable[[Any, Any, grpc.ServicerContext], _T]:
    """Turns ``method(self, request)`` into a servicer method whose OpErrors reach the caller by name."""

    @functools.wraps(method)
    def wrapped(self: Any, request: Any, context: grpc.ServicerContext) -> _T:
        _running.context = context
        try:
            return method(self, request)
        except OpError as error:
            abort(context, error)

    return wrapped


def abort(context: grpc.ServicerContext, error: OpError) -> NoReturn:
    """Ends a call with an error that reaches the caller by name; raises what ends the call on this side."""
    context.set_trailing_metadata(((_TASK, error.task), (_TYPE, str(wire_code(error)))))
    code = next(c for c in grpc.StatusCode if c.value[0] == error.code)
    context.abort(code, error.message)
    raise AssertionError("abort raises") from error


def caller() -> Identity:
    """In a servicer method: who its client is, by its certificate; ANYBODY without one."""
    return ANYBODY if _running.context is None else identity(_running.context)
