"""Synchronous training whose workers are stopped and killed: no aggregate is lost or applied twice."""

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import harness
import runtime as rt
from tests.sync.kit import Process, alone, reset, serving, wait_until
from tests.sync.task import STEPS, Model, Replica, batches

pytestmark = pytest.mark.chaos

Spec = dict[str, list[str]]
ADMIN = 4


@pytest.fixture(scope="module", params=[1, 2], ids=["1ps", "2ps"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Spec, list[Process]]]:
    with serving(request.param, ADMIN + 1) as found:
        yield found


@pytest.fixture
def spec(served: tuple[Spec, list[Process]]) -> Spec:
    with rt.Server(served[0], "worker", ADMIN) as server:
        reset(server)
    return served[0]


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
        others = [processes[0], processes[1], processes[3]]
        for other in others:
            goal = len(other.lines) + 100
            other.wait_for(lambda lines, goal=goal: len(lines) > goal)  # type: ignore[misc]
        at = len(stopped.steps())
        assert others[0].steps()[-1][0] > stopped.steps()[-1][0] + 50
        stopped.send(signal.SIGCONT)
        stopped.wait_for(lambda lines: len(lines) > at + 10)
        for process in processes:
            process.send(signal.SIGSTOP)
        with rt.Server(spec, "worker", ADMIN) as server:
            accepted, dropped, step = _counts(server)
        assert accepted == 3 * step  # whatever is under way, each aggregate has had three

        def refused() -> int:
            return sum(not counted for p in processes for _, counted in p.steps())

        wait_until(lambda: refused() >= dropped - len(processes))  # each may have one answer that it has not printed
        assert 0 < refused() <= dropped
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


def test_a_dead_worker_may_be_left_behind(spec: Spec, served: tuple[Spec, list[Process]]) -> None:
    """And whoever decides says so in its log: the ps when there is one, else the chief."""
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 10**9, "timeout": 1.0}
    processes = [Process("worker", i, options) for i in range(2)]
    decides = served[1][0] if len(served[1]) == 1 else processes[0]
    try:
        processes[1].wait_for(lambda lines: len(lines) > 10)
        processes[1].end()
        goal = len(processes[0].lines) + 100
        processes[0].wait_for(lambda lines: len(lines) > goal)
        decides.wait_for_log("goes on")
        steps = [s for s, _ in processes[0].steps()]
        assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps))
    finally:
        for process in processes:
            process.end()


# -- the chief -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("ps", "when", "says"),
    [
        (2, "gathered", "waiting for the chief to apply them"),
        (3, "half", "waiting for the chief to apply them"),
        (2, "half", "waiting for the chief to apply them"),
        (2, "committed", "gradients of workers [1] are in"),
    ],
)
def test_a_chief_that_dies_inside_a_step_leaves_it_to_the_next(ps: int, when: str, says: str) -> None:
    """Killed before, between and after the orders of one aggregate: applied once on each ps, as the values show."""
    with serving(ps, 3) as (spec, _), rt.Server(spec, "worker", 2) as server:
        options = {"cluster": spec, "needed": 2, "total": 2, "steps": STEPS, "rule": "slow"}
        processes = [Process("worker", 0, {**options, "dies": [20, when]}), Process("worker", 1, options)]
        try:
            assert processes[0].popen.wait(100) == -signal.SIGKILL
            with _watching(server) as waiting_for:
                wait_until(lambda: says in waiting_for())
            answered = 21 if when == "committed" else 20
            processes[1].wait_for(lambda lines: lines[-1:] == [f"[{answered}, true]"])
            processes.append(Process("worker", 0, options))
            for process in processes[1:]:
                process.wait_for(_finished)
            assert [s for s, _ in processes[1].steps()] == list(range(1, STEPS + 1))
            last = json.loads(next(line for line in processes[1].lines if line.startswith("{")))
            for mine, wanted in zip(last["values"], alone("slow", *batches(2)), strict=True):
                np.testing.assert_allclose(np.array(mine), wanted, rtol=2e-5, atol=2e-6)
        finally:
            for process in processes:
                process.end()


@contextmanager
def _watching(server: rt.Server) -> Iterator[Callable[[], str]]:
    """Looks at whom the step waits for, as anybody can."""
    model = Model(server, "slow", lambda o: harness.SyncReplicas(o, 2, 2, worker=0, is_chief=False))
    with rt.Session(server.target, model.graph, rt.SessionConfig(device_filters=("/job:ps",))) as session:
        yield lambda: str(session.run(model.optimizer.waiting_for))
