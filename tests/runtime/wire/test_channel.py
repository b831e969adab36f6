"""What a channel promises, the same over TCP, over a Unix socket and over TLS."""

import contextlib
import dataclasses
import functools
import gc
import os
import socket
import stat
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from runtime.cluster.endpoint import Endpoint
from runtime.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from runtime.limits import Limits
from runtime.tensor_spec import TensorSpec
from runtime.trust.certificates import Certificates
from runtime.wire import frames, sockets
from runtime.wire.codec import TensorBuffer, TensorLayout
from runtime.wire.connection import Reply
from runtime.wire.dial import ChannelOptions
from tests.kit.certificates import make
from tests.kit.waits import until
from tests.runtime.wire import kit
from tests.runtime.wire.kit import TASK, addend, make_peer, make_server, same

pytestmark = pytest.mark.usefixtures("no_open_ends")


class Pair:
    """A server, and a peer that reaches it in one way."""

    def __init__(self, way, certificates):
        self.way = way
        self.certificates = certificates if way == "tls" else None
        self.server, self.desk = self.serve()
        self.peers = []
        self.peer = self.connect()

    def serve(self, **options):
        return make_server(tls=self.certificates and self.certificates.server_context, **options)

    def connect(self, server=None, **options):
        server = server or self.server
        channel = ChannelOptions(prefer_unix=self.way == "unix", **options.pop("channel", {}))
        peer = make_peer(
            lambda timeout: server.endpoint("127.0.0.1"),
            options=channel,
            certificates=self.certificates,
            **options,
        )
        self.peers.append(peer)
        return peer

    def close(self):
        self.desk.release.set()
        for peer in self.peers:
            peer.close()
        self.server.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return Certificates(make(tmp_path_factory.mktemp("certificates") / "here"))


@pytest.fixture(params=["tcp", "unix", "tls"])
def pair(no_open_ends, request, certificates):
    pair = Pair(request.param, certificates)
    yield pair
    pair.close()


def test_lane_takes_the_wanted_way(pair):
    """A lane goes over the Unix socket, TCP or TLS as its options say."""
    lane = pair.peer.acquire()
    assert kit.is_unix(lane) == (pair.way == "unix")
    assert kit.is_tls(lane) == (pair.way == "tls")
    assert lane.link.incarnation == pair.peer.incarnation == 77
    pair.peer.release(lane)


MIXED = [
    np.array([1, 2, 3], "bfloat16"),
    np.array(True),
    np.zeros((0, 5), np.float32),
    np.arange(6).reshape(2, 3),
    np.linspace(0, 1, 1000, dtype=np.float32),
]


def test_fixed_layout_keeps_bits_and_alignment(pair):
    """Tensors of a fixed layout arrive with every bit and aligned to 64 bytes."""
    lane = pair.peer.acquire()
    aligned: list[int] = []
    pair.desk.seen = lambda inputs: aligned.extend(a.ctypes.data % 64 for a in inputs if a.size)
    for _ in range(3):
        assert same(lane.call(kit.ECHO_FIXED, 1, MIXED, kit.MIXED), MIXED)
    assert aligned == [0] * 12
    pair.peer.release(lane)


def test_reply_buffer_is_reused_if_given(pair):
    """A reply lands in the caller's buffer if one is given, and otherwise in fresh memory."""
    lane = pair.peer.acquire()
    out = TensorBuffer(kit.NUMBER)
    first = lane.call(kit.ADD, 1, addend(1), kit.NUMBER, out=out)
    second = lane.call(kit.ADD, 1, addend(1), kit.NUMBER, out=out)
    assert first[0] is second[0] is out.arrays[0] and second[0] == 2
    third = lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
    fourth = lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
    assert (third[0], fourth[0]) == (3, 4)
    pair.peer.release(lane)


def test_dynamic_payloads_carry_strings(pair):
    """A payload that describes itself carries numbers, byte strings and no tensors at all."""
    lane = pair.peer.acquire()
    values = [
        *MIXED,
        np.array([[b"a", b""], [b"\0\xff", b"long" * 1000]], object),
        np.zeros(100_000),
    ]
    got = lane.call(kit.ECHO, 1, values, None, dynamic=True)
    assert [g.tolist() for g in got] == [v.tolist() for v in values]
    assert lane.call(kit.ECHO, 1, [], None, dynamic=True) == []
    pair.peer.release(lane)


def test_empty_calls_are_answered(pair):
    """A call without tensors is answered with the tensors of its reply, if any."""
    lane = pair.peer.acquire()
    assert lane.call(kit.NOTHING, 1, [], kit.EMPTY) == []
    assert lane.call(kit.LANE, 1, [], kit.NUMBER) == [lane.number]
    pair.peer.release(lane)


@pytest.mark.parametrize("count", [1, 700, 3000])
def test_many_and_large_tensors(pair, count):
    """A call carries thousands of tensors and tensors of megabytes unchanged."""
    values = [np.full(9_000_000 // count, n % 251, np.uint8) for n in range(count)]
    layout = TensorLayout([TensorSpec.of(value) for value in values])
    kit_layouts = {**kit.INPUTS, 100: layout}
    pair.desk.input_layout = kit_layouts.__getitem__
    echoed = []
    pair.desk.seen = lambda inputs: echoed.append([np.array(a) for a in inputs])
    pair.desk.reply = lambda: Reply(echoed[-1])
    lane = pair.peer.acquire()
    assert same(lane.call(100, 1, values, layout), values)
    pair.peer.release(lane)


def test_strided_tensors_arrive_in_order(pair):
    """A strided array arrives with its elements in order."""
    lane = pair.peer.acquire()
    layout = TensorLayout([TensorSpec((4,), np.dtype(np.int64))])
    assert lane.call(kit.STRIDED, 1, [], layout)[0].tolist() == [1, 6, 11, 16]
    strided = [MIXED[0], MIXED[1], MIXED[2], np.arange(12).reshape(2, 6)[:, ::2], MIXED[4]]
    assert same(lane.call(kit.ECHO_FIXED, 1, strided, kit.MIXED), strided)
    pair.peer.release(lane)


def test_errors_keep_type_text_and_task(pair):
    """An error of a handler reaches the caller with its type, text and task, and the lane stays
    usable.
    """
    lane = pair.peer.acquire()
    with pytest.raises(
        FailedPreconditionError, match="variable w is not initialised .step 9"
    ) as caught:
        lane.call(kit.FAIL, 9, [], kit.NUMBER)
    assert caught.value.task == TASK
    with pytest.raises(InternalError, match="ZeroDivisionError: oops"):
        lane.call(kit.BUG, 1, [], kit.NUMBER)
    with pytest.raises(NotFoundError, match="handle 99"):
        lane.call(99, 1, [np.zeros(3_000_000, np.uint8)], kit.NUMBER)
    with pytest.raises(InvalidArgumentError, match="handle 1 takes Layout"):
        lane.call(kit.ADD, 1, [kit.number(1)], kit.NUMBER)
    with pytest.raises(InvalidArgumentError, match="describe themselves"):
        lane.call(kit.ECHO, 1, [], None)
    with pytest.raises(InvalidArgumentError, match="self-describing"):
        lane.call(kit.SUM, 1, [], kit.NUMBER, dynamic=True)
    assert lane.usable
    assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0]
    pair.peer.release(lane)
    # One lane and, unless it is still on its way, the heartbeat.
    assert pair.server.counters.accepted <= 2, "something was connected again"


def test_reply_of_other_layout_breaks_lane(pair):
    """A reply of another layout is an internal error, and the next lane is a fresh one."""
    lane = pair.peer.acquire()
    with pytest.raises(InternalError, match=r"3 bytes .*int64"):
        lane.call(kit.WRONG, 1, [], kit.NUMBER)
    assert not lane.usable
    with pytest.raises(FailedPreconditionError, match="broken"):
        lane.send(kit.SUM, 1, [])
    pair.peer.release(lane)
    fresh = pair.peer.acquire()
    assert fresh is not lane and fresh.call(kit.SUM, 1, [], kit.NUMBER) == [0]
    pair.peer.release(fresh)


def test_payload_limit_spares_registered_layouts(pair):
    """The limit of payloads holds for those that describe themselves, on both sides of a
    connection.
    """
    large = [np.zeros(5000, np.uint8)]
    small = pair.connect(channel={"max_payload_bytes": 1000})
    lane = small.acquire()
    with pytest.raises(
        ResourceExhaustedError, match=r"5\d\d\d bytes.*describe themselves.*limit .*is 1000"
    ):
        lane.call(kit.ECHO, 1, large, None, dynamic=True)
    assert lane.usable
    assert lane.call(kit.ADD, 1, addend(1), kit.NUMBER) == [1]
    small.release(lane)
    server, _ = pair.serve(limits=Limits(payload_bytes=1000))
    peer = pair.connect(server)
    lane = peer.acquire()
    with pytest.raises(
        ResourceExhaustedError, match=r"5\d\d\d bytes.*describe themselves.*limit .*is 1000"
    ):
        lane.call(kit.ECHO, 1, large, None, dynamic=True)
    assert lane.call(kit.ADD, 1, addend(1), kit.NUMBER) == [1]
    peer.release(lane)
    peer.close()
    server.stop()


def test_reply_has_no_payload_limit(pair):
    """A reply is received whatever its size, since the caller asked for the reply."""
    pair.desk.reply = lambda: Reply([np.zeros(5000, np.uint8)], dynamic=True)
    peer = pair.connect(channel={"max_payload_bytes": 1000})
    lane = peer.acquire()
    assert [a.nbytes for a in lane.call(kit.SUM, 1, [], None)] == [5000]
    peer.release(lane)


def test_reply_without_memory_names_bytes():
    """A reply for which there is no memory is a ResourceExhaustedError that names its bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            sock, _ = listening.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(frames.pack_header(frames.MAGIC, frames.WELCOME, 0, 0, 0, 77, 0))
                sock.recv(4096)
                sock.sendall(
                    frames.pack_header(frames.MAGIC, frames.REPLY, frames.DYNAMIC, 9, 1, 0, 1 << 60)
                )
                sock.recv(1)  # until the client hangs up

        thread = threading.Thread(target=serve)
        thread.start()
        there = Endpoint("127.0.0.1", listening.getsockname()[1], None, "", 77)
        peer = make_peer(lambda timeout: there, key=None, options=ChannelOptions(heartbeat_secs=60))
        lane = peer.acquire()
        with pytest.raises(
            ResourceExhaustedError,
            match=f"/job:ps/task:0.*no memory for a reply of {1 << 60} bytes",
        ):
            lane.call(9, 1, [], None)
        peer.release(lane)
        thread.join(60)
        peer.close()


def test_several_lanes_send_before_receiving(pair):
    """Calls on other lanes are answered while a call on the first lane waits."""
    lanes = [pair.peer.acquire() for _ in range(3)]
    pair.desk.release.clear()
    lanes[0].send(kit.BLOCK, 1, [])
    for lane in lanes[1:]:
        lane.send(kit.ADD, 1, addend(1))
    assert sorted(int(lane.receive(kit.NUMBER)[0]) for lane in lanes[1:]) == [1, 2]
    pair.desk.release.set()
    assert lanes[0].receive(kit.NUMBER) == [1]
    for lane in lanes:
        pair.peer.release(lane)


def test_lane_carries_one_call_at_once(pair):
    """A lane refuses a second call before the answer of the first, and a receive without a call."""
    lane = pair.peer.acquire()
    with pytest.raises(FailedPreconditionError, match="no call"):
        lane.receive(kit.NUMBER)
    lane.send(kit.SUM, 1, [])
    with pytest.raises(FailedPreconditionError, match="under way"):
        lane.send(kit.SUM, 1, [])
    assert lane.receive(kit.NUMBER) == [0]
    pair.peer.release(lane)


def test_wrong_token_is_unauthenticated(pair):
    """A peer with another token is refused, and the server keeps no lane for the peer."""
    with pytest.raises(UnauthenticatedError, match="another token") as caught:
        pair.connect(key=b"guess").acquire()
    assert caught.value.task == TASK
    assert pair.server.counters.lanes == 0


def test_deadline_ends_the_call(pair):
    """A call ends at its deadline with an error that names the task, and a new lane works."""
    lane = pair.peer.acquire()
    start = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="deadline") as caught:
        lane.call(kit.BLOCK, 1, [], kit.NUMBER, deadline=start + 0.2)
    assert time.monotonic() - start > 0.15 and caught.value.task == TASK
    assert not lane.usable
    pair.peer.release(lane)
    lane = pair.peer.acquire()
    for _ in range(3):
        assert lane.call(kit.SUM, 1, [], kit.NUMBER, deadline=time.monotonic() + 60) == [0]
    pair.peer.release(lane)


def test_another_thread_cancels_a_call(pair):
    """A thread cancels the call that another thread waits for."""
    lane = pair.peer.acquire()
    lane.send(kit.BLOCK, 1, [])
    assert pair.desk.blocked.acquire(timeout=60)
    threading.Timer(0.05, lane.cancel).start()
    with pytest.raises(CancelledError) as caught:
        lane.receive(kit.NUMBER)
    assert caught.value.task == TASK and not lane.usable
    pair.peer.release(lane)


def test_handler_hears_of_hang_up(pair):
    """The handler hears of the hang-up of the client whose call runs."""
    lane = pair.peer.acquire()
    lane.send(kit.BLOCK, 1, [])
    assert pair.desk.blocked.acquire(timeout=60)
    lane.cancel()
    assert pair.desk.release.wait(60)
    assert (kit.CLIENT, lane.number) in pair.desk.hung_up
    pair.peer.release(lane)


def test_cut_connections_do_not_show(pair):
    """Calls on a lane whose connection is cut run once each and return their results."""
    lane = pair.peer.acquire()
    for expected in range(1, 20):
        if expected % 3 == 0:
            lane.link.interrupt()
        lane.send(kit.ADD, 1, addend(1))
        if expected % 3 == 1:
            lane.link.interrupt()
        assert lane.receive(kit.NUMBER) == [expected]
    pair.peer.release(lane)
    assert pair.desk.runs == 19
    assert pair.server.counters.accepted > 10


def test_cut_call_runs_once(pair):
    """A call that is sent again while its first run goes on waits for the run's answer."""
    pair.desk.disconnected = lambda client, lane: None  # a stage that runs on, whoever waits for it
    lane = pair.peer.acquire()
    lane.send(kit.SLOW_ADD, 1, addend(5))
    assert pair.desk.blocked.acquire(timeout=60)
    lane.link.interrupt()
    got = []
    thread = threading.Thread(target=lambda: got.extend(lane.receive(kit.NUMBER)))
    thread.start()
    # The second connection says hello, sends the call again and waits for the first one's thread.
    until(lambda: pair.server.counters.calls == 2)
    assert not got
    pair.desk.release.set()
    thread.join(60)
    assert got == [5] and pair.desk.runs == 1
    pair.peer.release(lane)


def test_unremembered_reply_tensors_are_released(pair):
    """The server drops a reply's tensors after sending, unless the reply must be remembered."""
    made = []

    class Tensor(np.ndarray):
        pass

    def reply(remember):
        tensor = np.zeros((), np.int64).view(Tensor)
        made.append(weakref.ref(tensor))
        return Reply([tensor], remember=remember)

    lane = pair.peer.acquire()
    pair.desk.reply = lambda: reply(False)
    lane.call(kit.SUM, 1, [], kit.NUMBER)
    until(lambda: made[0]() is None)
    pair.desk.reply = lambda: reply(True)
    lane.call(kit.SUM, 1, [], kit.NUMBER)
    gc.collect()
    assert made[1]() is not None
    pair.desk.reply = lambda: Reply([kit.number(0 if made[1]() is None else 1)])
    assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0], "gone before the next call runs"
    pair.peer.release(lane)


def test_failed_call_leaves_no_tensors(pair):
    """An error of a call keeps no tensor of its handler alive."""
    made = []

    def reply():
        tensor: Any = np.zeros(10).view(type("Tensor", (np.ndarray,), {}))
        made.append(weakref.ref(tensor))
        raise NotFoundError(f"bad {len(tensor)}")

    pair.desk.reply = reply
    lane = pair.peer.acquire()
    gc.disable()
    try:
        with pytest.raises(NotFoundError, match="bad 10"):
            lane.call(kit.SUM, 1, [], kit.NUMBER)
        until(lambda: made[0]() is None)
    finally:
        gc.enable()
    pair.peer.release(lane)


def test_goodbye_drops_the_memory(pair):
    """The server forgets the lanes of a peer that closes, and the closed peer gives out no lane."""
    lanes = [pair.peer.acquire() for _ in range(3)]
    for lane in lanes:
        lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
        pair.peer.release(lane)
    assert pair.server.counters.lanes >= 3
    pair.peer.close()
    until(lambda: pair.server.counters.lanes == 0)
    with pytest.raises(CancelledError, match="closed"):
        pair.peer.acquire()


def test_lanes_are_forgotten_after_a_while(pair, often):
    """A lane without a connection is forgotten after lane_memory_secs."""
    server, _ = pair.serve(lane_memory_secs=0.1)
    peer = pair.connect(server)
    lane = peer.acquire()
    lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
    with pytest.raises(DeadlineExceededError):
        lane.call(kit.SLOW_ADD, 1, addend(1), kit.NUMBER, deadline=time.monotonic() + 0.05)
    peer.release(lane)
    heartbeat_only = 1
    until(lambda: server.counters.lanes == heartbeat_only)
    peer.close()
    server.stop()


def test_many_threads_share_a_peer(pair):
    """Eight threads share one peer, and each call runs once on at most one lane a thread."""

    def work():
        for _ in range(50):
            lane = pair.peer.acquire()
            lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
            pair.peer.release(lane)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert pair.desk.total == 400
    assert pair.server.counters.calls == 400
    assert pair.server.counters.lanes <= 9  # with that of the heartbeat


def test_large_buffers_are_given_back(pair):
    """A connection shrinks its buffer when large calls no longer come."""
    lane = pair.peer.acquire()
    lane.call(kit.ECHO, 1, [np.zeros(20 << 20, np.uint8)], None, dynamic=True)
    connection = next(c for c in pair.server._connections if c.lane == lane.number)
    assert connection.receiver.capacity > 20 << 20
    for _ in range(70):
        lane.call(kit.ADD, 1, addend(1), kit.NUMBER)
    assert connection.receiver.capacity < 1 << 20
    pair.peer.release(lane)


def test_stop_lets_calls_end(pair):
    """A server that stops lets a running call end within its grace."""
    lane = pair.peer.acquire()
    lane.send(kit.SLOW_ADD, 1, addend(3))
    assert pair.desk.blocked.acquire(timeout=60)
    stopper = threading.Thread(target=pair.server.stop, args=(10.0,))
    stopper.start()
    pair.desk.release.set()
    assert lane.receive(kit.NUMBER) == [3]
    stopper.join(60)
    assert not stopper.is_alive()
    pair.peer.release(lane)


def test_stop_cuts_calls_after_grace(pair):
    """A server that stops hangs up on calls that outlast its grace."""
    lane = pair.peer.acquire()
    lane.send(kit.BLOCK, 1, [])
    assert pair.desk.blocked.acquire(timeout=60)
    pair.server.stop(0.1)
    assert pair.desk.hung_up  # and not the end of the call, which comes when it is released
    lane.cancel()
    pair.peer.release(lane)


def test_close_cancels_a_call_under_way(pair):
    """Closing a peer cancels its call under way."""
    lane = pair.peer.acquire()
    lane.send(kit.BLOCK, 1, [])
    assert pair.desk.blocked.acquire(timeout=60)
    threading.Timer(0.05, pair.peer.close).start()
    with pytest.raises(CancelledError):
        lane.receive(kit.NUMBER)
    pair.peer.release(lane)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: ps0\r\n\r\n" * 3,
        bytes(1000),
        frames.pack_header(frames.MAGIC, frames.CALL, 0, 1, 1, 1, 2**63),
        frames.pack_header(frames.MAGIC, frames.HELLO, 0, 0, 0, 0, 2**63),
        frames.pack_header(frames.MAGIC, frames.HELLO, 0, 0, 0, 0, 5) + b"short",
        frames.pack_header(frames.MAGIC + 1, frames.HELLO, 0, 0, 0, 0, 0),
    ],
)
def test_garbage_closes_its_connection_only(pair, garbage):
    """Bytes that are no frame close their own connection, and other clients are served."""
    with socket.create_connection(("127.0.0.1", pair.server.port), timeout=60) as sock:
        sock.sendall(garbage)
        # closed with our bytes unread: as good as an end
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1000):
                continue
    lane = pair.peer.acquire()
    assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0]
    pair.peer.release(lane)


def test_fast_path_can_be_turned_off(set_variables):
    """BELLWETHER_FAST_PATH=0 keeps a lane from the Unix socket."""
    server, _ = make_server()
    try:
        for variable, unix in (("1", True), ("0", False)):
            set_variables(BELLWETHER_FAST_PATH=variable)
            peer = make_peer(lambda timeout: server.endpoint("127.0.0.1"))
            lane = peer.acquire()
            assert kit.is_unix(lane) == unix
            peer.release(lane)
            peer.close()
    finally:
        server.stop()


def test_unix_socket_is_private_and_removed():
    """The directory of a server's Unix socket is open to its user alone and goes with the server."""
    server, _ = make_server()
    assert server.unix_path
    directory = os.path.dirname(server.unix_path)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    server.stop()
    assert not os.path.exists(directory) and server.unix_path is None


def test_foreign_unix_path_is_not_used():
    """A client uses a Unix socket only if the endpoint is of its own host and the path exists."""
    server, _ = make_server()
    here = server.endpoint("127.0.0.1")
    for endpoint in (
        dataclasses.replace(here, host_id="elsewhere"),
        dataclasses.replace(here, unix_path=f"{here.unix_path}x"),
        dataclasses.replace(here, unix_path=None),
    ):
        peer = make_peer(functools.partial(lambda found, timeout: found, endpoint))
        lane = peer.acquire()
        assert not kit.is_unix(lane)
        peer.release(lane)
        peer.close()
    server.stop()


def test_untrusted_certificate_is_unauthenticated(certificates, tmp_path):
    """A client refuses a server whose certificate another authority signed."""
    server, _ = make_server(tls=certificates.server_context)
    peer = make_peer(
        lambda timeout: server.endpoint("127.0.0.1"),
        certificates=Certificates(make(tmp_path / "other")),
        options=ChannelOptions(prefer_unix=False),
    )
    with pytest.raises(UnauthenticatedError, match="certificate"):
        peer.acquire()
    peer.close()
    server.stop()


def test_silent_strangers_are_cut(often):
    """A connection that has not said hello after hello_secs is closed."""
    server, _ = make_server(limits=Limits(hello_secs=0.1))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b""
    server.stop()


def test_too_many_connections_are_refused():
    """A connection above the limit is refused with the name of the limit."""
    server, _ = make_server(limits=Limits(connections=1))
    peer = make_peer(
        lambda timeout: server.endpoint("127.0.0.1"), options=ChannelOptions(heartbeat_secs=60)
    )
    lane = peer.acquire()
    # The lane or the heartbeat has the only place; whoever comes next is told.
    with pytest.raises(
        ResourceExhaustedError,
        match="1 connections.*the limit connections is 1 .--limit_connections",
    ):
        for _ in range(3):
            peer.acquire()
    peer.release(lane)
    peer.close()
    server.stop()


def test_hang_up_is_seen_without_reading():
    """A hang-up of the other side shows without a read, and so does a closed socket."""
    near, far = socket.socketpair()
    assert not sockets.hung_up(near)
    far.close()
    assert sockets.hung_up(near)
    near.close()
    assert sockets.hung_up(near)
