"""A ps under load by strangers, and by a client that asks for too much, while another one trains and loses nothing."""

import contextlib
import json
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import runtime as rt
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc
from runtime.trust.security import find_token
from runtime.wire import frames
from runtime.wire.messages import pack
from tests.kit.processes import Program
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.server.test_pools import connection, proven
from tests.runtime.stranger import refused
from tests.runtime.wire.kit import say_hello

pytestmark = pytest.mark.cluster

SERVE = """
import json, resource, sys
import runtime as rt
cluster, limits, files = json.loads(sys.argv[1])
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
server = rt.Server(cluster, "ps", 0, limits=rt.Limits(**limits))
print("SERVING", server.tensors.port, flush=True)
server.join()
"""
SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How an HTTP/2 client begins."""
SILENT = 4096


class Trained:
    """A ps in a process of its own, and a client that trains on it until the block is over.

    Attributes:
        address: of the ps's gRPC port.
        data_port: of its tensor port.
        process: its figures.
        steps: that the client has trained so far.
        over: set when it should end.
    """

    def __init__(self, cluster: dict[str, list[str]], data_port: int, pid: int) -> None:
        self.address = cluster["ps"][0]
        self.data_port = data_port
        self.process = psutil.Process(pid)
        self.steps = 0
        self.over = threading.Event()
        self._failed: BaseException | None = None
        self._server = rt.Server(cluster, "worker", 0)
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        try:
            with (
                self._server,
                rt.Graph().as_default() as graph,
                rt.Session(self._server.target, graph) as sess,
            ):
                with rt.device("/job:ps/task:0"):
                    w = rt.Variable(np.zeros(100, np.float32), name="w")
                x = rt.placeholder(np.float32, [100], name="x")
                step = w.assign_add(x)
                sess.run(rt.global_variables_initializer())
                while not self.over.is_set():
                    sess.run(step, {x: np.ones(100, np.float32)})
                    self.steps += 1
                # nothing was lost, and nothing done twice
                assert sess.run(w).tolist() == [self.steps] * 100
        except BaseException as error:
            self._failed = error

    def goes_on(self) -> bool:
        """Whether training gets further from now on."""
        now = self.steps
        until(lambda: self.steps > now + 20 or self._failed is not None)
        return self._failed is None

    def figures(self) -> tuple[int, int]:
        """Descriptors and threads of the ps."""
        return self.process.num_fds(), self.process.num_threads()

    def __enter__(self) -> "Trained":
        self._thread.start()
        assert self.goes_on(), self._failed
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failed is not None:
            raise self._failed


@contextlib.contextmanager
def training(files: int = 0, **limits: Any) -> Iterator[Trained]:
    cluster = kit.addresses(ps=1, worker=1)
    with Program("python", "-c", SERVE, json.dumps([cluster, limits, files])) as ps:
        (port,) = ps.expect(r"SERVING (\d+)").groups()
        with Trained(cluster, int(port), ps.pid) as trained:
            yield trained
        ps.stop()


@contextlib.contextmanager
def many(port: int, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that say this and then nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made: list[socket.socket] = []
    try:
        for _ in range(min(count, hard - 500) if hard != resource.RLIM_INFINITY else count):
            made.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            with contextlib.suppress(OSError):  # it may have been ended before
                made[-1].sendall(says)
        yield made
    finally:
        for sock in made:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def newcomer(address: str, wait: float = 60.0) -> None:
    """A client that nobody has seen yet opens a session on the ps itself and reads what is there."""

    def read() -> bool:
        try:
            with rt.Graph().as_default() as graph, rt.Session(f"grpc://{address}", graph) as sess:
                with rt.device("/job:ps/task:0"):
                    w = rt.Variable(np.zeros(100, np.float32), name="w")
                assert sess.run(w)[0] >= 0
                return True
        except rt.UnavailableError:
            return False

    until(read, secs=wait)


@pytest.mark.parametrize("says", [b"", b"\x02\xb7"], ids=["nothing", "half a hello"])
def test_silent_connections_lock_nobody_out(says: bytes) -> None:
    """Silent connections to the tensor port keep no client out and cost few files and threads."""
    with training(hello_secs=600) as ps:
        before = ps.figures()
        with many(ps.data_port, SILENT, says):
            assert ps.goes_on()
            fds, threads = ps.figures()
            assert fds < before[0] + 200 and threads < before[1] + 200
            newcomer(ps.address)
            assert ps.goes_on()
        until(lambda: ps.figures()[0] <= before[0] + 2 and ps.figures()[1] <= before[1] + 4)


def test_silent_grpc_connections_are_bounded() -> None:
    """Silent connections to the gRPC port are bounded and give way."""
    with training() as ps:
        before = ps.figures()
        with many(int(ps.address.rpartition(":")[2]), SILENT):
            assert ps.goes_on()
            assert ps.figures()[0] < before[0] + rt.Limits().rpc_connections + 50
            newcomer(ps.address)  # after hello_secs
        until(lambda: ps.figures()[0] <= before[0] + 3)


def test_idle_grpc_connections_give_way() -> None:
    """Connections to the gRPC port that never call give way."""
    with training(rpc_idle_secs=1.0, connections=200) as ps:
        before = ps.figures()
        with many(int(ps.address.rpartition(":")[2]), 500, SETTINGS):
            assert ps.goes_on()
            assert ps.figures()[0] < before[0] + 100
            newcomer(ps.address)
        until(lambda: ps.figures()[0] <= before[0] + 3)


def test_few_files_leave_some_free() -> None:
    """A process with few files keeps some free, whoever connects."""
    with training(files=512, hello_secs=600, handshakes=10_000) as ps:
        with many(ps.data_port, 2000), many(int(ps.address.rpartition(":")[2]), 2000):
            assert ps.goes_on()
            assert ps.process.num_fds() < 500
            newcomer(ps.address)


def test_unclosed_sessions_harm_nobody() -> None:
    """Sessions that are never closed and endless plans are limited and harm nobody."""
    with training() as ps:
        rss = ps.process.memory_info().rss
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(connection(_Address(ps.address)))
            master = services_pb2_grpc.MasterServiceStub(proven(channel, _Address(ps.address)))
            sessions = []
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the limit client_sessions"):
                for _ in range(1000):
                    sessions.append(master.CreateSession(filters(), timeout=60).session)
            assert len(sessions) == rt.Limits().client_sessions
            plan = pb.RegisterPlanRequest(session=sessions[0])
            plan.plan.constants = pack([])
            plan.plan.slots = rt.Limits().plan_slots + 1
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the limit plan_slots"):
                master.RegisterPlan(plan, timeout=60)
            plan.plan.slots = 1
            for _ in range(2000):
                master.RegisterPlan(plan, timeout=60)
            assert ps.goes_on()
        newcomer(ps.address)
        assert ps.process.memory_info().rss < rss + (200 << 20)


def test_greedy_client_keeps_its_share() -> None:
    """A client that takes all connections gets its own share only."""
    with training(connections=256) as ps, contextlib.ExitStack() as stack:
        before = ps.figures()
        token = find_token(ps.address, None, 60)
        assert token is not None
        refusals = 0
        for lane in range(200):
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", ps.data_port), timeout=60)
            )
            file = stack.enter_context(sock.makefile("rwb"))
            kind, payload = say_hello(file, 7, token.key, "/job:ps/task:0", lane=lane)
            if kind == frames.ERROR:
                assert b"the limit client_connections is 16" in payload
                refusals += 1
        assert refusals == 200 - 16
        assert ps.goes_on()
        newcomer(ps.address)
        until(lambda: ps.figures()[0] < before[0] + 40)
        stack.close()
        until(lambda: ps.figures()[0] <= before[0] + 3 and ps.figures()[1] <= before[1] + 4)


class _Address:
    """What ``connection`` needs of a server in another process."""

    def __init__(self, address: str) -> None:
        self.address = address


def filters() -> pb.CreateSessionRequest:
    """A session that needs no task but the one that it asks."""
    return pb.CreateSessionRequest(options=pb.SessionOptions(device_filters=["/job:ps"]))
