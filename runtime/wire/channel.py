"""The client side of one connection: a lane, on which at most one call is under way.

Sending and receiving are separate, so that one thread can send to every ps before it waits for the first reply.

Exactly once. A lane has an id (client, lane number) and every call on it a sequence number. When the connection
breaks, the lane connects again, says hello with its id and sends the same call again; the server remembers the
last call that had an effect and answers instead of running it twice. A server that lost that memory (another
incarnation) means `AbortedError`.

A call that may wait is given up, at its time limit or by `cancel`, by closing the sending side alone: the task ends the
wait and says so, or its answer was on the way, and then it is taken. So what a task gives away somebody gets.
"""

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from runtime import timeouts
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
"""After so many breaks in a row, none of them of a connection that had lived for a while, a call gives up."""
_STEADY_SECS = 1.0
"""For how long a connection must have lived for the breaks before it not to count any more."""
_LISTEN_SECS = 0.1
_PING = frames.pack_header(frames.MAGIC, frames.PING, 0, 0, 0, 0, 0)


class Lane:
    """One connection to a task. One thread at a time uses it; `cancel` and `interrupt` are for others.

    Attributes:
        task: the peer, such as "/job:ps/task:0".
        number: of the lane within its client.
        incarnation: of the server that the lane was opened against; 0 before `open`.
        progress: grows while bytes move.
        connected_at: `time.monotonic()` of the newest connection.
    """

    def __init__(self, dialer: Dialer, number: int) -> None:
        """Makes a lane that is not connected; `Peer.acquire` gives connected ones."""
        self.task = dialer.task
        self.number = number
        self.incarnation = 0
        self.progress = 0
        self.connected_at = 0.0
        self._dialer = dialer
        self._options = dialer.options
        self._max_payload = dialer.options.max_payload_bytes
        self._endpoint: Endpoint | None = None
        self._attempt = 0
        self._sock: socket.socket | None = None
        self._sock_lock = threading.Lock()  # closing and interrupting only: a closed descriptor may be another's
        self._sendmsg: Callable[[Segments], int] = _not_connected
        self._recvmsg_into: Callable[[Sequence[Any]], Any] = _not_connected
        self._tick_secs = sockets.TICK_SECS
        self._head = bytearray(frames.HEADER_BYTES)
        self._seq = 0
        self._pending: Segments | None = None
        self._pending_bytes = 0
        self._pending_handle = 0
        self._since = self._log_at = 0.0
        self._deadline: float | None = None
        self._waits = self._sending = False
        self._given_up: OpError | None = None
        self._fault: Exception | None = None
        self._breaks = 0
        self._had_goodbye = False
        self._broken = False
        self._cancelled = threading.Event()

    @property
    def usable(self) -> bool:
        """Whether a next call can be sent: nothing under way, not broken, not cancelled."""
        return self._pending is None and not self._broken and not self._cancelled.is_set()

    def fileno(self) -> int:
        """The connection's file descriptor, to wait for an answer with; -1 when the connection is broken."""
        sock = self._sock
        return -1 if sock is None or self._fault is not None else sock.fileno()

    def open(self, deadline: float | None = None) -> None:
        """Connects for the first time, or anew after `close`: to whichever life of the task there is.

        Args:
            deadline: `time.monotonic()` at which to give up.

        Raises:
            UnavailableError: the task is gone, or silent for `reconnect_secs`.
            UnauthenticatedError: wrong token or certificate.
            DeadlineExceededError, CancelledError: as they say.
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
        """Sends a call. The buffers must not change until `receive` has returned: they may be sent again.

        Trouble with the network is not raised here but by `receive`, so that a caller can send to all peers first.

        Args:
            handle: what to call, u32.
            step: number of the step, u64.
            buffers: the input tensors in the order of the handle's layout, or any tensors with `dynamic`.
            dynamic: send shapes and dtypes along; strings are allowed.
            deadline: `time.monotonic()` at which this call gives up; None waits as long as the peer lives.
            waits: the task may let it wait for others. What it gives then must not be lost to one that gives up.

        Raises:
            FailedPreconditionError: the lane is broken, or its last call was not received.
            InvalidArgumentError: a string array without `dynamic`, or a dtype that tensors cannot have.
            ResourceExhaustedError: the payload describes itself and is over `max_payload_bytes`.
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
        """Waits for the reply of the call that was sent.

        Args:
            layout: of the reply; None if the handle replies with tensors that describe themselves.
            out: memory for the reply, of the same layout; None takes fresh memory. Its contents are arbitrary
                when an error is raised.

        Returns:
            The tensors, views of `out` or of the fresh memory.

        Raises:
            OpError: the error of the handler, with the code and message that it had; the lane stays usable.
            UnavailableError: the task is gone, or was silent for `reconnect_secs`; names it.
            AbortedError: the task restarted and lost its state.
            DeadlineExceededError: the deadline of the call has passed.
            CancelledError: `cancel` was called.
            FailedPreconditionError: no call is under way.
            InternalError: the reply is not what `layout` says.
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
        except BaseException:  # KeyboardInterrupt too: what the connection carries next is not known
            self.close()
            raise
        self._pending = None
        self._breaks = 0
        if self._given_up is not None:  # and answered all the same
            self.close()
            if isinstance(answer, CancelledError):
                raise self._given_up
        if isinstance(answer, OpError):
            raise answer
        return answer

    def answered(self) -> bool:
        """Whether the reply of the call under way has begun to come. For who waits for the replies of several lanes.

        Sends the call again first where the connection has broken, as `receive` does, and does not wait for the reply.
        With TLS only a part of it may have come that says nothing yet.

        Raises:
            OpError: as `receive`, when there is no connection to be had.
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
        """Sends and receives; see both."""
        self.send(handle, step, buffers, dynamic=dynamic, deadline=deadline, waits=waits)
        return self.receive(layout, out)

    def ping(self, deadline: float) -> None:
        """Sends a ping and waits for its answer.

        Args:
            deadline: `time.monotonic()` at which to give up.

        Raises:
            UnavailableError: the task has restarted, or has forgotten the lane, too.
            OpError: as `receive`.
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
        """Gives the call under way another deadline, `time.monotonic()`. For the thread that uses the lane."""
        self._deadline = deadline
        if self._pending is not None:
            self._set_tick(min(max(deadline - time.monotonic(), 0.001), sockets.TICK_SECS))

    def cancel(self) -> None:
        """Makes a call that is under way raise CancelledError, from any thread; the lane is of no use afterwards.

        A call that may wait is given up: it ends with the answer of the task, or without after a second.
        """
        self._cancelled.set()
        with self._sock_lock:
            if self._sock is not None:
                listens = self._waits and self._pending is not None and self._fault is None
                (sockets.half_close if listens else sockets.interrupt)(self._sock)

    def interrupt(self) -> None:
        """Cuts the connection, from any thread; a call that is under way connects again."""
        with self._sock_lock:
            if self._sock is not None:
                sockets.interrupt(self._sock)

    def close(self, *, goodbye: bool = False, whole_client: bool = False) -> bool:
        """Closes the connection; the lane cannot be used before another `open`. For the thread that uses the lane.

        Args:
            goodbye: tell the server that it can forget the lane now instead of after a while.
            whole_client: with the goodbye, that no other lane of this client will come either.

        Returns:
            True if the goodbye was sent.
        """
        sent = False
        self._broken = True
        self._pending = None
        self._fault = None
        sock = self._sock
        if goodbye and sock is not None and not self._cancelled.is_set():
            with contextlib.suppress(OSError):  # it forgets by itself, later
                sent = sock.send(frames.CLIENT_LEAVES if whole_client else frames.LEAVES) > 0
        self._drop_socket()
        return sent

    def stalled(self) -> None:
        """Looks at the deadline after a tick without a byte, and logs every 10 s for whom the call waits."""
        now = time.monotonic()
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
        # A call that may wait listens for the last word of the task, then ends with `error`; another ends now.
        if not self._waits or self._sending:
            raise error
        self._given_up = error
        self._deadline = time.monotonic() + timeouts.LAST_WORD_SECS
        self._set_tick(_LISTEN_SECS)
        with self._sock_lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):  # it forgets the lane by itself, later
                    self._sock.send(frames.LEAVES)
                sockets.half_close(self._sock)

    def _log_wait(self, now: float, since: float, what: str) -> float:
        # Says every 10 s for what a call waits, which it does since then unless it did before; gives for how long.
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
            left = deadline - time.monotonic()
            if left <= 0 and self._waits:
                left = _LISTEN_SECS  # the task must have read the call when it is told that nobody waits
            self._set_tick(min(max(left, 0.001), sockets.TICK_SECS))
        elif self._tick_secs != sockets.TICK_SECS:
            self._set_tick(sockets.TICK_SECS)
        sent = 0
        if len(segments) <= sockets.MAX_IOV:
            try:
                sent = self._sendmsg(segments)
            except ValueError:  # numpy: not contiguous, found before anything was sent
                segments = self._pending = [sockets.byte_view(segment) for segment in segments]
            except BlockingIOError:
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
        # Everything but a reply of fixed layout. `start` is what has been read of the payload.
        _, kind, flags, _, seq, _, length = fields
        try:
            frames.check_header(fields, length if kind == frames.REPLY else frames.MAX_CONTROL_BYTES)
        except OpError as error:
            error.task = self.task
            raise
        if kind == frames.GOODBYE:
            raise self._farewell()
        if len(start) == length + frames.HEADER_BYTES and start[length:] == frames.LEAVES:
            start = start[:length]  # the server has left since it sent this
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
        except (MemoryError, ValueError) as error:  # it was asked for, so it has no limit but this
            raise ResourceExhaustedError(f"no memory for a reply of {length} bytes: {error}", task=self.task) from None
        window = data.data
        window[: len(start)] = start
        sockets.receive_rest(sock, window[len(start) :], self)
        if kind == frames.ERROR:
            return frames.decode_error(data.tobytes(), self.task)
        return decode_dynamic(data)

    def _send_again(self) -> None:
        # After a fault: the call goes over another connection, unless it has ended.
        if isinstance(self._fault, OpError):
            raise self._fault
        if self._given_up is not None:
            raise self._given_up
        self._recover()

    def _recover(self) -> None:
        # Connects (again) until it works or the task is surely gone, then sends the pending call (again).
        started = time.monotonic()
        limit = started + self._options.reconnect_secs
        backoff = min(timeouts.LAST_BACKOFF_SECS, timeouts.FIRST_BACKOFF_SECS * 2 ** min(self._breaks, 10))
        if self._pending is not None and self.incarnation:
            self._breaks = 1 if started - self.connected_at >= _STEADY_SECS else self._breaks + 1
        if self._breaks > _MAX_BREAKS:
            raise UnavailableError(
                f"the connection broke {self._breaks} times in a row during one call", task=self.task
            )
        reason: Exception | None = self._fault
        stale = False  # the task may have moved
        pause = self._breaks > 1  # not the first time: do not run in circles
        if self._pending is not None and self.has_left():
            raise self._farewell()
        while True:
            self._drop_socket()
            now = time.monotonic()
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
            except DeadlineExceededError as error:  # where the task is nobody says: silent, not gone
                reason = error
            except OpError:
                raise
            except OSError as error:
                reason = error
                stale = isinstance(error, ConnectionRefusedError)

    def has_left(self) -> bool:
        """Returns True if the last that came is the server's goodbye, which nobody has read yet."""
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
        elif incarnation != endpoint.incarnation:  # it restarted since somebody asked where it is
            self._endpoint = self._dialer.endpoint(endpoint, timeout)
            return False
        self._tick_secs = 0.0
        self._set_tick(sockets.TICK_SECS)
        self.incarnation = incarnation
        self.connected_at = time.monotonic()
        self._fault = None
        if isinstance(sock, ssl.SSLSocket):
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
        # A wait may have been answered as the connection broke: that is worth another look after its deadline.
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
    return 0  # TLS has no sendmsg: everything goes the slow way
