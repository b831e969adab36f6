"""The client side of one connection: a lane with at most one call under way.

`Peer` opens the lanes. Sending and receiving are separate, so a thread can send to every ps before
waiting for the first reply.

A call runs exactly once. A lane has an id (client and lane number), and each call has a sequence
number. After a break the lane connects again, says hello with the same id, and sends the same call
again. The server remembers the last call with an effect, and answers a repeated call from memory. A
server of another incarnation has lost the memory, so the call raises `AbortedError`.

A call with `waits` is given up, at its deadline or by `cancel`, by closing only the sending side.
The task then ends the wait and says so, unless an answer is already on the way. The lane takes such
an answer, so no element handed out by the task is lost.
"""

from collections.abc import Sequence

from runtime import concurrency, timeouts
from runtime.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    OpError,
    ResourceExhaustedError,
    UnavailableError,
)
from runtime.tensor_spec import Array
from runtime.wire import answers, frames, sockets, times
from runtime.wire.codec import (
    Buffer,
    Segments,
    TensorBuffer,
    TensorLayout,
    encode_payload,
)
from runtime.wire.dial import TaskDialer
from runtime.wire.link import LaneWait, TaskLink

_PING = frames.pack_header(frames.MAGIC, frames.PING, 0, 0, 0, 0, 0)


class Lane:
    """A connection to a task, for one call at a time.

    One thread at a time uses a lane. Other threads may only call `cancel` and `link.interrupt`.

    Attributes:
        task: Name of the peer, such as "/job:ps/task:0".
        number: Number of the lane within its client.
        link: Connection of the lane. A call under way connects again after `link.interrupt`.
        progress: Counter that grows while the bytes of a long transfer move.
    """

    def __init__(self, dialer: TaskDialer, number: int) -> None:
        """Makes a lane without a connection; `Peer.acquire` returns connected lanes."""
        self.task = dialer.task
        self.number = number
        self.progress = 0
        self._max_payload = dialer.options.max_payload_bytes
        self.link = TaskLink(dialer, number)
        # The call under way, or None in `_pending`. Its buffers stay until the reply, to be sent
        # again after a break.
        self._head = bytearray(frames.HEADER_BYTES)
        self._seq = 0
        self._pending: Segments | None = None
        self._pending_bytes = 0
        self._pending_handle = 0
        self._wait = LaneWait()
        # True while a call is half sent.
        self._sending = False
        # `_given_up` is the error that ends the call unless its answer still comes. Set once at
        # most, and only for a call that may be held back: the lane closes after the call.
        self._given_up: OpError | None = None
        # True from `close` until the next `open`.
        self._broken = False

    @property
    def usable(self) -> bool:
        """True while the lane can send a call.

        No call is under way, and the lane is neither broken nor cancelled.
        """
        return self._pending is None and not self._broken and not self.link.cancelled.is_set()

    def fileno(self) -> int:
        """Returns the file descriptor for a poll; -1 without a connection."""
        sock = self.link.sock
        return -1 if sock is None or self.link.fault is not None else sock.fileno()

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
        self._wait.deadline = deadline
        self._broken = False
        self.link.forget()
        try:
            self._reconnect()
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

        The buffers must not change before `receive` returns: the lane may send them again. Network
        errors are kept for `receive`, so a caller can send to all peers first.

        Args:
            handle: Handle to call, u32.
            step: Number of the step, u64.
            buffers: Input tensors in the order of the handle's layout; any tensors with `dynamic`.
            dynamic: True to send shapes and dtypes along, which allows strings.
            deadline: `time.monotonic()` at which the call gives up; None waits as long as the peer
                lives.
            waits: True if the task may hold the call back for other calls. An answer to such a call
                is not lost when the caller gives up.

        Raises:
            FailedPreconditionError: The lane is broken, or the reply of its last call was not
                received.
            InvalidArgumentError: An array holds strings without `dynamic`, or has a dtype that
                tensors cannot have.
            ResourceExhaustedError: A self-describing payload is over `max_payload_bytes`.
        """
        if self._pending is not None:
            raise FailedPreconditionError(
                "a call is under way on this lane; receive its reply first", task=self.task
            )
        if self._broken:
            raise FailedPreconditionError("this lane is broken; acquire another", task=self.task)
        segments, length = encode_payload(buffers, dynamic)
        if dynamic and length > self._max_payload:
            raise ResourceExhaustedError(
                f"{frames.too_long(length)}: the limit is {self._max_payload}", task=self.task
            )
        self._seq = seq = self._seq + 1
        segments[0] = frames.pack_header(
            frames.MAGIC, frames.CALL, frames.DYNAMIC * dynamic, handle, seq, step, length
        )
        self._pending = segments
        self._pending_bytes = length + frames.HEADER_BYTES
        self._pending_handle = handle
        wait = self._wait
        wait.deadline = deadline
        wait.held_back = waits
        wait.since = 0.0
        try:
            self._send_pending()
        except (OSError, CancelledError) as error:
            self.link.fault = error

    def receive(self, layout: TensorLayout | None, out: TensorBuffer | None = None) -> list[Array]:
        """Waits for the reply of the call under way.

        Args:
            layout: Layout of the reply; None for self-describing tensors.
            out: Memory for the reply, of the same layout; None allocates fresh memory. Its contents
                are arbitrary after an error.

        Returns:
            The tensors, as views of `out` or of the fresh memory.

        Raises:
            OpError: The error of the handler, with its code and message. The lane stays usable.
            UnavailableError: The task is gone, or was silent for `reconnect_secs`. The error names
                the task.
            AbortedError: The task restarted and lost its state.
            DeadlineExceededError: The deadline of the call has passed.
            CancelledError: `cancel` was called.
            FailedPreconditionError: No call is under way.
            InternalError: The reply does not match `layout`.
        """
        if self._pending is None:
            raise FailedPreconditionError(
                "no call is under way on this lane; send one first", task=self.task
            )
        link = self.link
        try:
            while True:
                if link.fault is None:
                    try:
                        answer = self._read_answer(layout, out)
                        break
                    except OpError:
                        raise
                    except OSError as error:
                        link.fault = error
                self._send_again()
        except BaseException:
            # Also after KeyboardInterrupt: nobody knows what the connection carries next.
            self.close()
            raise
        self._pending = None
        link.breaks = 0
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

        For callers with calls under way on several lanes. Sends the call again after a break, as
        `receive` does, but never waits for the reply. With TLS the first bytes may be an incomplete
        record, so a `receive` may still wait.

        Raises:
            OpError: No connection can be made; the errors of `receive`.
        """
        link = self.link
        try:
            while True:
                if link.fault is None:
                    try:
                        return link.sock is not None and sockets.has_bytes(link.sock)
                    except OSError as error:
                        link.fault = error
                self._send_again()
        except BaseException:
            self.close()
            raise

    def call(
        self,
        handle: int,
        step: int,
        buffers: Sequence[Buffer],
        layout: TensorLayout | None,
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
        self._pending, self._pending_bytes = [_PING], len(_PING)
        self._wait.deadline, self._wait.since = deadline, 0.0
        try:
            self._send_pending()
        except (OSError, CancelledError) as error:
            self.link.fault = error
        try:
            self.receive(None)
        except AbortedError as error:
            raise UnavailableError(error.message, task=self.task) from error

    def limit(self, deadline: float) -> None:
        """Changes the deadline of the call under way. Only for the thread of the lane.

        Args:
            deadline: `time.monotonic()` at which the call gives up.
        """
        self._wait.deadline = deadline
        if self._pending is not None:
            self.link.set_tick(min(max(deadline - concurrency.monotonic(), 0.001), times.TICK_SECS))

    def cancel(self) -> None:
        """Makes the call under way raise CancelledError, from any thread.

        The lane is of no use afterwards. A call with `waits` is given up: the call ends with the
        answer of the task, or without an answer after a tick and `LAST_WORD_SECS`.
        """
        self.link.cancel(
            listens=lambda: (
                self._wait.held_back and self._pending is not None and self.link.fault is None
            )
        )

    def close(self, *, goodbye: bool = False, whole_client: bool = False) -> bool:
        """Closes the connection and the lane. Only for the thread of the lane.

        Only `open` makes the lane usable again.

        Args:
            goodbye: True to let the server forget the lane now, and not after a while.
            whole_client: True to say with the goodbye that the client leaves with all its lanes.

        Returns:
            True if the goodbye was sent.
        """
        self._broken = True
        self._pending = None
        self.link.fault = None
        sent = goodbye and self.link.say_goodbye(
            frames.CLIENT_LEAVES if whole_client else frames.LEAVES
        )
        self.link.drop()
        return sent

    def stalled(self) -> None:
        """Handles a tick without a byte.

        Gives the call up after `cancel` or its deadline, and logs a long wait.
        """
        now, wait = concurrency.monotonic(), self._wait
        if self._given_up is None and self.link.cancelled.is_set():
            self._give_up(CancelledError("the call was cancelled", task=self.task))
            return
        waited = wait.log(
            now, now - self.link.tick_secs, self.link.name, f"answer call {self._pending_handle}"
        )
        if wait.deadline is None:
            return
        remaining = wait.deadline - now
        if remaining > 0:
            self.link.set_tick(min(remaining, times.TICK_SECS))
        elif self._given_up is not None:
            raise self._given_up
        else:
            text = f"did not answer call {self._pending_handle} before its deadline (waited {waited:.1f} s)"
            self._give_up(DeadlineExceededError(f"at {self.link.endpoint}: {text}", task=self.task))

    def _give_up(self, error: OpError) -> None:
        # A call that does not wait ends now. So does a half-sent call: the task has not begun it.
        if not self._wait.held_back or self._sending:
            raise error
        # The task may have answered already. So the lane listens for a while before the call ends
        # with `error`.
        self._given_up = error
        self._wait.deadline = concurrency.monotonic() + timeouts.LAST_WORD_SECS
        self.link.set_tick(times.LISTEN_SECS)
        self.link.close_sending_side()

    def _send_pending(self) -> None:
        segments, total = self._pending, self._pending_bytes
        assert segments is not None
        link, deadline = self.link, self._wait.deadline
        if deadline is not None:
            left = deadline - concurrency.monotonic()
            if left <= 0 and self._wait.held_back:
                # The deadline has passed. The task must still read the call before the goodbye that
                # gives the call up.
                left = times.LISTEN_SECS
            link.set_tick(min(max(left, 0.001), times.TICK_SECS))
        elif link.tick_secs != times.TICK_SECS:
            link.set_tick(times.TICK_SECS)
        sent = 0
        if len(segments) <= sockets.MAX_IOV:
            try:
                sent = link.sendmsg(segments)
            except ValueError:
                # numpy refuses an array that is not contiguous, before anything is sent.
                segments = self._pending = [sockets.byte_view(segment) for segment in segments]
            except BlockingIOError:
                # A tick has passed: the peer does not read. `send_rest` continues.
                sent = 0
        if sent != total:
            assert link.sock is not None
            self._sending = True
            try:
                sockets.send_rest(link.sock, segments, sent, self)
            finally:
                self._sending = False

    def _read_answer(
        self, layout: TensorLayout | None, out: TensorBuffer | None
    ) -> list[Array] | OpError:
        sock, receive = self.link.sock, self.link.recvmsg_into
        assert sock is not None
        head = self._head
        # One system call receives the header and the payload, or its first bytes if its length is
        # unknown.
        if layout is None:
            window = memoryview(bytearray(256))
        else:
            if out is None:
                out = TensorBuffer(layout)
            window = out.window
        while True:
            try:
                count: int = receive((head, window))[0]
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
        expected = answers.ExpectedAnswer(self._seq, self._pending_handle, layout)
        return answers.read_other(self.link, self, fields, window[:count], expected)

    def _send_again(self) -> None:
        # After a fault the call goes over another connection, unless the call has ended.
        if isinstance(self.link.fault, OpError):
            raise self.link.fault
        if self._given_up is not None:
            raise self._given_up
        self._reconnect()

    def _reconnect(self) -> None:
        self.link.connect(self._wait, None if self._pending is None else self._send_pending)
