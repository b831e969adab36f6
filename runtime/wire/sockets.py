"""Bytes over sockets: whole frames out of many buffers, exact reads, TLS or not, and how a socket is set up.

Plain sockets stay in blocking mode and get their time limit from the kernel (`set_tick`): a blocked call returns
after one tick, and the caller looks at its deadline. That costs nothing on calls that do not block for long,
where Python's own timeouts cost a poll() for each read and write.
"""

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from runtime.wire.codec import Buffer

TICK_SECS: Final = 1.0
MAX_IOV: Final = 1024
"""Most buffers that the kernel takes in one sendmsg."""
_TLS_JOIN_BYTES: Final = 16 << 10
# Over loopback a socket buffer that fits the cache moves large tensors twice as fast as the automatic one
# (64 MB: 12 ms against 31 ms here). Between machines the automatic size knows the round trip time; we do not.
_LOOPBACK_BUFFER_BYTES: Final = 256 << 10
_UNIX_BUFFER_BYTES: Final = 512 << 10
_DRAIN_BYTES: Final = 64 << 10
_TIMEVAL: Final = struct.Struct("@ll")
_CREDENTIALS: Final = struct.Struct("@iII")
"""What Linux tells of a peer: process, user, group."""


class Waiter(Protocol):
    """Whoever waits for a socket: told of every tick without bytes, and counting the bytes."""

    progress: int

    def stalled(self) -> None:
        """A tick passed without a byte; raises to give up."""


def tune(sock: socket.socket) -> None:
    """Sets up a new connection: no delay, sensible buffers, and keepalive so that a vanished host is noticed."""
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
    """Sets the buffers of a connected TCP socket, if the peer is this host."""
    if sock.family != socket.AF_UNIX and sock.getpeername()[0] == sock.getsockname()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER_BYTES)


def peer_user(sock: socket.socket) -> int | None:
    """The user id of the process at the other end of a Unix socket; None of any other."""
    if sock.family != socket.AF_UNIX:
        return None
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def set_tick(sock: socket.socket, seconds: float) -> None:
    """Makes blocked reads and writes return after `seconds` (BlockingIOError, or TimeoutError with TLS)."""
    if isinstance(sock, ssl.SSLSocket):  # OpenSSL would swallow the kernel's limit and go on waiting
        sock.settimeout(seconds)
        return
    whole = int(seconds)
    limit = _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def interrupt(sock: socket.socket) -> None:
    """Ends the connection from any thread: whoever is blocked in it returns at once. The owner still closes it."""
    try:
        # Not sock.shutdown: SSLSocket's forgets the TLS state, and the blocked reader would get raw bytes.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more: nobody is blocked in it


def half_close(sock: socket.socket) -> None:
    """Tells the peer, from any thread, that nothing more will come; what it sends still arrives."""
    with contextlib.suppress(OSError):  # not connected any more: the peer knows
        socket.socket.shutdown(sock, socket.SHUT_WR)


def hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection, without reading from it."""
    try:
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
    except (OSError, ValueError):
        return True  # closed on our side
    return bool(poll.poll(0))


def has_bytes(sock: socket.socket) -> bool:
    """Whether something has come that can be read; with TLS perhaps not all of it yet.

    Raises:
        ConnectionResetError: nothing has, and nothing will: the peer has closed the connection.
        OSError: the connection broke.
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
    """Reads what has come and waits in a connection that nobody else reads; says whether it ends with a frame."""
    tail, secure = b"", isinstance(sock, ssl.SSLSocket)
    # Nothing more has come; or the connection is broken, or closed on our side.
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


def receive_rest(sock: socket.socket, window: memoryview, waiter: Waiter) -> None:
    """Fills `window` from the socket.

    Raises:
        ConnectionResetError: the peer closed the connection before.
        OSError: the connection broke.
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


def send_rest(sock: socket.socket, segments: Sequence[Buffer], skip: int, waiter: Waiter) -> None:
    """Sends what a first sendmsg of `segments` has left over.

    Args:
        sock: the connection.
        segments: the whole frame.
        skip: how many of its bytes are sent already.
        waiter: is told about ticks without progress.

    Raises:
        OSError: the connection broke.
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
            count = sock.send(views[first]) if secure else sock.sendmsg(views[first : first + MAX_IOV])
        except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
            waiter.stalled()  # sending the same view again is what OpenSSL asks for
            count = 0
        waiter.progress += count


def _joined(views: Sequence[memoryview]) -> list[memoryview]:
    # Every send by TLS is a record of its own: small pieces are joined, and large ones never copied.
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
    """The bytes of a buffer in C order; copies only what is not contiguous."""
    if isinstance(segment, np.ndarray):
        # numpy refuses memoryviews of ml_dtypes arrays, so look at them as bytes first.
        return np.ascontiguousarray(segment).reshape(-1).view(np.uint8).data
    return memoryview(segment).cast("B")
