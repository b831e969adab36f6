"""Connections to a host with several addresses, some of which may swallow packets.

A name may stand for an IPv6 address whose route leads nowhere and an IPv4 address that works, or
for the hosts of yesterday and of today. So the next address is tried beside one that does not
answer (RFC 8305, "Happy Eyeballs").
"""

import errno
import functools
import os
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from runtime import concurrency, timeouts


class Address(NamedTuple):
    """The arguments of ``socket.socket`` and ``connect`` for one address."""

    family: int
    kind: int
    protocol: int
    sockaddr: Any


def settled(host: str) -> str:
    """Returns 127.0.0.1 for "localhost", and any other host unchanged.

    Servers at "localhost" listen at 127.0.0.1. The system may know other addresses by the name,
    where any process could listen.

    Examples:
        >>> settled("localhost"), settled("ps0.example")
        ('127.0.0.1', 'ps0.example')
    """
    return "127.0.0.1" if host == "localhost" else host


_lock = concurrency.Lock()
_pending: dict[tuple[str, int], "Future[list[Address]]"] = {}
"""The look-ups under way, guarded by `_lock`.

Nothing ends a look-up, so threads that ask meanwhile wait for the same.
"""


def look_up(host: str, port: int, deadline: float) -> list[Address]:
    """Returns the addresses of a host, in the order of the system.

    Args:
        host: Name, or address without brackets.
        port: TCP port.
        deadline: ``time.monotonic()`` at which to give up.

    Raises:
        TimeoutError: The name servers did not answer in time.
        OSError: The name has no address.

    Examples:
        >>> [address.sockaddr for address in look_up("127.0.0.1", 2222, deadline=0.0)]
        [('127.0.0.1', 2222)]
    """
    try:
        return _resolve(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        # The host is a name.
        pass
    key = (host, port)
    with _lock:
        answer = _pending.get(key)
        if answer is None:
            # A thread of its own, as nothing gives getaddrinfo a time limit.
            try:
                answer = concurrency.in_thread(
                    functools.partial(_resolve_pending, *key), f"look up {host}"
                )
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, f"no thread to look {host} up: {error}") from error
            _pending[key] = answer
    try:
        return answer.result(max(0.0, deadline - concurrency.monotonic()))
    except TimeoutError:
        raise TimeoutError(f"the name servers gave no address of {host} in time") from None


def _resolve_pending(host: str, port: int) -> list[Address]:
    try:
        return _resolve(host, port, 0)
    finally:
        with _lock:
            del _pending[host, port]


def _resolve(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [
        Address(family, kind, protocol, sockaddr) for family, kind, protocol, _, sockaddr in found
    ]


def connect(
    addresses: Sequence[Address],
    make: Callable[[Address], socket.socket],
    deadline: float,
    adopt: Callable[[socket.socket], None],
) -> socket.socket:
    """Connects to the first address of a host that answers.

    Args:
        addresses: Addresses to try in turn, each beside those before it.
        make: Function that makes a socket for an address.
        deadline: ``time.monotonic()`` at which to give up.
        adopt: Function called with every new socket, with the newest again after every wait, and
            with the connected one at the end. Raises to end the attempt. Another thread may
            interrupt the socket of the last call.

    Returns:
        The connected socket, which does not block. The others are closed; after a failure all but
        the last adopted.

    Raises:
        ConnectionRefusedError: No process listens at an address, and no other address connects.
        OSError: The last failure; a TimeoutError after nothing but silence.
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
            now = concurrency.monotonic()
            if now >= deadline:
                break
            # The next address has its turn after `STAGGER_SECS`, or at once if no attempt is
            # under way.
            if left and (now >= next_at or not waiting):
                address = left.pop()
                adopted = make(address)
                made.append(adopted)
                adopt(adopted)
                adopted.setblocking(False)
                next_at = now + timeouts.STAGGER_SECS
                code = adopted.connect_ex(address.sockaddr)
                if code not in (0, errno.EINPROGRESS):
                    failures.append(_error(code))
                    continue
                waiting[adopted.fileno()] = adopted
                poll.register(adopted, select.POLLOUT)
            until = min(deadline, next_at) if left else deadline
            for fd, _ in poll.poll(max(0.0, until - concurrency.monotonic()) * 1000):
                sock = waiting.pop(fd)
                poll.unregister(fd)
                if (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) == 0:
                    adopted = sock
                    adopt(sock)
                    return sock
                failures.append(_error(code))
            assert adopted is not None
            # Raises if another thread has interrupted the socket, which ended the wait.
            adopt(adopted)
        raise _choose_failure(failures)
    finally:
        for sock in made:
            if sock is not adopted:
                sock.close()


def _choose_failure(failures: list[OSError]) -> OSError:
    # A refusal says more than a timeout: the host is there, and the task is not.
    refused = [failure for failure in failures if isinstance(failure, ConnectionRefusedError)]
    return (refused or failures or [TimeoutError("timed out")])[-1]


def _error(code: int) -> OSError:
    # OSError makes an error of the class of the code, such as ConnectionRefusedError.
    return OSError(code, os.strerror(code))
