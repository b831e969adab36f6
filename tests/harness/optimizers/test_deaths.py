"""Synchronous training whose workers are stopped and killed: no aggregate is lost or applied twice."""

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import harness
import runtime as rt
from tests.harness.optimizers.kit import alone, reset, serving, start, steps
from tests.harness.optimizers.task import STEPS, Model, Replica, batches
from tests.kit.processes import Task
from tests.kit.waits import until

pytestmark = pytest.mark.chaos

Spec = dict[str, list[str]]
ADMIN = 4


@pytest.fixture(scope="module", params=[1, 2], ids=["1ps", "2ps"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Spec, list[Task]]]:
    with serving(request.param, ADMIN + 1) as found:
        yield found


@pytest.fixture
def spec(served: tuple[Spec, list[Task]]) -> Spec:
    with rt.Server(served[0], "worker", ADMIN) as server:
        reset(server)
    return served[0]


def test_backup_workers_replace_a_stopped_worker(spec: Spec) -> None:
    """With three of four gradients needed, three workers continue without the stopped fourth, whose
    late gradients are dropped.
    """
    options = {"cluster": spec, "needed": 3, "total": 4, "steps": 10**9}
    processes = [start("worker", i, options) for i in range(4)]
    try:
        for process in processes:
            process.wait_for(lambda said: len(said) > 5)
        stopped = processes[2]
        stopped.freeze()
        others = [processes[0], processes[1], processes[3]]
        for other in others:
            goal = len(other.said) + 100
            other.wait_for(lambda said, goal=goal: len(said) > goal)  # type: ignore[misc]
        at = len(stopped.said)
        assert steps(others[0])[-1][0] > steps(stopped)[-1][0] + 50
        stopped.thaw()
        stopped.wait_for(lambda said: len(said) > at + 10)
        for process in processes:
            process.freeze()
        with rt.Server(spec, "worker", ADMIN) as server:
            accepted, dropped, step = _counts(server)
        assert accepted == 3 * step  # whatever is under way, each aggregate has had three

        def refused() -> int:
            return sum(not counted for p in processes for _, counted in steps(p))

        # each may have one answer that it has not said
        until(lambda: refused() >= dropped - len(processes))
        assert 0 < refused() <= dropped
    finally:
        for process in processes:
            process.close()


def _counts(server: rt.Server) -> list[int]:
    """Gradients accepted and dropped, and the global step."""
    replica = Replica(
        server,
        "sgd",
        lambda o: harness.SyncReplicas(o, 3, 4, worker=0, is_chief=False),
        chief=False,
    )
    sync = replica.optimizer
    found = [
        int(n)
        for n in replica.session.run(
            [sync.accepted_gradients, sync.dropped_gradients, replica.step]
        )
    ]
    replica.close()
    return found


def test_dead_worker_is_waited_for(spec: Spec) -> None:
    """A step waits for a dead worker until it is back, and no step is lost or repeated."""
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 10**9}
    processes = [start("worker", i, options) for i in range(2)]
    try:
        processes[1].wait_for(lambda said: len(said) > 10)
        processes[1].kill()
        processes.append(start("worker", 1, options))
        survivor, successor = processes[0], processes[2]
        successor.wait_for(lambda said: len(said) > 10)
        goal = len(survivor.said) + 100
        survivor.wait_for(lambda said: len(said) > goal)
        reached = [step for step, _ in steps(survivor)]
        assert reached == list(range(1, len(reached) + 1))  # none lost, none twice
    finally:
        for process in processes:
            process.close()


def test_dead_worker_may_be_left_behind(spec: Spec, served: tuple[Spec, list[Task]]) -> None:
    """With a timeout training continues without a dead worker, and the deciding task says so in its
    log.
    """
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 10**9, "timeout": 1.0}
    processes = [start("worker", i, options) for i in range(2)]
    decides = served[1][0] if len(served[1]) == 1 else processes[0]
    try:
        processes[1].wait_for(lambda said: len(said) > 10)
        processes[1].kill()
        goal = len(processes[0].said) + 100
        processes[0].wait_for(lambda said: len(said) > goal)
        decides.expect("goes on")
        reached = [s for s, _ in steps(processes[0])]
        assert all(after - before in (0, 1) for before, after in itertools.pairwise(reached))
    finally:
        for process in processes:
            process.close()


# -- the chief -----------------------------------------------------------------------------------------------------


def test_killed_chief_continues_where_it_was(spec: Spec) -> None:
    """A chief that is killed and started again continues, and the other worker misses no step."""
    options = {"cluster": spec, "needed": 2, "total": 2, "steps": 10**9}
    processes = [start("worker", i, options) for i in range(2)]
    try:
        processes[1].wait_for(lambda said: len(said) > 10)
        processes[0].kill()
        reborn, other = start("worker", 0, options), processes[1]
        processes.append(reborn)
        reborn.wait_for(lambda said: len(said) > 10)
        goal = len(other.said) + 100
        other.wait_for(lambda said: len(said) > goal)
        reached = [step for step, _ in steps(other)]
        assert reached == list(range(1, len(reached) + 1))
    finally:
        for process in processes:
            process.close()


@pytest.mark.parametrize(
    ("ps", "when", "says", "rule"),
    [
        (2, "gathered", "waiting for the chief to apply them", "slow"),
        (3, "half", "waiting for the chief to apply them", "slow"),
        pytest.param(
            2, "half", "waiting for the chief to apply them", "slow", marks=pytest.mark.nightly
        ),
        (2, "committed", "gradients of workers [1] are in", "slow"),
        # between the norm and the commit
        pytest.param(
            2, "gathered", "waiting for the chief to apply them", "clip", marks=pytest.mark.nightly
        ),
        (3, "half", "waiting for the chief to apply them", "clip"),
    ],
)
def test_chief_dying_inside_step_loses_nothing(ps: int, when: str, says: str, rule: str) -> None:
    """An aggregate whose chief dies before, between or after its orders is applied once on each ps."""
    with serving(ps, 3) as (spec, _), rt.Server(spec, "worker", 2) as server:
        options = {"cluster": spec, "needed": 2, "total": 2, "steps": STEPS, "rule": rule}
        processes = [
            start("worker", 0, {**options, "dies": [20, when]}),
            start("worker", 1, options),
        ]
        try:
            assert processes[0].wait() == -signal.SIGKILL
            with _watching(server, rule) as waiting_for:
                until(lambda: says in waiting_for())
            answered = 21 if when == "committed" else 20
            processes[1].wait_for(lambda said: said[-1:] == [("STEP", (answered, True))])
            processes.append(start("worker", 0, options))
            last, _ = [process.hear("END")[1] for process in processes[1:]]
            assert [s for s, _ in steps(processes[1])] == list(range(1, STEPS + 1))
            for mine, wanted in zip(last["values"], alone(rule, *batches(2)), strict=True):
                np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
        finally:
            for process in processes:
                process.close()


@contextmanager
def _watching(server: rt.Server, rule: str = "slow") -> Iterator[Callable[[], str]]:
    """Looks at whom the step waits for, as anybody can."""
    model = Model(server, rule, lambda o: harness.SyncReplicas(o, 2, 2, worker=0, is_chief=False))
    with rt.Session(
        server.target, model.graph, rt.SessionConfig(device_filters=("/job:ps",))
    ) as session:
        yield lambda: str(session.run(model.optimizer.waiting_for))
