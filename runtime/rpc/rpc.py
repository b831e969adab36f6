"""gRPC as this runtime uses it: channels, proofs of the token, and errors.

A client opens a channel with `open_channel` and calls its methods with `call`. A server checks its
clients with `ClientCheck` and ends a call by `abort`. An error keeps its name and its task across
the wire.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from runtime import concurrency, timeouts
from runtime.cluster import http_proxy
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
from runtime.rpc import times
from runtime.rpc.threads import CallThreads
from runtime.trust import diagnosis, roles, security
from runtime.trust.certificates import Certificates, Credential
from runtime.trust.roles import ANYBODY, Identity, identity_of
from runtime.trust.security import RefusalLog, Security, call_proof, find_token, observer_key
from runtime.trust.times import LOOK_SECS
from runtime.wire import versions

_TASK = "bellwether-task"
_TYPE = "bellwether-error"
"""Metadata of a failed call: the task that failed, and the number of its error's type."""
_CHALLENGE = "bellwether-challenge"
"""Metadata of a call refused for want of a proof: the server's nonce and its own proofs, with dots between."""
_ADDRESS = "bellwether-address"
"""Metadata of the same call: the address by which the cluster knows the server."""
_PROOF = "bellwether-proof"
"""Metadata of a call: the server's nonce, the client's, a hash of the address and task dialled, and the client's
proof, with dots between.
"""
_LONGEST_PROOF = 512
"""Most characters of a proof that a server reads."""
_EMPTY_CALL = "/bellwether.WorkerService/Status"
"""The method of the empty call by which a client asks for the server's proof."""
_WIRE = "bellwether-wire"
"""Metadata of a call: the version of its client (``versions.spoken``)."""
_MOST_PROOFS = 3
"""Most attempts of one call. The task may restart, and ask again, between two of them."""
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
"""The methods that need no proof: those of the health service."""
_MAX_MESSAGE = 2**31 - 1
_NO_CONTACT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""The codes of a call that may not have reached the task."""
_CLOSED_HERE = "Channel closed!"
"""gRPC's text for a call under way whose channel this process has closed.

Only the text marks such a call.
"""


def _to_millis(secs: float) -> int:
    return round(secs * 1000)


CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    # A proxy of the environment must not take local traffic.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", _to_millis(timeouts.GRPC_BACKOFF_SECS)),
    # The limit of one attempt. After a refusal the next attempt comes sooner.
    ("grpc.min_reconnect_backoff_ms", _to_millis(timeouts.ATTEMPT_SECS)),
    # Every task waits for a restarted ps.
    ("grpc.max_reconnect_backoff_ms", _to_millis(timeouts.GRPC_BACKOFF_SECS)),
    # A restarted task may have moved.
    ("grpc.dns_min_time_between_resolutions_ms", _to_millis(timeouts.GRPC_DNS_SECS)),
    ("grpc.keepalive_time_ms", _to_millis(timeouts.GRPC_IDLE_SECS)),
    ("grpc.keepalive_timeout_ms", _to_millis(timeouts.GRPC_PING_SECS)),
    ("grpc.keepalive_permit_without_calls", 0),
    (
        # By default gRPC pings a silent call twice, then once a minute.
        "grpc.http2.max_pings_without_data",
        0,
    ),
    # Otherwise a frozen peer would go unseen for a minute.
    ("grpc.http2.ping_timeout_ms", _to_millis(timeouts.GRPC_PING_SECS)),
]
_TOO_LONG = "larger than max"
"""The part of gRPC's text that marks a message over the limit."""

_T = TypeVar("_T")
_Servicer = TypeVar("_Servicer")
_Request = TypeVar("_Request")
_Texts: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"
_Answer: TypeAlias = "grpc.CallFuture[Message]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"
"""The function that answers the calls of one method."""
_Proceed: TypeAlias = Callable[[grpc.ClientCallDetails, Message], _Answer]
"""The rest of a call, behind an interceptor."""


def server_options(limits: Limits) -> list[tuple[str, str | int]]:
    """Returns the channel options of a server with these limits.

    Tensors go over the tensor channel. The long messages here are the feeds of clients in other
    processes, and the constants of their graphs. Compression is off, because a compressed message
    may grow to any length.
    """
    return [
        ("grpc.max_send_message_length", limits.request_bytes),
        ("grpc.max_receive_message_length", limits.request_bytes),
        # Calls beyond these wait at the client.
        ("grpc.max_concurrent_streams", limits.client_waiting_calls + limits.calls + limits.orders),
        ("grpc.max_allowed_incoming_connections", limits.rpc_connections),
        # Also for a connection that sends no settings.
        ("grpc.server_handshake_timeout_ms", _to_millis(limits.hello_secs)),
        ("grpc.max_connection_idle_ms", _to_millis(limits.rpc_idle_secs)),
        # Bit 0 stands for no compression.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # A second server on one port must fail, not share the port.
        ("grpc.so_reuseport", 0),
        # Otherwise a client that pings every GRPC_IDLE_SECS is cut off as a nuisance in a call of
        # minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", _to_millis(timeouts.GRPC_LEAST_IDLE_SECS)),
    ]


def open_channel(address: str, given: Security | None = None, task: str = "") -> grpc.Channel:
    """Returns a channel to ``host:port``, connected at the first call.

    With certificates, a call raises PermissionDeniedError if the server has the certificate of
    another task, or of another run.

    Args:
        address: Address of the control plane. For a task without a token, another name known to
            gRPC will do (``dns://...``).
        given: Certificates, or the token of a task without a token file for this user. The settings
            in force in this process by default.
        task: Task expected at the address, such as "/job:ps/task:0"; empty for any task.

    Raises:
        UnauthenticatedError: The certificates cannot be used.
    """
    given = security.in_force(given, os.environ)
    certificates = given.tls() if given else None
    if certificates is not None:
        certificates.check()
    plain = _LazyChannel(security.dialled(address), certificates, task)
    channel = grpc.intercept_channel(cast(grpc.Channel, plain), _ReachDiagnosis(plain))
    return grpc.intercept_channel(channel, _TokenProver(channel, address, given, task))


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Returns the credentials of a server with certificates of its clients.

    A client needs a certificate of the server's CA. Each handshake uses the current content of the
    files.
    """
    used = certificates.current

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(used.key, used.certificate)], used.authorities
        )

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # gRPC asks before each handshake. A new configuration replaces that of the handshakes under
        # way: some of them fail by this, or the process ends with SIGABRT. So None is returned
        # until the files change.
        nonlocal used
        if certificates.current is used:
            return None
        used = certificates.current
        return configuration()

    # None is documented, and missing in the stub.
    fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)
    return grpc.dynamic_ssl_server_credentials(
        configuration(), fetcher, require_client_authentication=True
    )


class _LazyChannel:
    """A channel that connects when used, and may be closed meanwhile.

    The interceptors ask for the method of each call anew, because gRPC itself ends the process when
    a closed channel is asked. After a change of our certificate files, calls go by another gRPC
    channel. Calls under way end on the old channel.

    Args:
        target: ``host:port``, or a name known to gRPC.
        certificates: Certificates of this process; None for a channel without TLS.
        task: Task as in `open_channel`. gRPC compares its name with the names in the server's
            certificate.

    Attributes:
        closed: Event set by `close`.
    """

    def __init__(self, target: str, certificates: Certificates | None, task: str) -> None:
        self.closed = concurrency.Event()
        self.certificates = certificates
        self._target = target
        self._task = task
        self._lock = concurrency.Lock()
        # The credential of `_channel`. `_lock` guards both, so that a call uses a channel that is
        # not closed.
        self._held: Credential | None = None
        self._channel: grpc.Channel | None = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        """Returns a function of a gRPC channel, such as ``unary_unary``.

        On a closed channel the function raises ValueError.
        """

        def function(*arguments: object, **options: object) -> object:
            with self._lock:
                if self.closed.is_set():
                    raise ValueError("the channel is closed")
                held = None if self.certificates is None else self.certificates.current
                if self._channel is None or held is not self._held:
                    self._channel, self._held = self._connect_channel(held), held
                return getattr(self._channel, name)(*arguments, **options)

        return function

    def close(self) -> None:
        """Ends all calls on the newest connection, and all later calls."""
        with self._lock:
            self.closed.set()
            if self._channel is not None:
                self._channel.close()

    def look(self, secs: float) -> diagnosis.TaskLook:
        """Looks at the task for at most ``secs`` seconds, by another connection."""
        return diagnosis.look(self._target, self.certificates, self._task, secs)

    def _connect_channel(self, held: Credential | None) -> grpc.Channel:
        assert self._lock.locked(), "two calls would make two connections"
        options = dict([*CHANNEL_OPTIONS, *http_proxy.grpc_options()])
        if held is None:
            return grpc.insecure_channel(self._target, options=list(options.items()))
        if name := roles.server_name(held.names, self._task):
            options["grpc.ssl_target_name_override"] = name
        credentials = grpc.ssl_channel_credentials(held.authorities, held.key, held.certificate)
        return grpc.secure_channel(self._target, credentials, list(options.items()))


class _ReachDiagnosis(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """An interceptor that finds the reason why a task cannot be reached.

    gRPC reports the same error for a task gone and for a task with other TLS settings or
    certificates.
    """

    def __init__(self, channel: _LazyChannel) -> None:
        self._channel = channel
        self._reached = False

    def intercept_unary_unary(
        self, continuation: _Proceed, client_call_details: grpc.ClientCallDetails, request: Message
    ) -> _Answer:
        """Makes a call, and raises the reason if the task cannot be reached.

        A call with wait_for_ready fails at once if the task has other TLS settings or certificates.
        """
        details = client_call_details
        if details.wait_for_ready and not self._reached:
            details = self._wait_for_task(details)
        answer = continuation(details, request)
        if not answer.done():
            return answer
        code = answer.code()
        waited_in_vain = code is grpc.StatusCode.DEADLINE_EXCEEDED and details.wait_for_ready
        # Without TLS the only possible finding is a task that speaks TLS. A task that was reached
        # does not begin to.
        unknown = self._channel.certificates is not None or not self._reached
        self._reached = code not in _NO_CONTACT
        if unknown and (waited_in_vain or _has_no_contact(answer)):
            problem = self._channel.look(LOOK_SECS).problem
            # A call that waits for room ends by its deadline, and may be made again.
            if problem is not None and not (
                waited_in_vain and isinstance(problem, UnavailableError)
            ):
                raise problem
        return answer

    def _wait_for_task(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        """Looks until the task answers or the deadline has passed.

        Returns the details with the seconds left.
        """
        deadline = _deadline_of(details)
        while True:
            now = concurrency.monotonic()
            found = self._channel.look(
                times.LONGEST_LOOK_SECS
                if deadline == math.inf
                else max(times.LEAST_SECS, deadline - now)
            )
            if found.problem is not None and not isinstance(found.problem, UnavailableError):
                raise found.problem
            if (
                found.answered
                or concurrency.monotonic() >= deadline
                or self._channel.closed.wait(times.LOOK_AGAIN_SECS)
            ):
                return _with_deadline(details, deadline)


def _deadline_of(details: grpc.ClientCallDetails) -> float:
    return math.inf if details.timeout is None else concurrency.monotonic() + float(details.timeout)


def _with_deadline(
    details: grpc.ClientCallDetails, deadline: float, **changed: object
) -> grpc.ClientCallDetails:
    """Returns the details of a call that ends at a deadline.

    Args:
        details: Details of the call.
        deadline: ``time.monotonic()`` at which to end; infinity for a call without a deadline.
        **changed: Other details to change.
    """
    left = (
        None if deadline == math.inf else max(times.LEAST_SECS, deadline - concurrency.monotonic())
    )
    # gRPC's details are a named tuple, and its stubs do not say so.
    return details._replace(timeout=left, **changed)  # type: ignore[attr-defined,no-any-return]


def _read_texts(metadata: _Texts) -> Mapping[str, str]:
    return {key: str(value) for key, value in metadata or ()}


def _has_no_contact(answer: grpc.Call) -> bool:
    """Returns True if gRPC has not reached the task.

    Returns False for an error sent by the task itself.
    """
    return answer.code() is grpc.StatusCode.UNAVAILABLE and _TYPE not in _read_texts(
        answer.trailing_metadata()
    )


class _TokenChallenge(NamedTuple):
    """The answer of a server to a call without a proof.

    Attributes:
        nonce: Random text of the server's process, needed in the client's proof.
        proofs: Proofs of the server, with the token and with the observer's token. Empty if the
            client means another task.
        address: Address of the server in the cluster.
        task: Name of the server's task.
    """

    nonce: str
    proofs: Sequence[str]
    address: str
    task: str


class _TokenProver(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """An interceptor that proves the token of this process with each call.

    A process with a token makes an empty call first. By the answer the server proves to have the
    token too, and to be the task at the dialled address. Only then the process sends a request and
    its own proof. Each call also carries the version of this process.

    Args:
        channel: Channel of the calls.
        address: Dialled address.
        given: Settings with the token of a task without a token file for this user.
        task: Task as in `open_channel`.
    """

    def __init__(
        self, channel: grpc.Channel, address: str, given: Security | None, task: str
    ) -> None:
        self._channel = channel
        self._address = address
        self._given = given
        self._task = task
        self._about = security.about(security.dialled(address), task)
        self._speaks = (_WIRE, versions.spoken())
        # The proof of the last call; None until the first call, and after a server has asked again
        # or was out of reach.
        self._shown: str | None = None

    def intercept_unary_unary(
        self, continuation: _Proceed, client_call_details: grpc.ClientCallDetails, request: Message
    ) -> _Answer:
        """Makes a call, and repeats it for a new process of the task.

        The new process asks for a proof of its own.
        """
        details, deadline, asked = client_call_details, _deadline_of(client_call_details), False
        for _ in range(_MOST_PROOFS):
            shown = self._shown = self._shown or self._find_proof(
                _with_deadline(details, deadline), asked
            )
            metadata = (*(details.metadata or ()), self._speaks, (_PROOF, shown))
            answer = continuation(_with_deadline(details, deadline, metadata=metadata), request)
            if not answer.done():
                break
            asked = _challenge_of(answer) is not None
            if asked or _has_no_contact(answer):
                # The task's next process has another nonce, and asks again.
                self._shown = None
            if not asked:
                break
        return answer

    def _find_proof(self, details: grpc.ClientCallDetails, asked: bool) -> str:
        """Returns the proof that calls show.

        Args:
            details: Details of the call to make.
            asked: True if the server has asked for a token.

        Raises:
            UnauthenticatedError: The server has not shown that it has our token, or asks while this
                process has none.
            InvalidArgumentError: Another task answers at the address.
        """
        # Looked up only now: a server that answers has left its token before.
        token = find_token(self._address, self._given, timeouts.ATTEMPT_SECS)
        nonce = concurrency.random_hex(16)
        unproven = f".{nonce}.{self._about}."
        challenge = self._ask_server(unproven, details) if asked or token is not None else None
        if challenge is None and token is not None:
            raise UnauthenticatedError(security.not_asked(token))
        if challenge is None:
            return unproven
        if token is not None:
            about = (challenge.nonce, nonce, self._about)
            expected = call_proof(token.key, b"server", *about)
            if any(hmac.compare_digest(expected, proof) for proof in challenge.proofs):
                return ".".join((*about, call_proof(token.key, b"client", *about)))
        # A call with the server's nonce and without a proof lets the server log the refusal.
        self._ask_server(f"{challenge.nonce}{unproven}", details)
        if not challenge.proofs:
            if security.dialled(challenge.address) == security.dialled(self._address):
                raise InvalidArgumentError(
                    f"at {self._address} answers {challenge.task}, not {self._task}"
                )
            raise UnauthenticatedError(security.elsewhere(self._address, challenge.address))
        raise UnauthenticatedError(
            security.none_found() if token is None else security.wrong(token)
        )

    def _ask_server(self, shown: str, details: grpc.ClientCallDetails) -> _TokenChallenge | None:
        """Makes an empty call, and returns the challenge of the server.

        Returns None if the server asks for no proof.
        """
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


def _challenge_of(answer: grpc.Call | grpc.RpcError) -> _TokenChallenge | None:
    """Returns the challenge of the server in a refused call, or None."""
    told = _read_texts(answer.trailing_metadata())  # type: ignore[arg-type]  # its stubs are wrong
    if answer.code() is not grpc.StatusCode.UNAUTHENTICATED or _CHALLENGE not in told:
        return None
    nonce, *proofs = told[_CHALLENGE].split(".")
    return _TokenChallenge(
        nonce, proofs, printable(told.get(_ADDRESS, "")), printable(told.get(_TASK, ""))
    )


@functools.cache
def _threads_for_strangers(process: int) -> CallThreads:
    """Returns the threads for calls refused, or open to all.

    Each process has its own, as a forked child has none of its parent's threads.
    """
    return CallThreads("grpc strangers", most=4)


def for_strangers(answer: Callable[..., _T]) -> Callable[..., _T]:
    """Returns a method for gRPC to run on the few threads for strangers.

    Strangers are clients without a proof. Their calls are answered at once. Every other call has
    its own thread (``runtime.rpc.threads``), and a flood of strangers would make thousands.

    Args:
        answer: Method to run.
    """
    method = functools.partial(answer)
    # gRPC looks for the pool by this name.
    method.experimental_thread_pool = _threads_for_strangers(os.getpid())  # type: ignore[attr-defined]
    return method


class ClientCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """An interceptor that refuses clients before their requests are read.

    Refuses clients of another wire version, and clients without the token. Calls of the health
    service pass: they report if the task serves, and nothing else.

    Args:
        task: Task of the server.
        key: Token for clients to have; None lets every client in.
        refusals: Log of the refused clients.
        dialled: Function that returns ``host:port`` of the control plane, by each name a client may
            dial. Called only after the start of the server.
    """

    def __init__(
        self,
        task: str,
        key: bytes | None,
        refusals: RefusalLog,
        dialled: Callable[[], Sequence[str]],
    ) -> None:
        self._dialled = dialled
        self._task = task
        # The full token first, the observer's second; empty without a token.
        self._keys = [] if key is None else [key, observer_key(key)]
        self._refusals = refusals
        self._nonce = concurrency.random_hex(16)

    @functools.cached_property
    def _own_names(self) -> frozenset[str]:
        """The texts by which a client may mean this task.

        Each is the hash of an address of the task, with the name of the task or without.
        """
        dialled = map(security.dialled, self._dialled())
        return frozenset(
            security.about(address, task) for address in dialled for task in ("", self._task)
        )

    def is_observer(self, handler_call_details: grpc.HandlerCallDetails) -> bool:
        """Returns True if a call comes from a client with the observer's token."""
        shown = _shown_proof(_read_texts(handler_call_details.invocation_metadata))
        return any(self._proves_key(shown, key) for key in self._keys[1:])

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the handler of a call, or a handler that refuses the call."""
        told = _read_texts(handler_call_details.invocation_metadata)
        shown, problem = _shown_proof(told), versions.why_not_understood(told.get(_WIRE, ""))
        # The next interceptor checks which orders a client with a token may give.
        is_known = not self._keys or any(self._proves_key(shown, key) for key in self._keys)
        if handler_call_details.method.startswith(_OPEN_TO_ALL) or (is_known and not problem):
            return continuation(handler_call_details)

        def refuse(requests: object, context: grpc.ServicerContext) -> None:
            if problem:
                abort(context, UnimplementedError(problem, task=self._task))
            self._refuse_call(shown, context)

        return grpc.stream_unary_rpc_method_handler(for_strangers(refuse))

    def _proves_key(self, shown: str, key: bytes) -> bool:
        nonce, theirs, about, proof = _split_proof(shown)
        if nonce != self._nonce or about not in self._own_names:
            return False
        return hmac.compare_digest(
            proof.encode(), call_proof(key, b"client", nonce, theirs, about).encode()
        )

    def _refuse_call(self, shown: str, context: grpc.ServicerContext) -> None:
        # A method that takes a stream reads no message unless it asks for one.
        nonce, theirs, about, _ = _split_proof(shown)
        # A client that asks for a challenge, or has the nonce of an earlier process, comes again.
        if not shown or nonce == self._nonce:
            self._refusals.tell(
                host_of(context.peer()), "it has not shown that it has the token (calls)"
            )
        proofs = []
        if about in self._own_names:
            proofs = [call_proof(key, b"server", self._nonce, theirs, about) for key in self._keys]
        error = UnauthenticatedError("it asks for a token")
        context.set_trailing_metadata(
            (
                (_TASK, self._task),
                (_TYPE, str(wire_code(error))),
                (_CHALLENGE, ".".join((self._nonce, *proofs))),
                (_ADDRESS, self._dialled()[0]),
            )
        )
        context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)


def _shown_proof(told: Mapping[str, str]) -> str:
    """Returns the proof in the metadata of a call."""
    return told.get(_PROOF, "")[:_LONGEST_PROOF]


def _split_proof(shown: str) -> tuple[str, str, str, str]:
    # A stranger may send any text, and missing parts are empty: they prove nothing.
    nonce, theirs, about, proof, *_ = (*shown.split(".", 3), "", "", "")
    return nonce, theirs, about, proof


def identity(context: grpc.ServicerContext) -> Identity:
    """Returns the identity of a call's client, by its certificate.

    Raises:
        PermissionDeniedError: The certificate names an unknown role, or several roles.
    """
    return identity_of(names(context))


def names(context: grpc.ServicerContext) -> tuple[str, ...]:
    """Returns the names in the certificate of a call's client.

    Empty without a certificate.
    """
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]  # its stubs are wrong
    found = shown.get("x509_subject_alternative_name") or shown.get("x509_common_name") or ()
    return tuple(roles.shown_to_people(name.decode(errors="backslashreplace") for name in found))


def host_of(peer: str) -> str:
    """Returns the address in gRPC's name of a peer.

    Examples:
        >>> host_of("ipv4:1.2.3.4:567"), host_of("ipv6:%5B::1%5D:567")
        ('1.2.3.4', '::1')
    """
    return peer.partition(":")[2].rpartition(":")[0].removeprefix("%5B").removesuffix("%5D")


def call(
    method: Callable[..., _T],
    request: object,
    *,
    timeout: float | None,
    task: str,
    wait_for_ready: bool = False,
) -> _T:
    """Calls a stub method, and raises gRPC's errors as ours.

    Args:
        method: Method of a stub.
        request: Message to send.
        timeout: Seconds for the call; None for no limit.
        task: Name of the called task, for errors.
        wait_for_ready: True to wait for a task to come up.

    Raises:
        OpError: The error of the class of the code. Names ``task``, unless the server has named
            another task.
        PermissionDeniedError: Also if the server's certificate is not for the task.
        CancelledError: This side has closed the channel, or the task has sent the error.
        UnavailableError: No contact, also if the task's server stops meanwhile.
    """
    try:
        return method(request, timeout=timeout, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise _from_grpc(error, task) from None
    except (UnauthenticatedError, PermissionDeniedError, UnavailableError) as error:
        error.task = error.task or task
        raise
    except ValueError as error:
        # gRPC raises ValueError after another thread has closed the channel. Only the text marks
        # it.
        if "closed" not in str(error):
            raise
        raise CancelledError(f"the connection was closed: {error}", task=task) from None


def _from_grpc(error: grpc.RpcError, task: str) -> OpError:
    told = _read_texts(error.trailing_metadata())  # type: ignore[arg-type]  # its stubs are wrong
    code, number = error.code().value[0], told.get(_TYPE, "")
    if number.isdecimal() and int(number) & 0xFF == code:
        # The low byte of an error type's number is its gRPC code. A number with another code is not
        # ours.
        code = int(number)
    text = error.details() or error.code().name
    if error.code() is grpc.StatusCode.CANCELLED and not number and text != _CLOSED_HERE:
        # No task has sent this: gRPC reports it of calls that come while their server stops.
        return UnavailableError("its server has cut the call off", task=told.get(_TASK, task))
    if _TOO_LONG in text:
        text += f"; the limit request_bytes of the task (--limit_request_bytes, Server(limits=), {VARIABLE})"
    return error_from_code(code, text, told.get(_TASK, task))


class _RunningCall(concurrency.local):
    context: grpc.ServicerContext | None = None


_running = _RunningCall()


@contextlib.contextmanager
def when_abandoned(action: Callable[[], None]) -> Iterator[None]:
    """Calls ``action`` if the caller goes before the block ends. For servicer methods.

    Args:
        action: Function to call, from another thread.
    """
    inside = True

    def ended() -> None:
        if inside:
            action()

    if _running.context is not None and not _running.context.add_callback(ended):
        # The caller has gone already.
        action()
    try:
        yield
    finally:
        inside = False


def peer() -> str:
    """Returns gRPC's name of the connection of the running call.

    Returns "" outside of a servicer method.
    """
    return "" if _running.context is None else str(_running.context.peer())


def servicer_method(
    method: Callable[[_Servicer, _Request], _T],
) -> Callable[[_Servicer, _Request, grpc.ServicerContext], _T]:
    """Turns ``method(self, request)`` into a servicer method.

    The interceptor of the task ends a call that raises.
    """

    @functools.wraps(method)
    def wrapped(self: _Servicer, request: _Request, context: grpc.ServicerContext) -> _T:
        _running.context = context
        return method(self, request)

    return wrapped


def abort(context: grpc.ServicerContext, error: OpError) -> NoReturn:
    """Ends a call with an error, for the caller to receive by name.

    Raises the exception of gRPC for the end of the call on this side.
    """
    context.set_trailing_metadata(((_TASK, error.task), (_TYPE, str(wire_code(error)))))
    assert error.code, "an error has a status number, and 0 means success"
    code = next(c for c in grpc.StatusCode if c.value[0] == error.code)
    context.abort(code, error.message)
    raise AssertionError("abort raises") from error


def caller() -> Identity:
    """Returns the identity of the running call's client, by its certificate.

    Returns ANYBODY outside of a servicer method, and for a client without a certificate.
    """
    return ANYBODY if _running.context is None else identity(_running.context)
