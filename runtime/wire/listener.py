"""The server side of the tensor channel: listeners on TCP and on a Unix socket, and the threads of connections."""

import contextlib
import os
import select
import shutil
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from absl import logging

from runtime.errors import OpError, ResourceExhaustedError
from runtime.limits import Limits
from runtime.trust.certificates import Context
from runtime.trust.greeting import Greeting
from runtime.trust.roles import ANYBODY, Identity
from runtime.trust.security import Refusals
from runtime.wire import frames, socket_dirs, sockets
from runtime.wire.connection import Connection, Handler, Reply, ServerContext, peer_host
from runtime.wire.endpoint import Endpoint, fast_path_enabled, host_id
from runtime.wire.reply_cache import LaneTable

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
_LONGEST_UNIX_PATH: Final = 100


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


class _Newcomer(NamedTuple):
    """A plain connection whose client introduces itself."""

    sock: socket.socket
    accepted_at: float
    greeting: Greeting


class TensorServer:
    """Serves the calls of lanes, each connection on a thread of its own: a call that blocks blocks only its lane.

    One more thread accepts connections, notices clients that hang up during a call, and forgets old lanes. It also
    waits for the first byte of each connection, and hears who its client is, so that a stranger costs a descriptor and
    no thread, unless it speaks TLS; where there are too many it ends those that are silent, and not those that work.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str | Sequence[str] = "",
        port: int = 0,
        task: str = "",
        key: bytes | None,
        incarnation: int,
        refusals: Refusals | None = None,
        own: Identity = ANYBODY,
        unix: bool = True,
        tls: Context | None = None,
        limits: Limits | None = None,
        lane_memory_secs: float = 600.0,
        gone_secs: float = 10.0,
    ) -> None:
        """Prepares a server; `start` opens it.

        Args:
            handler: runs the calls.
            host: address to listen on, or several; empty or ``::`` listens on all, IPv6 too where there is any.
            port: TCP port; 0 takes a free one.
            task: whose server it is; clients that mean another are refused when there is a key.
            key: the token that clients must have; None lets everybody in.
            incarnation: random u64 of this process of the task.
            refusals: tells of clients without the token.
            own: what the task's own certificate says that it is.
            unix: listen on a Unix socket too (in a directory that only this user can enter).
            tls: gives the context for each connection over TCP; the Unix socket stays plain.
            limits: how many connections there may be, how long they may take, and how much they may send.
            lane_memory_secs: how long a lane without a connection is remembered.
            gone_secs: how long a client without a connection is expected back; then the handler's `gone` is told.
        """
        self._limits = limits = limits or Limits()
        self._context = ServerContext(
            handler=handler,
            task=task,
            key=key,
            incarnation=incarnation,
            limits=limits,
            lanes=LaneTable[Reply](limits),
            refusals=refusals or Refusals(task),
            own=own,
        )
        self._hosts = [host] if isinstance(host, str) else list(host)
        self._port = port
        self._unix = unix and fast_path_enabled() and hasattr(socket, "AF_UNIX")
        self._tls = tls
        self._lane_memory_secs = lane_memory_secs
        self._gone_secs = gone_secs
        self._unix_path: str | None = None
        self._unix_directory: str | None = None
        self._listeners: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._silent: dict[int, tuple[socket.socket, float]] = {}
        """Accepted connections of which no byte has come, by descriptor, the oldest first; of the listener thread."""
        self._greeting: dict[int, _Newcomer] = {}
        """Plain connections whose client has begun to say who it is, the oldest first; of the listener thread."""
        self._shaking: dict[int, Connection] = {}
        """Those that may not have been welcomed yet, the oldest first; of the listener thread."""
        self._idle: dict[Connection, tuple[int, float, float]] = {}
        """By connection its calls and last ping when it was looked at, and since when they have been the same."""
        self._tidied_at = 0.0
        self._flooded = 0  # silent connections that have given way since
        self._connections: dict[int, tuple[Connection, threading.Thread]] = {}
        self._ended: list[tuple[Connection, threading.Thread]] = []
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
        self._context = replace(self._context, incarnation=incarnation)
        now = time.monotonic()
        self._context.lanes.inherit(kept, now, now + self._lane_memory_secs)

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
            live = [connection for connection, _ in [*self._connections.values(), *self._ended]]
            return ServerCounters(
                connections=len(self._connections) + len(self._silent) + len(self._greeting),
                accepted=self._accepted,
                lanes=len(self._context.lanes),
                calls=self._past[0] + sum(c.calls for c in live),
                bytes_in=self._past[1] + sum(c.bytes_in for c in live),
                bytes_out=self._past[2] + sum(c.bytes_out for c in live),
            )

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
        heard = self._context.lanes.heard_at(client)
        if heard is None:
            return None
        now = time.monotonic()
        if now - self._turned_at > _ASLEEP_SECS:
            return 0.0
        return max(0.0, now - max(heard, self._awake_since))

    def check_client(self, client: int, who: Identity) -> None:
        """Raises PermissionDeniedError when a client's id is known here as that of another than ``who``."""
        self._context.lanes.check_client(client, who)

    def connected(self, client: int) -> bool:
        """Whether a client has a connection at this moment."""
        return self._context.lanes.connected(client)

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
        with self._lock:
            pairs = [*self._connections.values(), *self._ended]
        for connection, _ in pairs:
            if not connection.busy and not (leaving and connection.is_tls):  # whose own thread says goodbye, soon
                if leaving:
                    connection.send_goodbye()
                connection.interrupt()
        while any(connection.busy for connection, _ in pairs) and (left := deadline - time.monotonic()) > 0:
            self._context.progress.wait(left)
            self._context.progress.clear()
        for connection, thread in pairs:
            if leaving and not connection.busy:
                thread.join(_GOODBYE_SECS)  # one that was busy says its goodbye by itself
            connection.interrupt()
            if connection.busy:
                connection.notify_handler()
        limit = time.monotonic() + _JOIN_SECS
        for connection, thread in pairs:
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                logging.error("The call of client %x, lane %d does not end", connection.client, connection.lane)
                continue
            connection.close()
        assert self._epoll is not None
        self._epoll.close()
        os.close(self._wake)
        self._context.lanes.clear()
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
        try:
            directory = socket_dirs.make_directory()
        except OSError as error:
            logging.info("No Unix socket for tensors: %s", error)
            return []
        path = os.path.join(directory, socket_dirs.SOCKET_NAME)
        if len(path) > _LONGEST_UNIX_PATH:
            os.rmdir(directory)
            logging.info("No Unix socket for tensors: the temporary directory has too long a name")
            return []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(_BACKLOG)
        self._unix_directory, self._unix_path = directory, path
        return [listener]

    def _turn(self) -> None:
        # Wakes the listener thread.
        with self._lock:
            if self._wake >= 0:
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
                    for fd, _ in self._epoll.poll(_TURN_SECS):
                        if fd in self._listeners:
                            self._accept_some(self._listeners[fd])
                        elif fd in self._silent:
                            self._first_byte(fd)
                        elif fd in self._greeting:
                            self._hear(fd)
                        elif fd != self._wake:
                            self._hung_up(fd)
                        else:
                            os.eventfd_read(fd)
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
            while self._silent:
                self._silent.popitem()[1][0].close()
            while self._greeting:
                self._greeting.popitem()[1].sock.close()

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
        refused = self._make_room()
        if refused is not None:
            self._refuse(sock, refused)
            return True
        assert self._epoll is not None
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT)
        self._silent[sock.fileno()] = (sock, time.monotonic())
        return True

    def _make_room(self) -> ResourceExhaustedError | None:
        """Ends a connection where one more would be too many; gives the error when there is none that may be ended."""
        limits = self._limits
        if self._newcomers() >= limits.handshakes:
            for fd in [fd for fd, c in self._shaking.items() if c.welcomed or c.gone]:
                del self._shaking[fd]
            if self._newcomers() >= limits.handshakes:
                self._end_handshake()
        with self._lock:
            living = [c for c, _ in self._connections.values() if not c.gone]
        if len(living) + len(self._silent) + len(self._greeting) < limits.connections or self._end_handshake():
            return None
        now = time.monotonic()
        idlest = longest_idle(
            [(c, c.client, now - self._idle[c][2]) for c in living if not c.busy and c in self._idle], _WORKS_SECS
        )
        if idlest is None:
            return limits.exceeded("connections", f"the tensor port has {len(living)} connections that work")
        self._tell(idlest.peer_host, "connections", "its idle connection gives way to a new one")
        idlest.interrupt()
        return None

    def _newcomers(self) -> int:
        return len(self._silent) + len(self._greeting) + len(self._shaking)

    def _end_handshake(self) -> bool:
        """Ends the oldest connection that has said nothing, else the oldest that has not shown who it is."""
        if self._silent:
            fd, (sock, _) = next(iter(self._silent.items()))
            if not self._flooded:  # else this is done a thousand times a second, and telling costs more than the rest
                self._tell(peer_host(sock), "handshakes", "a connection that says nothing gives way to a new one")
            self._flooded += 1
            self._end_silent(fd)
            return True
        for newcomer in self._greeting.values():
            self._tell(peer_host(newcomer.sock), "handshakes", "a connection that says no hello gives way to a new one")
            self._end_greeting(newcomer)
            return True
        for fd, connection in self._shaking.items():
            if not (connection.welcomed or connection.gone):
                self._tell(connection.peer_host, "handshakes", "a connection that says no hello gives way to a new one")
                connection.interrupt()
                del self._shaking[fd]
                return True
        return False

    def _tell(self, host: str, limit: str, what: str) -> None:
        self._context.refusals.tell(host, str(self._limits.exceeded(limit, what).message), "limit")

    def _refuse(self, sock: socket.socket, error: ResourceExhaustedError) -> None:
        payload = frames.encode_error(error)
        head = frames.pack_header(frames.MAGIC, frames.ERROR, 0, 0, 0, 0, len(payload))
        self._context.refusals.tell(peer_host(sock), error.message, "limit")
        with sock, contextlib.suppress(OSError):  # the client may be gone again
            if self._tls is None or sock.family == socket.AF_UNIX:  # else it would take it for a failed handshake
                sock.send(head + payload, socket.MSG_DONTWAIT)

    def _end_silent(self, fd: int) -> None:
        sock, _ = self._silent.pop(fd)
        sock.close()  # epoll forgets it

    def _end_greeting(self, newcomer: _Newcomer) -> None:
        del self._greeting[newcomer.sock.fileno()]
        newcomer.sock.close()

    def _first_byte(self, fd: int) -> None:
        sock, accepted_at = self._silent[fd]
        try:
            if not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._end_silent(fd)
                return
        except OSError:  # it broke
            self._end_silent(fd)
            return
        del self._silent[fd]
        of_other_user = sockets.peer_user(sock) not in (None, os.geteuid(), 0)
        context = self._context
        greeting = Greeting(context.task, context.key, context.incarnation, of_other_user=of_other_user)
        if self._tls is not None and sock.family != socket.AF_UNIX:
            self._begin(sock, greeting, self._tls)
            return
        self._greeting[fd] = _Newcomer(sock, accepted_at, greeting)
        self._hear(fd)

    def _hear(self, fd: int) -> None:
        """Hears what has come of a greeting, and answers; begins with the connection when it is over."""
        newcomer = self._greeting[fd]
        sock, _, greeting = newcomer
        try:
            while greeting.wanted:
                said = sock.recv(greeting.wanted, socket.MSG_DONTWAIT)
                if not said:
                    raise ConnectionResetError("the client has hung up")
                answer = greeting.hear(said)
                if answer and sock.send(answer, socket.MSG_DONTWAIT) != len(answer):
                    raise ConnectionAbortedError("the client takes no answer")
        except BlockingIOError:
            assert self._epoll is not None
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT)
        except OpError as error:
            self._context.refusals.tell(peer_host(sock), f"{error.message} (tensors)")
            payload = frames.encode_error(error)
            head = frames.pack_header(frames.MAGIC, frames.ERROR, 0, 0, 0, 0, len(payload))
            with contextlib.suppress(OSError):  # it has hung up
                sock.send(head + payload, socket.MSG_DONTWAIT)
                with contextlib.suppress(BlockingIOError):  # nothing has come
                    sock.recv(frames.MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)  # else closing would take the answer back
            self._end_greeting(newcomer)
        except OSError:
            self._end_greeting(newcomer)
        else:
            del self._greeting[fd]
            self._begin(sock, greeting, None)

    def _begin(self, sock: socket.socket, greeting: Greeting, tls: Context | None) -> None:
        """Has a thread serve a connection; closes it where that is not possible."""
        try:
            self._start_thread(sock, greeting, None if tls is None else tls())
        except (RuntimeError, MemoryError, OSError) as error:  # no thread, memory or descriptor to be had just now
            sock.close()  # its client tries again
            logging.error("Cannot serve a tensor connection, it is closed: %s: %s", type(error).__name__, error)
            self._context.stopping.wait(_TROUBLE_SECS)

    def _start_thread(self, sock: socket.socket, greeting: Greeting, ssl_context: ssl.SSLContext | None) -> None:
        sock.setblocking(True)
        connection = Connection(self._context, sock, greeting, ssl_context)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"tensor connection {self._accepted}", daemon=True
        )
        with self._lock:
            self._connections[connection.fd] = (connection, thread)
        assert self._epoll is not None
        try:
            self._epoll.modify(connection.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            thread.start()
        except BaseException:
            with self._lock:
                del self._connections[connection.fd]
            raise
        self._shaking[connection.fd] = connection

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                pair = self._connections.pop(connection.fd, None)
                if pair is not None:
                    self._ended.append(pair)
            if not self._context.stopping.is_set():
                self._turn()  # the listener thread joins this one and closes the socket

    def _hung_up(self, fd: int) -> None:
        with self._lock:
            pair = self._connections.get(fd)
        if pair is not None:
            pair[0].note_hang_up()

    def _join_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for connection, thread in ended:
            thread.join(_JOIN_SECS)
            self._idle.pop(connection, None)
            if self._shaking.get(connection.fd) is connection:
                del self._shaking[connection.fd]
            connection.close()
            with self._lock:
                self._past[0] += connection.calls
                self._past[1] += connection.bytes_in
                self._past[2] += connection.bytes_out

    def _tidy(self, now: float) -> None:
        late, self._flooded = now - self._limits.hello_secs, 0
        for fd in [fd for fd, (_, accepted_at) in self._silent.items() if accepted_at < late]:
            self._end_silent(fd)
        for newcomer in [n for n in self._greeting.values() if n.accepted_at < late]:
            self._end_greeting(newcomer)
        with self._lock:
            connections = [connection for connection, _ in self._connections.values()]
        for connection in connections:
            if not connection.welcomed:
                if connection.accepted_at < late:
                    connection.interrupt()
                continue
            if connection.too_slow(now):
                self._tell(connection.peer_host, "frame_rate", "a call that comes too slowly is given up")
                connection.interrupt()
            calls, heard_at = connection.calls, connection.heard_at
            before = self._idle.get(connection)
            if connection.busy or before is None or before[:2] != (calls, heard_at):
                self._idle[connection] = (calls, heard_at, now)
        for client in self._context.lanes.give_up(now - self._gone_secs):
            self._context.notify_gone(client, goodbye=False)
        self._context.lanes.expire(now - self._lane_memory_secs)


_C = TypeVar("_C")


def longest_idle(candidates: Sequence[tuple[_C, int, float]], least_secs: float) -> _C | None:
    """Which connection gives way to a new one: of the client that has most, the one that was idle for longest.

    Args:
        candidates: (connection, client, seconds idle).
        least_secs: one that has worked since is not among them.
    """
    having = Counter(client for _, client, _ in candidates)
    idle = [(having[client], secs, index) for index, (_, client, secs) in enumerate(candidates) if secs >= least_secs]
    return candidates[max(idle)[2]][0] if idle else None
