"""Bytes over sockets: frames out of many buffers, exact reads, and setup.

Plain sockets stay in blocking mode and get their time limit from the kernel (`set_tick`). A blocked
call returns after one tick, and the caller looks at its deadline. A call that does not block for
long pays nothing for this. Python's own timeouts cost a poll() for each read and write.
"""

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from runtime.wire.codec import Buffer

MAX_IOV = 1024
"""Most buffers that the kernel takes in one sendmsg."""
_TLS_JOIN_BYTES = 16 << 10
"""Bytes up to which small pieces are joined; the longest record of TLS."""
# Over loopback a socket buffer that fits the cache moves large tensors twice as fast as the
# automatic size (64 MB: 12 ms, not 31 ms). Between machines the automatic size follows the round
# trip time, which is not known here.
_LOOPBACK_BUFFER_BYTES = 256 << 10
_UNIX_BUFFER_BYTES = 512 << 10
_DRAIN_BYTES = 64 << 10
_TIMEVAL = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("@iII")
"""The credentials that Linux reports of a peer: process, user, group."""


class TransferWaiter(Protocol):
    """The object for which a transfer runs."""

    progress: int
    """Count of the bytes moved."""

    def stalled(self) -> None:
        """Handles a tick without a byte; raises to give up."""


def tune(sock: socket.socket) -> None:
    """Sets up a new connection: no delay, buffers, and keepalive.

    Keepalive and the user timeout let the kernel notice a vanished host.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


def tune_buffers(sock: socket.socket) -> None:
    """Sets the buffers of a TCP connection within this host.

    Leaves other connections alone.
    """
    if sock.family != socket.AF_UNIX and sock.getpeername()[0] == sock.getsockname()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER_BYTES)


def peer_user(sock: socket.socket) -> int | None:
    """Returns the user id of the process behind a Unix socket.

    Returns None for any other socket.
    """
    if sock.family != socket.AF_UNIX:
        return None
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


def set_tick(sock: socket.socket, seconds: float) -> None:
    """Makes blocked reads and writes return after `seconds`.

    They raise BlockingIOError, or TimeoutError with TLS.

    Args:
        sock: Connected socket.
        seconds: Length of a tick, at least a microsecond.
    """
    if isinstance(sock, ssl.SSLSocket):
        # OpenSSL would swallow the kernel's limit and continue to wait.
        sock.settimeout(seconds)
        return
    whole = int(seconds)
    # A limit of zero would mean no limit at all.
    limit = _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def interrupt(sock: socket.socket) -> None:
    """Ends the connection, from any thread.

    A thread that is blocked in the connection returns at once. The owner still closes the socket.
    """
    try:
        # Not sock.shutdown: SSLSocket's forgets the TLS state, and the blocked reader would get raw
        # bytes.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        # Not connected any more, so no thread is blocked in the connection.
        return


def half_close(sock: socket.socket) -> None:
    """Ends the sending side, from any thread. Bytes of the peer still arrive."""
    # The peer of a broken connection knows already.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)


def hung_up(sock: socket.socket) -> bool:
    """Returns True if the peer has closed the connection. Reads nothing."""
    try:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
    except (OSError, ValueError):
        # Closed on our side.
        return True
    return bool(poll.poll(0))


def has_bytes(sock: socket.socket) -> bool:
    """Returns True if received bytes can be read.

    With TLS the bytes may be an incomplete record, so a read may still wait.

    Raises:
        ConnectionResetError: The peer has closed the connection, and no byte is left.
        OSError: The connection broke.
    """
    if isinstance(sock, ssl.SSLSocket):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(sock.pending() or poll.poll(0))
    try:
        if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return True
    except BlockingIOError:
        return False
    raise ConnectionResetError("the peer closed the connection")


def ends_with(sock: socket.socket, frame: bytes) -> bool:
    """Returns True if the received bytes end with ``frame``.

    Reads and drops all bytes that have arrived. No other thread may read the connection.
    """
    tail, secure = b"", isinstance(sock, ssl.SSLSocket)
    # The loop ends when nothing more has come, or the connection is broken or closed on our side.
    with contextlib.suppress(OSError, ValueError):
        before = sock.gettimeout()
        try:
            if secure:
                sock.settimeout(0)
            while data := sock.recv(_DRAIN_BYTES, 0 if secure else socket.MSG_DONTWAIT):
                tail = (tail + data)[-len(frame) :]
        finally:
            if secure:
                sock.settimeout(before)
    return tail == frame


def receive_rest(sock: socket.socket, window: memoryview, waiter: TransferWaiter) -> None:
    """Fills `window` from the socket.

    Args:
        sock: Connected socket.
        window: Memory to fill.
        waiter: Object told of ticks without a byte; counts the bytes.

    Raises:
        ConnectionResetError: The peer closed the connection before.
        OSError: The connection broke.
    """
    while window:
        try:
            count = sock.recv_into(window)
        except (BlockingIOError, TimeoutError):
            waiter.stalled()
            continue
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        waiter.progress += count
        window = window[count:]


def send_rest(
    sock: socket.socket, segments: Sequence[Buffer], skip: int, waiter: TransferWaiter
) -> None:
    """Sends the bytes of `segments` that a first sendmsg has left over.

    Args:
        sock: Connected socket.
        segments: Buffers of the whole frame.
        skip: Number of bytes already sent.
        waiter: Object told of ticks without a byte; counts the bytes.

    Raises:
        OSError: The connection broke.
    """
    views = [view for view in map(byte_view, segments) if view]
    secure = isinstance(sock, ssl.SSLSocket)
    if secure:
        views = _joined(views)
    first, count = 0, skip
    while True:
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if first == len(views):
            return
        if count:
            views[first] = views[first][count:]
        try:
            count = (
                sock.send(views[first]) if secure else sock.sendmsg(views[first : first + MAX_IOV])
            )
        except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
            # OpenSSL requires that the next send has the same bytes.
            waiter.stalled()
            count = 0
        waiter.progress += count


def _joined(views: Sequence[memoryview]) -> list[memoryview]:
    # Every send by TLS is a record of its own. So small pieces are joined, and large pieces never
    # copied.
    found: list[memoryview] = []
    small = bytearray()
    for view in views:
        if len(small) + len(view) > _TLS_JOIN_BYTES:
            found.append(memoryview(bytes(small)))
            small.clear()
        if len(view) > _TLS_JOIN_BYTES:
            found.append(view)
        else:
            small += view
    return [*found, memoryview(bytes(small))]


def byte_view(segment: Buffer) -> memoryview:
    """Returns the bytes of a buffer in C order. Copies only a buffer that is not contiguous.

    Examples:
        >>> list(byte_view(np.arange(6, dtype=np.uint8).reshape(2, 3).T))
        [0, 3, 1, 4, 2, 5]
    """
    if isinstance(segment, np.ndarray):
        # numpy refuses memoryviews of ml_dtypes arrays, so look at them as bytes first.
        return np.ascontiguousarray(segment).reshape(-1).view(np.uint8).data
    return memoryview(segment).cast("B")
