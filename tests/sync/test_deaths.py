"""Synchronous training whose workers are stopped and killed: no aggregate is lost or applied twice."""

import signal
from collections.abc import Iterator

import pytest

import harness
import runtime as rt
from tests.sync.kit import Process, cluster, reset
from tests.sync.task import Replica

Spec = dict[str, list[str]]
ADMIN = 4


@pytest.fixture(scope="module", params=[1, 2], ids=["1ps", "2ps"])
def served(request: pytest.FixtureRequest) -> Iterator[Spec]:
    with cluster(request.param, ADMIN + 1) as found:
        yield found


@pytest.fixture
def spec(served: Spec) -> Spec:
    with rt.Server(served, "worker", ADMIN) as server:
        reset(server)
    return served


def _finished(lines: list[str]) -> bool:
    return any(line.startswith("{") for line in lines)


def test_backup_workers(spec: Spec) -> None:
    """Three of four are aggregated; one is stopped in the middle: the others go on, and its gradients do not count."""
    options = {"cluster": spec, "needed": 3, "total": 4, "steps": 10**9}
    processes = [Process("worker", i, options) for i in range(4)]
    try:
        for process in processes:
            process.wait_for(lambda lines: len(lines) > 5)
        stopped = processes[2]
        stopped.send(signal.SIGSTOP)
        at, others = len(stopped.steps()), [processes[0], processes[1], processes[3]]
        for other in others:
            goal = len(other.lines) + 100
            other.wait_for(lambda lines, goal=goal: len(lines) > goal)  # type: ignore[misc]
        assert len(stopped.steps()) - at <= 1  # a line that was on its way
        stopped.send(signal.SIGCONT)
        stopped.wait_for(lambda lines: len(lines) > at + 10)
        for process in processes:
            process.send(signal.SIGSTOP)
        with rt.Server(spec, "worker", ADMIN) as server:
            accepted, dropped, step = _counts(server)
        assert accepted == 3 * step  # whatever is under way, each aggregate has had three
        refused = sum(not counted for p in processes for _, counted in p.steps())
        assert 0 < refused <= dropped <= refused + len(processes)  # each may have one answer that it has not printed
    finally:
        for process in processes:
            process.end()


def _counts(server: rt.Server) -> list[int]:
    """Gradients accepted and dropped, and the global step."""
    replica = Replica(server, "sgd", lambda o: harness.SyncReplicas(o, 3, 4, worker=0, is_chief=False), chief=False)
    sync = replica.optimizer
    found = [int(n) for n in replica.session.run([sync.accepted_gradients, sync.dropped_gradients, replica.step])]
    replica.close()
    return found


def test_a_dead_worker_is_waited_for_until_it_is_back(spec: Spec) -> None:
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 200}
    processes = [Process("worker", i, options) for i in range(2)]
    try:
        processes[1].wait_for(lambda lines: len(lines) > 10)
        processes[1].end()
        before = len(processes[0].steps())
        processes.append(Process("worker", 1, options))
        for process in (processes[0], processes[2]):
            process.wait_for(_finished)
        steps = [s for s, _ in processes[0].steps()]
        assert before < 200
        assert steps == list(range(1, 201))  # none lost, none twice
    finally:
        for process in processes:
            process.end()


def test_a_dead_worker_may_be_left_behind(spec: Spec) -> None:
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 200, "timeout": 1.0}
    processes = [Process("worker", i, options) for i in range(2)]
    try:
        processes[1].wait_for(lambda lines: len(lines) > 10)
        processes[1].end()
        processes[0].wait_for(_finished)
        assert [s for s, _ in processes[0].steps()] == list(range(1, 201))
    finally:
        for process in processes:
            process.end()


def test_a_chief_that_was_killed_goes_on_where_it_was(spec: Spec) -> None:
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 200}
    processes = [Process("worker", i, options) for i in range(2)]
    try:
        processes[1].wait_for(lambda lines: len(lines) > 10)
        processes[0].end()
        reborn = Process("worker", 0, options)
        processes.append(reborn)
        for process in (processes[1], reborn):
            process.wait_for(_finished)
        assert [s for s, _ in processes[1].steps()] == list(range(1, 201))
    finally:
        for process in processes:
            process.end()
