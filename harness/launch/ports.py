"""Free TCP ports for a local cluster, held until the tasks that will listen on them start."""

import contextlib
import pathlib
import random
import socket

from harness.launch import times

LOWEST = 10_000
_TRIES = 500


def hold_ports(count: int, lowest: int = LOWEST) -> list[socket.socket]:
    """Binds `count` free TCP ports from `lowest` on, on all interfaces.

    Close a socket just before its task starts.

    The ports lie outside the range that the system hands out by itself where that leaves room, so
    that between the close and the task's own bind no outgoing connection and no other program's
    "any port" can take them. The sockets do not set SO_REUSEADDR: with it two launchers could hold
    the same port without noticing; and as a socket that was never connected leaves nothing behind,
    the task can bind at once.

    Raises:
        OSError: if the system has no port to give.
    """
    highest = _highest_quiet()
    with contextlib.ExitStack() as on_error:
        held = [on_error.enter_context(_hold_one(lowest, highest)) for _ in range(count)]
        on_error.pop_all()
    return held


def listens(address: str) -> bool:
    """Returns True if a process listens at an address (``host:port``)."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=times.CONNECT_SECS).close()
    except (OSError, ValueError):
        return False
    return True


def _hold_one(lowest: int, highest: int) -> socket.socket:
    # A generator with a seed would give two launchers that were forked alike the same ports.
    chosen = random.SystemRandom()
    tries = _TRIES if highest - lowest >= _TRIES else 0
    for _ in range(tries):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.bind(("", chosen.randint(lowest, highest)))
            return holder
        except OSError:
            holder.close()
    # The choice of the system, where the range is too small or too full.
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind(("", 0))
    return holder


def _highest_quiet() -> int:
    """Returns the last port below the system's range of ephemeral ports; 0 where the range is unknown."""
    try:
        first = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    except OSError:
        return 0
    return int(first) - 1
