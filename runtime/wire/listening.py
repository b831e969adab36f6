"""The listening sockets of a tensor server: TCP at each of its addresses, and a Unix socket for tasks of this host."""

import os
import shutil
import socket
from collections.abc import Sequence

from absl import logging

from runtime.cluster.endpoint import fast_path_enabled
from runtime.wire import socket_dirs

_BACKLOG = 1024
_PORT_TRIES = 5
"""Attempts to find a port that is free at all addresses."""


class ListeningSockets:
    """The listening sockets of one server. Only one thread at a time may use them.

    Attributes:
        port: The TCP port; the real port once opened.
        unix_path: Path of the Unix socket while it is open; None without one.
        sockets: The open sockets by descriptor.
    """

    def __init__(self, hosts: Sequence[str], port: int, *, unix: bool) -> None:
        """Opens nothing.

        Args:
            hosts: Addresses to listen on. An empty one or ``::`` means all, with IPv6 if the host
                has it.
            port: TCP port; 0 takes a free port.
            unix: True to listen on a Unix socket too, in a directory for this user only.
        """
        self.port = port
        self.unix_path: str | None = None
        self.sockets: dict[int, socket.socket] = {}
        self._hosts = hosts
        self._unix = unix and fast_path_enabled()
        self._directory: str | None = None

    def open(self) -> None:
        """Opens the sockets.

        Raises:
            OSError: The port is taken.
        """
        opened = self._listen_tcp()
        self.port = opened[0].getsockname()[1]
        if self._unix:
            opened += self._listen_unix()
        for listener in opened:
            listener.setblocking(False)
        self.sockets = {listener.fileno(): listener for listener in opened}

    def close(self) -> None:
        """Closes the sockets. The Unix socket keeps its path until `remove_path`."""
        for listener in self.sockets.values():
            listener.close()

    def remove_path(self) -> None:
        """Removes the directory of the Unix socket."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self.unix_path = None

    def _listen_tcp(self) -> list[socket.socket]:
        # All addresses have one port: a port that is free at the first may be taken at the next.
        for left in reversed(range(1 if self.port else _PORT_TRIES)):
            listeners: list[socket.socket] = []
            port = self.port
            try:
                for host in self._hosts:
                    listeners.append(_listen_at(host, port))
                    port = listeners[0].getsockname()[1]
            except BaseException as error:
                for listener in listeners:
                    listener.close()
                if not (left and listeners and isinstance(error, OSError)):
                    raise
            else:
                return listeners
        raise AssertionError("the last try gives listeners or raises")

    def _listen_unix(self) -> list[socket.socket]:
        socket_dirs.sweep()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._directory = socket_dirs.make_directory()
            path = os.path.join(self._directory, socket_dirs.SOCKET_NAME)
            listener.bind(path)
            listener.listen(_BACKLOG)
        except OSError as error:
            # Also raised for a temporary directory with too long a name.
            listener.close()
            logging.info("No Unix socket for tensors: %s", error)
            return []
        self.unix_path = path
        return [listener]


def _listen_at(host: str, port: int) -> socket.socket:
    if host in ("", "::") and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            # The system has IPv6, and does not let this process use it: IPv4 alone will do.
            if port:
                logging.debug("No IPv6 for the tensor port: %s", error)
            host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
