"""Figures for Prometheus: who reaches them is said by --metrics_host, and nobody holds a thread for long."""

import logging
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from absl import flags
from absl.testing import flagsaver

import runtime as rt
from harness import monitoring
from harness.monitoring.prometheus import REQUESTS, MetricsServer
from harness.monitoring.times import REQUEST_SECS


@pytest.fixture(scope="module")
def server() -> Iterator[rt.Server]:
    with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as made:
        yield made


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=30):
            return True
    except ConnectionRefusedError:
        return False


def scrape(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_figures_stay_on_this_machine(server: rt.Server) -> None:
    """The figures are for this machine only, unless the task itself is insecure."""
    outer = [
        a.address
        for found in psutil.net_if_addrs().values()
        for a in found
        if a.family == socket.AF_INET and not a.address.startswith("127.")
    ]
    with MetricsServer(server, 0) as endpoint:
        assert [host for host in ("127.0.0.3", *outer) if listens(host, endpoint.port)] == []
        assert "bellwether_started_unix_secs" in scrape(endpoint.port)
    with pytest.raises(
        rt.InvalidArgumentError, match="0.0.0.0 are for others, too.*BELLWETHER_SECURITY"
    ):
        MetricsServer(server, 0, "0.0.0.0")
    with rt.Server(
        {"worker": ["localhost:0"]}, "worker", 0, security=rt.Security.insecure()
    ) as insecure:
        with MetricsServer(insecure, 0, "0.0.0.0") as endpoint:
            assert [
                host for host in ("127.0.0.3", *outer) if not listens(host, endpoint.port)
            ] == []


def test_flag_chooses_the_host(server: rt.Server, caplog: pytest.LogCaptureFixture) -> None:
    """--metrics_host chooses the address of the figures."""
    flags.FLAGS.mark_as_parsed()
    caplog.set_level(logging.INFO)

    def port() -> int:
        return int(re.findall(r"figures for Prometheus at port (\d+)", caplog.text)[-1])

    with flagsaver.flagsaver(metrics_port=0), monitoring.watched(server):
        assert listens("127.0.0.1", port()) and not listens("127.0.0.3", port())
    with flagsaver.flagsaver(metrics_port=0, metrics_host="127.0.0.3"), monitoring.watched(server):
        assert listens("127.0.0.3", port()) and not listens("127.0.0.1", port())
        assert "bellwether_started_unix_secs" in scrape(port(), "127.0.0.3")


@pytest.mark.cluster  # waits for a limit of seconds
def test_half_requests_hold_few_threads(server: rt.Server) -> None:
    """Half requests hold a bounded number of threads for a bounded time."""
    before = threading.active_count()
    with MetricsServer(server, 0) as endpoint:
        half = []
        for _ in range(10 * REQUESTS):
            half.append(socket.create_connection(("127.0.0.1", endpoint.port), timeout=60))
            try:
                half[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost:")
            except OSError:
                pass  # turned away already
        began = time.monotonic()
        assert threading.active_count() <= before + 1 + REQUESTS
        for sock in half:  # all are hung up on, whether they say more or not
            try:
                assert sock.recv(1000) == b""
            except ConnectionResetError:
                pass
        assert time.monotonic() - began < REQUEST_SECS + 50
        assert "bellwether_started_unix_secs" in scrape_soon(endpoint)
        for sock in half:
            sock.close()


def scrape_soon(endpoint: MetricsServer) -> str:
    """As Prometheus: it comes again where it was turned away."""
    until = time.monotonic() + 60
    while True:
        try:
            return scrape(endpoint.port)
        except OSError:
            if time.monotonic() > until:
                raise
            threading.Event().wait(0.1)


@pytest.mark.cluster  # waits for a limit of seconds
def test_dribbling_client_is_disconnected(server: rt.Server) -> None:
    """A client that sends a byte at a time is disconnected after the time of a request."""
    with (
        MetricsServer(server, 0) as endpoint,
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) as sock,
    ):
        sock.settimeout(0.5)
        until = time.monotonic() + REQUEST_SECS + 60
        sock.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        while time.monotonic() < until:
            try:
                sock.sendall(b"x")  # always something within any time limit of one read
                if sock.recv(10) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it is served for ever")
