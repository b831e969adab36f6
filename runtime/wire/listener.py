"""The server side of the tensor channel: listeners, and the threads of connections.

`TensorServer` listens on TCP and on a Unix socket. Each welcome client has a thread of its own
(`connection.Connection`).
"""

import operator
import os
import select
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from absl import logging

from runtime import concurrency
from runtime.cluster.endpoint import Endpoint, host_id
from runtime.errors import OpError, ResourceExhaustedError
from runtime.wire import times
from runtime.wire.connection import Connection, ConnectionState, Reply, ServerContext, notify
from runtime.wire.listening import ListeningSockets
from runtime.wire.room import find_room

_AT_ONCE = 64
"""Connections accepted in a row before the thread turns to those that are there."""
_NEWS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """The counters of a server since its start.

    Attributes:
        connections: Open connections.
        accepted: Accepted connections, open or not.
        lanes: Remembered lanes.
        calls: Received calls.
        bytes_in: Bytes of received calls, headers included.
        bytes_out: Bytes of sent replies, headers included.
    """

    connections: int
    accepted: int
    lanes: int
    calls: int
    bytes_in: int
    bytes_out: int


class TensorServer:
    """A server of the tensor channel, with a thread for each connection.

    A call that blocks holds up its own lane only. One more thread accepts connections, notices
    clients that hang up during a call, and forgets old lanes.

    The same thread receives the greetings of plain connections, so a stranger costs a descriptor
    and no thread. A TLS connection gets its thread with its first byte. At the limit of
    connections, a silent or idle connection gives way to a new one; a working connection stays.

    Attributes:
        lanes: Memories of the lanes, by which clients are known.
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
        """Prepares a server; `start` opens its ports.

        Args:
            context: State shared by the connections, with the handler of calls.
            hosts: Addresses to listen on. An empty one or ``::`` means all, with IPv6 if the host
                has it.
            port: TCP port; 0 takes a free port.
            unix: True to listen on a Unix socket too, in a directory for this user only.
            lane_memory_secs: Seconds for which a lane without a connection is remembered.
            gone_secs: Seconds for which a client without a connection is expected back. Then the
                handler's `gone` is called.
        """
        self._context = context
        self._limits = context.limits
        self.lanes = context.lanes
        self._listening = ListeningSockets(hosts, port, unix=unix)
        self._lane_memory_secs = lane_memory_secs
        self._gone_secs = gone_secs
        # Guards `_past` and the removal from `_connections` together, so that `counters` counts
        # each connection once.
        self._lock = concurrency.Lock()
        # The oldest first. Only the listener's thread changes the table.
        self._connections: dict[Connection, None] = {}
        """All connections that are not closed."""
        self._by_descriptor: dict[int, Connection] = {}
        """The connections of which epoll tells, by descriptor; a descriptor that is taken anew has the newest."""
        self._ended: deque[Connection] = deque()
        """The connections whose thread ends; the listener's thread joins and removes them."""
        self._tidied_at = 0.0
        self._flooded = False
        """True if a newcomer has given way since the last walk.

        To log a thousand in a second costs more than the rest.
        """
        self._accepted = 0
        # Calls, bytes in and bytes out of the connections that are closed.
        self._past = [0, 0, 0]
        # `start` sets all three: a server with a thread has an epoll and an eventfd.
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._threads = concurrency.ThreadGroup("tensor port")
        self._thread: concurrency.Thread | None = None

    def inherit(self, incarnation: int, kept: Mapping[tuple[int, int], tuple[int, Reply]]) -> None:
        """Continues as an earlier process of this server, before `start`.

        The lanes of clients do not notice.

        Args:
            incarnation: Incarnation of the earlier process.
            kept: Number and reply of the last call with an effect, by client and lane.
        """
        self._context.incarnation = incarnation
        now = concurrency.monotonic()
        self.lanes.inherit(kept, now, now + self._lane_memory_secs)

    @property
    def port(self) -> int:
        """The TCP port; the real port once started."""
        return self._listening.port

    @property
    def unix_path(self) -> str | None:
        """The path of the Unix socket while the server runs; None without one."""
        return self._listening.unix_path

    @property
    def counters(self) -> ServerCounters:
        """The counters as of now."""
        with self._lock:
            there = list(self._connections)
            figures = zip(self._past, *map(_figures, there), strict=True)
            return ServerCounters(len(there), self._accepted, len(self.lanes), *map(sum, figures))

    def endpoint(self, host: str) -> Endpoint:
        """Returns the endpoint by which clients find this server.

        Args:
            host: Name or address by which clients reach this host.
        """
        return Endpoint(host, self.port, self.unix_path, host_id(), self._context.incarnation)

    def start(self) -> None:
        """Opens the listeners and starts to serve.

        Raises:
            OSError: The port is taken.
            RuntimeError: The server was started or stopped before.
        """
        if self._thread is not None or self._context.stopping.is_set():
            raise RuntimeError("a TensorServer starts once; make another")
        self._listening.open()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        for listener in self._listening.sockets:
            self._epoll.register(listener, select.EPOLLIN)
        self._threads.owner = f"tensor port {self.port}"
        self._thread = self._threads.start(self._run, name=self._threads.owner)

    def stop(self, grace: float = 0.0, *, leaving: bool = False) -> None:
        """Closes all connections and joins all threads. A second call does nothing.

        Args:
            grace: Seconds for the calls under way to end. Then their connections are cut, and the
                handler's `disconnected` is called.
            leaving: True if this server is not expected back. Connected clients then receive a
                goodbye.
        """
        if self._thread is None or self._context.stopping.is_set():
            self._context.stopping.set()
            return
        deadline = concurrency.monotonic() + grace
        if leaving:
            self._context.leaving.set()
        self._context.stopping.set()
        self._turn()
        self._thread.join(times.JOIN_SECS)
        connections = [c for c in self._connections if c.thread is not None]
        _drain(connections, self._context.progress, deadline, leaving)
        limit = concurrency.monotonic() + times.JOIN_SECS
        for connection in connections:
            if not connection.join(max(0.0, limit - concurrency.monotonic())):
                logging.error(
                    "The call of client %x, lane %d does not end",
                    connection.client,
                    connection.lane,
                )
            self._remove(connection)
        assert self._epoll is not None
        self._epoll.close()
        os.close(self._wake)
        self._listening.remove_path()

    def _turn(self) -> None:
        # Wakes the listener's thread.
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        assert self._epoll is not None
        stopping, listeners = self._context.stopping, self._listening.sockets
        try:
            while not stopping.is_set():
                try:
                    now = concurrency.monotonic()
                    self.lanes.note_turn(now)
                    found = self._epoll.poll(times.TURN_SECS)
                    # Newcomers last: theirs may be the descriptor of a connection that gives way to
                    # them.
                    for fd, events in sorted(found, key=lambda event: event[0] in listeners):
                        if fd in listeners:
                            self._accept_some(listeners[fd])
                        elif fd == self._wake:
                            os.eventfd_read(fd)
                        elif (connection := self._by_descriptor.get(fd)) is not None:
                            if connection.state >= ConnectionState.ENTERING:
                                connection.note_hang_up()
                            else:
                                self._greet(connection, events)
                    self._join_ended()
                    if now - self._tidied_at >= times.TIDY_SECS:
                        self._tidied_at = now
                        self._tidy(now)
                except Exception:
                    # The thread survives every error: clients that are connected, and those to
                    # come, need it.
                    logging.exception("The tensor port %d goes on after an error", self.port)
                    stopping.wait(times.TROUBLE_SECS)
        finally:
            self._listening.close()
            for connection in list(self._connections):
                if connection.state < ConnectionState.ENTERING:
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
        except OSError as error:
            # Out of descriptors, or the client has gone already.
            logging.error("Cannot accept a tensor connection: %s", error)
            self._context.stopping.wait(times.TROUBLE_SECS)
            return False
        self._accepted += 1
        connection = Connection(self._context, sock)
        refused = self._make_room()
        if refused is not None:
            connection.log_refusal(refused)
            # A TLS client would take the reason for a failed handshake.
            if not connection.is_tls:
                connection.refuse(refused)
            connection.close()
            return True
        assert self._epoll is not None
        self._epoll.register(sock, _NEWS)
        self._connections[connection] = None
        # A TLS client that hangs up early closes a descriptor before its thread has ended.
        self._by_descriptor[connection.fd] = connection
        return True

    def _make_room(self) -> ResourceExhaustedError | None:
        """Ends a connection if one more would be too many.

        Returns the error for the newcomer if no connection may be ended, else None.
        """
        room = find_room(self._connections, self._limits, concurrency.monotonic())
        if (newcomer := room.newcomer) is not None:
            if not self._flooded:
                what = (
                    "says nothing" if newcomer.state is ConnectionState.SILENT else "says no hello"
                )
                self._tell(
                    newcomer, "handshakes", f"a connection that {what} gives way to a new one"
                )
            self._flooded = True
            self._end_newcomer(newcomer)
        elif room.idle is not None:
            self._tell(room.idle, "connections", "its idle connection gives way to a new one")
            room.idle.interrupt()
        return room.refusal

    def _tell(self, connection: Connection, limit: str, what: str) -> None:
        connection.log_refusal(self._limits.exceeded(limit, what))

    def _end_newcomer(self, connection: Connection) -> None:
        if connection.state >= ConnectionState.ENTERING:
            connection.interrupt()
        else:
            self._remove(connection)

    def _remove(self, connection: Connection) -> None:
        with self._lock:
            del self._connections[connection]
            self._past = list(map(operator.add, self._past, _figures(connection)))
        if self._by_descriptor.get(connection.fd) is connection:
            del self._by_descriptor[connection.fd]
        # epoll forgets a closed descriptor.
        connection.close()

    def _greet(self, connection: Connection, events: int) -> None:
        """Receives a part of a greeting; starts the thread after the whole.

        A TLS connection gets its thread at once: the greeting comes after the handshake.
        """
        try:
            if not connection.is_tls:
                connection.receive_greeting(socket.MSG_DONTWAIT)
            elif events & select.EPOLLRDHUP:
                raise ConnectionResetError("the client has hung up")
        except BlockingIOError:
            connection.state = ConnectionState.GREETING
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
        """Starts the thread of a connection.

        Closes the connection if the system has no thread for it.
        """
        assert connection.thread is None, "a connection has one thread"
        name = f"tensor connection {self._accepted}"
        connection.thread = self._threads.create(self._serve, connection, name=name)
        before, connection.state = connection.state, ConnectionState.ENTERING
        assert self._epoll is not None
        try:
            self._epoll.modify(connection.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            connection.thread.start()
        except (RuntimeError, MemoryError, OSError) as error:
            # No thread, memory or descriptor is to be had just now. The client will try again.
            connection.state = before
            self._remove(connection)
            logging.error(
                "Cannot serve a tensor connection, it is closed: %s: %s",
                type(error).__name__,
                error,
            )
            self._context.stopping.wait(times.TROUBLE_SECS)

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            self._ended.append(connection)
            if not self._context.stopping.is_set():
                # The listener's thread joins this thread and closes the socket.
                self._turn()

    def _join_ended(self) -> None:
        while self._ended:
            connection = self._ended.popleft()
            connection.join(times.JOIN_SECS)
            self._remove(connection)

    def _tidy(self, now: float) -> None:
        # Newcomers have `hello_secs` for the greeting, and the TLS handshake before it.
        late, self._flooded = now - self._limits.hello_secs, False
        for connection in list(self._connections):
            if connection.state < ConnectionState.SERVED:
                if connection.accepted_at < late:
                    self._end_newcomer(connection)
                continue
            if connection.receiver.too_slow(now):
                self._tell(connection, "frame_rate", "a call that comes too slowly is given up")
                connection.interrupt()
            connection.note_work(now)
        for client in self.lanes.give_up(now - self._gone_secs):
            notify(self._context.handler.gone, client, False)
        self.lanes.expire(now - self._lane_memory_secs)


def _drain(
    connections: Sequence[Connection], progress: concurrency.Event, deadline: float, leaving: bool
) -> None:
    """Waits for the calls under way until the deadline, and cuts all connections.

    Args:
        connections: Connections that have a thread.
        progress: Event that is set by the end of each call.
        deadline: ``monotonic()`` at which calls under way are cut.
        leaving: True if clients receive a goodbye.
    """
    for connection in connections:
        # A TLS client receives its goodbye from the connection's own thread, within a tick.
        if not connection.busy and not (leaving and connection.is_tls):
            if leaving:
                connection.send_goodbye()
            connection.interrupt()
    while (
        any(connection.busy for connection in connections)
        and (left := deadline - concurrency.monotonic()) > 0
    ):
        progress.wait(left)
        progress.clear()
    for connection in connections:
        if leaving and not connection.busy:
            # A connection that was busy says goodbye from its own thread.
            connection.join(times.GOODBYE_SECS)
        connection.interrupt()
        if connection.busy:
            connection.notify_handler()


def _figures(connection: Connection) -> tuple[int, int, int]:
    return astuple(connection.traffic)
