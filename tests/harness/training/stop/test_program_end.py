"""A ps whose program ends while training goes on: whom the process waits for, and whom not."""

import json
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.kit.processes import Program
from tests.runtime.kit import addresses

pytestmark = pytest.mark.cluster

MODEL = """
import json, sys, time
import harness, runtime as rt
cluster = json.loads(sys.argv[1])
def step():
    with rt.device("/job:ps/task:0"):
        return harness.get_or_create_global_step().assign_add(1).op
"""
OPEN = """
servers = rt.Server(cluster, "ps", 0), rt.Server(cluster, "worker", 0)
train = step()
sv = harness.Supervisor()
session = sv.prepare_or_wait_for_session(servers[1].target)
session.run(train)
"""
STOP = """
sv.stop()
print("JOINED", servers[0].join())
"""
LATE = """
import threading
def serve():
    threading.main_thread().join()
    with rt.Server.create_local_server() as server, rt.Session(server.target) as session:
        print("GOT", session.run(rt.constant(3.0)))
threading.Thread(target=serve).start()
"""
WORKER = """
def work():
    with rt.Server(cluster, "worker", 0) as server:
        train = step()
        with harness.MonitoredTrainingSession(server.target, True) as session:
            while True:
                session.run(train)
                print("TRAINS", flush=True)
                time.sleep(0.1)
"""
PS = """
from absl import logging
logging.set_verbosity(logging.INFO)
server = rt.Server(cluster, "ps", 0)
while not server.worker.store.run.connected():
    time.sleep(0.05)
print("OVER", flush=True)
"""
BUSY = """
import jax.numpy as jnp
server = rt.Server(cluster, "worker", 0)
with rt.device("/job:ps/task:0"):
    matrix = rt.Variable(jnp.zeros((512, 512)), name="matrix")
    update = matrix.assign_add(rt.call(lambda a: jnp.tanh(a @ a), matrix))
with rt.Session(server.target) as session:
    session.run(matrix.initializer)
    print("COMPILES", flush=True)
    session.run(update.op)
    print("TRAINS", flush=True)
    while True:
        session.run(update.op)
"""
FAILS = """
server = rt.Server(cluster, "ps", 0)
input()
raise ValueError("the program's own")
"""
DAEMON = """
import multiprocessing
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work, daemon=True).start()
"""


@pytest.mark.parametrize("end", ["", STOP], ids=["the program ends", "the ps is joined"])
def test_open_session_of_own_process(end: str) -> None:
    """No ps waits for a session that its own process has left open."""
    with Program("python", "-c", MODEL + OPEN + end, argument()) as program:
        assert ("JOINED True" in program.result(30.0)) == bool(end)


def test_server_of_thread_after_main() -> None:
    """A thread that outlives the main thread may start a server."""
    with Program("python", "-c", MODEL + LATE, argument()) as program:
        assert "GOT 3.0" in program.result()


def test_daemon_processes_end_with_ps(tmp_path: Path) -> None:
    """A ps whose program has started the worker as a daemon process comes to an end."""
    path = tmp_path / "program.py"
    path.write_text(MODEL + WORKER + DAEMON + textwrap.indent(PS, "    "))
    with Program("python", str(path), argument(), cold=True) as program:
        program.expect("OVER")
        assert program.wait(30.0) == 0


@pytest.mark.parametrize(
    "end", ["", "server.stop(); "], ids=["it serves on", "its server is stopped"]
)
def test_exit_code_of_ps_stays(end: str) -> None:
    """A ps that calls sys.exit serves on for connected workers, unless it stops its server, and ends with its code."""
    given = argument()
    with (
        Program("python", "-c", MODEL + PS + end + "sys.exit(3)", given) as ps,
        Program("python", "-c", MODEL + WORKER + "work()", given) as worker,
    ):
        if not end:
            ps.expect("the program is over; serving on for the sessions of /job:worker/task:0")
            worker.expect("TRAINS")
            assert ps.code is None
            worker.kill()
        assert ps.wait(30.0) == 3


@pytest.mark.parametrize("during", ["COMPILES", "TRAINS"])
def test_failed_ps_ends_with_1(during: str) -> None:
    """A ps whose program fails ends with 1, also while it compiles or computes for a worker."""
    given = argument()
    with (
        Program("python", "-c", MODEL + FAILS, given) as ps,
        Program("python", "-c", MODEL + BUSY, given) as worker,
    ):
        worker.expect(during)
        time.sleep(0.1)  # native code begins a moment later, and no sign shows it
        ps.enter("go")
        assert ps.wait(30.0) == 1


def test_interrupt_ends_ps_after_program() -> None:
    """Ctrl-C ends a ps that serves on after its program, without a traceback."""
    given = argument()
    with (
        Program("python", "-c", MODEL + PS, given) as ps,
        Program("python", "-c", MODEL + WORKER + "work()", given) as worker,
    ):
        ps.expect("the program is over; serving on for the sessions of /job:worker/task:0")
        worker.expect("TRAINS")
        assert ps.code is None
        ps.signal(signal.SIGINT)
        assert ps.wait(30.0) == 0
        assert "Traceback" not in ps.output()


def argument() -> str:
    return json.dumps(addresses(ps=1, worker=1))
