"""A client that is not expected back: it said goodbye, or all its connections have been gone for a while."""

import threading
import time
from typing import Any

import pytest

from runtime.cluster.endpoint import Endpoint
from runtime.wire import connection
from runtime.wire.dial import ChannelOptions
from runtime.wire.listener import TensorServer
from runtime.wire.peer import Peer
from runtime.wire.receiver import CallReceiver
from runtime.wire.reply_cache import LaneTable
from tests.runtime.wire.kit import (
    CLIENT,
    NUMBER,
    SECRET,
    SUM,
    TASK,
    CuttingProxy,
    Desk,
    finds,
    make_peer,
    make_server,
    until_heart_beats,
)


class GoneDesk(Desk):
    """A handler that notes who is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[int, bool]] = []
        self.told = threading.Event()

    def gone(self, client: int, goodbye: bool) -> None:
        self.left.append((client, goodbye))
        self.told.set()


def _use(peer: Any) -> None:
    lane = peer.acquire()
    lane.call(SUM, 1, [], NUMBER)
    peer.release(lane)


def _served(**options: Any) -> tuple[TensorServer, GoneDesk, Any]:
    desk = GoneDesk()
    server, _ = make_server(desk, **options)
    endpoint = server.endpoint("127.0.0.1")
    return server, desk, lambda timeout: endpoint


def test_goodbye_is_told_at_once() -> None:
    """The server hears of a client's goodbye at once."""
    server, desk, resolve = _served(gone_secs=60.0)
    peer = make_peer(resolve)
    _use(peer)
    until_heart_beats(server)
    peer.close()
    assert desk.told.wait(60)
    assert desk.left == [(CLIENT, True)]
    server.stop()


def test_goodbye_is_told_during_a_heartbeat() -> None:
    """The server hears of a goodbye also while a heartbeat is under way."""
    server, desk, resolve = _served(gone_secs=60.0)
    beating = ChannelOptions(heartbeat_secs=1e-6)  # one is nearly always under way
    for client in range(1, 51):
        peer = Peer(TASK, resolve, client, finds(SECRET), options=beating)
        _use(peer)
        peer.close()
        while (client, True) not in desk.left:
            assert desk.told.wait(60), f"client {client} closed unnoticed"
            desk.told.clear()
    server.stop()


def test_goodbye_counts_after_hang_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server reads a goodbye also if the listener sees the hang-up first."""

    # after the reply, until the listener has seen the hang-up
    def dawdle(self: CallReceiver, used: int) -> None:
        deadline = time.monotonic() + 20
        while not connection.caller_is_gone() and time.monotonic() < deadline:
            threading.Event().wait(0.001)

    monkeypatch.setattr(connection, "LARGE_BUFFER_BYTES", 0)
    monkeypatch.setattr(CallReceiver, "consider_shrinking", dawdle)
    server, desk, resolve = _served(gone_secs=60.0)
    peer = make_peer(resolve)
    lane = peer.acquire()
    lane.call(SUM, 1, [], NUMBER)
    lane.close(goodbye=True, whole_client=True)
    assert desk.told.wait(100)
    assert desk.left == [(CLIENT, True)]
    peer.close()
    server.stop()


@pytest.mark.usefixtures("often")
def test_silence_is_told_once() -> None:
    """A client without connections is reported once, and an idle connected client is not reported."""
    server, desk, resolve = _served(gone_secs=0.2)
    proxy = CuttingProxy(server.port, 0, 0)
    peer = make_peer(lambda timeout: Endpoint("127.0.0.1", proxy.port, None, "", 77))
    lane = peer.acquire()
    lane.call(SUM, 1, [], NUMBER)
    assert not desk.told.wait(1.5)  # connected, though idle: it is there
    proxy.close()  # no goodbye, as if the process had died
    assert desk.told.wait(60)
    assert desk.left == [(CLIENT, False)]
    peer.release(lane)
    peer.close()
    server.stop()


def test_unconnected_client_is_given_up_once() -> None:
    """The table gives up a client once for each time that the client loses all connections."""

    class LaneOwner:
        gone = False

    table: LaneTable[None] = LaneTable()
    first, second = LaneOwner(), LaneOwner()
    one, _, _ = table.attach(1, 1, 1, first, 0.0)
    two, _, _ = table.attach(1, 2, 1, second, 0.0)
    assert table.give_up(100.0) == []
    table.detach(1, 1, one, first, 5.0)
    assert table.give_up(100.0) == []  # the other lane is connected
    table.detach(1, 2, two, second, 8.0)
    assert table.give_up(7.0) == []
    assert table.give_up(9.0) == [1]
    assert table.give_up(10.0) == []  # told
    third = LaneOwner()
    table.attach(1, 1, 2, third, 20.0)
    table.detach(1, 1, one, third, 30.0)
    assert table.give_up(31.0) == [1]


def test_interrupted_heartbeat_start_allows_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer closes although an interrupt hit the start of its heartbeat."""
    server, _, resolve = _served(gone_secs=60.0)
    peer = make_peer(resolve)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name.startswith("heartbeat"):
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _use(peer)
    peer.close()
    server.stop()
