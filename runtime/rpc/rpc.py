"""gRPC the way this runtime uses it: channel options, errors that keep their name and task across the wire."""

from __future__ import annotations

import contextlib
import functools
import hmac
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import grpc

from runtime import timeouts
from runtime.errors import (
    CancelledError,
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    error_from_code,
    printable,
    wire_code,
)
from runtime.limits import VARIABLE, Limits
from runtime.rpc.threads import CallThreads
from runtime.trust import diagnosis, roles, security
from runtime.trust.certificates import Certificates, Credential
from runtime.trust.roles import ANYBODY, Identity, identity_of
from runtime.trust.security import Refusals, Security, call_proof, find_token, observer_key
from runtime.wire import http_proxy, versions

_TASK = "bellwether-task"
_TYPE = "bellwether-error"
"""Metadata of a failed call: the task that failed, and the number of its error's type."""
_CHALLENGE = "bellwether-challenge"
"""Metadata of a call that was refused for want of a proof: the server's nonce and its own proofs, with dots between."""
_ADDRESS = "bellwether-address"
"""Metadata of such a call: the address by which the cluster knows the server."""
_PROOF = "bellwether-proof"
"""Metadata of a call: the server's nonce, the client's, what was dialled and the client's proof, with dots between."""
_LONGEST_PROOF = 512
_EMPTY_CALL = "/bellwether.WorkerService/Status"
_WIRE = "bellwether-wire"
"""Metadata of a call: the version of its client (``versions.spoken``)."""
_MOST_PROOFS = 3
"""How often one call is made at most: the task may restart, and ask again, between two of them."""
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_MAX_MESSAGE = 2**31 - 1
_NO_CONTACT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
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
_TOO_LONG = "larger than max"

_T = TypeVar("_T")


def server_options(limits: Limits) -> list[tuple[str, str | int]]:
    """Channel options of a server with these limits. Messages come as they are: a compressed one may be of any length.

    Tensors go over the tensor channel; what is long here is what a client in another process feeds, and the constants
    of its graph.
    """
    return [
        ("grpc.max_send_message_length", limits.request_bytes),
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
    """Returns a channel to ``host:port``; it connects when it is used.

    With certificates a call raises PermissionDeniedError where the server's is that of another task, or of another run.

    Args:
        address: of the control plane; another name that gRPC knows (``dns://...``) for a task without a token.
        given: the certificates, or the token of a task that has left none for this user; what ``BELLWETHER_SECURITY``
            says by default.
        task: that is to be there, such as "/job:ps/task:0"; empty where it may be any.

    Raises:
        UnauthenticatedError: the certificates cannot be used.
    """
    given = security.in_force(given, os.environ)
    certificates = given.tls() if given else None
    if certificates is not None:
        certificates.check()
    plain = _Channel(security.dialled(address), certificates, task)
    channel = grpc.intercept_channel(cast(grpc.Channel, plain), _Diagnosis(plain))
    return grpc.intercept_channel(channel, _Prover(channel, address, given, task))


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
    When the files of our certificate have changed, calls go by another channel of gRPC. Those under way end on theirs.

    Args:
        target: ``host:port``, or a name of gRPC's own.
        certificates: of this process; None for a channel without TLS.
        task: as of `open_channel`. gRPC compares its name with those in the server's certificate.

    Attributes:
        closed: set when it is closed.
    """

    def __init__(self, target: str, certificates: Certificates | None, task: str) -> None:
        self.closed = threading.Event()
        self.certificates = certificates
        self._target = target
        self._task = task
        self._lock = threading.Lock()
        self._held: Credential | None = None
        self._channel: grpc.Channel | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a function of a channel of gRPC, such as ``unary_unary``; on a closed channel a ValueError."""

        def function(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if self.closed.is_set():
                    raise ValueError("the channel is closed")
                held = None if self.certificates is None else self.certificates.current
                if self._channel is None or held is not self._held:
                    self._channel, self._held = self._open(held), held
                return getattr(self._channel, name)(*arguments, **options)

        return function

    def close(self) -> None:
        """Ends all calls on the newest connection, and those to come."""
        with self._lock:
            self.closed.set()
            if self._channel is not None:
                self._channel.close()

    def look(self, secs: float) -> diagnosis.Look:
        """Looks at the task by a connection of its own, for at most so many seconds."""
        return diagnosis.look(self._target, self.certificates, self._task, secs)

    def _open(self, held: Credential | None) -> grpc.Channel:
        options = dict([*CHANNEL_OPTIONS, *http_proxy.grpc_options()])
        if held is None:
            return grpc.insecure_channel(self._target, options=list(options.items()))
        if name := roles.server_name(held.names, self._task):
            options["grpc.ssl_target_name_override"] = name
        credentials = grpc.ssl_channel_credentials(held.authorities, held.key, held.certificate)
        return grpc.secure_channel(self._target, credentials, list(options.items()))


class _Diagnosis(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Finds out why a task cannot be reached: gRPC says the same of one that is gone and of one that refuses us."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._reached = False

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call; one that would wait for a task with which we do not come together fails at once."""
        details = client_call_details
        if details.wait_for_ready and not self._reached:
            details = self._wait(details)
        answer = continuation(details, request)
        if not answer.done():
            return answer
        code = answer.code()
        waited_in_vain = code is grpc.StatusCode.DEADLINE_EXCEEDED and details.wait_for_ready
        # Without TLS there is one thing to find out, and a task that was reached has not begun to speak TLS.
        unknown = self._channel.certificates is not None or not self._reached
        self._reached = code not in _NO_CONTACT
        if unknown and (waited_in_vain or _has_no_contact(answer)):
            problem = self._channel.look(diagnosis.LOOK_SECS).problem
            # A call that waits for room is told by its deadline, and may be made again.
            if problem is not None and not (waited_in_vain and isinstance(problem, UnavailableError)):
                raise problem
        return answer

    def _wait(self, details: Any) -> Any:
        """Looks until the task answers or the deadline has come; returns the details with the seconds that are left."""
        deadline = _deadline_of(details)
        while True:
            now = time.monotonic()
            found = self._channel.look(_LOOK_SECS if deadline == math.inf else max(_LEAST_SECS, deadline - now))
            if found.problem is not None and not isinstance(found.problem, UnavailableError):
                raise found.problem
            if found.answered or time.monotonic() >= deadline or self._channel.closed.wait(_LOOK_AGAIN_SECS):
                return _until(details, deadline)


def _deadline_of(details: Any) -> float:
    return math.inf if details.timeout is None else time.monotonic() + float(details.timeout)


def _until(details: Any, deadline: float) -> Any:
    """Returns the details of a call that ends at a deadline of ``time.monotonic()``."""
    left = None if deadline == math.inf else max(_LEAST_SECS, deadline - time.monotonic())
    return details._replace(timeout=left)


def _texts(metadata: Iterable[Any] | None) -> Mapping[str, str]:
    return {entry.key: str(entry.value) for entry in metadata or ()}


def _has_no_contact(answer: Any) -> bool:
    """Returns True if gRPC has not reached the task; False for an error that the task itself has sent."""
    return answer.code() is grpc.StatusCode.UNAVAILABLE and _TYPE not in _texts(answer.trailing_metadata())


class _Challenge(NamedTuple):
    """The answer of a server to a call without a proof.

    Attributes:
        nonce: random text of the server's process, which the client's proof must hold.
        proofs: of the server, for clients with the token and for observers; none for a client that means another.
        address: by which the cluster knows the server.
        task: as the server calls itself.
    """

    nonce: str
    proofs: Sequence[str]
    address: str
    task: str


class _Prover(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Shows a server with each call that this process has its token, and of which version it is.

    Where this process has a token, an empty call comes first: the server proves that it has the token too, and is the
    task at the address that was dialled. Only then the process sends a request, and its own proof.

    Args:
        channel: by which the calls go.
        address: that is dialled.
        given: the token for a task that has left none for this user.
        task: as of `open_channel`.
    """

    def __init__(self, channel: grpc.Channel, address: str, given: Security | None, task: str) -> None:
        self._channel = channel
        self._address = address
        self._given = given
        self._task = task
        self._about = security.about(security.dialled(address), task)
        self._speaks = (_WIRE, versions.spoken())
        self._shown: str | None = None

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call; anew where another process of the task has come and asks again."""
        details, deadline, asked = client_call_details, _deadline_of(client_call_details), False
        for _ in range(_MOST_PROOFS):
            shown = self._shown = self._shown or self._introduce(_until(details, deadline), asked)
            metadata = (*(details.metadata or ()), self._speaks, (_PROOF, shown))
            answer = continuation(_until(details, deadline)._replace(metadata=metadata), request)
            if not answer.done():
                break
            asked = _challenge_of(answer) is not None
            if asked or _has_no_contact(answer):
                self._shown = None  # another process may come
            if not asked:
                break
        return answer

    def _introduce(self, details: Any, asked: bool) -> str:
        """Returns what calls show.

        Args:
            details: of the call that is to be made.
            asked: the server has asked for a token.

        Raises:
            UnauthenticatedError: The server has not shown that it has our token, or asks and this process has none.
        """
        # Looked for now: whoever has answered has left its token before.
        token = find_token(self._address, self._given, timeouts.ATTEMPT_SECS)
        nonce = secrets.token_hex(16)
        unproven = f".{nonce}.{self._about}."
        challenge = self._ask(unproven, details) if asked or token is not None else None
        if challenge is None and token is not None:
            raise UnauthenticatedError(security.not_asked(token))
        if challenge is None:
            return unproven
        if token is not None:
            about = (challenge.nonce, nonce, self._about)
            expected = call_proof(token.key, b"server", *about)
            if any(hmac.compare_digest(expected, proof) for proof in challenge.proofs):
                return ".".join((*about, call_proof(token.key, b"client", *about)))
        self._ask(f"{challenge.nonce}{unproven}", details)  # the server tells whom it refuses
        if not challenge.proofs:
            if security.dialled(challenge.address) == security.dialled(self._address):
                raise InvalidArgumentError(f"at {self._address} answers {challenge.task}, not {self._task}")
            raise UnauthenticatedError(security.elsewhere(self._address, challenge.address))
        raise UnauthenticatedError(security.none_found() if token is None else security.wrong(token))

    def _ask(self, shown: str, details: Any) -> _Challenge | None:
        """Makes an empty call; returns the challenge by which it is refused, None where the server does not ask."""
        try:
            self._channel.unary_unary(_EMPTY_CALL, None, None)(
                b"",
                timeout=details.timeout,
                metadata=(self._speaks, (_PROOF, shown)),
                wait_for_ready=details.wait_for_ready,
            )
        except grpc.RpcError as error:
            challenge = _challenge_of(error)
            if challenge is None:
                raise
            return challenge
        return None


def _challenge_of(answer: Any) -> _Challenge | None:
    """Returns the challenge by which a call was refused; None where that is not why."""
    told = _texts(answer.trailing_metadata())
    if answer.code() is not grpc.StatusCode.UNAUTHENTICATED or _CHALLENGE not in told:
        return None
    nonce, *proofs = told[_CHALLENGE].split(".")
    return _Challenge(nonce, proofs, printable(told.get(_ADDRESS, "")), printable(told.get(_TASK, "")))


@functools.cache
def _threads_for_strangers(process: int) -> CallThreads:
    """Returns the threads of calls that are refused, or open to all, in a process: a forked child has none of them."""
    return CallThreads("grpc strangers", most=4)


def for_strangers(answer: Callable[..., _T]) -> Callable[..., _T]:
    """Returns a method that gRPC runs on the few threads of calls that have not shown who they are.

    Such calls are answered at once. Others have a thread each (``runtime.rpc.threads``), which a flood of
    strangers would make by the thousand.

    Args:
        answer: The method.
    """
    method = functools.partial(answer)
    # The name by which gRPC looks for the pool.
    method.experimental_thread_pool = _threads_for_strangers(os.getpid())  # type: ignore[attr-defined]
    return method


class ClientCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses the calls of clients of another wire version, and of those without the token, before they are read.

    Calls of the health service pass: they say whether the task serves, and nothing else.

    Args:
        task: whose server it is.
        key: the token that clients must have; None lets everybody in.
        refusals: tells of those who are refused.

    Attributes:
        addresses: ``host:port`` of the control plane, by each name that clients may dial; set before the server starts.
    """

    def __init__(self, task: str, key: bytes | None, refusals: Refusals) -> None:
        self.addresses: Sequence[str] = ()
        self._task = task
        self._keys = [] if key is None else [key, observer_key(key)]
        self._refusals = refusals
        self._nonce = secrets.token_hex(16)

    @functools.cached_property
    def _own(self) -> frozenset[str]:
        """The texts of address and task by which a client may mean this task, with its name or with none."""
        dialled = map(security.dialled, self.addresses)
        return frozenset(security.about(address, task) for address in dialled for task in ("", self._task))

    def is_observer(self, handler_call_details: Any) -> bool:
        """Returns True if a call comes from a client that has the observer's token."""
        shown = _shown(_texts(handler_call_details.invocation_metadata))
        return any(self._proves(shown, key) for key in self._keys[1:])

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler of a call, or one that refuses it."""
        told = _texts(handler_call_details.invocation_metadata)
        shown, problem = _shown(told), versions.why_not_understood(told.get(_WIRE, ""))
        # What a client with a token may order is looked at next.
        is_known = not self._keys or any(self._proves(shown, key) for key in self._keys)
        if handler_call_details.method.startswith(_OPEN_TO_ALL) or (is_known and not problem):
            return continuation(handler_call_details)

        def refuse(requests: Any, context: grpc.ServicerContext) -> None:
            if problem:
                abort(context, UnimplementedError(problem, task=self._task))
            self._refuse(shown, context)

        return grpc.stream_unary_rpc_method_handler(for_strangers(refuse))

    def _proves(self, shown: str, key: bytes) -> bool:
        nonce, theirs, about, proof = _parts(shown)
        if nonce != self._nonce or about not in self._own:
            return False
        return hmac.compare_digest(proof.encode(), call_proof(key, b"client", nonce, theirs, about).encode())

    def _refuse(self, shown: str, context: grpc.ServicerContext) -> None:
        # A method that takes a stream reads none of it unless it asks.
        nonce, theirs, about, _ = _parts(shown)
        # A client that asks, or has the nonce of an earlier process, comes again.
        if not shown or nonce == self._nonce:
            self._refusals.tell(host_of(context.peer()), "it has not shown that it has the token (calls)")
        proofs = []
        if about in self._own:
            proofs = [call_proof(key, b"server", self._nonce, theirs, about) for key in self._keys]
        error = UnauthenticatedError("it asks for a token")
        context.set_trailing_metadata(
            (
                (_TASK, self._task),
                (_TYPE, str(wire_code(error))),
                (_CHALLENGE, ".".join((self._nonce, *proofs))),
                (_ADDRESS, self.addresses[0]),
            )
        )
        context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)


def _shown(told: Mapping[str, str]) -> str:
    """The proof that comes with a call."""
    return told.get(_PROOF, "")[:_LONGEST_PROOF]


def _parts(shown: str) -> tuple[str, str, str, str]:
    nonce, theirs, about, proof, *_ = (*shown.split(".", 3), "", "", "")
    return nonce, theirs, about, proof


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
    return tuple(roles.shown_to_people(name.decode(errors="backslashreplace") for name in found))


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
    told = _texts(error.trailing_metadata())
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
    """Turns ``method(self, request)`` into a servicer method. The interceptor of the task ends a call that raises."""

    @functools.wraps(method)
    def wrapped(self: Any, request: Any, context: grpc.ServicerContext) -> _T:
        _running.context = context
        return method(self, request)

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
