"""The address of a task's tensor port, and the ways to reach it."""

import functools
import os
from dataclasses import dataclass

from runtime.cluster.spec import join_address

FAST_PATH_VARIABLE = "BELLWETHER_FAST_PATH"
"""Name of an environment variable; "0" turns the Unix socket between tasks of one host off."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a tensor server, as the control plane reports it.

    Attributes:
        host: Host name or address for TCP, without brackets.
        port: TCP port.
        unix_path: Path of the Unix socket, or None.
        host_id: `host_id()` of the server's process.
        incarnation: u64 that the server drew when it started.
    """

    host: str
    port: int
    unix_path: str | None
    host_id: str
    incarnation: int

    def __str__(self) -> str:
        """Returns host:port, for messages."""
        return join_address(self.host, self.port)


@functools.cache
def host_id() -> str:
    """Returns an id of this host's boot and network namespace.

    Equal in processes that share both.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def fast_path_enabled() -> bool:
    """Returns True if the environment allows Unix sockets."""
    return os.environ.get(FAST_PATH_VARIABLE, "1") != "0"


def reachable_unix_path(endpoint: Endpoint) -> str | None:
    """Returns the Unix socket of an endpoint, or None.

    Returns None if this process cannot use the socket.
    """
    path = endpoint.unix_path
    if path and endpoint.host_id == host_id() and fast_path_enabled() and os.path.exists(path):
        return path
    return None
