"""A server that leaves for good tells its clients, whenever they come to know of it; one that stops tells nothing."""

import pathlib
import socket
import threading
import time
from typing import Any

import pytest

from runtime.cluster.endpoint import Endpoint
from runtime.errors import TaskLeftError, UnavailableError
from runtime.trust.certificates import Certificates
from runtime.wire import frames, times
from runtime.wire.channel import Lane
from runtime.wire.dial import ChannelOptions
from tests.kit.certificates import make
from tests.kit.changes import SetTimes
from tests.kit.waits import until, until_thread_ends
from tests.runtime.wire import kit
from tests.runtime.wire.kit import ADD, addend, make_peer, make_server

pytestmark = pytest.mark.usefixtures("no_open_ends")
WAYS = pytest.mark.parametrize("prefer_unix", [False, True], ids=["tcp", "unix"])


def served(**options: Any) -> tuple[Any, Any]:
    server, _ = make_server()
    gone = threading.Event()

    def resolve(timeout: float) -> Any:
        if gone.is_set():
            raise UnavailableError("nobody listens", task=kit.TASK)
        return server.endpoint("127.0.0.1")

    stop = server.stop

    def stopped(grace: float = 0.0, *, leaving: bool = False) -> None:
        gone.set()
        stop(grace, leaving=leaving)

    server.stop = stopped
    return server, make_peer(resolve, options=ChannelOptions(**options))


def served_by_tls(directory: pathlib.Path, heartbeat_secs: float) -> tuple[Any, Any]:
    """Returns a server with certificates, and a peer that has a lane to the server and a heartbeat."""
    certificates = Certificates(make(directory / "here"))
    server, _ = make_server(tls=certificates.server_context)
    endpoint = server.endpoint("127.0.0.1")
    options = ChannelOptions(
        prefer_unix=False, heartbeat_secs=heartbeat_secs, heartbeat_timeout_secs=60.0
    )
    peer = make_peer(lambda timeout: endpoint, certificates=certificates, options=options)
    peer.release(peer.acquire())
    return server, peer


@WAYS
@pytest.mark.parametrize(("leaving", "error"), [(True, TaskLeftError), (False, UnavailableError)])
def test_call_after_server_has_gone(
    leaving: bool, error: type[Exception], prefer_unix: bool
) -> None:
    """A call to a server that has left fails with TaskLeftError, and to a stopped one with
    UnavailableError.
    """
    # nobody but the call finds out
    server, peer = served(prefer_unix=prefer_unix, heartbeat_secs=60.0)
    lane = peer.acquire()
    assert lane.call(ADD, 1, addend(1), kit.NUMBER)
    server.stop(1.0, leaving=leaving)
    with pytest.raises(error):
        lane.call(ADD, 2, addend(1), kit.NUMBER)
    peer.release(lane)
    peer.close()


@WAYS
def test_later_calls_hear_of_leaving(prefer_unix: bool) -> None:
    """Every later call to a server that has left fails with TaskLeftError."""
    server, peer = served(prefer_unix=prefer_unix, heartbeat_secs=0.02)
    first, second = peer.acquire(), peer.acquire()
    for lane in (first, second):
        lane.call(ADD, 1, addend(1), kit.NUMBER)
        peer.release(lane)
    kit.until_heart_beats(server)
    server.stop(1.0, leaving=True)
    until_thread_ends(f"heartbeat {kit.TASK}")  # it has found out
    for _ in range(3):
        with pytest.raises(TaskLeftError):  # the third has no connection left
            lane = peer.acquire()
            try:
                lane.call(ADD, 2, addend(1), kit.NUMBER)
            finally:
                peer.release(lane)
    peer.close()


@WAYS
def test_stuck_call_closes_its_connection(prefer_unix: bool, set_times: SetTimes) -> None:
    """A call that outlives its stopped server closes its socket at its end."""
    set_times(times, JOIN_SECS=0.05)
    desk = kit.Desk()
    # This handler does not notice that its client has gone.
    desk.disconnected = lambda client, lane: None  # type: ignore[method-assign]
    server, _ = make_server(desk)
    peer = make_peer(
        lambda timeout: server.endpoint("127.0.0.1"),
        options=ChannelOptions(prefer_unix=prefer_unix, reconnect_secs=0.1),
    )
    lane = peer.acquire()
    called = kit.in_thread(lambda: lane.call(kit.BLOCK, 1, [], kit.NUMBER))
    desk.blocked.acquire()
    server.stop()
    desk.release.set()
    with pytest.raises(UnavailableError):
        called.result(100)
    peer.close()


def test_signs_of_life_are_recorded() -> None:
    """The pings of a client count as signs of life on the server."""
    server, peer = served(heartbeat_secs=0.05)
    assert server.lanes.silent_secs(kit.CLIENT) is None
    lane = peer.acquire()
    lane.call(ADD, 1, addend(1), kit.NUMBER)
    assert server.lanes.silent_secs(kit.CLIENT) < 60
    first = server.lanes.heard_at(kit.CLIENT)
    for _ in range(3):
        last = server.lanes.heard_at(kit.CLIENT)
        until(lambda last=last: server.lanes.heard_at(kit.CLIENT) > last)  # the pings
    assert server.lanes.silent_secs(kit.CLIENT) <= time.monotonic() - first
    peer.release(lane)
    peer.close()
    server.stop()


def test_look_for_goodbye_spares_heartbeat(tmp_path: pathlib.Path) -> None:
    """A look for a goodbye leaves a TLS connection of the heartbeat whole."""
    server, peer = served_by_tls(tmp_path, heartbeat_secs=0.05)
    kit.until_heart_beats(server)
    for _ in range(3):
        last = server.lanes.heard_at(kit.CLIENT)
        assert not peer.left
        until(lambda last=last: server.lanes.heard_at(kit.CLIENT) > last)
    assert server.counters.accepted == 2
    peer.close()
    server.stop()


def test_pinging_tls_client_hears_of_leaving(tmp_path: pathlib.Path) -> None:
    """A TLS client that pings without a pause hears that the server leaves."""
    server, peer = served_by_tls(tmp_path, heartbeat_secs=0.02)
    last = until(lambda: server.lanes.heard_at(kit.CLIENT))
    until(lambda: server.lanes.heard_at(kit.CLIENT) > last)
    server.stop(leaving=True)
    until_thread_ends(f"heartbeat {kit.TASK}")
    assert peer.left
    peer.close()


def test_goodbye_behind_pong_is_seen() -> None:
    """A goodbye that arrives in one piece with the answer to a ping is seen."""
    peer = make_peer(lambda timeout: Endpoint("127.0.0.1", 1, None, "", 1))
    lane = Lane(peer._dialer, 1)
    here, there = socket.socketpair()
    with here, there:
        link = lane.link
        link.sock, link.sendmsg, link.recvmsg_into = here, here.sendmsg, here.recvmsg_into
        there.sendall(frames.pack_header(frames.MAGIC, frames.PONG, 0, 0, 0, 0, 0) + frames.LEAVES)
        lane.ping(time.monotonic() + 60)
        assert lane.link.has_left()
        lane.close()
    peer.close()
