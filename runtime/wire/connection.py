"""The server side of one connection: the hello, then call after call.

`TensorServer` makes a `Connection` of each accepted socket, and a thread that runs it. The server's
`Handler` does the work of the calls, and a `LaneRecord` lets a repeated call run once.
"""

import contextlib
import enum
import math
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from absl import logging

from runtime import concurrency
from runtime.errors import (
    DataLossError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from runtime.limits import Limits
from runtime.tensor_spec import Array
from runtime.trust import roles
from runtime.trust.certificates import Context, shown_names
from runtime.trust.roles import ANYBODY, Identity, identity_of
from runtime.trust.security import CUT_TLS, NOT_TLS, RefusalLog, no_handshake, speaks_tls
from runtime.wire import frames, sockets, times
from runtime.wire.codec import (
    Buffer,
    Segments,
    TensorLayout,
    encode_payload,
)
from runtime.wire.greeting import ClientGreeting
from runtime.wire.handles import ORDERS
from runtime.wire.receiver import LARGE_BUFFER_BYTES, CallReceiver
from runtime.wire.reply_cache import CallSuperseded, LaneRecord, LaneTable

# Most handles with cached permissions. A full cache is emptied, so handles without end cost no
# memory without end.
_PERMITTED = 4096
_PONG = frames.pack_header(frames.MAGIC, frames.PONG, 0, 0, 0, 0, 0)

_Fields = tuple[int, int, int, int, int, int, int]


class Reply(NamedTuple):
    """The answer of a handler.

    Attributes:
        buffers: Tensors, sent from their own memory without a copy. After the send the connection
            keeps no reference, unless `remember` is set.
        remember: True if the call had an effect, and so must not run again. The reply is kept until
            the lane's next call.
        dynamic: True to send shapes and dtypes along, which allows strings. The client receives
            with layout None.
    """

    buffers: Sequence[Buffer]
    remember: bool = False
    dynamic: bool = False


class Handler(Protocol):
    """The part of a server that runs the calls. Threads of many connections use it at once."""

    def input_layout(self, handle: int) -> TensorLayout | None:
        """Returns the layout of a handle's inputs, or None for self-describing tensors.

        Raises:
            NotFoundError: The handle does not exist.
        """
        ...

    def call(self, handle: int, client: int, step: int, inputs: list[Array]) -> Reply:
        """Runs a call and returns its reply.

        Args:
            handle: Handle to run, u32.
            client: Id of the calling client, u64.
            step: Number of the client's step, u64.
            inputs: Views of the connection's receive buffer, aligned to 64 bytes, valid until
                `call` returns. By then every computation on the views must have ended, and every
                alias (`jax.device_put`) must be dropped.

        Raises:
            OpError: Sent to the client with its code and message.
        """
        ...

    def permit(self, handle: int, client: int) -> None:
        """Checks that a client may call a handle. Called once for each connection and handle.

        Raises:
            PermissionDeniedError: The client may not call the handle.
        """

    def disconnected(self, client: int, lane: int) -> None:
        """Notes that a client has hung up during or just after `call`.

        Runs on another thread than `call`, and must not block. `call` may end early. A client that
        has closed only its own side (`Lane.cancel`) receives the answer. The client may also
        connect again and repeat the call. So `call` notes in `call_memory()` what must not be done
        twice. On the thread of `call`, `current_lane()` returns the lane, and `caller_is_gone()`
        returns True if the connection of `call` itself has ended.
        """

    def gone(self, client: int, goodbye: bool) -> None:
        """Notes that a client is not expected back. Runs on another thread.

        Args:
            client: Id of the client.
            goodbye: True if the client has said goodbye. False if the client had no connection for
                a while. Such a client may come back.
        """


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The settings and the state that the connections of one server share.

    Attributes:
        handler: Handler that runs the calls.
        key: Token that clients must have; None lets every client in.
        incarnation: Random u64 of this process of the task.
        task: Task of the server. With a key, a client that means another task is refused.
        limits: Limits on the number, the duration and the size of connections and calls.
        own: Identity in the task's own certificate.
        tls: Function that returns the TLS context for a TCP connection; None for plain TCP. The
            Unix socket stays plain.
        refusals: Log of the refused clients.
        lanes: Memories of the lanes.
        stopping: Event set when the server ends.
        leaving: Event set before `stopping` if the server ends for good. Connected clients then
            receive a goodbye.
        progress: Event set after each call while stopping.
    """

    handler: Handler
    key: bytes | None
    incarnation: int
    task: str = ""
    limits: Limits = field(default_factory=Limits)
    own: Identity = ANYBODY
    tls: Context | None = None
    refusals: RefusalLog = field(default_factory=lambda: RefusalLog("a server"))
    lanes: LaneTable[Reply]
    stopping: concurrency.Event = field(default_factory=concurrency.Event)
    leaving: concurrency.Event = field(default_factory=concurrency.Event)
    progress: concurrency.Event = field(default_factory=concurrency.Event)


def notify(hook: Callable[..., None], *about: int) -> None:
    """Calls a hook of the handler, and logs its exception."""
    try:
        hook(*about)
    except Exception:
        logging.exception("%s() of the handler failed", hook.__name__)


class _ThreadCall(concurrency.local):
    connection: "Connection | None" = None

    @property
    def record(self) -> "LaneRecord[Reply] | None":
        return None if self.connection is None else self.connection._record


_local = _ThreadCall()


def current_lane() -> int:
    """Returns the lane number of the call on this thread.

    Returns 0 outside `Handler.call`.
    """
    return 0 if _local.connection is None else _local.connection.lane


def current_call() -> tuple[int, int]:
    """Returns lane and number of the call on this thread.

    Returns (0, 0) outside `Handler.call`.
    """
    record = _local.record
    return (0, 0) if record is None else (current_lane(), record.seq)


def current_identity() -> Identity:
    """Returns the identity of the client of the call on this thread.

    Returns ANYBODY outside `Handler.call`.
    """
    return ANYBODY if _local.connection is None else _local.connection.who


def caller_is_gone() -> bool:
    """Returns True if the current call's client is known to be gone.

    The current call is the call on this thread. Returns False outside `Handler.call`.
    """
    connection = _local.connection
    return connection is not None and connection.gone


def caller_has_hung_up() -> bool:
    """Returns True if the current call's client has hung up by now.

    Unlike `caller_is_gone`, asks the socket.
    """
    connection = _local.connection
    return connection is not None and connection.check_hung_up()


def call_memory() -> dict[str, Any]:
    """Returns the notes of the call that runs on this thread.

    The notes include those of an earlier run of the same call that was cut off. They are dropped
    when the call has been answered. Outside `Handler.call` the dict is fresh and empty.
    """
    return {} if (record := _local.record) is None else record.memory


def _peer_host(sock: socket.socket) -> str:
    try:
        peer = sock.getpeername()
    except OSError:
        # The client has gone already.
        return "somewhere"
    return str(peer[0]) if isinstance(peer, tuple) else "a Unix socket"


class ConnectionState(enum.IntEnum):
    """The state of a connection. A connection of a lower state gives way to a new one first."""

    SILENT = 0
    """No byte has come."""
    GREETING = 1
    """The listener's thread receives the greeting."""
    ENTERING = 2
    """The connection has a thread. The client is not welcome yet."""
    SERVED = 3
    """The client is welcome."""
    ENDED = 4
    """The thread has no more use for the socket."""


@dataclass(slots=True)
class ConnectionTraffic:
    """The counters of a connection.

    Attributes:
        calls: Number of calls received.
        bytes_in: Bytes of calls received, headers included.
        bytes_out: Bytes of replies sent, headers included.
    """

    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Connection:
    """An accepted connection, run by a thread of its own.

    The thread runs `run`; other threads may call every other method.

    Attributes:
        state: State of the connection.
        thread: Thread of the connection; None before the state ENTERING.
        client: Id of the client; 0 before the hello.
        lane: Number of the client's lane; 0 before the hello.
        who: Identity in the client's certificate.
        busy: True while a call is received or runs.
        gone: True once the client has hung up or the server has cut the connection. Never False
            again.
        traffic: Counters of calls and bytes.
        receiver: Memory for received calls. The listener looks there for calls that arrive too
            slowly.
        peer_host: Address of the client without a port; a description in words if there is none.
        is_tls: True if the client must speak TLS. Then only the connection's own thread may write.
        accepted_at: `time.monotonic()` of the accept.
        heard_at: `time.monotonic()` of the last ping; before the first ping, of the accept or the
            welcome.
        idle_since: `time.monotonic()` of the listener's last look that found a call or a ping since
            the look before; infinity before the first look.
        fd: Descriptor of the accepted socket; negative once another connection has the descriptor.
            After `close` the number may belong to another socket.
    """

    def __init__(self, context: ServerContext, sock: socket.socket) -> None:
        """Takes over an accepted socket."""
        self.state = ConnectionState.SILENT
        self.thread: concurrency.Thread | None = None
        self.client = 0
        self.lane = 0
        self.who = ANYBODY
        self.busy = False
        self.gone = False
        self.traffic = ConnectionTraffic()
        self.receiver = CallReceiver(context.limits)
        self.accepted_at = self.heard_at = concurrency.monotonic()
        self.idle_since = math.inf
        self.fd = sock.fileno()
        # Read now: a client that has gone has no address.
        self.peer_host = _peer_host(sock)
        self.is_tls = context.tls is not None and sock.family != socket.AF_UNIX
        # Calls and `heard_at` at the last `note_work`.
        self._seen = (0, 0.0)
        self._context = context
        self._sock = sock
        of_other_user = sockets.peer_user(sock) not in (None, os.geteuid(), 0)
        self._greeting = ClientGreeting(
            context.task, context.key, context.incarnation, of_other_user=of_other_user
        )
        # Guards `_sock` and `_closed`: after the close the descriptor may belong to another socket,
        # and must not be shut down.
        self._sock_lock = concurrency.Lock()
        self._closed = False
        # The memory of the lane; None before the hello.
        self._record: LaneRecord[Reply] | None = None
        self._permitted: set[int] = set()

    def receive_greeting(self, flags: int = 0) -> None:
        """Receives the greeting and answers, until the greeting is complete.

        Args:
            flags: Flags for recv and send; MSG_DONTWAIT for a thread that must not wait.

        Raises:
            BlockingIOError: With MSG_DONTWAIT, the rest has not come yet.
            OpError: The client is not welcome.
            OSError: The connection broke.
        """
        greeting = self._greeting
        while greeting.wanted:
            said = self._sock.recv(greeting.wanted, flags)
            if not said:
                raise ConnectionResetError("the client has hung up")
            answer = greeting.hear(said)
            if answer and self._sock.send(answer, flags) != len(answer):
                raise ConnectionAbortedError("the client takes no answer")

    def refuse(self, error: OpError) -> None:
        """Sends a client the reason of its refusal, without TLS and without waiting."""
        # A client that has hung up, or does not read, goes without the reason.
        with contextlib.suppress(OSError):
            # The plain methods, also on a TLS socket, whose client has spoken something else than
            # TLS.
            socket.socket.send(self._sock, frames.pack_error(0, error), socket.MSG_DONTWAIT)
            # Closing a socket with unread bytes resets the connection, and takes the reason back.
            socket.socket.recv(self._sock, frames.MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)

    def log_refusal(self, error: OpError) -> None:
        """Logs that the client was refused something."""
        tell = self._context.refusals.tell
        if isinstance(error, PermissionDeniedError):
            tell(self.peer_host, error.message, "tensors", self.who.names)
        elif isinstance(error, ResourceExhaustedError):
            tell(self.peer_host, error.message, "limit")
        else:
            tell(self.peer_host, f"{error.message} (tensors)")

    def run(self) -> None:
        """Serves the connection until it closes; never raises."""
        try:
            self._enter()
            # Only now: a stranger costs no memory.
            self.receiver.allocate()
            _local.connection = self
            self._serve()
        except OpError as error:
            # The client is none of ours, or its bytes are damaged.
            self.log_refusal(error)
        except (CallSuperseded, OSError) as error:
            no_tls = isinstance(error, ssl.SSLError) and not isinstance(error, CUT_TLS)
            if not no_tls or self.state is ConnectionState.SERVED:
                logging.debug("Connection of client %x, lane %d: %r", self.client, self.lane, error)
            else:
                self.log_refusal(UnauthenticatedError(no_handshake(error)))
                if getattr(error, "reason", None) in NOT_TLS:
                    self.refuse(UnauthenticatedError(speaks_tls()))
        except Exception:
            logging.exception("Tensor connection from %s failed", self.peer_host)
        finally:
            self.interrupt()
            if self._record is not None:
                self._context.lanes.detach(
                    self.client, self.lane, self._record, self, concurrency.monotonic()
                )
            with self._sock_lock:
                self.state = ConnectionState.ENDED
                if self._closed:
                    self._sock.close()

    def close(self) -> None:
        """Closes the socket. While `run` uses the socket, the end of `run` closes it."""
        with self._sock_lock:
            self._closed = True
            if self.state not in (ConnectionState.ENTERING, ConnectionState.SERVED):
                self._sock.close()

    def join(self, secs: float) -> bool:
        """Waits for the end of the thread.

        Returns False if the thread still runs.
        """
        assert self.thread is not None
        self.thread.join(secs)
        return not self.thread.is_alive()

    def interrupt(self) -> None:
        """Cuts the connection, so that its thread wakes up and ends."""
        self.gone = True
        with self._sock_lock:
            if not self._closed:
                sockets.interrupt(self._sock)

    def check_hung_up(self) -> bool:
        """Returns True if the client has hung up by now."""
        if not self.gone:
            with self._sock_lock:
                if self._closed or not sockets.hung_up(self._sock):
                    return False
            self.gone = True
        return True

    def send_goodbye(self) -> None:
        """Tells the client that this server leaves for good.

        No reply may be half sent on the connection.
        """
        # A client that has gone, or has not read for long, goes without the goodbye.
        with self._sock_lock, contextlib.suppress(OSError):
            if not self._closed and self.state is ConnectionState.SERVED:
                self._sock.send(frames.LEAVES, 0 if self.is_tls else socket.MSG_DONTWAIT)

    def note_hang_up(self) -> None:
        """Notifies the handler if the client has hung up during a call."""
        if self.check_hung_up() and self.busy:
            self.notify_handler()

    def notify_handler(self) -> None:
        """Tells the handler that no client waits for the running call."""
        notify(self._context.handler.disconnected, self.client, self.lane)

    def note_work(self, now: float) -> None:
        """Updates `idle_since` of a welcome client. The listener's thread calls this method.

        Args:
            now: `time.monotonic()`.
        """
        seen = (self.traffic.calls, self.heard_at)
        if self.busy or seen != self._seen:
            self._seen, self.idle_since = seen, now

    def _enter(self) -> None:
        # No time limit is needed here: the listener cuts connections that take too long.
        context = self._context
        sockets.tune(self._sock)
        if self.is_tls:
            assert context.tls is not None
            secure = context.tls().wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            with self._sock_lock:
                self._sock = secure
                # The connection may have been cut before its descriptor went to `secure`.
                if self._closed or self.gone:
                    raise ConnectionAbortedError("cut")
            secure.do_handshake()
        sockets.tune_buffers(self._sock)
        try:
            # With TLS the whole greeting is still to come. Without, the listener's thread has
            # received it.
            self.receive_greeting()
            self._identify()
            hello, now = self._greeting.hello, concurrency.monotonic()
            self.client, self.lane = hello.client, hello.lane
            attached = context.lanes.attach(
                hello.client, hello.lane, hello.attempt, self, now, self.who
            )
        except OpError as error:
            # The client may have hung up.
            with contextlib.suppress(OSError):
                self._send_error(0, error)
            raise
        self._record, known, before = attached
        # The client has given up the lane's earlier connection. A call that still runs there should
        # end soon, because the client will repeat the call on this connection.
        if isinstance(before, Connection):
            before.interrupt()
            if before.busy:
                before.notify_handler()
        if self.is_tls:
            self._sock.settimeout(times.TLS_TICK_SECS)
        self.heard_at = now
        flags = frames.RESUMED if known else 0
        # No goodbye may overtake the welcome, so both are sent under the lock. The state changes
        # before the client knows: until then the listener may end the connection for a newcomer.
        with self._sock_lock:
            self.state = ConnectionState.SERVED
            self._sock.sendall(
                frames.pack_header(
                    frames.MAGIC, frames.WELCOME, flags, 0, 0, context.incarnation, 0
                )
            )

    def _identify(self) -> None:
        """Reads the client's certificate and checks that its role may connect.

        Raises:
            PermissionDeniedError: The role or the run of the client is wrong.
        """
        if not isinstance(self._sock, ssl.SSLSocket):
            return
        names = shown_names(self._sock)
        # For the log, in case the names are refused.
        self.who = Identity(names)
        self.who = identity_of(names)
        roles.check_run(self._context.own, self.who)
        roles.check("tensors", self.who)

    def _permit(self, handle: int) -> None:
        """Checks that the client may call a handle, and remembers a permission.

        Raises:
            PermissionDeniedError: The client may not call the handle.
        """
        order = ORDERS.get(handle, "stage")
        try:
            roles.check(order, self.who)
            self._context.handler.permit(handle, self.client)
        except PermissionDeniedError as error:
            self._context.refusals.tell(self.peer_host, error.message, order, self.who.names)
            raise
        if len(self._permitted) >= _PERMITTED:
            self._permitted.clear()
        self._permitted.add(handle)

    def _serve(self) -> None:
        sock, receiver, context = self._sock, self.receiver, self._context
        # Reads all that was sent, also by a client that has hung up: its last frame may be a
        # goodbye.
        while True:
            try:
                count = sock.recv_into(receiver.window)
            except TimeoutError:
                if not self.is_tls:
                    raise
                if context.leaving.is_set():
                    self.send_goodbye()
                    return
                continue
            if count < frames.HEADER_BYTES:
                if count == 0:
                    return
                sockets.receive_rest(sock, receiver.window[count : frames.HEADER_BYTES], receiver)
                count = frames.HEADER_BYTES
            fields = frames.unpack_header(receiver.window)
            # The length of a call is checked in `_call`, by the layout of its handle.
            if fields[1] == frames.CALL and fields[0] == frames.MAGIC:
                self.busy = True
                try:
                    self._call(fields, count)
                finally:
                    self.busy = False
                    if receiver.capacity > LARGE_BUFFER_BYTES:
                        receiver.consider_shrinking(fields[6])
                    if context.stopping.is_set():
                        context.progress.set()
                if context.stopping.is_set():
                    if context.leaving.is_set():
                        self.send_goodbye()
                    return
            elif self._ends_with(fields, count):
                return

    def _ends_with(self, fields: _Fields, count: int) -> bool:
        """Handles a frame that is no call; returns True if the connection ends with the frame."""
        frames.check_header(fields, 0)
        if count != frames.HEADER_BYTES:
            raise DataLossError("bytes follow a frame that stands alone")
        kind = fields[1]
        if kind == frames.PING:
            self.heard_at = concurrency.monotonic()
            self._sock.sendall(_PONG)
            # The socket of a TLS client that sends pings may never be silent for a tick.
            if self.is_tls and self._context.leaving.is_set():
                self.send_goodbye()
                return True
            return False
        if kind != frames.GOODBYE:
            raise DataLossError(f"a client sent a frame of kind {kind}")
        whole = fields[2] & frames.WHOLE_CLIENT
        self._context.lanes.forget(
            self.client, None if whole else self.lane, concurrency.monotonic()
        )
        if whole:
            notify(self._context.handler.gone, self.client, True)
        return True

    def _call(self, fields: _Fields, count: int) -> None:
        _, _, flags, handle, seq, step, length = fields
        record = self._record
        assert record is not None
        traffic = self.traffic
        traffic.calls += 1
        traffic.bytes_in += length + frames.HEADER_BYTES
        try:
            layout = self._context.handler.input_layout(handle)
            if handle not in self._permitted:
                self._permit(handle)
            _check_form(self._context.limits, layout, flags, handle, length)
        except Exception as error:
            # The payload is read and dropped, so that the client can send its next call on this
            # connection.
            self.receiver.drain(self._sock, length + frames.HEADER_BYTES - count)
            self._send_error(seq, self._notified(error, handle))
            return
        if count != length + frames.HEADER_BYTES:
            self.receiver.receive_payload(self._sock, length, count)
        # Nobody waits for the answer. A call that matters comes again on another connection.
        if self.gone:
            return
        try:
            reply = record.begin(self, seq)
        except FailedPreconditionError as error:
            self._send_error(seq, error)
            return
        answer = reply or self._run_handler(record, layout, fields)
        if isinstance(answer, OpError):
            self._send_error(seq, answer)
        else:
            self._send_reply(seq, handle, answer)

    def _run_handler(
        self, record: LaneRecord[Reply], layout: TensorLayout | None, fields: _Fields
    ) -> Reply | OpError:
        handle, step, length = fields[3], fields[5], fields[6]
        kept: Reply | None = None
        try:
            reply = self._context.handler.call(
                handle, self.client, step, self.receiver.inputs(layout, handle, length)
            )
            if reply.remember:
                kept = reply
            return reply
        except Exception as error:
            # Without its traceback, which would keep the handler's tensors alive in a cycle with
            # this frame.
            return self._notified(error, handle).with_traceback(None)
        finally:
            # The notes are for a second run, which follows only if this run was cut off without a
            # reply to keep.
            if record.memory and (kept is not None or not self.gone):
                record.memory = {}
            record.finish(kept)

    def _notified(self, error: Exception, handle: int) -> OpError:
        """Returns the error to send, and logs a refusal or failure."""
        if isinstance(error, OpError):
            if isinstance(error, ResourceExhaustedError) and error.limit:
                self.log_refusal(error)
            return error
        self._context.refusals.report_failure(
            self.peer_host, f"call {handle} of client {self.client:x}", error
        )
        return InternalError(f"call {handle} failed: {type(error).__name__}: {error}")

    def _send_reply(self, seq: int, handle: int, reply: Reply) -> None:
        try:
            segments, length = encode_payload(reply.buffers, reply.dynamic)
        except Exception as error:
            self._send_error(seq, self._notified(error, handle))
            return
        segments[0] = frames.pack_header(
            frames.MAGIC, frames.REPLY, frames.DYNAMIC * reply.dynamic, handle, seq, 0, length
        )
        self._send(segments, length + frames.HEADER_BYTES)

    def _send_error(self, seq: int, error: OpError) -> None:
        frame = frames.pack_error(seq, error)
        self._send([frame], len(frame))

    def _send(self, segments: Segments, total: int) -> None:
        sock = self._sock
        sent = 0
        # Before the send: a client that has a reply finds it counted.
        self.traffic.bytes_out += total
        if not self.is_tls and len(segments) <= sockets.MAX_IOV:
            try:
                sent = sock.sendmsg(segments)
            except ValueError:
                # numpy refuses an array that is not contiguous, before anything is sent.
                segments = [sockets.byte_view(segment) for segment in segments]
        if sent != total:
            sockets.send_rest(sock, segments, sent, self.receiver)


def _check_form(
    limits: Limits, layout: TensorLayout | None, flags: int, handle: int, length: int
) -> None:
    """Checks that a call has the form that its handle takes."""
    if layout is None:
        if not flags & frames.DYNAMIC:
            raise InvalidArgumentError(
                f"handle {handle} takes tensors that describe themselves (dynamic=True)"
            )
        if length > limits.payload_bytes:
            raise limits.exceeded("payload_bytes", frames.too_long(length))
    elif flags & frames.DYNAMIC or length != layout.nbytes:
        form = "self-describing" if flags & frames.DYNAMIC else "fixed"
        raise InvalidArgumentError(f"handle {handle} takes {layout}, got {length} bytes ({form})")
