"""Parts that the tests of who is let in share: training that must not notice, and strangers at each port."""

import contextlib
import re
import secrets
import socket
import ssl
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import runtime as rt
from harness.certs import CA
from harness.monitoring.prometheus import MetricsServer
from runtime.cluster.endpoint import Endpoint
from runtime.cluster.spec import split_address
from runtime.trust.security import Security
from runtime.wire import frames
from tests.runtime import kit

PS = "/job:ps/task:0"


class Training:
    """A ps and a worker, as if in two processes, and a worker's session that never stops."""

    def __init__(self, security: Security) -> None:
        self.security = security
        cluster = kit.addresses(ps=1, worker=1)
        self.stack = contextlib.ExitStack()
        self.ps = self.stack.enter_context(rt.Server(cluster, "ps", 0, security=self.security))
        self.worker = self.stack.enter_context(
            rt.Server(cluster, "worker", 0, security=self.security)
        )
        for server in (self.ps, self.worker):
            kit.set_apart(server)
        self.metrics = self.stack.enter_context(MetricsServer(self.ps, 0, "0.0.0.0"))
        self.steps = 0
        self.failure: BaseException | None = None
        self._over = threading.Event()
        self._moved = threading.Condition()
        with rt.Graph().as_default() as graph, rt.device(PS):
            self._w = rt.Variable(np.zeros(3, np.float32), name="w")
            self._step = self._w.assign_add(np.ones(3, np.float32))
            initialize = rt.global_variables_initializer()
        self._session = self.stack.enter_context(
            rt.Session(self.worker.target, graph, security=self.security)
        )
        self._session.run(initialize)
        self._thread = threading.Thread(target=self._train, name="trains")
        self._thread.start()

    def _train(self) -> None:
        try:
            while not self._over.is_set():
                self._session.run(self._step)
                with self._moved:
                    self.steps += 1
                    self._moved.notify_all()
        except BaseException as error:
            self.failure = error
            with self._moved:
                self._moved.notify_all()

    def goes_on(self, steps: int = 20) -> None:
        """Waits until training has gone on for some steps."""
        with self._moved:
            goal = self.steps + steps
            assert self._moved.wait_for(lambda: self.steps >= goal or self.failure is not None, 120)
        assert self.failure is None

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        try:
            assert self.failure is None
            assert self._session.run(self._w).tolist() == [self.steps] * 3
        finally:
            self.stack.close()

    def endpoint(self, way: str) -> Endpoint:
        there = self.ps.tensors.endpoint("127.0.0.1")
        return (
            there
            if way == "unix"
            else Endpoint(there.host, there.port, None, there.host_id, there.incarnation)
        )


def forget_refusals(server: rt.Server) -> None:
    """Has a server log the next refusal of any client at once."""
    server._parts.refusals._told.clear()


def told(caplog: pytest.LogCaptureFixture, pattern: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if re.search(pattern, r.getMessage())]


def context_of(
    authority: CA | None, pair: tuple[bytes, bytes] | None, tmp_path: Path
) -> ssl.SSLContext:
    """A client of Python's own, which looks at nothing itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if pair is not None:
        (tmp_path / "key").write_bytes(pair[0])
        (tmp_path / "pem").write_bytes(pair[1])
        context.load_cert_chain(tmp_path / "pem", tmp_path / "key")
    return context


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
PORTS = ("grpc", "tensors", "metrics")


def greeting(way: str) -> bytes:
    """How a client begins."""
    if way == "tensors":
        hello = frames.encode_hello(frames.LaneHello(secrets.randbits(60) | 1, 1, 1, bytes(16)))
        return frames.pack_header(frames.MAGIC, frames.HELLO, 0, 0, 0, 0, len(hello)) + hello
    return PREFACE if way == "grpc" else b"GET /metrics HTTP/1.0\r\n\r\n"


def port_of(training: Training, way: str) -> int:
    ports = {"grpc": split_address(training.ps.address)[1], "tensors": training.ps.tensors.port}
    return ports.get(way, training.metrics.port)


def answer(training: Training, way: str, context: ssl.SSLContext | None) -> bytes:
    """What a stranger hears at a port who begins as is usual there; nothing when it is hung up on."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(
            socket.create_connection(("127.0.0.1", port_of(training, way)), timeout=60)
        )
        try:
            if context is not None:
                sock = stack.enter_context(context.wrap_socket(sock))
            sock.sendall(greeting(way))
            return sock.recv(1000)
        except (ssl.SSLError, ConnectionError):
            return b""


def figures(training: Training, given: ssl.SSLContext | None) -> str:
    scheme = "http" if given is None else "https"
    with urllib.request.urlopen(
        f"{scheme}://127.0.0.1:{training.metrics.port}/metrics", timeout=60, context=given
    ) as a:
        return str(a.read().decode())
