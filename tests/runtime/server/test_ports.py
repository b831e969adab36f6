"""A port that somebody has already: who dies is waited for, and who lives is named."""

import errno
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence

import pytest

import runtime as rt
from runtime import timeouts
from tests.kit.changes import SetTimes
from tests.kit.processes import Program
from tests.runtime.kit import addresses

pytestmark = pytest.mark.cluster

IMPATIENT = "import runtime.timeouts; runtime.timeouts.PORT_SECS = 0.5"
MEMBER = f"""
{IMPATIENT}
import harness
with harness.join_cluster() as me:
    print("I am", me.job, me.index, flush=True)
    import sys; sys.stdin.readline()
"""
SERVE = """
import json, sys, runtime as rt
with rt.Server(json.loads(sys.argv[1]), "ps", 0) as server:
    print("serving", flush=True)
    server.join()
"""
HOLD = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('held'); sys.stdin.read()"


def serve(cluster: Mapping[str, Sequence[str]]) -> Program:
    return Program("python", "-c", SERVE, json.dumps(cluster))


@pytest.fixture
def impatient(set_times: SetTimes) -> None:
    set_times(timeouts, PORT_SECS=0.3)


def test_duplicate_task_is_one_line() -> None:
    """Two processes that are the same task get one line and the exit code of a wrong configuration."""
    (ps,), (worker,) = addresses(ps=1, worker=1).values()
    flags = [f"--ps_hosts={ps}", f"--worker_hosts={worker}", "--job_name=worker", "--task_index=0"]
    with Program("python", "-c", MEMBER, *flags) as first:
        first.expect("I am worker 0")
        with Program("python", "-c", MEMBER, *flags) as second:
            assert second.wait() == 2
            (line,) = second.lines("two tasks")
            port = worker.rpartition(":")[2]
            assert line == (
                "two tasks say that they are /job:worker/task:0: /job:worker/task:0 (process "
                f"{first.pid} on "
                f"{socket.gethostname()}) lives and serves at port {port} of 127.0.0.1, where this "
                "one was to serve: "
                "give each an index (--task_index) of its own"
            )
            assert second.lines()[-1] == line
        first.enter("enough")
        assert first.wait() == 0


def test_dying_process_is_waited_for() -> None:
    """A server waits for the port of a process that dies."""
    cluster = addresses(ps=1)
    with serve(cluster) as first:
        first.expect("serving")
        with serve(cluster) as second:
            second.expect(
                rf"port \d+ is taken by /job:ps/task:0 \(process {first.pid} on .*\): trying for "
                r"10 s"
            )
            first.signal(signal.SIGKILL)
            second.expect("serving")


@pytest.mark.usefixtures("impatient")
def test_frozen_process_is_named() -> None:
    """A port that a frozen process holds is refused with that process."""
    cluster = addresses(ps=1)
    with serve(cluster) as first:
        first.expect("serving")
        first.freeze()
        try:
            with pytest.raises(
                rt.UnknownError, match=rf"[Aa]ddress already in use, by process {first.pid} \("
            ):
                rt.Server(cluster, "ps", 0)
        finally:
            first.thaw()


@pytest.mark.usefixtures("impatient")
def test_stranger_at_port_is_named() -> None:
    """A port that a foreign process holds is refused with that process, and may be tried again."""
    cluster = addresses(ps=1)
    port = cluster["ps"][0].rpartition(":")[2]
    with Program("python", "-c", HOLD, port, cold=True) as stranger:
        stranger.expect("held")
        with pytest.raises(rt.UnknownError) as caught:
            rt.Server(cluster, "ps", 0)
        why = f"{os.strerror(errno.EADDRINUSE)}, by process {stranger.pid} ("
        said = f"cannot listen on port {port} of 127.0.0.1: {why}"
        assert (
            caught.value.message.startswith(said)
            and "give ps task 0 another port" in caught.value.message
        )
        assert caught.value.task == "/job:ps/task:0"
    rt.Server(cluster, "ps", 0).stop()


@pytest.mark.usefixtures("impatient")
def test_task_of_other_cluster_is_named() -> None:
    """A port that a task of another cluster holds is refused with that task."""
    cluster = addresses(ps=1, worker=1)
    with serve({**cluster, "ps": [*cluster["ps"], *addresses(ps=1)["ps"]]}) as first:
        first.expect("serving")
        with pytest.raises(
            rt.UnknownError, match=rf"/job:ps/task:0 of another cluster \(process {first.pid} on"
        ):
            rt.Server(cluster, "ps", 0)


def test_own_port_is_not_awaited(set_times: SetTimes) -> None:
    """A port that the same process holds is refused at once."""
    set_times(timeouts, PORT_SECS=3600.0)
    cluster = addresses(ps=1)
    port = cluster["ps"][0].rpartition(":")[2]
    with (
        rt.Server(cluster, "ps", 0),
        pytest.raises(rt.InvalidArgumentError, match=rf"process {os.getpid()} .*{port}"),
    ):
        rt.Server(cluster, "ps", 0)
    rt.Server(cluster, "ps", 0).stop()  # it was given back
    with socket.create_server(("127.0.0.1", int(port))):
        with pytest.raises(rt.UnknownError, match=rf"port {port}.*by process {os.getpid()} "):
            rt.Server(cluster, "ps", 0)
