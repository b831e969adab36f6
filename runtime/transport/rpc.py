"""gRPC the way this runtime uses it: channel options, errors that keep their name and task across the wire."""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import grpc

from runtime import timeouts
from runtime.cluster.spec import split_address
from runtime.errors import (
    CancelledError,
    OpError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    error_from_code,
    wire_code,
)
from runtime.limits import VARIABLE, Limits
from runtime.transport import addresses, diagnosis, http_proxy, roles, security, versions
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
_STRANGERS = futures.ThreadPoolExecutor(4, "grpc strangers")
"""The threads of calls that are refused, or open to all; they start with the first of these calls."""
_MAX_MESSAGE = 2**31 - 1
_NO_CONTACT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"
_NO_ROOM = (
    "it hangs up at once: it is just ending, or has as many connections as it may (--limit_rpc_connections, "
    f"Server(limits=), {VARIABLE})"
)
"""What gRPC says of a call that was not made for want of a connection: the server's certificate is not trusted."""
_LEAST_SECS = 0.05
_LOOK_SECS = 5.0
"""How long a look may take at most before a call that has no end."""
_LOOK_AGAIN_SECS = 0.1
"""How soon somebody looks again who waits for a task to come."""
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
_TRIES_ONCE = [(f"grpc.{which}_reconnect_backoff_ms", 1 << 30) for which in ("initial", "max")]
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


def open_channel(address: str, given: Security | None = None, task: str = "") -> grpc.Channel:
    """A channel to ``host:port``; connects when it is used.

    With certificates a call raises PermissionDeniedError where the server's is that of another task, or of another run.

    Args:
        address: of the control plane; another name that gRPC knows (``dns://...``) for a task without a token.
        given: the certificates, or the token of a task that has left none for this user; what ``BELLWETHER_SECURITY``
            says by default.
        task: that is to be there, such as "/job:ps/task:0"; empty where it may be any.

    Raises:
        UnauthenticatedError: the certificates cannot be used.
    """
    host, _, port = address.rpartition(":")
    target = f"{addresses.settled(host)}:{port}"
    given = security.in_force(given, os.environ)
    certificates = given.tls() if given else None
    prover = _Prover(address, given)
    if certificates is None:
        plain = _Channel(lambda: grpc.insecure_channel(target, options=_options()))
        return grpc.intercept_channel(cast(grpc.Channel, plain), prover, _Diagnosis(target))
    certificates.check()
    channel = _TlsChannel(target, certificates, task)
    return grpc.intercept_channel(cast(grpc.Channel, channel), prover, _Meeting(channel))


def _options(further: Sequence[tuple[str, str | int]] = ()) -> list[tuple[str, str | int]]:
    return list(dict([*CHANNEL_OPTIONS, *http_proxy.grpc_options(), *further]).items())


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials of a server that takes clients with a certificate of its CA, by what the files hold at the time."""
    used = certificates.current

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(used.key, used.certificate)], used.authorities)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Asked before each handshake. What is given replaces what the handshakes under way use: some of them fail by
        # that, or the process ends with SIGABRT. So it is given only when it is another one.
        nonlocal used
        if certificates.current is used:
            return None
        used = certificates.current
        return configuration()

    fetcher = cast(
        Callable[[], grpc.ServerCertificateConfiguration], changed
    )  # None is documented, and not in its stub
    return grpc.dynamic_ssl_server_credentials(configuration(), fetcher, require_client_authentication=True)


class _Channel:
    """A channel that is opened when it is used, and can be closed while it is.

    The interceptors ask for the method of each call anew; grpc itself ends the process when a closed channel is asked.

    Args:
        make: opens one of gRPC's.

    Attributes:
        closed: set when it is closed.
    """

    def __init__(self, make: Callable[[], grpc.Channel]) -> None:
        self.closed = threading.Event()
        self._make = make
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def __getattr__(self, name: str) -> Any:
        """What a channel has besides."""
        with self._lock:
            return getattr(self._newest(), name)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """A method, as of a channel of gRPC.

        Raises:
            ValueError: the channel is closed.
        """
        with self._lock:
            return self._newest().unary_unary(*arguments, **options)

    def close(self) -> None:
        """Ends all calls on the newest connection, and those to come."""
        with self._lock:
            self.closed.set()
            if self._channel is not None:
                self._channel.close()

    def _newest(self) -> grpc.Channel:
        if self.closed.is_set():
            raise ValueError("the channel is closed")
        if self._channel is None:
            self._channel = self._make()
        return self._channel


class _TlsChannel(_Channel):
    """A channel that connects to servers only at which we have looked.

    gRPC compares the host in a server's certificate, and has no place in Python for more. So we look ourselves, by a
    connection of our own, and then have gRPC trust the certificate that was good, and no other: whoever takes the place
    of that server does not get a call. (A certificate that names no role is as good as any of our CA.)

    When the files of our own certificate have changed, or we have looked again, calls go by another connection. Those
    under way end on the connection that they have.

    Args:
        target: ``host:port``, or a name of gRPC's own, at which we cannot look.
        certificates: of this process.
        task: as of `open_channel`.
    """

    def __init__(self, target: str, certificates: Certificates, task: str) -> None:
        super().__init__(self._secure)
        self._target = target
        self._certificates = certificates
        self._task = task
        self._held = certificates.current
        self._trusted = b""
        self.hangs_up = False
        """Whether the server has hung up on us before it has shown a certificate, when we have last looked."""

    @property
    def has_met(self) -> bool:
        """Whether we have looked who the server is, with the certificate that we have now."""
        return bool(self._trusted) and self._held is self._certificates.current

    def meet(self, secs: float) -> bool:
        """Looks who the server is.

        Args:
            secs: how long it may take.

        Returns:
            Whether somebody has answered, who is trusted from now on.

        Raises:
            UnauthenticatedError: it refuses us, or we do not take its certificate.
            PermissionDeniedError: its certificate is not for this server.
        """
        held = self._certificates.current
        if not diagnosis.can_look(self._target):
            self._trust(held, held.authorities)
            return True
        found = diagnosis.look(self._target, self._certificates, secs)
        self.hangs_up = found.hung_up
        if found.problem:
            raise UnauthenticatedError(found.problem)
        if not found.certificate:
            return False
        server = roles.check_server(held.names, found.names, self._task)
        self._trust(held, held.authorities if server.role is None else found.certificate)
        return True

    def _trust(self, held: Credential, trusted: bytes) -> None:
        with self._lock:
            if held is not self._held or trusted != self._trusted:
                self._held, self._trusted = held, trusted
                self._channel = None  # what it was goes when the last call on it has ended

    def _secure(self) -> grpc.Channel:
        held = self._held
        # Before we have looked, nobody is trusted but who has our own certificate: this connection only says what gRPC
        # says of a server that is not there. It does not try again, each time in vain and with a line in the log, once
        # the server is there and no call has come that has us look.
        trusted, further = (self._trusted, []) if self._trusted else (held.certificate, _TRIES_ONCE)
        credentials = grpc.ssl_channel_credentials(trusted, held.key, held.certificate)
        return grpc.secure_channel(self._target, credentials, _options(further))


class _Meeting(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Looks who the server is before the first call, and again when nobody can be reached.

    gRPC says the same of a task that is gone, of one that refuses us, and of one that we do not take.
    """

    def __init__(self, channel: _TlsChannel) -> None:
        self._channel = channel

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call; once more where it was not made, because the server has another certificate than before.

        A call that waits for a server would wait for the one that we met, and so is preceded by a look each time.
        """
        details = cast(_CallDetails, client_call_details)  # what _Prover makes
        if details.wait_for_ready or not self._channel.has_met:
            deadline = None if details.timeout is None else time.monotonic() + details.timeout
            self._meet(deadline, wait=bool(details.wait_for_ready))
            if deadline is not None:
                details = details._replace(timeout=max(_LEAST_SECS, deadline - time.monotonic()))
        answer = continuation(details, request)
        if isinstance(answer, grpc.Future) and not answer.done():
            return answer
        code = answer.code() if isinstance(answer, grpc.RpcError) else grpc.StatusCode.OK
        waited_in_vain = code is grpc.StatusCode.DEADLINE_EXCEEDED and details.wait_for_ready
        if code is grpc.StatusCode.UNAVAILABLE or waited_in_vain:
            answers = self._channel.meet(diagnosis.LOOK_SECS)
            if self._channel.hangs_up and not waited_in_vain:  # who waits is told by the deadline, and may wait on
                raise UnavailableError(_NO_ROOM)
            if answers and not waited_in_vain and _NOT_TRUSTED in (answer.details() or ""):
                answer = continuation(details, request)
        return answer

    def _meet(self, deadline: float | None, *, wait: bool) -> None:
        """Looks who the server is; until somebody answers, if that is waited for."""
        over = False
        while not over:
            left = _LOOK_SECS if deadline is None else max(_LEAST_SECS, deadline - time.monotonic())
            over = self._channel.meet(left) or not wait or (deadline is not None and time.monotonic() >= deadline)
            over = over or self._channel.closed.wait(_LOOK_AGAIN_SECS)


class _Diagnosis(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Finds out why nobody can be reached: gRPC says the same of a task that is gone and of one that refuses us."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._reached = False

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call; one that would wait for a task that refuses us fails at once."""
        if client_call_details.wait_for_ready and not self._reached:
            self._look()
        answer = continuation(client_call_details, request)
        if isinstance(answer, grpc.Future) and not answer.done():
            return answer
        code = answer.code() if isinstance(answer, grpc.RpcError) else grpc.StatusCode.OK
        if code is grpc.StatusCode.UNAVAILABLE and not self._reached:
            self._look()
        self._reached |= code not in _NO_CONTACT
        return answer

    def _look(self) -> None:
        if problem := diagnosis.look_plainly(self._target).problem:
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


def for_strangers(answer: Callable[..., _T]) -> Callable[..., _T]:
    """Returns a method that gRPC runs on the few threads of calls that have not shown who they are.

    Such calls are answered at once. Others have a thread each (``runtime.server.threads``), which a flood of
    strangers would make by the thousand.

    Args:
        answer: The method.
    """
    method = functools.partial(answer)
    method.experimental_thread_pool = _STRANGERS  # type: ignore[attr-defined]  # the name by which gRPC looks for it
    return method


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
        return grpc.stream_unary_rpc_method_handler(for_strangers(lambda requests, context: abort(context, error)))


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
        self._asked = grpc.stream_unary_rpc_method_handler(for_strangers(self._ask))
        self._refused = grpc.stream_unary_rpc_method_handler(for_strangers(self._refuse))

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
        PermissionDeniedError: the server's certificate is not for that task, too.
        CancelledError: this side has closed the channel, or the task has said so.
        UnavailableError: no contact, also where the task's server stops meanwhile.
    """
    try:
        return method(request, timeout=timeout, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise _from_grpc(error, task) from None
    except (UnauthenticatedError, PermissionDeniedError, UnavailableError) as error:
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
