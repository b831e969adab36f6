"""Sessions of clients elsewhere: who owns them, what renews them and what ends them; and what one step's end is not."""

import gc
import json
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import runtime as rt
import runtime.session.session
from runtime import timeouts
from runtime.master import tasks
from runtime.master.dropped import later
from runtime.rpc import threads, times
from runtime.server import remote_sessions
from runtime.server.pools import WAITING
from tests.kit.changes import SetTimes
from tests.kit.processes import Program, programs
from tests.kit.waits import until
from tests.runtime.kit import TARGET, addresses, in_thread, limited, processes, servers

pytestmark = pytest.mark.cluster

SOON_SECS = 60.0
"""Within this time what must not hang has ended, on a machine that is busy with other things."""
WAIT = rt.SessionConfig(start_timeout_secs=60)


@pytest.fixture
def remote() -> Iterator[tuple[rt.Server, rt.Server]]:
    """A worker and a ps in this process; its sessions reach the worker's master as those of another process do."""
    with rt.Graph().as_default(), servers(sockets=True, ps=1, worker=1) as made:
        tasks.withdraw(made[TARGET].address, made[TARGET])
        yield made[TARGET], made["/job:ps/task:0"]


def queue() -> rt.FIFOQueue:
    with rt.device("/job:ps/task:0"):
        return rt.FIFOQueue(1, np.int32, [[]], name="numbers")


def waiting(server: rt.Server) -> int:
    """How many calls wait in kernels of a task."""
    return len(server.worker.waits)


# -- waiting steps and the control plane -----------------------------------------------------------------------------


def test_waiting_steps_leave_control_plane_free(
    remote: tuple[rt.Server, rt.Server],
) -> None:
    """A hundred waiting steps leave the control plane free for other clients."""
    server, ps = remote
    q = queue()
    put, take = q.enqueue(1), q.dequeue()
    producers = 100
    with rt.Session(server.target, config=WAIT) as session:
        session.run(put)
        waits = [in_thread(lambda: session.run(put)) for _ in range(producers)]
        until(lambda: waiting(ps) == producers)
        assert rt.probe(server.address, timeout_secs=SOON_SECS).values["remote_calls"] == producers
        with rt.Session(server.target, config=WAIT) as another:  # somebody joins, and plans a step
            for _ in range(producers + 1):
                assert another.run(take, timeout_secs=SOON_SECS) == 1
        for thread, results in waits:
            thread.join(SOON_SECS)
            assert results == [None]


def test_call_threads_are_reused(
    monkeypatch: pytest.MonkeyPatch,
    set_times: SetTimes,
) -> None:
    """Threads of calls are used again, end when idle, and are awaited when the system has none."""
    set_times(times, IDLE_SECS=0.2)
    pool = threads.CallThreads("calls-of-a-test")
    release = threading.Event()

    def alive() -> int:
        return sum(thread.name == "calls-of-a-test" for thread in threading.enumerate())

    waits = [pool.submit(release.wait, SOON_SECS) for _ in range(20)]
    assert pool.submit(lambda: "at once").result(SOON_SECS) == "at once"
    assert 20 <= alive() <= 21

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        late = [pool.submit(lambda: "late") for _ in range(3)]
    release.set()
    assert [future.result(SOON_SECS) for future in waits + late] == [True] * 20 + ["late"] * 3
    failed = pool.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(SOON_SECS)
    until(lambda: alive() == 0)


# -- the end of a server ---------------------------------------------------------------------------------------------

JOIN = """
import sys, runtime as rt
rt.Session(sys.argv[1])
"""


def remote_calls(address: str) -> int:
    """How many sessions are opened and steps run there for clients elsewhere; -1 when nobody listens yet."""
    try:
        return int(rt.probe(address, timeout_secs=5.0).values["remote_calls"])
    except rt.OpError:
        return -1


def test_waiting_session_allows_sigterm() -> None:
    """A server ends at SIGTERM although a session waits for a task."""
    cluster = addresses(ps=1, worker=1)  # no ps will ever come
    (address,) = cluster["worker"]
    with processes(cluster, ("worker", 0)) as (worker,), programs() as start:
        clients = [start("python", "-c", JOIN, f"grpc://{address}") for _ in range(2)]
        until(lambda: remote_calls(address) == 2)
        clients[0].kill()
        until(lambda: remote_calls(address) == 1)  # the wait goes with who waited
        until(lambda: worker.handles(signal.SIGTERM), "it serves, and joins a moment later")
        worker.signal(signal.SIGTERM)
        assert worker.wait(SOON_SECS) == 0


def test_stopped_server_ends_opening_sessions() -> None:
    """A stopped server ends the sessions that its process is opening."""
    with rt.Server(addresses(ps=1, worker=1), "worker", 0) as server:
        thread, results = in_thread(lambda: rt.Session(server.target))
        until(lambda: bool(server.master._pending))
        server.stop()
        thread.join(SOON_SECS)
        assert [type(result) for result in results] == [rt.UnavailableError]
        assert "its server has stopped" in str(results[0])
        with pytest.raises(rt.UnavailableError, match="its server has stopped"):
            server.master.create_session(rt.SessionConfig())


def test_waiting_client_logs_the_task(
    set_times: SetTimes, caplog: pytest.LogCaptureFixture
) -> None:
    """A remote client that waits for a task logs the task and the time."""
    set_times(timeouts, LOG_EVERY_SECS=0.5)
    cluster = addresses(ps=1, worker=1)
    missing = f"still waiting for /job:ps/task:0 at {cluster['ps'][0]}"
    with rt.Server(cluster, "worker", 0) as server, caplog.at_level("INFO"):
        tasks.withdraw(server.address, server)
        with pytest.raises(rt.DeadlineExceededError, match=re.escape(missing)):
            rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=3.0))
    assert caplog.text.count(missing) >= 3
    assert re.search(f"for [12] s now: .*{re.escape(missing)}", caplog.text)


NO_STOP = """
import json, sys, runtime as rt
server = rt.Server(json.loads(sys.argv[1]), "worker", 0)
print("serving", flush=True)
sys.stdin.readline()
"""
TAKE = """
import sys, numpy as np, runtime as rt
with rt.device(sys.argv[2]):
    take = rt.FIFOQueue(1, np.int32, [[]], name="numbers").dequeue()
with rt.Session(sys.argv[1], config=rt.SessionConfig(start_timeout_secs=60)) as session:
    session.run(take)
"""


def test_script_ends_during_clients_step() -> None:
    """A script without stop ends although a client waits in a step."""
    cluster = addresses(worker=1)
    (address,) = cluster["worker"]
    with programs() as start:
        server = start("python", "-c", NO_STOP, json.dumps(cluster))
        server.expect("^serving$")
        start("python", "-c", TAKE, f"grpc://{address}", TARGET)
        until(lambda: rt.probe(address).values["calls_total"] >= 0 and remote_calls(address) == 1)
        server.enter("go")
        assert server.wait(SOON_SECS) == 0


# -- whose session, and for how long ---------------------------------------------------------------------------------


def long(x: Any) -> Any:
    """Keeps a processor busy for some seconds."""
    return jax.lax.fori_loop(0, 1 << 29, lambda _, a: a * 1.000001 + 0.5, x)


@pytest.mark.chaos
def test_timed_out_step_ends_alone(
    remote: tuple[rt.Server, rt.Server],
) -> None:
    """A step whose time is over ends no other step and no session."""
    server, ps = remote
    q = queue()
    put, take = q.enqueue(7), q.dequeue()
    with rt.device(TARGET):
        slow = rt.call(long, rt.placeholder(np.float32, [], name="x"), name="slow")
    with rt.Session(server.target, config=WAIT) as session:
        thread, results = in_thread(lambda: session.run(take))
        until(lambda: waiting(ps) == 1)
        with pytest.raises(rt.DeadlineExceededError, match="Deadline Exceeded|before its deadline"):
            session.run(slow, {"x:0": 1.0}, timeout_secs=0.1)
        until(lambda: server.pools.running(WAITING) == 1)  # the program has ended too
        assert thread.is_alive() and waiting(ps) == 1
        session.run(put)
        thread.join(SOON_SECS)
        assert results == [7]


def test_abandoned_step_ends_everywhere(
    remote: tuple[rt.Server, rt.Server], set_times: SetTimes
) -> None:
    """A step of a killed client ends on every task, and other steps wait on."""
    # it is not the session's end that ends the step
    set_times(timeouts, LEASE_SECS=600.0)
    server, ps = remote
    q = queue()
    put, take = q.enqueue(7), q.dequeue()
    with Program("python", "-c", TAKE, server.target, "/job:ps/task:0") as client:
        until(lambda: waiting(ps) == 1)
        with rt.Session(server.target, config=WAIT) as session:
            thread, results = in_thread(lambda: session.run(take))
            until(lambda: waiting(ps) == 2)
            client.kill()
            until(lambda: waiting(ps) == 1)
            session.run(put)
            thread.join(SOON_SECS)
            assert results == [7]


IDLE = """
import sys, numpy as np, runtime as rt
with rt.device("/job:ps/task:0"):
    size = rt.FIFOQueue(1, np.int32, [[]], name="numbers").size()
session = rt.Session(sys.argv[1], config=rt.SessionConfig(start_timeout_secs=60))
session.run(size)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_dead_clients_session_ends(
    remote: tuple[rt.Server, rt.Server], set_times: SetTimes
) -> None:
    """The session of a dead client ends after its lease, and an idle session stays."""
    # Of the client in this process, also the limit of each renewal. A busy machine may miss some.
    set_times(timeouts, RENEW_SECS=0.5)
    server, ps = remote
    size = queue().size()
    with rt.Session(server.target, config=WAIT) as session:
        assert session.run(size) == 0
        with programs() as start:
            for client in [start("python", "-c", IDLE, server.target) for _ in range(2)]:
                client.expect("^ready$")
            assert (
                len(server.remote_sessions)
                == server.report().values["sessions"]
                == ps.worker.registry.sessions
                == 3
            )
        set_times(timeouts, LEASE_SECS=6.0)
        until(lambda: len(server.remote_sessions) == 1)
        until(lambda: ps.worker.registry.sessions == 1)
        until(lambda: server.report().values["sessions"] == 1)
        assert session.run(size) == 0


def test_expired_client_is_told_so(
    remote: tuple[rt.Server, rt.Server], set_times: SetTimes
) -> None:
    """A client whose lease has ended is told so."""
    set_times(timeouts, LEASE_SECS=0.5)  # shorter than the client thinks
    server, _ = remote
    size = queue().size()
    with rt.Session(server.target, config=WAIT) as session:
        until(lambda: not len(server.remote_sessions))
        with pytest.raises(rt.AbortedError, match=r"did not hear of this client for 0.5 s"):
            session.run(size)


class Expired:
    """A session whose lease has ended."""

    def __init__(self, number: int, error: Exception | None = None) -> None:
        self.id, self.error, self.closed = number, error, False

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def expire(set_times: SetTimes, *sessions: Any) -> None:
    """Has a table close the sessions."""
    set_times(timeouts, LEASE_SECS=0.0, LEASE_LOOK_SECS=0.01)
    table = remote_sessions.RemoteSessions()
    for session in sessions:
        table.add(session)
    until(lambda: all(session.closed for session in sessions))
    assert not len(table)


def test_failed_expiry_is_logged(set_times: SetTimes, caplog: pytest.LogCaptureFixture) -> None:
    """An expired session that cannot be closed is logged, and the others are closed."""
    sessions = Expired(1, ValueError("of this session")), Expired(2)
    expire(set_times, *sessions)
    until(lambda: "of this session" in caplog.text)


def test_expiry_works_without_threads(set_times: SetTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired sessions are closed although the system has no thread."""
    later(lambda: None)  # the thread of dropped objects runs already, as after any session

    def refuse(work: Any, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(remote_sessions.concurrency, "in_thread", refuse)
    sessions = Expired(1), Expired(2)
    expire(set_times, *sessions)


def test_stopped_server_keeps_no_session(
    remote: tuple[rt.Server, rt.Server],
) -> None:
    """A stopped server keeps no session of a remote client."""
    server, _ = remote
    with rt.Session(server.target, config=WAIT):
        assert len(server.remote_sessions) == 1
        server.stop(0)
        assert not len(server.remote_sessions)
        # Nothing watches a server without sessions.
        until(lambda: server.remote_sessions._watch is None)


@pytest.mark.parametrize("kind", ["local master", "remote master"])
def test_dropped_sessions_are_closed(kind: str) -> None:
    """Sessions that are dropped without close are closed."""
    with rt.Graph().as_default(), servers(sockets=True, ps=1, worker=1) as made:
        server, ps = made[TARGET], made["/job:ps/task:0"]
        if kind == "remote master":
            tasks.withdraw(server.address, server)
        size = queue().size()
        for _ in range(3):
            dropped = rt.Session(server.target, config=WAIT)
            assert dropped.run(size) == 0
        kept = rt.Session(server.target, config=WAIT)
        del dropped
        gc.collect()
        until(lambda: server.report().values["sessions"] == 1)
        until(lambda: ps.tensors.counters.connections <= 2)  # a lane and a heartbeat
        assert kept.run(size) == 0
        kept.close()
        until(lambda: ps.tensors.counters.connections == 0)


# -- plans that a session has dropped --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local master", "remote master"])
def test_dropped_plans_lose_their_stages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task forgets the stages of plans that a session has dropped."""
    plans, shapes = 4, 24
    monkeypatch.setattr(runtime.session.recent, "MOST", plans)
    with (
        rt.Graph().as_default(),
        # nothing is kept without a session
        limited(session_plans=plans, spare_stages=0),
        servers(sockets=True, ps=1, worker=1) as made,
    ):
        server, ps = made[TARGET], made["/job:ps/task:0"]
        if kind == "remote master":
            tasks.withdraw(server.address, server)
        x = rt.placeholder(np.float32, [None], name="x")
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(2.0, name="v")
            total = rt.numpy.sum(x) * v
        with rt.Session(server.target, config=WAIT) as session:
            session.run(v.initializer)
            for size in range(1, shapes + 1):
                for again in (size, 1):  # the first plan is used all the time
                    assert session.run([total, v], {x: np.ones(again)}) == [2.0 * again, 2.0]
            most = 2 * (plans + 1)
            until(lambda: len(ps.worker.registry) <= most)
            assert session.run([total, v], {x: np.ones(1)}) == [2.0, 2.0]
            # dropped, and planned again
            assert session.run([total, v], {x: np.ones(5)}) == [10.0, 2.0]
        until(lambda: not len(ps.worker.registry))


def test_session_ending_during_compilation() -> None:
    """A session that ends while its stage is compiled leaves nothing."""
    entered, ended = threading.Event(), threading.Event()
    with rt.Graph().as_default(), servers(sockets=True, ps=1, worker=1) as made:
        server, worker = made[TARGET], made["/job:ps/task:0"].worker
        size, find = queue().size(), worker.executor.find_device

        def slow(*arguments: Any) -> Any:
            device = find(*arguments)
            entered.set()
            assert ended.wait(60)
            return device

        with rt.device("/job:ps/task:0"):
            v = rt.Variable(2.0, name="v")
        session = rt.Session(server.target, config=WAIT)
        assert session.run(size) == 0
        worker.executor.find_device = slow  # type: ignore[method-assign]
        thread, results = in_thread(lambda: session.run(v.initializer))
        assert entered.wait(60)
        session.close()
        until(lambda: not worker.registry.sessions)
        calls = len(worker.registry)
        ended.set()
        thread.join(60)
        assert isinstance(results[0], rt.CancelledError)
        until(lambda: len(worker.registry) > calls and not worker.registry.sessions, secs=SOON_SECS)


def test_refused_plan_leaves_nothing() -> None:
    """A plan that one task refuses is not kept by the others."""

    def refuse(*arguments: Any) -> Any:
        raise rt.ResourceExhaustedError("no memory to compile this")

    with rt.Graph().as_default(), servers(sockets=True, ps=2, worker=1) as made:
        first, second = (made[f"/job:ps/task:{i}"].worker for i in range(2))
        variables = []
        for i in range(2):
            with rt.device(f"/job:ps/task:{i}"):
                variables.append(rt.Variable(2.0, name=f"v_{i}"))
        with rt.Session(made[TARGET].target, config=WAIT) as session:
            second.executor.find_device = refuse  # type: ignore[method-assign]
            with pytest.raises(rt.ResourceExhaustedError):
                session.run(variables)
            assert len(first.registry) == 1
            until(lambda: not any(first.registry.kept()[2].values()), secs=SOON_SECS)
