"""The client side of one connection: a lane with at most one call under way.

`Peer` opens the lanes. Sending and receiving are separate, so a thread can send to every ps before waiting for the
first reply.

A call runs exactly once. A lane has an id (client and lane number), and each call has a sequence number. After a break
the lane connects again, says hello with the same id, and sends the same call again. The server remembers the last call
with an effect, and answers a repeated call from memory. A server of another incarnation has lost the memory, so the
call raises `AbortedError`.

A call with `waits` is given up, at its deadline or by `cancel`, by closing only the sending side. The task then ends
the wait and says so, unless an answer is already on the way. The lane takes such an answer, so no element handed out
by the task is lost.
"""

import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from runtime import concurrency, timeouts
from runtime.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    OpError,
    ResourceExhaustedError,
    TaskLeftError,
    UnavailableError,
)
from runtime.tensor_spec import Array, aligned_buffer
from runtime.wire import frames, sockets
from runtime.wire.codec import (
    Buffer,
    Layout,
    Segments,
    TensorBuffer,
    decode_dynamic,
    encode_payload,
)
from runtime.wire.dial import Dialer
from runtime.wire.endpoint import Endpoint

_MAX_BREAKS = 32
"""Most breaks in a row during one call. With one more, the call gives up."""
_STEADY_SECS = 1.0
"""Seconds that a connection must have lived for the breaks before it not to count."""
_LISTEN_SECS = 0.1
"""Seconds between two looks at the deadline while a call that was given up listens for its answer."""
_PING = frames.pack_header(frames.MAGIC, frames.PING, 0, 0, 0, 0, 0)


class Lane:
    """A connection to a task, for one call at a time.

    One thread at a time uses a lane. Other threads may only call `cancel` and `interrupt`.

    Attributes:
        task: Name of the peer, such as "/job:ps/task:0".
        number: Number of the lane within its client.
        incarnation: Incarnation of the server, chosen by `open`; 0 before. Later connections to another incarnation
            raise AbortedError.
        progress: Counter that grows while the bytes of a long transfer move.
        connected_at: `time.monotonic()` of the newest connection.
    """

    def __init__(self, dialer: Dialer, number: int) -> None:
        """Makes a lane without a connection; `Peer.acquire` returns connected lanes."""
        self.task = dialer.task
        self.number = number
        self.incarnation = 0
        self.progress = 0
        self.connected_at = 0.0
        self._dialer = dialer
        self._options = dialer.options
        self._max_payload = dialer.options.max_payload_bytes
        # The connection. While `_sock` is None, `_sendmsg` and `_recvmsg_into` raise ConnectionResetError.
        self._endpoint: Endpoint | None = None
        self._attempt = 0
        self._sock: socket.socket | None = None
        # Guards `_sock` against an interrupt after a close, when the descriptor may belong to another socket.
        self._sock_lock = concurrency.Lock()
        self._sendmsg: Callable[[Segments], int] = _not_connected
        self._recvmsg_into: Callable[[Sequence[Any]], Any] = _not_connected
        self._tick_secs = sockets.TICK_SECS
        # The call under way, or None in `_pending`. Its buffers stay until the reply, to be sent again after a break.
        self._head = bytearray(frames.HEADER_BYTES)
        self._seq = 0
        self._pending: Segments | None = None
        self._pending_bytes = 0
        self._pending_handle = 0
        # The start of the wait under way and the time of its next log line; 0.0 before its first tick.
        self._since = self._log_at = 0.0
        self._deadline: float | None = None
        # `_given_up` is the error that ends the call unless its answer still comes. Set once at most, and only for a
        # call with `_waits`: the lane closes after the call.
        self._waits = self._sending = False
        self._given_up: OpError | None = None
        # The trouble with the connection, for the next `receive` or `answered` to mend. None while the connection
        # works.
        self._fault: Exception | None = None
        self._breaks = 0
        self._had_goodbye = False
        # True from `close` until the next `open`.
        self._broken = False
        self._cancelled = concurrency.Event()

    @property
    def usable(self) -> bool:
        """True while the lane can send a call.

        No call is under way, and the lane is neither broken nor cancelled.
        """
        return self._pending is None and not self._broken and not self._cancelled.is_set()

    def fileno(self) -> int:
        """Returns the file descriptor for a poll; -1 without a connection."""
        sock = self._sock
        return -1 if sock is None or self._fault is not None else sock.fileno()

    def open(self, deadline: float | None = None) -> None:
        """Connects to the current incarnation of the task, at first or after `close`.

        Args:
            deadline: `time.monotonic()` at which to give up.

        Raises:
            UnavailableError: The task is gone, or silent for `reconnect_secs`.
            UnauthenticatedError: The token or a certificate is wrong.
            DeadlineExceededError: The deadline has passed.
            CancelledError: `cancel` was called.
        """
        self._deadline, self._endpoint = deadline, None
        self._broken, self.incarnation, self._breaks = False, 0, 0
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def send(
        self,
        handle: int,
        step: int,
        buffers: Sequence[Buffer],
        *,
        dynamic: bool = False,
        deadline: float | None = None,
        waits: bool = False,
    ) -> None:
        """Sends a call, whose reply `receive` returns.

        The buffers must not change before `receive` returns: the lane may send them again. Network errors are kept for
        `receive`, so a caller can send to all peers first.

        Args:
            handle: Handle to call, u32.
            step: Number of the step, u64.
            buffers: Input tensors in the order of the handle's layout; any tensors with `dynamic`.
            dynamic: True to send shapes and dtypes along, which allows strings.
            deadline: `time.monotonic()` at which the call gives up; None waits as long as the peer lives.
            waits: True if the task may hold the call back for other calls. An answer to such a call is not lost when
                the caller gives up.

        Raises:
            FailedPreconditionError: The lane is broken, or the reply of its last call was not received.
            InvalidArgumentError: An array holds strings without `dynamic`, or has a dtype that tensors cannot have.
            ResourceExhaustedError: A self-describing payload is over `max_payload_bytes`.
        """
        if self._pending is not None:
            raise FailedPreconditionError("a call is under way on this lane; receive its reply first", task=self.task)
        if self._broken:
            raise FailedPreconditionError("this lane is broken; acquire another", task=self.task)
        segments, length = encode_payload(buffers, dynamic)
        if dynamic and length > self._max_payload:
            raise ResourceExhaustedError(f"{frames.too_long(length)}: the limit is {self._max_payload}", task=self.task)
        self._seq = seq = self._seq + 1
        segments[0] = frames.pack_header(frames.MAGIC, frames.CALL, frames.DYNAMIC * dynamic, handle, seq, step, length)
        self._pending = segments
        self._pending_bytes = length + frames.HEADER_BYTES
        self._pending_handle = handle
        self._deadline = deadline
        self._waits = waits
        self._since = 0.0
        try:
            self._send_pending()
        except (OSError, CancelledError) as error:
            self._fault = error

    def receive(self, layout: Layout | None, out: TensorBuffer | None = None) -> list[Array]:
        """Waits for the reply of the call under way.

        Args:
            layout: Layout of the reply; None for self-describing tensors.
            out: Memory for the reply, of the same layout; None allocates fresh memory. Its contents are arbitrary
                after an error.

        Returns:
            The tensors, as views of `out` or of the fresh memory.

        Raises:
            OpError: The error of the handler, with its code and message. The lane stays usable.
            UnavailableError: The task is gone, or was silent for `reconnect_secs`. The error names the task.
            AbortedError: The task restarted and lost its state.
            DeadlineExceededError: The deadline of the call has passed.
            CancelledError: `cancel` was called.
            FailedPreconditionError: No call is under way.
            InternalError: The reply does not match `layout`.
        """
        if self._pending is None:
            raise FailedPreconditionError("no call is under way on this lane; send one first", task=self.task)
        try:
            while True:
                if self._fault is None:
                    try:
                        answer = self._read_answer(layout, out)
                        break
                    except OpError:
                        raise
                    except OSError as error:
                        self._fault = error
                self._send_again()
        except BaseException:
            # Also after KeyboardInterrupt: nobody knows what the connection carries next.
            self.close()
            raise
        self._pending = None
        self._breaks = 0
        # The call was given up and answered all the same. Any answer but a cancellation counts.
        if self._given_up is not None:
            self.close()
            if isinstance(answer, CancelledError):
                raise self._given_up
        if isinstance(answer, OpError):
            raise answer
        return answer

    def answered(self) -> bool:
        """Returns True if the awaited reply has begun to arrive.

        For callers with calls under way on several lanes. Sends the call again after a break, as `receive` does, but
        never waits for the reply. With TLS the first bytes may be an incomplete record, so a `receive` may still wait.

        Raises:
            OpError: No connection can be made; the errors of `receive`.
        """
        try:
            while True:
                if self._fault is None:
                    try:
                        return self._sock is not None and sockets.has_bytes(self._sock)
                    except OSError as error:
                        self._fault = error
                self._send_again()
        except BaseException:
            self.close()
            raise

    def call(
        self,
        handle: int,
        step: int,
        buffers: Sequence[Buffer],
        layout: Layout | None,
        *,
        out: TensorBuffer | None = None,
        dynamic: bool = False,
        deadline: float | None = None,
        waits: bool = False,
    ) -> list[Array]:
        """Sends a call and returns the reply; see `send` and `receive`."""
        self.send(handle, step, buffers, dynamic=dynamic, deadline=deadline, waits=waits)
        return self.receive(layout, out)

    def ping(self, deadline: float) -> None:
        """Sends a ping and waits for the answer.

        Args:
            deadline: `time.monotonic()` at which to give up.

        Raises:
            UnavailableError: The task is gone or silent, has restarted, or has forgotten the lane.
            OpError: The other errors of `receive`.
        """
        self._pending, self._pending_bytes, self._deadline, self._since = [_PING], len(_PING), deadline, 0.0
        try:
            self._send_pending()
        except (OSError, CancelledError) as error:
            self._fault = error
        try:
            self.receive(None)
        except AbortedError as error:
            raise UnavailableError(error.message, task=self.task) from error

    def limit(self, deadline: float) -> None:
        """Changes the deadline of the call under way. Only for the thread of the lane.

        Args:
            deadline: `time.monotonic()` at which the call gives up.
        """
        self._deadline = deadline
        if self._pending is not None:
            self._set_tick(min(max(deadline - concurrency.monotonic(), 0.001), sockets.TICK_SECS))

    def cancel(self) -> None:
        """Makes the call under way raise CancelledError, from any thread.

        The lane is of no use afterwards. A call with `waits` is given up: the call ends with the answer of the task,
        or without an answer after a tick and `LAST_WORD_SECS`.
        """
        self._cancelled.set()
        with self._sock_lock:
            if self._sock is not None:
                listens = self._waits and self._pending is not None and self._fault is None
                (sockets.half_close if listens else sockets.interrupt)(self._sock)

    def interrupt(self) -> None:
        """Cuts the connection, from any thread. A call under way connects again."""
        with self._sock_lock:
            if self._sock is not None:
                sockets.interrupt(self._sock)

    def close(self, *, goodbye: bool = False, whole_client: bool = False) -> bool:
        """Closes the connection and the lane. Only for the thread of the lane.

        Only `open` makes the lane usable again.

        Args:
            goodbye: True to let the server forget the lane now, and not after a while.
            whole_client: True to say with the goodbye that the client leaves with all its lanes.

        Returns:
            True if the goodbye was sent.
        """
        sent = False
        self._broken = True
        self._pending = None
        self._fault = None
        sock = self._sock
        if goodbye and sock is not None and not self._cancelled.is_set():
            # A server without the goodbye forgets the lane by itself, later.
            with contextlib.suppress(OSError):
                sent = sock.send(frames.CLIENT_LEAVES if whole_client else frames.LEAVES) > 0
        self._drop_socket()
        return sent

    def stalled(self) -> None:
        """Handles a tick without a byte.

        Gives the call up after `cancel` or its deadline, and logs a long wait.
        """
        now = concurrency.monotonic()
        if self._given_up is None and self._cancelled.is_set():
            self._give_up(CancelledError("the call was cancelled", task=self.task))
            return
        waited = self._log_wait(now, now - self._tick_secs, f"answer call {self._pending_handle}")
        if self._deadline is None:
            return
        remaining = self._deadline - now
        if remaining > 0:
            self._set_tick(min(remaining, sockets.TICK_SECS))
        elif self._given_up is not None:
            raise self._given_up
        else:
            text = f"did not answer call {self._pending_handle} before its deadline (waited {waited:.1f} s)"
            self._give_up(DeadlineExceededError(f"at {self._endpoint}: {text}", task=self.task))

    def _give_up(self, error: OpError) -> None:
        # A call that does not wait ends now. So does a half-sent call: the task has not begun it.
        if not self._waits or self._sending:
            raise error
        # The task may have answered already. So the lane listens for a while before the call ends with `error`.
        self._given_up = error
        self._deadline = concurrency.monotonic() + timeouts.LAST_WORD_SECS
        self._set_tick(_LISTEN_SECS)
        with self._sock_lock:
            if self._sock is not None:
                # A server without the goodbye forgets the lane by itself, later.
                with contextlib.suppress(OSError):
                    self._sock.send(frames.LEAVES)
                sockets.half_close(self._sock)

    def _log_wait(self, now: float, since: float, what: str) -> float:
        """Returns the seconds waited so far, and logs a long wait.

        Args:
            now: `time.monotonic()`.
            since: Start of the wait; used by the first call of a wait only.
            what: Event that the call waits for, such as "be reached".
        """
        if not self._since:
            self._since, self._log_at = since, since + timeouts.LOG_EVERY_SECS
        waited = now - self._since
        if now >= self._log_at:
            self._log_at = now + timeouts.LOG_EVERY_SECS
            logging.warning("Waiting for %s to %s, for %.0f s now", self._dialer.name, what, waited)
        return waited

    def _send_pending(self) -> None:
        segments, total = self._pending, self._pending_bytes
        assert segments is not None
        deadline = self._deadline
        if deadline is not None:
            left = deadline - concurrency.monotonic()
            if left <= 0 and self._waits:
                # The deadline has passed. The task must still read the call before the goodbye that gives the call up.
                left = _LISTEN_SECS
            self._set_tick(min(max(left, 0.001), sockets.TICK_SECS))
        elif self._tick_secs != sockets.TICK_SECS:
            self._set_tick(sockets.TICK_SECS)
        sent = 0
        if len(segments) <= sockets.MAX_IOV:
            try:
                sent = self._sendmsg(segments)
            except ValueError:
                # numpy refuses an array that is not contiguous, before anything is sent.
                segments = self._pending = [sockets.byte_view(segment) for segment in segments]
            except BlockingIOError:
                # A tick has passed: the peer does not read. `send_rest` continues.
                sent = 0
        if sent != total:
            assert self._sock is not None
            self._sending = True
            try:
                sockets.send_rest(self._sock, segments, sent, self)
            finally:
                self._sending = False

    def _read_answer(self, layout: Layout | None, out: TensorBuffer | None) -> list[Array] | OpError:
        sock = self._sock
        assert sock is not None
        head = self._head
        # One system call receives the header and the payload, or its first bytes if its length is unknown.
        if layout is None:
            window = memoryview(bytearray(256))
        else:
            if out is None:
                out = TensorBuffer(layout)
            window = out.window
        while True:
            try:
                count: int = self._recvmsg_into((head, window))[0]
                break
            except (BlockingIOError, TimeoutError):
                self.stalled()
        if count < frames.HEADER_BYTES:
            if count == 0:
                raise ConnectionResetError("the peer closed the connection")
            sockets.receive_rest(sock, memoryview(head)[count:], self)
            count = frames.HEADER_BYTES
        fields = frames.unpack_header(head)
        magic, kind, flags, _, seq, _, length = fields
        count -= frames.HEADER_BYTES
        # The usual case: a reply of the expected layout, already in its place.
        if (
            out is not None
            and kind == frames.REPLY
            and length == out.layout.nbytes
            and seq == self._seq
            and magic == frames.MAGIC
            and not flags & frames.DYNAMIC
        ):
            if count != length:
                sockets.receive_rest(sock, window[count:], self)
            return list(out.arrays)
        return self._read_other(sock, fields, layout, window[:count])

    def _read_other(
        self,
        sock: socket.socket,
        fields: tuple[int, int, int, int, int, int, int],
        layout: Layout | None,
        start: memoryview,
    ) -> list[Array] | OpError:
        # Handles every frame but a reply of a fixed layout. `start` holds the received bytes of the payload.
        _, kind, flags, _, seq, _, length = fields
        try:
            frames.check_header(fields, length if kind == frames.REPLY else frames.MAX_CONTROL_BYTES)
        except OpError as error:
            error.task = self.task
            raise
        if kind == frames.GOODBYE:
            raise self._farewell()
        # The server has left since it sent this frame: its goodbye came in the same read.
        if len(start) == length + frames.HEADER_BYTES and start[length:] == frames.LEAVES:
            start = start[:length]
            self._had_goodbye = True
        if kind == frames.PONG:
            return []
        if kind not in (frames.REPLY, frames.ERROR) or seq != self._seq or len(start) > length:
            raise InternalError(f"answered call {self._seq} with a frame of kind {kind}, seq {seq}", task=self.task)
        if kind == frames.REPLY and (layout is not None or not flags & frames.DYNAMIC):
            expected = "a self-describing payload" if layout is None else repr(layout)
            form = "self-describing" if flags & frames.DYNAMIC else "fixed"
            raise InternalError(
                f"replied to call {self._pending_handle} with {length} bytes ({form}), expected {expected}",
                task=self.task,
            )
        try:
            data = aligned_buffer(length)
        except (MemoryError, ValueError) as error:
            # A reply has no limit but the memory, because the client asked for it.
            raise ResourceExhaustedError(f"no memory for a reply of {length} bytes: {error}", task=self.task) from None
        window = data.data
        window[: len(start)] = start
        sockets.receive_rest(sock, window[len(start) :], self)
        if kind == frames.ERROR:
            return frames.decode_error(data.tobytes(), self.task)
        return decode_dynamic(data)

    def _send_again(self) -> None:
        # After a fault the call goes over another connection, unless the call has ended.
        if isinstance(self._fault, OpError):
            raise self._fault
        if self._given_up is not None:
            raise self._given_up
        self._recover()

    def _recover(self) -> None:
        # Connects until it works or the task is surely gone, then sends the call under way again.
        started = concurrency.monotonic()
        limit = started + self._options.reconnect_secs
        backoff = min(timeouts.LAST_BACKOFF_SECS, timeouts.FIRST_BACKOFF_SECS * 2 ** min(self._breaks, 10))
        # Only breaks during a call count, and only those of short-lived connections in a row.
        if self._pending is not None and self.incarnation:
            self._breaks = 1 if started - self.connected_at >= _STEADY_SECS else self._breaks + 1
        if self._breaks > _MAX_BREAKS:
            raise UnavailableError(
                f"the connection broke {self._breaks} times in a row during one call", task=self.task
            )
        reason: Exception | None = self._fault
        # True after a refused connection: the task may have moved, so its endpoint is asked for again.
        stale = False
        # The first attempt after a break comes at once. After more breaks each attempt waits, so as not to spin.
        pause = self._breaks > 1
        if self._pending is not None and self.has_left():
            raise self._farewell()
        while True:
            self._drop_socket()
            now = concurrency.monotonic()
            self._check_given_up(now, started, limit, reason)
            self._log_wait(now, started, f"be reached ({reason})")
            if pause:
                if self._cancelled.wait(min(backoff, limit - now)):
                    continue
                backoff = min(timeouts.LAST_BACKOFF_SECS, backoff * 2)
            pause = True
            timeout = max(min(timeouts.ATTEMPT_SECS, limit - now, self._last_attempt() - now), 0.001)
            try:
                if self._endpoint is None or stale:
                    self._endpoint = self._dialer.endpoint(self._endpoint, timeout)
                if self._connect(self._endpoint, timeout):
                    return
            except DeadlineExceededError as error:
                # Nobody has told the endpoint in time: the task is silent, and not known to be gone.
                reason = error
            except OpError:
                raise
            except OSError as error:
                reason = error
                stale = isinstance(error, ConnectionRefusedError)

    def has_left(self) -> bool:
        """Returns True if the server's goodbye is the last frame received.

        Reads and drops the bytes that have arrived. So no answer may be expected on the connection.
        """
        with self._sock_lock:
            if self._sock is None:
                return False
            return self._had_goodbye or sockets.ends_with(self._sock, frames.LEAVES)

    def _farewell(self) -> TaskLeftError:
        at = f" at {self._endpoint}" if self._endpoint else ""
        return TaskLeftError(f"it has left{at}: training is over, and nothing more is taken", task=self.task)

    def _connect(self, endpoint: Endpoint, timeout: float) -> bool:
        self._attempt += 1
        sock, incarnation, resumed = self._dialer.dial(endpoint, self.number, self._attempt, timeout, self._adopt)
        if self.incarnation:
            if incarnation != self.incarnation:
                raise AbortedError("restarted during the session, its state is gone", task=self.task)
            if not resumed:
                raise AbortedError("forgot this lane, so the call cannot be known to run once", task=self.task)
        elif incarnation != endpoint.incarnation:
            # The task restarted after its endpoint was asked for.
            self._endpoint = self._dialer.endpoint(endpoint, timeout)
            return False
        # The new socket has no tick yet, so `_set_tick` must set one.
        self._tick_secs = 0.0
        self._set_tick(sockets.TICK_SECS)
        self.incarnation = incarnation
        self.connected_at = concurrency.monotonic()
        self._fault = None
        if isinstance(sock, ssl.SSLSocket):
            # TLS has neither sendmsg nor recvmsg_into: `send_rest` sends all, and the header arrives alone.
            self._sendmsg = _nothing_sent
            self._recvmsg_into = lambda buffers: (sock.recv_into(buffers[0]),)
        else:
            self._sendmsg = sock.sendmsg
            self._recvmsg_into = sock.recvmsg_into
        if self._pending is not None:
            self._send_pending()
        return True

    def _check_given_up(self, now: float, started: float, limit: float, reason: Exception | None) -> None:
        if self._cancelled.is_set():
            raise CancelledError("the call was cancelled", task=self.task)
        if now >= self._last_attempt():
            raise DeadlineExceededError(f"no contact before the deadline ({reason})", task=self.task)
        if now >= limit:
            at = f" at {self._endpoint}" if self._endpoint else ""
            raise UnavailableError(
                f"no contact{at} for {now - started:.1f} s (reconnect_secs={self._options.reconnect_secs:g}): {reason}",
                task=self.task,
            )

    def _last_attempt(self) -> float:
        # The answer to a wait may have been lost with the connection, and be kept for a repeated call. So a wait
        # connects for a little longer than its deadline.
        late = timeouts.LAST_WORD_SECS if self._waits and self._pending is not None else 0.0
        return math.inf if self._deadline is None else self._deadline + late

    def _adopt(self, sock: socket.socket) -> None:
        with self._sock_lock:
            self._sock = sock
            if self._cancelled.is_set():
                raise CancelledError("the call was cancelled", task=self.task)

    def _drop_socket(self) -> None:
        with self._sock_lock:
            sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()
        self._sendmsg = self._recvmsg_into = _not_connected

    def _set_tick(self, seconds: float) -> None:
        sock = self._sock
        if seconds != self._tick_secs and sock is not None:
            sockets.set_tick(sock, seconds)
            self._tick_secs = seconds


def _not_connected(_: object) -> Any:
    raise ConnectionResetError("not connected")


def _nothing_sent(_: object) -> int:
    # TLS has no sendmsg: `send_rest` sends everything.
    return 0
