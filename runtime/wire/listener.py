"""The server side of the tensor channel: listeners on TCP and on a Unix socket, and the threads of connections."""

import os
import select
import shutil
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from absl import logging

from runtime.errors import OpError, ResourceExhaustedError
from runtime.wire import socket_dirs
from runtime.wire.connection import Connection, Handler, Reply, ServerContext, State, notify
from runtime.wire.endpoint import Endpoint, fast_path_enabled, host_id

__all__ = ["Handler", "Reply", "ServerCounters", "TensorServer"]

_BACKLOG: Final = 1024
_TURN_SECS: Final = 1.0
_TIDY_SECS: Final = 0.25
"""How often all connections and lanes are looked at, at most: a flood must not have them walked for each new one."""
_AT_ONCE: Final = 64
"""Connections accepted in a row before those that are there are heard."""
_WORKS_SECS: Final = 5.0
"""A connection that had a call or a ping within this time works, and gives way to nobody."""
_ASLEEP_SECS: Final = 3.0
_GOODBYE_SECS: Final = 0.5
_JOIN_SECS: Final = 5.0
_TROUBLE_SECS: Final = 0.1
"""Pause after a connection that could not be served for want of something, so as not to run in circles."""
_PORT_TRIES: Final = 5
_NEWS: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What a server has done since it started.

    Attributes:
        connections: connections that are open.
        accepted: connections that were accepted, open or not.
        lanes: lanes that are remembered.
        calls: calls received.
        bytes_in: bytes of calls received, headers included.
        bytes_out: bytes of replies sent, headers included.
    """

    connections: int
    accepted: int
    lanes: int
    calls: int
    bytes_in: int
    bytes_out: int


class TensorServer:
    """Serves the calls of lanes, each connection on a thread of its own: a call that blocks blocks only its lane.

    One more thread accepts connections, notices clients that hang up during a call, and forgets old lanes. It also
    waits for the first byte of each connection, and hears who its client is, so that a stranger costs a descriptor and
    no thread, unless it speaks TLS; where there are too many it ends those that are silent, and not those that work.

    Attributes:
        lanes: the memories of the lanes, which know the clients.
    """

    def __init__(
        self,
        context: ServerContext,
        *,
        hosts: Sequence[str] = ("",),
        port: int = 0,
        unix: bool = True,
        lane_memory_secs: float = 600.0,
        gone_secs: float = 10.0,
    ) -> None:
        """Prepares a server; `start` opens it.

        Args:
            context: what its connections share, the handler of calls among it.
            hosts: addresses to listen on; an empty one or ``::`` listens on all, IPv6 too where there is any.
            port: TCP port; 0 takes a free one.
            unix: listen on a Unix socket too (in a directory that only this user can enter).
            lane_memory_secs: how long a lane without a connection is remembered.
            gone_secs: how long a client without a connection is expected back; then the handler's `gone` is told.
        """
        self._context = context
        self._limits = context.limits
        self.lanes = context.lanes
        self._hosts = hosts
        self._port = port
        self._unix = unix and fast_path_enabled()
        self._lane_memory_secs = lane_memory_secs
        self._gone_secs = gone_secs
        self._unix_path: str | None = None
        self._unix_directory: str | None = None
        self._listeners: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}
        """By descriptor all that are not closed, the oldest first; only the thread of the listener changes it."""
        self._ended: deque[Connection] = deque()
        """Those whose thread ends."""
        self._tidied_at = 0.0
        self._flooded = False
        """True if a newcomer has given way since: telling of a thousand in a second costs more than the rest."""
        self._accepted = 0
        self._past = [0, 0, 0]  # calls, bytes in and out of connections that are closed
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._turned_at = self._awake_since = time.monotonic()

    def inherit(self, incarnation: int, kept: Mapping[tuple[int, int], tuple[int, Reply]]) -> None:
        """Before the start: goes on as an earlier process of this server, whose lanes do not notice.

        Args:
            incarnation: of that life.
            kept: by (client, lane), the number of its last call with an effect, and the reply.
        """
        self._context.incarnation = incarnation
        now = time.monotonic()
        self.lanes.inherit(kept, now, now + self._lane_memory_secs)

    @property
    def port(self) -> int:
        """The TCP port; the real one once started."""
        return self._port

    @property
    def unix_path(self) -> str | None:
        """Path of the Unix socket while the server runs, None without one."""
        return self._unix_path

    @property
    def counters(self) -> ServerCounters:
        """The counters as of now."""
        with self._lock:
            there = list(self._connections.values())
            calls, bytes_in, bytes_out = map(sum, zip(self._past, *map(_figures, there), strict=True))
            return ServerCounters(len(there), self._accepted, len(self.lanes), calls, bytes_in, bytes_out)

    def endpoint(self, host: str) -> Endpoint:
        """What clients need to find this server.

        Args:
            host: the name or address by which they reach this host.
        """
        return Endpoint(host, self._port, self._unix_path, host_id(), self._context.incarnation)

    def start(self) -> None:
        """Opens the listeners and starts serving.

        Raises:
            OSError: the port is taken.
            RuntimeError: it was started before.
        """
        if self._thread is not None or self._context.stopping.is_set():
            raise RuntimeError("a TensorServer starts once; make another")
        listeners = self._listen_tcp()
        self._port = listeners[0].getsockname()[1]
        if self._unix:
            listeners += self._listen_unix()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        for listener in listeners:
            listener.setblocking(False)
            self._epoll.register(listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"tensor port {self._port}", daemon=True)
        self._thread.start()

    def silent_secs(self, client: int) -> float | None:
        """For how long a client has given no sign of life, by a connection or a ping; None when it is not known.

        Time in which this process did not run itself (it was frozen, or starved) does not count: it heard nobody.
        """
        heard = self.lanes.heard_at(client)
        if heard is None:
            return None
        now = time.monotonic()
        if now - self._turned_at > _ASLEEP_SECS:
            return 0.0
        return max(0.0, now - max(heard, self._awake_since))

    def stop(self, grace: float = 0.0, *, leaving: bool = False) -> None:
        """Closes everything and joins all threads. Does nothing the second time.

        Args:
            leaving: this server is not expected to come back: clients that are still connected are told so.
            grace: seconds that calls under way may take to end; then their connections are cut, and the handler
                is told by its `disconnected`.
        """
        if self._thread is None or self._context.stopping.is_set():
            self._context.stopping.set()
            return
        deadline = time.monotonic() + grace
        if leaving:
            self._context.leaving.set()
        self._context.stopping.set()
        self._turn()
        self._thread.join(_JOIN_SECS)
        connections = [c for c in self._connections.values() if c.thread is not None]
        for connection in connections:
            if not connection.busy and not (leaving and connection.is_tls):  # whose own thread says goodbye, soon
                if leaving:
                    connection.send_goodbye()
                connection.interrupt()
        while any(connection.busy for connection in connections) and (left := deadline - time.monotonic()) > 0:
            self._context.progress.wait(left)
            self._context.progress.clear()
        for connection in connections:
            if leaving and not connection.busy:
                connection.join(_GOODBYE_SECS)  # one that was busy says its goodbye by itself
            connection.interrupt()
            if connection.busy:
                connection.notify_handler()
        limit = time.monotonic() + _JOIN_SECS
        for connection in connections:
            if connection.join(max(0.0, limit - time.monotonic())):
                connection.close()
            else:
                logging.error("The call of client %x, lane %d does not end", connection.client, connection.lane)
        assert self._epoll is not None
        self._epoll.close()
        os.close(self._wake)
        if self._unix_directory is not None:
            shutil.rmtree(self._unix_directory, ignore_errors=True)
        self._unix_path = None

    def _listen_tcp(self) -> list[socket.socket]:
        # Several addresses have one port: one that is free at the first may be taken at the next.
        for left in reversed(range(1 if self._port else _PORT_TRIES)):
            listeners: list[socket.socket] = []
            port = self._port
            try:
                for host in self._hosts:
                    listeners.append(self._listen_at(host, port))
                    port = listeners[0].getsockname()[1]
            except BaseException as error:
                for listener in listeners:
                    listener.close()
                if not (left and listeners and isinstance(error, OSError)):
                    raise
            else:
                return listeners
        raise AssertionError("the last try gives listeners or raises")

    def _listen_at(self, host: str, port: int) -> socket.socket:
        if host in ("", "::") and socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            except OSError as error:
                if port:
                    logging.debug("No IPv6 for the tensor port: %s", error)
                host = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)

    def _listen_unix(self) -> list[socket.socket]:
        socket_dirs.sweep()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._unix_directory = socket_dirs.make_directory()
            path = os.path.join(self._unix_directory, socket_dirs.SOCKET_NAME)
            listener.bind(path)
            listener.listen(_BACKLOG)
        except OSError as error:  # also of a temporary directory with too long a name
            listener.close()
            logging.info("No Unix socket for tensors: %s", error)
            return []
        self._unix_path = path
        return [listener]

    def _turn(self) -> None:
        # Wakes the listener thread.
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        assert self._epoll is not None
        stopping = self._context.stopping
        try:
            while not stopping.is_set():
                try:
                    now = time.monotonic()
                    if now - self._turned_at > _ASLEEP_SECS:
                        self._awake_since = now
                    self._turned_at = now
                    for fd, events in self._epoll.poll(_TURN_SECS):
                        if fd in self._listeners:
                            self._accept_some(self._listeners[fd])
                        elif fd == self._wake:
                            os.eventfd_read(fd)
                        elif (connection := self._connections.get(fd)) is not None:
                            if connection.state >= State.ENTERING:
                                connection.note_hang_up()
                            else:
                                self._greet(connection, events)
                    self._join_ended()
                    if now - self._tidied_at >= _TIDY_SECS:
                        self._tidied_at = now
                        self._tidy(now)
                except Exception:  # whatever it is, those who are connected and those to come need this thread
                    logging.exception("The tensor port %d goes on after an error", self._port)
                    stopping.wait(_TROUBLE_SECS)
        finally:
            for listener in self._listeners.values():
                listener.close()
            for connection in list(self._connections.values()):
                if connection.state < State.ENTERING:
                    self._remove(connection)

    def _accept_some(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not self._accept(listener):
                return

    def _accept(self, listener: socket.socket) -> bool:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:  # out of descriptors, or the client is gone already
            logging.error("Cannot accept a tensor connection: %s", error)
            self._context.stopping.wait(_TROUBLE_SECS)
            return False
        self._accepted += 1
        connection = Connection(self._context, sock)
        refused = self._make_room()
        if refused is not None:
            connection.log_refusal(refused)
            if not connection.is_tls:  # else it would take the reason for a failed handshake
                connection.refuse(refused)
            connection.close()
            return True
        assert self._epoll is not None
        self._epoll.register(sock, _NEWS)
        self._connections[connection.fd] = connection
        return True

    def _make_room(self) -> ResourceExhaustedError | None:
        """Ends a connection where one more would be too many; gives the error when there is none that may be ended."""
        limits = self._limits
        living = [connection for connection in self._connections.values() if not connection.gone]
        newcomers = [connection for connection in living if connection.state < State.SERVED]
        is_full = len(living) >= limits.connections
        if newcomers and (is_full or len(newcomers) >= limits.handshakes):
            oldest = min(newcomers, key=lambda newcomer: newcomer.state)
            if not self._flooded:
                what = "says nothing" if oldest.state is State.SILENT else "says no hello"
                self._tell(oldest, "handshakes", f"a connection that {what} gives way to a new one")
            self._flooded = True
            self._end_newcomer(oldest)
            return None
        if not is_full:
            return None
        # Of the client that has most, the one that was idle for longest.
        having = Counter(connection.client for connection in living)
        since = time.monotonic() - _WORKS_SECS
        idle = [connection for connection in living if not connection.busy and connection.idle_since <= since]
        if not idle:
            return limits.exceeded("connections", f"the tensor port has {len(living)} connections that work")
        idlest = max(idle, key=lambda connection: (having[connection.client], -connection.idle_since))
        self._tell(idlest, "connections", "its idle connection gives way to a new one")
        idlest.interrupt()
        return None

    def _tell(self, connection: Connection, limit: str, what: str) -> None:
        connection.log_refusal(self._limits.exceeded(limit, what))

    def _end_newcomer(self, connection: Connection) -> None:
        if connection.state >= State.ENTERING:
            connection.interrupt()
        else:
            self._remove(connection)

    def _remove(self, connection: Connection) -> None:
        with self._lock:
            del self._connections[connection.fd]
            self._past = [past + last for past, last in zip(self._past, _figures(connection), strict=True)]
        connection.close()  # epoll forgets it

    def _greet(self, connection: Connection, events: int) -> None:
        """Hears what has come of a greeting; begins with the connection when it is over, or speaks TLS."""
        try:
            if not connection.is_tls:
                connection.receive_greeting(socket.MSG_DONTWAIT)
            elif events & select.EPOLLRDHUP:
                raise ConnectionResetError("the client has hung up")
        except BlockingIOError:
            connection.state = State.GREETING
            assert self._epoll is not None
            self._epoll.modify(connection.fd, _NEWS)
        except OpError as error:
            connection.log_refusal(error)
            connection.refuse(error)
            self._remove(connection)
        except OSError:
            self._remove(connection)
        else:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Has a thread serve a connection; closes it where that is not possible."""
        name = f"tensor connection {self._accepted}"
        connection.thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        before, connection.state = connection.state, State.ENTERING
        assert self._epoll is not None
        try:
            self._epoll.modify(connection.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            connection.thread.start()
        except (RuntimeError, MemoryError, OSError) as error:  # no thread, memory or descriptor to be had just now
            connection.state = before
            self._remove(connection)  # its client tries again
            logging.error("Cannot serve a tensor connection, it is closed: %s: %s", type(error).__name__, error)
            self._context.stopping.wait(_TROUBLE_SECS)

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            self._ended.append(connection)
            if not self._context.stopping.is_set():
                self._turn()  # the listener thread joins this one and closes the socket

    def _join_ended(self) -> None:
        while self._ended:
            connection = self._ended.popleft()
            connection.join(_JOIN_SECS)
            self._remove(connection)

    def _tidy(self, now: float) -> None:
        late, self._flooded = now - self._limits.hello_secs, False
        for connection in list(self._connections.values()):
            if connection.state < State.SERVED:
                if connection.accepted_at < late:
                    self._end_newcomer(connection)
                continue
            if connection.too_slow(now):
                self._tell(connection, "frame_rate", "a call that comes too slowly is given up")
                connection.interrupt()
            connection.note_work(now)
        for client in self.lanes.give_up(now - self._gone_secs):
            notify(self._context.handler.gone, client, False)
        self.lanes.expire(now - self._lane_memory_secs)


def _figures(connection: Connection) -> tuple[int, int, int]:
    return connection.calls, connection.bytes_in, connection.bytes_out
