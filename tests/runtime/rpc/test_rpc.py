"""How the control plane reaches a task again."""

import contextlib
import pathlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime.errors import CancelledError, UnavailableError
from runtime.limits import Limits
from runtime.rpc import rpc, threads
from tests.kit.ports import free_ports

ATTEMPTS = 12


@contextlib.contextmanager
def serving(
    handler: Callable[[bytes, grpc.ServicerContext], bytes],
) -> Iterator[tuple[str, Callable[[], object]]]:
    """A gRPC server with one method, /test/call: its address, and what stops it."""
    server = grpc.server(threads.CallThreads("test"), options=rpc.server_options(Limits()))
    handlers = {"call": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", lambda: server.stop(2).wait()
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("registered", [False, True])
def test_closed_channel_cancels_the_call(registered: bool) -> None:
    """A call over a closed channel is CancelledError, where gRPC by itself may end the process."""
    channel = rpc.open_channel("127.0.0.1:1")
    method: Any = channel.unary_unary("/any/method", _registered_method=registered)  # type: ignore[call-arg]
    channel.close()
    with pytest.raises(CancelledError, match="closed"):
        rpc.call(method, b"", timeout=1, task="/job:ps/task:0")


def test_channel_closed_meanwhile_cancels_call() -> None:
    """A call whose channel is closed meanwhile is CancelledError."""
    under_way, release = threading.Event(), threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
        under_way.set()
        release.wait(60)
        return request

    with serving(wait) as (address, _), rpc.open_channel(address) as channel:
        threading.Thread(target=lambda: under_way.wait(60) and channel.close(), daemon=True).start()
        with pytest.raises(CancelledError, match="closed"):
            rpc.call(channel.unary_unary("/test/call"), b"", timeout=60, task="/job:ps/task:0")
        release.set()


def cut_off(listener: socket.socket) -> None:
    """Answers a call by ending its stream with the code CANCEL, as a gRPC server does that stops before it takes it."""
    headers, reset, settings, acknowledged, cancel = 1, 3, 4, 1, 8
    client, _ = listener.accept()
    with client:
        stream = client.makefile("rb")
        stream.read(24)  # the preface of HTTP/2
        # length, which is 0, and kind; flags; stream
        client.sendall(struct.pack(">IBI", settings, 0, 0))
        while head := stream.read(9):
            size, kind, flags, number = head[:3], head[3], head[4], head[5:]
            stream.read(int.from_bytes(size, "big"))
            if kind == settings and not flags & acknowledged:
                client.sendall(struct.pack(">IBI", settings, acknowledged, 0))
            if kind == headers:
                client.sendall(
                    struct.pack(">IB", 4 << 8 | reset, 0) + number + struct.pack(">I", cancel)
                )


def test_cut_call_has_lost_contact() -> None:
    """A call that a stopping server cuts off is UnavailableError with the task."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=cut_off, args=(listener,), daemon=True).start()
        with rpc.open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            with pytest.raises(
                UnavailableError, match="^/job:ps/task:0: its server has cut the call off$"
            ):
                rpc.call(channel.unary_unary("/any/method"), b"", timeout=60, task="/job:ps/task:0")


def test_stopping_server_loses_contact() -> None:
    """Every call to a server that stops ends with UnavailableError."""
    errors: list[type[BaseException]] = []

    def keep_calling(address: str, begun: threading.Semaphore) -> None:
        with rpc.open_channel(address) as channel:
            method = channel.unary_unary("/test/call")
            rpc.call(method, b"", timeout=60, task="/job:ps/task:0")
            begun.release()
            try:
                while True:
                    rpc.call(method, b"", timeout=60, task="/job:ps/task:0")
            except Exception as error:
                errors.append(type(error))

    for _ in range(20):
        with serving(lambda request, context: request) as (address, stop):
            begun = threading.Semaphore(0)
            callers = [
                threading.Thread(target=keep_calling, args=(address, begun)) for _ in range(4)
            ]
            for caller in callers:
                caller.start()
            for _ in callers:
                assert begun.acquire(timeout=60)
            stop()
            for caller in callers:
                caller.join(60)
    assert errors == [UnavailableError] * 80


def test_reconnects_do_not_slow_down() -> None:
    """Attempts to connect again follow each other fast."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        with rpc.open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            call = channel.unary_unary("/any/method").future(b"", timeout=600, wait_for_ready=True)
            for _ in range(ATTEMPTS):
                # within 30 s: gRPC's own pauses grow to two minutes
                connection, _ = listener.accept()
                connection.close()  # a task that is about to be gone, or not there yet
            call.cancel()
            with pytest.raises(grpc.FutureCancelledError):
                call.result()


class NameServer(threading.Thread):
    """Answers questions for IPv4 addresses over UDP, and says that there is nothing else."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.address = "127.0.0.1"
        self.asked: list[float] = []
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            question, client = self._sock.recvfrom(4096)
            if not question:
                return
            end = question.index(b"\0", 12) + 5  # a name, its type and class
            is_a = question[end - 4 : end - 2] == b"\0\1"
            head = question[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, int(is_a), 0, 0)
            record = b"\xc0\x0c\0\1\0\1" + struct.pack(">IH", 0, 4) + socket.inet_aton(self.address)
            if is_a:
                self.asked.append(time.monotonic())
            self._sock.sendto(head + question[12:end] + (record if is_a else b""), client)

    def close(self) -> None:
        self._sock.sendto(b"", self._sock.getsockname())
        self.join(60)
        self._sock.close()


def _serve(address: str, port: int) -> grpc.Server:
    server = grpc.server(threads.CallThreads("test"))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    assert server.add_insecure_port(f"{address}:{port}") == port
    server.start()
    return server


def test_moved_task_is_found_within_seconds() -> None:
    """A task that comes back at another address is found within seconds."""
    names = NameServer()
    (port,) = free_ports(1)
    before = _serve("127.0.0.2", port)
    names.address = "127.0.0.2"
    with rpc.open_channel(f"dns://127.0.0.1:{names.port}/ps.test:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
        before.stop(None)
        after = _serve("127.0.0.3", port)
        names.address = "127.0.0.3"
        began = time.monotonic()
        check(health_pb2.HealthCheckRequest(), timeout=600, wait_for_ready=True)
        took = time.monotonic() - began
    after.stop(None)
    names.close()
    assert len(names.asked) >= 2
    assert took < 30  # 1 to 2 s when nothing else runs; by itself gRPC would not have asked before


def test_grpc_knows_every_option() -> None:
    """gRPC knows every option that its channels and servers are given."""
    library = pathlib.Path(cygrpc.__file__).read_bytes()
    for name, _ in [*rpc.CHANNEL_OPTIONS, *rpc.server_options(Limits())]:
        assert name.encode() + b"\0" in library, name


class PingCounter(threading.Thread):
    """Passes on a client's connection, and says when that has pinged often enough."""

    PING, ANSWER = 6, 1

    def __init__(self, server: int, wanted: int) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server = server
        self._wanted = wanted
        self.enough = threading.Event()
        self.start()

    def run(self) -> None:
        client, _ = self._listener.accept()
        self._listener.close()
        address = ("127.0.0.1", self._server)
        with client, client.makefile("rb") as stream, socket.create_connection(address) as server:
            back = threading.Thread(target=self._answers, args=(server, client), daemon=True)
            back.start()
            server.sendall(stream.read(24))  # the preface of HTTP/2
            seen = 0
            with contextlib.suppress(OSError):  # either end may be closed first
                while head := stream.read(9):
                    server.sendall(head + stream.read(int.from_bytes(head[:3], "big")))
                    seen += head[3] == self.PING and not head[4] & self.ANSWER
                    if seen >= self._wanted:
                        self.enough.set()
                server.shutdown(socket.SHUT_WR)
            back.join(60)

    @staticmethod
    def _answers(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # either end may be closed first
            while data := server.recv(65536):
                client.sendall(data)


@pytest.mark.cluster  # starts no process, but gRPC pings every second at most
def test_silent_call_outlives_its_pings() -> None:
    """A call that is silent for minutes is not ended by its own pings."""
    release = threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
        release.wait(120)
        return request

    server = grpc.server(threads.CallThreads("test"), options=rpc.server_options(Limits()))
    handlers = {"wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    # the fourth would be one too many
    counter = PingCounter(server.add_insecure_port("127.0.0.1:0"), wanted=6)
    server.start()
    faster = dict(rpc.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1_100}
    with grpc.insecure_channel(
        f"127.0.0.1:{counter.port}", options=list(faster.items())
    ) as channel:
        answer = channel.unary_unary("/test/wait").future(b"said", timeout=120)
        answer.add_done_callback(lambda _: counter.enough.set())  # also one that has failed
        assert counter.enough.wait(120)
        release.set()
        assert answer.result(60) == b"said"
    server.stop(None)
