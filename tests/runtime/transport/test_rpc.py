"""How the control plane reaches a task again."""

import socket
import struct
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from harness.launch.ports import free_ports
from runtime.errors import CancelledError
from runtime.server import threads
from runtime.transport import rpc

ATTEMPTS = 12


def test_a_call_over_a_channel_that_was_closed_is_cancelled() -> None:
    channel = rpc.open_channel("127.0.0.1:1")
    method = channel.unary_unary("/any/method")
    channel.close()
    with pytest.raises(CancelledError, match="closed"):
        rpc.call(method, b"", timeout=1, task="/job:ps/task:0")


def test_attempts_to_connect_again_come_fast_and_do_not_slow_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        with rpc.open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            call = channel.unary_unary("/any/method").future(b"", timeout=600, wait_for_ready=True)
            for _ in range(ATTEMPTS):
                connection, _ = listener.accept()  # within 30 s: gRPC's own pauses grow to two minutes
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


def test_a_task_that_comes_back_at_another_address_is_found_within_seconds() -> None:
    """gRPC by itself asks the name server again after half a minute at the soonest."""
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
