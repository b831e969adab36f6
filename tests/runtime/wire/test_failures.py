"""What happens when the other process dies, freezes or restarts, and when the network cuts."""

import dataclasses
import threading
import time
from typing import Any

import pytest

from runtime.cluster.endpoint import Endpoint
from runtime.concurrency import list_threads
from runtime.errors import AbortedError, CancelledError, DeadlineExceededError, UnavailableError
from runtime.wire.connection import ServerContext
from runtime.wire.dial import ChannelOptions
from runtime.wire.listener import TensorServer
from runtime.wire.reply_cache import LaneTable
from tests.kit.waits import until
from tests.runtime.wire import kit
from tests.runtime.wire.kit import (
    TASK,
    CuttingProxy,
    Desk,
    ServerProcess,
    addend,
    make_peer,
    make_server,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_open_ends")]

WAYS = pytest.mark.parametrize("prefer_unix", [False, True], ids=["tcp", "unix"])
QUICK: dict[str, Any] = {"heartbeat_secs": 0.1, "heartbeat_timeout_secs": 0.4}


@pytest.fixture
def other(no_open_ends):
    process = ServerProcess()
    yield process
    process.close()


class Caller(threading.Thread):
    """Receives on a thread of its own, and keeps the result or the error."""

    def __init__(self, lane):
        super().__init__()
        self.lane = lane
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self.lane.receive(kit.NUMBER)
        except Exception as error:
            self.error = error


@WAYS
def test_killed_server_ends_the_call(other, prefer_unix):
    """A call whose server is killed ends with UnavailableError that names the task."""
    peer = make_peer(
        other.resolve, options=ChannelOptions(prefer_unix=prefer_unix, reconnect_secs=7200)
    )
    lane = peer.acquire()
    assert kit.is_unix(lane) == prefer_unix
    lane.send(kit.BLOCK, 1, [])
    caller = Caller(lane)
    other.kill()
    caller.join(100)
    assert type(caller.error) is UnavailableError and caller.error.task == TASK
    peer.release(lane)
    with pytest.raises(UnavailableError) as caught:
        peer.acquire()
    assert caught.value.task == TASK
    peer.close()


@WAYS
def test_frozen_peer_is_noticed_call_completes(other, prefer_unix):
    """A frozen task shows as silent, and its call completes once when the task runs again."""
    options = ChannelOptions(prefer_unix=prefer_unix)  # the defaults: 1 s and 2 s
    peer = make_peer(other.resolve, options=options)
    lane = peer.acquire()
    assert lane.call(kit.ADD, 1, addend(1), kit.NUMBER) == [1]
    assert peer.silent_since is None
    other.freeze()
    frozen = time.monotonic()
    lane.send(kit.ADD, 2, addend(1))
    caller = Caller(lane)
    until(lambda: peer.silent_since is not None)
    noticed = time.monotonic()
    assert noticed - frozen > 1
    since = peer.silent_since
    assert since is not None and since <= frozen + 1.5
    other.thaw()
    caller.join(100)
    assert caller.error is None and caller.result == [2]
    until(lambda: peer.silent_since is None)
    assert lane.call(kit.SUM, 3, [], kit.NUMBER) == [2]
    peer.release(lane)
    peer.close()


def test_frozen_peer_is_given_up(other):
    """A call to a task that stays frozen fails after reconnect_secs, and has run at most once."""
    peer = make_peer(other.resolve, options=ChannelOptions(reconnect_secs=0.5, **QUICK))
    lane = peer.acquire()
    other.freeze()
    lane.send(kit.ADD, 1, addend(1))
    with pytest.raises(
        UnavailableError, match=r"no contact at \S+ for \d+\.\d s \(reconnect_secs=0.5\)"
    ) as caught:
        lane.receive(kit.NUMBER)
    assert caught.value.task == TASK
    peer.release(lane)
    with pytest.raises(DeadlineExceededError):
        peer.acquire(deadline=time.monotonic() + 0.2)
    with pytest.raises(UnavailableError, match="no contact"):
        peer.acquire()
    other.thaw()
    lane = peer.acquire()
    # Nobody knows whether the call that was given up ran; but it did not run twice.
    assert int(lane.call(kit.SUM, 1, [], kit.NUMBER)[0]) in (0, 1)
    peer.release(lane)
    peer.close()


def test_large_call_to_frozen_peer_ends(other):
    """A call too large for the socket's buffer fails after reconnect_secs if the task is frozen."""
    import numpy as np

    peer = make_peer(other.resolve, options=ChannelOptions(reconnect_secs=0.3, **QUICK))
    lane = peer.acquire()
    other.freeze()
    lane.send(kit.ECHO, 1, [np.zeros(64 << 20, np.uint8)], dynamic=True)
    with pytest.raises(UnavailableError, match="no contact"):
        lane.receive(None)
    peer.release(lane)
    peer.close()


def test_cancel_works_while_reconnecting(other):
    """A call that waits for a connection can be cancelled."""
    peer = make_peer(other.resolve, options=ChannelOptions(**QUICK))
    lane = peer.acquire()
    other.freeze()
    lane.send(kit.ADD, 1, addend(1))
    caller = Caller(lane)
    until(lambda: peer.silent_since is not None)
    lane.cancel()
    caller.join(100)
    assert type(caller.error) is CancelledError
    peer.release(lane)
    peer.close()


def test_close_leaves_a_frozen_peer(other):
    """Closing a peer ends its heartbeat and its call although the task is frozen."""
    peer = make_peer(
        other.resolve, options=ChannelOptions(heartbeat_timeout_secs=60, reconnect_secs=120)
    )
    lane = peer.acquire()
    other.freeze()
    lane.send(kit.ADD, 1, addend(1))
    caller = Caller(lane)
    peer.close()
    beats = [thread for thread in list_threads() if thread.name == f"heartbeat {TASK}"]
    assert not beats  # close has waited for its end, not given it up
    caller.join(100)
    assert type(caller.error) is CancelledError
    peer.release(lane)


def test_reconnecting_heartbeat_keeps_one_lane():
    """A heartbeat that connects again and again uses one lane."""
    server, _ = make_server()
    proxy = CuttingProxy(server.port, 1, 2000)
    there = Endpoint("127.0.0.1", proxy.port, None, "", 77)
    peer = make_peer(lambda timeout: there, options=ChannelOptions(heartbeat_secs=0.02))
    peer.release(peer.acquire())
    until(lambda: server.counters.accepted > 10)
    until(lambda: server.counters.lanes == 2)
    peer.close()
    proxy.close()
    server.stop()


@WAYS
def test_long_calls_to_living_peer_stay(prefer_unix):
    """A call longer than the heartbeat's timeout goes on while the task answers pings."""
    server, desk = make_server()
    # A loaded machine answers within the time limit, too.
    options = ChannelOptions(
        heartbeat_secs=0.05, heartbeat_timeout_secs=5.0, prefer_unix=prefer_unix
    )
    peer = make_peer(lambda timeout: server.endpoint("127.0.0.1"), options=options)
    lane = peer.acquire()
    lane.send(kit.BLOCK, 1, [])
    caller = Caller(lane)
    caller.join(6.0)
    assert caller.is_alive() and peer.silent_since is None
    desk.release.set()
    caller.join(60)
    assert caller.result == [1]
    assert server.counters.accepted == 2
    peer.release(lane)
    peer.close()
    server.stop()


def test_restarted_server_aborts_call_and_peer():
    """A call to a restarted server is aborted, and the peer stays bound to the old incarnation."""
    server, _ = make_server(incarnation=1)
    places = [server]
    peer = make_peer(lambda timeout: places[-1].endpoint("127.0.0.1"))
    lane = peer.acquire()
    assert lane.call(kit.ADD, 1, addend(1), kit.NUMBER) == [1]
    server.stop()
    again, desk = make_server(incarnation=2, port=server.port)
    places.append(again)
    with pytest.raises(AbortedError, match="restarted") as caught:
        lane.call(kit.ADD, 2, addend(1), kit.NUMBER)
    assert caught.value.task == TASK
    peer.release(lane)
    with pytest.raises(AbortedError, match="restarted"):
        peer.acquire()
    assert peer.incarnation == 1 and desk.runs == 0
    peer.close()
    again.stop()


def test_moved_server_is_found_again():
    """A lane reaches a server that has moved to another port."""
    server, desk = make_server(incarnation=1)
    proxy = CuttingProxy(server.port, 0, 0)
    places = [proxy.port]
    peer = make_peer(
        lambda timeout: dataclasses.replace(
            server.endpoint("127.0.0.1"), port=places[-1], unix_path=None
        )
    )
    lane = peer.acquire()
    assert lane.call(kit.ADD, 1, addend(1), kit.NUMBER) == [1]
    places.append(server.port)
    proxy.close()
    assert lane.call(kit.ADD, 2, addend(1), kit.NUMBER) == [2]
    peer.release(lane)
    peer.close()
    server.stop()


def test_stale_endpoint_is_resolved_again():
    """A peer resolves again when its first endpoint is of an old incarnation."""
    server, _ = make_server(incarnation=2)
    old = Endpoint("127.0.0.1", server.port, None, "", 1)
    answers = [old]
    peer = make_peer(lambda timeout: answers.pop() if answers else server.endpoint("127.0.0.1"))
    lane = peer.acquire()
    assert lane.link.incarnation == 2
    peer.release(lane)
    peer.close()
    server.stop()


def test_forgotten_lane_aborts_its_call():
    """A call on a lane that the server has forgotten is aborted and does not run."""
    server, desk = make_server()
    peer = make_peer(lambda timeout: server.endpoint("127.0.0.1"))
    lane = peer.acquire()
    lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
    server.lanes.forget(kit.CLIENT, lane.number, time.monotonic())
    lane.link.interrupt()
    with pytest.raises(AbortedError, match="forgot"):
        lane.call(kit.ADD, 2, addend(1), kit.NUMBER)
    assert desk.runs == 1
    peer.release(lane)
    peer.close()
    server.stop()


@pytest.mark.parametrize("seed", range(3))
def test_cut_network_counts_every_add_once(seed, monkeypatch):
    """Every call runs once through a network that cuts connections at random bytes."""
    desk = Desk()
    monkeypatch.setattr(desk, "disconnected", lambda client, lane: None)
    server, _ = make_server(desk)
    # A call is 4,168 bytes there and 40 back: cuts fall into hellos, headers, tensors and replies.
    proxy = CuttingProxy(server.port, seed, 40_000)
    endpoint = Endpoint("127.0.0.1", proxy.port, None, "", 77)
    peer = make_peer(lambda timeout: endpoint)
    threads, calls = 4, 60
    failures = []

    def work():
        try:
            for step in range(calls):
                lane = peer.acquire()
                lane.call(kit.ADD, step, addend(1), kit.NUMBER)
                peer.release(lane)
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    peer.close()
    proxy.close()
    server.stop()
    assert not failures
    assert proxy.cuts > 20
    assert desk.total == desk.runs == threads * calls


def test_reborn_server_welcomes_unknown_lanes_briefly() -> None:
    """A reborn server aborts a call on an unknown lane once lanes of its own life may be forgotten."""
    desk = Desk()
    context = ServerContext(
        handler=desk, task=kit.TASK, key=kit.SECRET, incarnation=1, lanes=LaneTable()
    )
    server = TensorServer(context, hosts=["127.0.0.1"], unix=False, lane_memory_secs=6.0)
    server.inherit(77, {})
    server.start()
    proxy = CuttingProxy(server.port, 0, 0)
    direct = server.endpoint("127.0.0.1")
    there = [dataclasses.replace(direct, port=proxy.port)]

    def resolve(timeout: float) -> Endpoint:
        if not there:
            raise DeadlineExceededError("the network is cut", task=TASK)
        return there[0]

    peer = make_peer(resolve, options=ChannelOptions(reconnect_secs=60))
    lane = peer.acquire()
    lane.send(kit.SLOW_ADD, 1, addend(1))
    caller = Caller(lane)
    assert desk.blocked.acquire(timeout=60)
    there.clear()
    proxy.close()  # the call runs, and its answer is lost
    until(lambda: desk.runs == 1)
    until(lambda: server.counters.lanes == 0)
    there.append(direct)
    caller.join(30)
    assert desk.runs == 1
    assert type(caller.error) is AbortedError
    peer.close()
    server.stop()
