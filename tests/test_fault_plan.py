"""Fault plans are values; links carry bytes and can be cut; leaks are found."""

import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults import Fault, FaultPlan, Kind, Links, no_leaks

TASKS = ["ps:0", "ps:1", "worker:0", "worker:1"]


def test_plan_is_a_printable_value() -> None:
    """A fault plan is a value that prints its faults."""
    empty = FaultPlan(seed=7)
    plan = (
        empty.kill("worker", 1, at_step=200)
        .kill("worker", 1, after_secs=1)
        .freeze("ps", 0, secs=5)
        .cut("worker:0", "ps:1", secs=2, at_secs=3, reset=True)
        .stop("worker", 0, restart_secs=0.5)
    )
    assert empty.faults == ()
    assert plan.faults[0] == Fault(Kind.KILL, "worker:1", at_step=200)
    assert str(plan) == (
        "seed 7: kill worker:1 at step 200; kill worker:1 1 s later; freeze ps:0 for 5 s; "
        "cut worker:0 from ps:1 (reset) at 3 s for 2 s; stop worker:0, again after 0.5 s"
    )


def test_plan_draws_a_seed() -> None:
    """A plan without a seed draws a seed."""
    assert FaultPlan().seed != FaultPlan().seed
    assert FaultPlan().kill("ps", 0).seed is not None


def test_impossible_faults_are_refused() -> None:
    """Faults with contradictory or negative times are refused."""
    with pytest.raises(ValueError, match="at_step or at_secs, not both"):
        FaultPlan().kill("ps", 0, at_step=1, at_secs=1)
    with pytest.raises(ValueError, match="freeze ps:0: secs=-1 is below 0"):
        FaultPlan().freeze("ps", 0, secs=-1)


@given(st.integers(0, 2**32), st.integers(0, 40), st.floats(1, 1000))
def test_random_plans_repeat_and_are_fair(seed: int, count: int, over_secs: float) -> None:
    """A random plan repeats with its seed and hits all tasks equally often."""
    plan = FaultPlan.random(TASKS, count, over_secs, seed=seed)
    assert plan == FaultPlan.random(TASKS, count, over_secs, seed=seed)
    assert len(plan.faults) == count
    times = [fault.at_secs or 0.0 for fault in plan.faults]
    assert times == sorted(times) and all(0 <= at <= over_secs for at in times)
    hits = [sum(fault.task == task for fault in plan.faults) for task in TASKS]
    assert max(hits) - min(hits) <= 1
    for fault in plan.faults:
        assert (fault.peer != "") == (fault.kind is Kind.CUT)
        assert fault.peer == "" or fault.peer.partition(":")[0] != fault.task.partition(":")[0]


def connect(links: Links, task: str, port: int) -> socket.socket:
    """A connection of a task to a port of this machine, by the task's proxy."""
    sock = socket.create_connection(("127.0.0.1", links.ports[task]), 5)
    sock.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
    return sock


def answer(sock: socket.socket) -> str:
    return sock.recv(100).decode().partition("\r\n")[0]


def test_links_carry_drop_and_reset() -> None:
    """Links carry bytes, hold them while cut, and reset connections."""
    with no_leaks(), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        links = Links(["a:0", "b:0"], lambda asked: "b:0" if asked == port else "")
        try:
            with connect(links, "a:0", port) as client:
                server, _ = listener.accept()
                with server:
                    assert answer(client) == "HTTP/1.1 200 Connected"
                    client.sendall(b"one")
                    assert server.recv(10) == b"one"
                    links.cut("b:0", "a:0")  # both ways, whichever is named first
                    client.sendall(b"two")
                    server.settimeout(0.1)
                    with pytest.raises(TimeoutError):
                        server.recv(10)
                    links.heal("a:0", "b:0")
                    server.settimeout(5)
                    assert server.recv(10) == b"two"  # late, and not lost
                    server.sendall(b"three")
                    assert client.recv(10) == b"three"
                    links.cut("a:0", "b:0", reset=True)
                    with pytest.raises(ConnectionError):
                        client.recv(10)
            with connect(links, "a:0", port) as client, pytest.raises(ConnectionError):
                assert client.recv(100) == b""
                raise ConnectionError("closed")
            links.heal("a:0", "b:0")
            with connect(links, "a:0", port) as client:
                assert answer(client) == "HTTP/1.1 200 Connected"
        finally:
            links.close()


def test_links_report_an_absent_listener() -> None:
    """A link answers 502 when no task listens at the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    links = Links(["a:0"], lambda asked: "")
    try:
        with connect(links, "a:0", port) as client:
            assert "502" in answer(client)
    finally:
        links.close()


def leak_thread() -> None:
    threading.Thread(target=time.sleep, args=(0.5,), name="forgotten").start()


@pytest.mark.cluster
def test_leaks_are_found(tmp_path: pathlib.Path) -> None:
    """Threads, sockets, files and processes that a block leaves behind are named."""
    kept: list[object] = []
    with pytest.raises(AssertionError, match="left behind: thread forgotten"), no_leaks(secs=0.05):
        leak_thread()
    with (
        pytest.raises(AssertionError, match="left behind: socket AF_INET 127.0.0.1:"),
        no_leaks(secs=0.05),
    ):
        kept.append(socket.create_server(("127.0.0.1", 0)))
    with (
        pytest.raises(AssertionError, match=f"left behind: file {tmp_path}/open"),
        no_leaks(secs=0.05),
    ):
        kept.append(open(tmp_path / "open", "w"))  # noqa: SIM115 - it is the leak
    with pytest.raises(AssertionError, match="left behind: process .*sleep"), no_leaks(secs=0.05):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        kept.append(child)
    child.kill()
    child.wait()
    for thing in kept[:2]:
        thing.close()  # type: ignore[attr-defined]
    with no_leaks():
        leak_thread()  # it ends in time


def test_block_error_is_not_hidden() -> None:
    """An error of the block is raised in place of its leaks."""
    with pytest.raises(KeyError, match="mine"), no_leaks(secs=0.0):
        raise KeyError("mine")
