"""A port with more connections than it takes: those that are silent give way, those that work do not."""

import contextlib
import itertools
import os
import pathlib
import socket
import ssl
import struct
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.errors import ResourceExhaustedError
from runtime.trust.certificates import Certificates
from runtime.wire import frames, times
from runtime.wire.connection import Connection
from runtime.wire.listener import TensorServer
from tests.kit.certificates import make
from tests.kit.changes import SetTimes
from tests.kit.waits import until
from tests.runtime.kit import limited
from tests.runtime.wire import kit
from tests.runtime.wire.kit import CLIENT, SECRET, make_server
from tests.runtime.wire.test_gone import GoneDesk

WELCOMED = frames.WELCOME
PING = frames.pack_header(frames.MAGIC, frames.PING, 0, 0, 0, 0, 0)


@contextlib.contextmanager
def serving(desk: kit.Desk | None = None, **limits: Any) -> Iterator[tuple[TensorServer, kit.Desk]]:
    with limited(**limits) as given:
        server, made = make_server(desk, limits=given, unix=False)
        try:
            yield server, made
        finally:
            made.release.set()
            server.stop()


@contextlib.contextmanager
def connected(server: TensorServer) -> Iterator[tuple[socket.socket, Any]]:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock,
        sock.makefile("rwb") as file,
    ):
        yield sock, file


def hello(file: Any, client: int, lane: int = 1) -> tuple[int, bytes]:
    return kit.say_hello(file, client, SECRET, lane=lane)


def is_open(sock: socket.socket) -> bool:
    """Whether the server has not ended a connection on which nothing is due."""
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        sock.settimeout(60)


def works(server: TensorServer, client: int = CLIENT) -> None:
    """Somebody who comes now is served."""
    endpoint = server.endpoint("127.0.0.1")
    peer = kit.Peer(kit.TASK, lambda timeout: endpoint, client, kit.finds(SECRET))
    lane = peer.acquire()
    assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0]
    peer.release(lane)
    peer.close()


def threads() -> int:
    return sum(thread.name.startswith("tensor connection") for thread in threading.enumerate())


def test_silent_connections_give_way() -> None:
    """Silent connections give way to others and cost no thread."""
    with serving(handshakes=8, hello_secs=600) as (server, _), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(server))[0] for _ in range(200)]
        until(lambda: server.counters.accepted == 200 and server.counters.connections <= 8)
        assert threads() == 0
        works(server)
        until(lambda: sum(map(is_open, silent)) <= 8)


def test_unfinished_hellos_give_way() -> None:
    """Connections that begin a hello and do not end it give way to others."""
    with serving(handshakes=8, hello_secs=600) as (server, _), contextlib.ExitStack() as stack:
        for _ in range(100):
            sock, _file = stack.enter_context(connected(server))
            sock.sendall(b"\x02")
        until(lambda: server.counters.accepted == 100 and server.counters.connections <= 8)
        works(server)


@pytest.mark.usefixtures("often")
def test_silent_connection_has_hello_secs() -> None:
    """A silent connection is closed after hello_secs."""
    with serving(hello_secs=0.1) as (server, _), connected(server) as (sock, _file):
        assert sock.recv(1) == b""
        works(server)


def test_client_has_limited_connections() -> None:
    """A client above its limit of connections is refused, and other clients are served."""
    with serving(client_connections=3) as (server, _), contextlib.ExitStack() as stack:
        files = [stack.enter_context(connected(server))[1] for _ in range(4)]
        for lane, file in enumerate(files[:3]):
            assert hello(file, 1, lane)[0] == WELCOMED
        kind, payload = hello(files[3], 1, 3)
        assert kind == frames.ERROR and isinstance(
            frames.decode_error(payload, ""), ResourceExhaustedError
        )
        assert b"the limit client_connections is 3" in payload
        works(server)
        files[0].close()
        stack.close()
        until(lambda: server.counters.connections == 0)
        with connected(server) as (_sock, file):
            assert hello(file, 1, 9)[0] == WELCOMED


class BusyDesk(kit.Desk):
    """A handler that keeps the thread of the listener for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.go_on = threading.Event(), threading.Event()

    def disconnected(self, client: int, lane: int) -> None:
        super().disconnected(client, lane)
        self.told.set()
        self.go_on.wait(60)


def test_descriptor_news_spare_the_next(
    tmp_path: pathlib.Path,
) -> None:
    """News of a connection that gave way do not end the next one with the same descriptor."""
    certificates = Certificates(make(tmp_path / "here"))
    with limited(handshakes=1, hello_secs=600) as limits, contextlib.ExitStack() as stack:
        desk = BusyDesk()
        server, _ = make_server(desk, limits=limits, tls=certificates.server_context)
        stack.callback(server.stop)
        stack.callback(desk.go_on.set)
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(server.unix_path or "")
        with caller, caller.makefile("rwb") as file:
            assert hello(file, 1)[0] == WELCOMED
            caller.sendall(frames.pack_header(frames.MAGIC, frames.CALL, 0, kit.BLOCK, 1, 1, 0))
            assert desk.blocked.acquire(timeout=60)
            old = stack.enter_context(connected(server))[0]
            until(lambda: server.counters.connections == 2)
        assert desk.told.wait(60)
        stack.enter_context(connected(server))
        new = stack.enter_context(connected(server))[0]
        old.shutdown(socket.SHUT_RDWR)
        desk.go_on.set()
        until(lambda: server.counters.accepted == 4)
        context = certificates.client_context()
        # it is welcome to shake hands
        with context.wrap_socket(new, server_hostname="127.0.0.1") as secure:
            assert secure.version()


def test_cut_handshake_spares_the_next(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a connection that was cut before its handshake spares the next one with the same descriptor."""
    certificates = Certificates(make(tmp_path / "here"))
    begun, cut, ended, go_on = (threading.Event() for _ in range(4))
    interrupt = Connection.interrupt

    def wrapped_late() -> ssl.SSLContext:
        if not begun.is_set():
            begun.set()
            assert cut.wait(60)
        return certificates.server_context()

    def interrupt_late(self: Connection) -> None:
        if threading.current_thread() is self.thread and not ended.is_set():
            ended.set()
            assert go_on.wait(60)
        interrupt(self)

    monkeypatch.setattr(Connection, "interrupt", interrupt_late)
    server, _ = make_server(unix=False, tls=wrapped_late)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        stack.callback(go_on.set)
        stack.callback(cut.set)
        # before the descriptor of the first connection is free
        new = stack.enter_context(socket.socket())
        new.settimeout(60)
        with socket.create_connection(("127.0.0.1", server.port)) as old:
            old.sendall(b"a hello")
            assert begun.wait(60)
            # a reset
            old.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            number = old.detach()
        os.close(number)
        # so the lowest free descriptor will be that of the connection
        os.dup2(new.fileno(), number)
        stack.callback(os.close, number)
        cut.set()
        assert ended.wait(60)
        new.connect(("127.0.0.1", server.port))
        until(lambda: server.counters.accepted == 2)
        until(lambda: server.counters.connections == 2)
        go_on.set()
        until(lambda: server.counters.connections == 1)
        with certificates.client_context().wrap_socket(new, server_hostname="127.0.0.1") as secure:
            assert secure.version()


def test_idle_connection_gives_way(
    set_times: SetTimes,
) -> None:
    """At the limit an idle connection gives way, and not one that waits or pings."""
    set_times(times, WORKS_SECS=0.5)
    with serving(connections=6) as (server, desk), contextlib.ExitStack() as stack:
        made = [stack.enter_context(connected(server)) for _ in range(6)]
        for (_, file), (client, lane) in zip(
            made, ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (4, 1)), strict=True
        ):
            assert hello(file, client, lane)[0] == WELCOMED
        waits, pings = made[3][0], made[4][0]
        waits.sendall(frames.pack_header(frames.MAGIC, frames.CALL, 0, kit.BLOCK, 1, 1, 0))
        assert desk.blocked.acquire(timeout=60)
        over = threading.Event()

        def beat() -> None:
            while not over.wait(0.05):
                pings.sendall(PING)
                assert len(made[4][1].read(frames.HEADER_BYTES)) == frames.HEADER_BYTES

        beating = kit.in_thread(beat)
        clients = itertools.count(100)
        for left in (2, 1):
            while not lets_in(server, next(clients), stack):
                threading.Event().wait(0.01)
            # It had most. A newcomer who was turned away may have ended one, too.
            until(lambda left=left: sum(is_open(sock) for sock, _ in made[:3]) <= left)
        assert is_open(waits)
        over.set()
        beating.result(60)
        assert is_open(pings)


def lets_in(server: TensorServer, client: int, stack: contextlib.ExitStack) -> bool:
    """Whether a new client is welcomed, and not told that all connections worked a moment ago; it stays then."""
    with contextlib.ExitStack() as own:
        _, file = own.enter_context(connected(server))
        try:
            if hello(file, client)[0] != WELCOMED:
                return False
        except OSError:
            return False
        stack.push(own.pop_all())
        return True


@pytest.mark.parametrize("handle", [kit.ECHO_FIXED, 999], ids=["a call", "a call that is refused"])
@pytest.mark.usefixtures("often")
def test_slow_call_is_given_up(handle: int) -> None:
    """A call that comes slower than frame_rate is cut, also if its handle is unknown."""
    length = kit.MIXED.nbytes
    with (
        serving(frame_secs=0.2, frame_rate=1 << 20) as (server, _),
        connected(server) as (sock, file),
    ):
        assert hello(file, 1)[0] == WELCOMED
        sock.sendall(
            frames.pack_header(frames.MAGIC, frames.CALL, 0, handle, 1, 1, length)
            + bytes(length // 2)
        )
        assert file.read() == b""
        works(server)


def test_a_stopped_server_has_no_connections() -> None:
    """A stopped server counts no connections and keeps its count of calls."""
    with serving() as (server, _), connected(server) as (sock, file):
        assert hello(file, 1)[0] == WELCOMED
        sock.sendall(frames.pack_header(frames.MAGIC, frames.CALL, 0, kit.SUM, 1, 1, 0))
        assert kit.read(file)[0] == frames.REPLY
        server.stop()
        assert (server.counters.connections, server.counters.calls) == (0, 1)


def test_slow_call_at_rate_is_served() -> None:
    """A call that takes longer than frame_secs at the wanted rate is served."""
    length = kit.MIXED.nbytes
    with serving(frame_secs=0.2, frame_rate=1) as (server, _), connected(server) as (sock, file):
        assert hello(file, 1)[0] == WELCOMED
        sock.sendall(
            frames.pack_header(frames.MAGIC, frames.CALL, 0, kit.ECHO_FIXED, 1, 1, length)
            + bytes(length - 1)
        )
        connection, *_ = server._connections
        until(lambda: connection.receiver._frame_at > 0)
        threading.Event().wait(0.5)  # longer than frame_secs
        sock.sendall(bytes(1))
        assert kit.read(file)[0] == frames.REPLY


def test_hello_after_goodbye_leaves_nothing() -> None:
    """A hello that is read after its client's goodbye leaves no lane behind."""
    desk = GoneDesk()
    with serving(desk) as (server, _):
        with connected(server) as (sock, file):
            assert hello(file, 1, 1)[0] == WELCOMED
            sock.sendall(
                frames.pack_header(frames.MAGIC, frames.GOODBYE, frames.WHOLE_CLIENT, 0, 0, 0, 0)
            )
            assert desk.told.wait(60)
        with connected(server) as (_, file):
            # it was sent before the goodbye, on another connection
            assert hello(file, 1, 2)[0] == WELCOMED
            assert server.counters.lanes == 1
        until(lambda: server.counters.connections == 0)
        assert server.counters.lanes == 0


def test_returning_client_is_remembered_after_call() -> None:
    """A client that calls after its goodbye is remembered."""
    desk = GoneDesk()
    with serving(desk) as (server, _):
        with connected(server) as (sock, file):
            assert hello(file, 1, 1)[0] == WELCOMED
            sock.sendall(
                frames.pack_header(frames.MAGIC, frames.GOODBYE, frames.WHOLE_CLIENT, 0, 0, 0, 0)
            )
            assert desk.told.wait(60)
        with connected(server) as (sock, file):
            assert hello(file, 1, 2)[0] == WELCOMED
            sock.sendall(frames.pack_header(frames.MAGIC, frames.CALL, 0, kit.SUM, 1, 1, 0))
            assert kit.read(file)[0] == frames.REPLY
        until(lambda: server.counters.connections == 0)
        assert server.counters.lanes == 1


def test_client_loses_its_oldest_lanes() -> None:
    """A client above its limit of lanes loses its own oldest lanes."""
    with serving(client_lanes=3) as (server, _):
        make_one(server, 2, 1)
        for lane in range(1, 6):
            make_one(server, 1, lane)
        assert server.counters.lanes == 4
        assert [lane for lane in (5, 4, 3, 2, 1) if knows(server, 1, lane)] == [5, 4, 3]
        assert knows(server, 2, 1)


def knows(server: TensorServer, client: int, lane: int) -> bool:
    """Attaches another connection to a lane; returns True if the server knew the lane."""
    owner = types.SimpleNamespace(gone=False, heard_at=0.0)
    return server.lanes.attach(client, lane, 2, owner, 0.0)[1]


def make_one(server: TensorServer, client: int, lane: int) -> None:
    """A connection that comes and goes without a goodbye."""
    with connected(server) as (_, file):
        assert hello(file, client, lane)[0] == WELCOMED
    until(lambda: server.counters.connections == 0)
