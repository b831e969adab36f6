"""Connections to one task: finding the task, connecting, and the hello.

The lanes of a `Peer` share a `TaskDialer`. It connects by the Unix socket of a task on this host, or
else by TCP. A proxy in the environment replaces both.
"""

import hmac
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime import concurrency, timeouts
from runtime.cluster import addresses, http_proxy
from runtime.cluster.endpoint import Endpoint, reachable_unix_path
from runtime.cluster.spec import join_address
from runtime.errors import DeadlineExceededError, OpError, UnauthenticatedError
from runtime.limits import Limits
from runtime.trust import diagnosis, security
from runtime.trust.certificates import Certificates
from runtime.trust.security import FindToken
from runtime.trust.token_files import Token
from runtime.wire import frames, sockets
from runtime.wire.greeting import tensor_proof


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """The time limits and sizes of a channel.

    Attributes:
        reconnect_secs: Seconds for which a call tries to reach a silent peer, before
            UnavailableError.
        heartbeat_secs: Seconds between two pings.
        heartbeat_timeout_secs: Seconds without an answer after which the peer is silent, and its
            connections are cut.
        max_payload_bytes: Longest self-describing payload of a call, in bytes. A payload of a fixed
            layout may be longer.
        prefer_unix: True to use the Unix socket of a peer on this host.
    """

    reconnect_secs: float = timeouts.RECONNECT_SECS
    heartbeat_secs: float = timeouts.HEARTBEAT_SECS
    heartbeat_timeout_secs: float = timeouts.HEARTBEAT_TIMEOUT_SECS
    max_payload_bytes: int = Limits.payload_bytes
    prefer_unix: bool = True


class LaneWelcome(NamedTuple):
    """A connection that is ready for frames.

    Attributes:
        sock: Connected socket. It still has the time limit of the hello.
        incarnation: Incarnation of the server that answered.
        resumed: True if the server knew the lane.
    """

    sock: socket.socket
    incarnation: int
    resumed: bool


@dataclass(eq=False)
class TaskDialer:
    """A maker of connections from one client to one task.

    Any number of threads may use a dialer. The network is not touched before the first call. The
    arguments are those of `Peer`.

    Attributes:
        task: Name of the peer, such as "/job:ps/task:0".
        options: Time limits and sizes.
    """

    task: str
    resolve: Callable[[float], Endpoint]
    client_id: int
    find_token: FindToken
    options: ChannelOptions
    certificates: Certificates | None
    # The last endpoint of the task, None before the first question. A thread that asks holds
    # `_lock`, so that many threads ask once.
    _endpoint: Endpoint | None = field(default=None, init=False)
    _lock: concurrency.Lock = field(default_factory=concurrency.Lock, init=False)

    @property
    def name(self) -> str:
        """The task and its last known endpoint, for messages."""
        return self.task if self._endpoint is None else f"{self.task} at {self._endpoint}"

    def endpoint(self, stale: Endpoint | None, timeout: float) -> Endpoint:
        """Returns the endpoint of the task.

        Args:
            stale: Endpoint that did not work. The task is asked again, unless another thread has
                just done so.
            timeout: Seconds that the question may take.

        Raises:
            UnavailableError: The task is gone.
            DeadlineExceededError: The task did not answer in time.
        """
        if not self._lock.acquire(timeout=timeout):
            raise DeadlineExceededError(
                f"did not tell its tensor port within {timeout:.1f} s", task=self.task
            )
        try:
            if self._endpoint is None or self._endpoint is stale:
                self._endpoint = self.resolve(timeout)
            return self._endpoint
        finally:
            self._lock.release()

    def dial(
        self,
        endpoint: Endpoint,
        lane: int,
        attempt: int,
        timeout: float,
        adopt: Callable[[socket.socket], None],
    ) -> LaneWelcome:
        """Connects to the task and says hello.

        Args:
            endpoint: Endpoint of the task.
            lane: Number of the lane within this client.
            attempt: Count of the lane's connections.
            timeout: Seconds for the whole of it.
            adopt: Function called with every socket before the socket may block, so that another
                thread can interrupt it. After a failure the caller closes the socket of the last
                call.

        Raises:
            ConnectionRefusedError: No process listens at the endpoint.
            OSError: The connection failed, broke or took too long.
            UnauthenticatedError: The server refused our token, or did not show that it has the
                token.
            PermissionDeniedError: The server's certificate belongs to another task or another run.
            OpError: The server refused this client.
        """
        deadline = concurrency.monotonic() + timeout
        sock = self._connect(endpoint, deadline, adopt)
        hello = frames.LaneHello(
            self.client_id, lane, attempt, concurrency.random_bytes(frames.NONCE_BYTES)
        )
        _send(sock, frames.HELLO, frames.encode_hello(hello))
        kind, flags, incarnation, payload = self._read_answer(sock, deadline)
        try:
            # Looked up only now: a server that answers has left its token before.
            token = self.find_token(max(0.0, deadline - concurrency.monotonic()))
            if kind == frames.CHALLENGE:
                self._prove(sock, token, hello, incarnation, payload)
                kind, flags, incarnation, _ = self._read_answer(sock, deadline)
            elif token is not None:
                raise UnauthenticatedError(security.not_asked(token))
        except UnauthenticatedError as error:
            error.task = error.task or self.task
            raise
        if kind != frames.WELCOME:
            raise ConnectionAbortedError(f"the answer to hello has kind {kind}")
        return LaneWelcome(sock, incarnation, bool(flags & frames.RESUMED))

    def _prove(
        self,
        sock: socket.socket,
        token: Token | None,
        hello: frames.LaneHello,
        incarnation: int,
        challenge: bytes,
    ) -> None:
        """Answers a challenge, with a proof only if the server has proved itself.

        Raises:
            UnauthenticatedError: This process and the server have no token in common. The server
                has been told.
        """
        nonce, proof = challenge[: frames.NONCE_BYTES], challenge[frames.NONCE_BYTES :]
        about = (nonce, hello, self.task, incarnation)
        if token is None or not hmac.compare_digest(
            proof, tensor_proof(token.key, b"server", *about)
        ):
            _send(sock, frames.PROOF, frames.NO_PROOF)
            raise UnauthenticatedError(
                security.none_found() if token is None else security.wrong(token)
            )
        _send(sock, frames.PROOF, tensor_proof(token.key, b"client", *about))

    def _read_answer(self, sock: socket.socket, deadline: float) -> tuple[int, int, int, bytes]:
        """Returns kind, flags, incarnation and payload of the server's next frame.

        Raises:
            OpError: The error of an error frame.
        """
        try:
            fields = frames.unpack_header(_read(sock, frames.HEADER_BYTES, deadline))
            frames.check_header(fields, frames.MAX_CONTROL_BYTES)
        except OpError as error:
            error.task = self.task
            raise
        _, kind, flags, _, _, incarnation, length = fields
        payload = _read(sock, length, deadline)
        if kind == frames.ERROR:
            raise frames.decode_error(payload, self.task)
        return kind, flags, incarnation, payload

    def _connect(
        self, endpoint: Endpoint, deadline: float, adopt: Callable[[socket.socket], None]
    ) -> socket.socket:
        via = http_proxy.proxy()
        path = reachable_unix_path(endpoint) if self.options.prefer_unix and via is None else None
        if path is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            adopt(sock)
            sockets.tune(sock)
            try:
                _limit(sock, deadline)
                sock.connect(path)
                # Another user may have put a socket in the place of the task's.
                if sockets.peer_user(sock) not in (None, os.geteuid(), 0):
                    raise PermissionError("another user listens there")
                return sock
            except (FileNotFoundError, PermissionError, ConnectionRefusedError):
                # The socket is another user's, in another mount, or left over: TCP decides.
                sock.close()
        return self._connect_tcp(endpoint, via, deadline, adopt)

    def _connect_tcp(
        self,
        endpoint: Endpoint,
        via: tuple[str, int] | None,
        deadline: float,
        adopt: Callable[[socket.socket], None],
    ) -> socket.socket:
        host, port = via or (endpoint.host, endpoint.port)
        context, name = None, ""
        if self.certificates is not None:
            context = self.certificates.client_context()
            name = self.certificates.name_of(self.task) or endpoint.host
        sock = addresses.connect(
            addresses.look_up(host, port, deadline),
            lambda address: self._make_socket(address, name, context),
            deadline,
            adopt,
        )
        _limit(sock, deadline)
        if via is not None:
            http_proxy.request_tunnel(sock, endpoint.host, endpoint.port, deadline)
        sockets.tune_buffers(sock)
        if isinstance(sock, ssl.SSLSocket):
            self._shake_hands(sock, endpoint, deadline)
        return sock

    def _make_socket(
        self, address: addresses.Address, name: str, context: ssl.SSLContext | None
    ) -> socket.socket:
        sock = socket.socket(address.family, address.kind, address.protocol)
        sockets.tune(sock)
        if context is None:
            return sock
        # Before it connects: wrapping a connection that has just been cut would lose its
        # descriptor.
        return context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)

    def _shake_hands(self, sock: ssl.SSLSocket, endpoint: Endpoint, deadline: float) -> None:
        _limit(sock, deadline)
        try:
            sock.do_handshake()
        except security.CUT_TLS:
            # The connection was cut in the middle of the handshake, so another attempt may succeed.
            raise
        except ssl.SSLError as error:
            problem: OpError | None = None
            if isinstance(error, ssl.SSLCertVerificationError):
                # A second connection finds out whose certificate it is.
                address = join_address(endpoint.host, endpoint.port)
                problem = diagnosis.look(
                    address, self.certificates, self.task, deadline - concurrency.monotonic()
                ).problem
            problem = problem or UnauthenticatedError(security.no_handshake(error))
            problem.task = self.task
            raise problem from error


def _limit(sock: socket.socket, deadline: float) -> None:
    remaining = deadline - concurrency.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(remaining)


def _send(sock: socket.socket, kind: int, payload: bytes) -> None:
    sock.sendall(frames.pack_header(frames.MAGIC, kind, 0, 0, 0, 0, len(payload)) + payload)


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray(count)
    window = memoryview(data)
    while window:
        _limit(sock, deadline)
        got = _receive(sock, window)
        if got == 0:
            if data.startswith(security.TLS_ALERT):
                raise UnauthenticatedError(security.speaks_tls())
            raise ConnectionResetError(
                "the peer closed the connection during the hello: it is ending, or one side speaks "
                "TLS and one does not"
            )
        window = window[got:]
    return bytes(data)


def _receive(sock: socket.socket, window: memoryview) -> int:
    try:
        return sock.recv_into(window)
    except security.CUT_TLS:
        return 0
    except ssl.SSLError as error:
        # With TLS 1.3 a server checks our certificate only after our side of the handshake.
        raise UnauthenticatedError(security.no_handshake(error)) from error
