"""The receiving side of a connection on a server: the memory for calls, and the rate at which a call must come."""

import socket

from runtime import concurrency
from runtime.errors import DataLossError
from runtime.limits import Limits
from runtime.tensor_spec import Array, aligned_buffer
from runtime.wire import frames, sockets
from runtime.wire.codec import TensorLayout, decode_dynamic

# A frame is received in one piece: its header ends where the aligned payload begins.
_PAYLOAD_AT = 64
_HEADER_AT = _PAYLOAD_AT - frames.HEADER_BYTES
# A buffer starts small, grows to the largest call, and shrinks after many small calls if it is
# large.
_FIRST_BUFFER_BYTES = 64 << 10
LARGE_BUFFER_BYTES = 4 << 20
_SHRINK_AFTER_CALLS = 64
_DRAIN_BYTES = 1 << 20
# Most handles with cached views. A full cache is emptied, so handles without end cost no memory
# without end.
_VIEWS = 256


class CallReceiver:
    """The receive buffer of one connection. Has no memory before `allocate`: a stranger costs none.

    Attributes:
        window: Memory from the header of a call on.
        capacity: Longest payload that the window has room for, in bytes.
        progress: Counter that grows with the bytes of large payloads, in both directions.
    """

    def __init__(self, limits: Limits) -> None:
        """Takes the limits on the rate of calls."""
        self.capacity = 0
        self.progress = 0
        self._limits = limits
        # The start of the payload under way, 0.0 while there is none, and `progress` at its start.
        self._frame_at = 0.0
        self._frame_from = 0
        # The arrays over the buffer by handle. Emptied with each new buffer, so that no view keeps
        # an old one.
        self._views: dict[int, tuple[TensorLayout, list[Array]]] = {}
        self._small_calls = 0

    def allocate(self, nbytes: int = _FIRST_BUFFER_BYTES) -> None:
        """Makes a buffer for payloads of up to ``nbytes``."""
        self.capacity = nbytes
        self._raw = aligned_buffer(_PAYLOAD_AT + nbytes)
        self.window = self._raw.data[_HEADER_AT:]
        self._views.clear()

    def inputs(self, layout: TensorLayout | None, handle: int, length: int) -> list[Array]:
        """Returns the tensors of the received call, as views of the buffer.

        Args:
            layout: Layout of the tensors; None for tensors that describe themselves.
            handle: Handle of the call, by which views are cached.
            length: Bytes of the payload.
        """
        if layout is None:
            return decode_dynamic(self._raw[_PAYLOAD_AT : _PAYLOAD_AT + length])
        cached = self._views.get(handle)
        if cached is None or cached[0] is not layout:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            cached = self._views[handle] = (layout, layout.views(self._raw, _PAYLOAD_AT))
        return list(cached[1])

    def receive_payload(self, sock: socket.socket, length: int, count: int) -> None:
        """Receives the rest of a call.

        Args:
            sock: Socket of the connection.
            length: Bytes of the payload.
            count: Bytes of header and payload that are in the buffer.
        """
        have = count - frames.HEADER_BYTES
        if have > length:
            raise DataLossError("a client sent a second call before it got the reply of the first")
        if length > self.capacity:
            start = self._raw[_PAYLOAD_AT : _PAYLOAD_AT + have]
            self.allocate(length)
            self._raw[_PAYLOAD_AT : _PAYLOAD_AT + have] = start
        self._receive(sock, self.window[count : length + frames.HEADER_BYTES], have)

    def drain(self, sock: socket.socket, count: int) -> None:
        """Receives and drops the last ``count`` bytes of a call that is refused."""
        if count < 0:
            raise DataLossError("a client sent a second call before it got the reply of the first")
        scratch = memoryview(bytearray(min(count, _DRAIN_BYTES)))
        while count > 0:
            part = scratch[: min(count, _DRAIN_BYTES)]
            self._receive(sock, part)
            count -= len(part)

    def _receive(self, sock: socket.socket, window: memoryview, have: int = 0) -> None:
        """Receives a part of a call, at a rate that the listener watches.

        Args:
            sock: Socket of the connection.
            window: Memory to fill.
            have: Bytes of the payload that came before.
        """
        self._frame_from, self._frame_at = self.progress - have, concurrency.monotonic()
        try:
            sockets.receive_rest(sock, window, self)
        finally:
            self._frame_at = 0.0

    def stalled(self) -> None:
        """Continues to wait: a client may take as long as it likes."""

    def too_slow(self, now: float) -> bool:
        """Returns True if a call arrives too slowly. For the thread of the listener.

        A call that takes longer than `Limits.frame_secs` must come at `Limits.frame_rate` on
        average.

        Args:
            now: `time.monotonic()`.
        """
        began, limits = self._frame_at, self._limits
        secs = now - began
        return (
            bool(began)
            and secs > limits.frame_secs
            and self.progress - self._frame_from < limits.frame_rate * secs
        )

    def consider_shrinking(self, length: int) -> None:
        """Gives memory back after many small calls, of which the last had ``length`` bytes."""
        # One large call (a restore) must not cost its memory for as long as the connection lives.
        self._small_calls = self._small_calls + 1 if length * 4 < self.capacity else 0
        if self._small_calls >= _SHRINK_AFTER_CALLS:
            self._small_calls = 0
            self.allocate(max(length, _FIRST_BUFFER_BYTES))
