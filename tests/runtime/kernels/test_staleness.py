"""Bounded staleness: nobody runs ahead of the slowest by more than the bound, and nobody waits for the dead."""

import contextlib
import threading
from typing import Any

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
import runtime as rt
from runtime.errors import CancelledError, DeadlineExceededError
from runtime.kernels.staleness import StalenessBound
from runtime.state.cancellation import Cancellation
from tests.harness.optimizers.kit import cluster, in_threads
from tests.harness.optimizers.task import Replica, batches
from tests.kit.waits import until


def _now() -> Cancellation:
    return Cancellation(deadline=0.0)


@given(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=40))
def test_ticks_keep_the_bound(bound: int, order: list[int]) -> None:
    """A tick that would lead the slowest worker by more than the bound waits."""
    staleness = StalenessBound("c", bound)
    for worker in (0, 1, 2, 0):  # all join, and have as many steps
        with contextlib.suppress(DeadlineExceededError):
            staleness.tick(worker, worker, _now())
    steps = [0, 0, 0]
    for worker in order:
        steps[worker] += 1
        ahead = steps[worker] - min(steps)
        if ahead <= bound:
            assert staleness.tick(worker, worker, _now()) == ahead
        else:
            with pytest.raises(DeadlineExceededError):
                staleness.tick(worker, worker, _now())
            break  # in life it would wait now


@given(st.integers(0, 3), st.integers(2, 4), st.integers(1, 20))
def test_threads_stay_within_bound(bound: int, workers: int, rounds: int) -> None:
    """No worker of many threads gets further ahead than the bound."""
    staleness, steps, worst = StalenessBound("c", bound), [0] * workers, [0]
    together = threading.Barrier(workers)

    def work(worker: int) -> None:
        steps[worker] = 1
        together.wait(60)
        for _ in range(rounds):
            worst[0] = max(worst[0], staleness.tick(worker, worker, Cancellation()))
        staleness.end_client(worker)

    in_threads([lambda w=w: work(w) for w in range(workers)])  # type: ignore[misc]
    assert worst[0] <= bound


def test_gone_client_is_not_waited_for() -> None:
    """A worker whose session has ended is not waited for."""
    staleness = StalenessBound("c", 0)
    staleness.tick(1, 11, _now())
    waiting: list[Any] = []
    thread = threading.Thread(
        target=lambda: waiting.append([staleness.tick(0, 10, Cancellation()) for _ in range(3)])
    )
    thread.start()
    thread.join(0.05)
    staleness.end_client(11)
    thread.join(60)
    assert waiting == [[0, 0, 0]]


def test_newcomer_starts_with_slowest() -> None:
    """A worker that joins or starts again begins where the slowest worker is."""
    staleness = StalenessBound("c", 100)
    for _ in range(5):
        staleness.tick(0, 10, _now())
    assert staleness.tick(1, 11, _now()) == 1
    # started again: one step ahead of where the slowest was
    assert staleness.tick(0, 12, _now()) == 1


def test_staleness_waits_end() -> None:
    """A wait for slower workers ends by cancellation, clearing or the end of training."""
    for end in ("cancel", "clear", "finish"):
        staleness, cancellation, done = StalenessBound("c", 0), Cancellation(), []
        staleness.tick(1, 11, _now())

        def tick(
            staleness: StalenessBound = staleness,
            cancellation: Cancellation = cancellation,
            done: list[Any] = done,
        ) -> None:
            try:
                done.append(staleness.tick(0, 10, cancellation))
            except CancelledError as error:
                done.append(error)

        thread = threading.Thread(target=tick)
        thread.start()
        {
            "cancel": cancellation.set,
            "clear": staleness.clear,
            "finish": lambda c=staleness: c.set_finished(True),
        }[end]()
        thread.join(60)
        assert len(done) == 1
        assert isinstance(done[0], int if end == "finish" else CancelledError)


@pytest.mark.cluster
def test_fast_worker_is_held_at_bound() -> None:
    """A fast worker is held at the bound until the slow one moves or leaves, and every update
    counts.
    """
    with cluster(1, 2) as spec:
        servers = [rt.Server(spec, "worker", i) for i in range(2)]
        x, y = batches(2)

        def wrap(optimizer: harness.Optimizer) -> harness.StaleSynchronous:
            return harness.StaleSynchronous(optimizer, 3)

        fast, slow = in_threads(
            [lambda i=i: Replica(servers[i], "sgd", wrap, i == 0) for i in range(2)]
        )  # type: ignore[misc]
        slow.run(x[0, 1], y[0, 1])
        done: list[int] = []

        def run_ahead() -> None:
            try:
                for k in range(20):
                    done.append(fast.run(x[k, 0], y[k, 0])[0])
            except rt.CancelledError:
                return

        thread = threading.Thread(target=run_ahead)
        thread.start()
        # It joined where the slow one was, 1: three steps ahead are answered, the next is in and
        # waits.
        for bound in (3, 4):
            until(lambda bound=bound: len(done) >= bound)  # type: ignore[misc]
            thread.join(0.3)
            assert len(done) == bound
            if bound == 3:
                slow.run(x[1, 1], y[1, 1])
        slow.close()  # it leaves: nobody waits for it any more
        thread.join(60)
        assert len(done) == 20
        assert int(fast.session.run(fast.step)) == 22  # no update is lost or doubled
        fast.close()
        for server in servers:
            server.stop()


def test_missing_arguments_are_asked_for() -> None:
    """StaleSynchronous refuses a negative bound and a missing global step."""
    with rt.Graph().as_default():
        w = rt.Variable(np.ones(2, np.float32), name="w")
        with pytest.raises(ValueError, match="max_staleness=-1"):
            step = harness.get_or_create_global_step()
            harness.StaleSynchronous(harness.Optimizer(optax.sgd(0.1)), -1).minimize(
                rt.call(lambda v: v.sum(), w), step
            )
    with rt.Graph().as_default():
        w = rt.Variable(np.ones(2, np.float32), name="w")
        with pytest.raises(ValueError, match="a global step is needed"):
            harness.StaleSynchronous(harness.Optimizer(optax.sgd(0.1)), 1).minimize(
                rt.call(lambda v: v.sum(), w)
            )


def test_retired_worker_is_not_waited_for() -> None:
    """A worker that has finished is not waited for although its session lives."""
    staleness = StalenessBound("c", 0)
    staleness.tick(1, 11, _now())
    waiting: list[Any] = []
    thread = threading.Thread(
        target=lambda: waiting.append([staleness.tick(0, 10, Cancellation()) for _ in range(3)])
    )
    thread.start()
    thread.join(0.05)
    assert not waiting
    staleness.retire(11, 1)
    thread.join(60)
    assert waiting == [[0, 0, 0]]
