"""Connecting to a host that may have several addresses: all of them have a chance, whichever swallows packets.

A name may stand for an IPv6 address whose route leads nowhere and an IPv4 address that works, or for the hosts of
yesterday and of today. So the next address is tried beside one that keeps us waiting (RFC 8305, "Happy Eyeballs").
"""

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

STAGGER_SECS: Final = 0.25
"""How long an address is waited for before the next one is tried beside it."""


class Address(NamedTuple):
    """What ``socket.socket`` and ``connect`` take."""

    family: int
    kind: int
    protocol: int
    sockaddr: Any


def settled(host: str) -> str:
    """The address that "localhost" means here, whatever the system thinks; other hosts as they are.

    Servers at "localhost" listen at this one. At another that the name may stand for, anybody could.
    """
    return "127.0.0.1" if host == "localhost" else host


_lock = threading.Lock()
_pending: dict[tuple[str, int], "Future[list[Address]]"] = {}
"""The look-ups under way. Nothing ends one, so that everybody who asks meanwhile waits for the same."""


def look_up(host: str, port: int, deadline: float) -> list[Address]:
    """The addresses of a host, in the order in which the system would try them.

    Args:
        host: name, or address without brackets.
        port: TCP port.
        deadline: ``time.monotonic()`` at which to give up.

    Raises:
        TimeoutError: the name servers did not answer in time.
        OSError: the name has no address.
    """
    try:
        return _resolve(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    key = (host, port)
    with _lock:
        answer = _pending.get(key)
        if answer is None:
            answer = Future()
            # A thread of its own, as nothing gives getaddrinfo a time limit.
            thread = threading.Thread(target=_resolve_into, args=(key, answer), name=f"look up {host}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, f"no thread to look {host} up: {error}") from error
            _pending[key] = answer
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise TimeoutError(f"the name servers gave no address of {host} in time") from None


def _resolve_into(key: tuple[str, int], answer: "Future[list[Address]]") -> None:
    try:
        answer.set_result(_resolve(*key, 0))
    except Exception as error:
        answer.set_exception(error)
    finally:
        with _lock:
            del _pending[key]


def _resolve(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, kind, protocol, sockaddr) for family, kind, protocol, _, sockaddr in found]


def connect(
    addresses: Sequence[Address],
    make: Callable[[Address], socket.socket],
    deadline: float,
    adopt: Callable[[socket.socket], None],
) -> socket.socket:
    """Connects to whichever of a host's addresses answers first.

    Args:
        addresses: where; one after the other is tried, each beside those before it.
        make: makes a socket for an address.
        deadline: ``time.monotonic()`` at which to give up.
        adopt: is given every new socket, the newest again after every wait, and the connected one at the end; it raises
            to end this. Whoever has it may interrupt it from another thread.

    Returns:
        The connected socket, which does not block. The others are closed; on failure all but the one adopted last.

    Raises:
        ConnectionRefusedError: nobody listens at one of them, and the others are no better.
        OSError: the last trouble, a TimeoutError when there was none but silence.
    """
    left = list(reversed(addresses))
    made: list[socket.socket] = []
    waiting: dict[int, socket.socket] = {}
    adopted: socket.socket | None = None
    failures: list[OSError] = []
    poll = select.poll()
    next_at = 0.0
    try:
        while left or waiting:
            now = time.monotonic()
            if now >= deadline:
                break
            if left and (now >= next_at or not waiting):
                address = left.pop()
                adopted = make(address)
                made.append(adopted)
                adopt(adopted)
                adopted.setblocking(False)
                next_at = now + STAGGER_SECS
                code = adopted.connect_ex(address.sockaddr)
                if code not in (0, errno.EINPROGRESS):
                    failures.append(_error(code))
                    continue
                waiting[adopted.fileno()] = adopted
                poll.register(adopted, select.POLLOUT)
            until = min(deadline, next_at) if left else deadline
            for fd, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000):
                sock = waiting.pop(fd)
                poll.unregister(fd)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    adopted = sock
                    adopt(sock)
                    return sock
                failures.append(_error(code))
            assert adopted is not None
            adopt(adopted)  # raises if that is what interrupted it
        refused = [failure for failure in failures if isinstance(failure, ConnectionRefusedError)]
        raise (refused or failures or [TimeoutError("timed out")])[-1]
    finally:
        for sock in made:
            if sock is not adopted:
                sock.close()


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))  # of the class that the code says
