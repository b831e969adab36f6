"""The conditional accumulator against a plain model: any interleaving, several threads."""

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import CancelledError, DeadlineExceededError, InvalidArgumentError
from runtime.kernels.accumulator import AccumulatorResource, reduce_in_order
from runtime.state.cancellation import Cancellation
from tests.harness.optimizers.kit import in_threads

F32 = np.dtype(np.float32)


def _array(value: float) -> np.ndarray:
    return np.array([value, -value], np.float32)


class Model:
    """What an accumulator must do, in plain Python."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.step = 0
        self.waiting: dict[int, float] = {}
        self.accepted = self.stale = self.repeated = 0

    def apply(self, value: float, local_step: int, worker: int) -> bool:
        if local_step < self.step:
            self.stale += 1
            return False
        if worker in self.waiting:
            self.repeated += 1
            return False
        self.waiting[worker] = value
        self.accepted += 1
        return True

    def take(self) -> float:
        total = sum(self.waiting.values())
        result = total / len(self.waiting) if self.reduction == "mean" else total
        self.waiting = {}
        self.step += 1
        return result


APPLY = st.tuples(st.just("apply"), st.integers(-8, 8), st.integers(0, 5), st.integers(0, 3))
TAKE = st.tuples(st.just("take"), st.integers(1, 4))
SET = st.tuples(st.just("set"), st.integers(0, 5))


@given(st.lists(st.one_of(APPLY, APPLY, TAKE, SET), max_size=40), st.sampled_from(["mean", "sum"]))
def test_accumulator_follows_its_model(actions: list[tuple[Any, ...]], reduction: str) -> None:
    """An accumulator does what its model does in any sequence of calls."""
    real, model = AccumulatorResource(F32, (2,), reduction), Model(reduction)
    for action in actions:
        if action[0] == "apply":
            _, value, step, worker = action
            assert real.apply_grad(_array(value), step, worker) == model.apply(value, step, worker)
        elif action[0] == "set":
            real.set_global_step(action[1])
            model.step = action[1]
        elif len(model.waiting) >= action[1]:
            np.testing.assert_allclose(
                real.take_grad(action[1], Cancellation()), _array(model.take()), rtol=1e-6
            )
        else:
            with pytest.raises(DeadlineExceededError):
                real.take_grad(action[1], Cancellation(deadline=0.0))
        assert real.num_accumulated == len(model.waiting)
        assert real.dropped_gradients == model.stale + model.repeated


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 4)), max_size=12),
        min_size=2,
        max_size=5,
    ),
    st.integers(1, 3),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_accumulator_threads_lose_nothing(
    pushes: list[list[tuple[int, int]]], count: int, resets: list[int]
) -> None:
    """Threads lose no gradient of an accumulator and invent none."""
    accumulator = AccumulatorResource(F32, (2,), "sum")
    accepted: list[float] = []
    taken: list[float] = []
    stop = Cancellation()

    def push(worker: int, mine: list[tuple[int, int]]) -> None:
        for value, step in mine:
            if accumulator.apply_grad(_array(value), step, worker):
                accepted.append(value)

    def take() -> None:
        while True:
            try:
                taken.append(float(accumulator.take_grad(count, stop)[0]))
            except CancelledError:
                return

    def reset() -> None:
        for step in resets:
            accumulator.set_global_step(step)

    taker = threading.Thread(target=take)
    others = [threading.Thread(target=push, args=(w, mine)) for w, mine in enumerate(pushes)]
    others.append(threading.Thread(target=reset))
    for thread in [taker, *others]:
        thread.start()
    for thread in others:
        thread.join()
    left = 0.0
    stop.set()
    taker.join()
    if accumulator.num_accumulated:
        left = float(accumulator.take_grad(1, Cancellation())[0])
    assert sum(taken) + left == sum(accepted)
    assert len(accepted) + accumulator.dropped_gradients == sum(map(len, pushes))


# -- several threads against the model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """One call: what, when it was called and answered (numbers that only grow), and what it gave."""

    what: tuple[Any, ...]
    called: int
    answered: int
    result: Any


def _fits(model: Model, done: Done) -> bool:
    """Whether the model, where it is now, gives what the call gave; moves the model on."""
    what, *arguments = done.what
    if what == "apply":
        return model.apply(*arguments) == done.result
    if what == "set":
        model.step = arguments[0]
        return True
    if done.result is None:  # it gave up: at some moment of its life there were too few
        return len(model.waiting) < arguments[0]
    return len(model.waiting) >= arguments[0] and np.isclose(model.take(), done.result)


def _explained(model: Model, left: tuple[Done, ...]) -> bool:
    """Whether the calls can be put in an order that the model agrees with; a call follows what was answered before."""
    if not left:
        return True
    first_answer = min(done.answered for done in left)
    for i, done in enumerate(left):
        if done.called < first_answer or done.answered == first_answer:
            after = copy.deepcopy(model)
            if _fits(after, done) and _explained(after, left[:i] + left[i + 1 :]):
                return True
    return False


@given(
    st.lists(
        st.lists(st.one_of(APPLY, APPLY, TAKE, SET), min_size=1, max_size=4), min_size=2, max_size=4
    ),
    st.sampled_from(["mean", "sum"]),
)
def test_accumulator_calls_are_linearizable(
    programs: list[list[tuple[Any, ...]]], reduction: str
) -> None:
    """There is one order of all concurrent calls in which the model answers the same (Herlihy and
    Wing, 1990).
    """
    real, clock = AccumulatorResource(F32, (2,), reduction), itertools.count()
    together = threading.Barrier(len(programs))
    history: list[Done] = []

    def call(action: tuple[Any, ...]) -> Any:
        if action[0] == "apply":
            return real.apply_grad(_array(action[1]), action[2], action[3])
        if action[0] == "set":
            return real.set_global_step(action[1])
        try:
            return float(real.take_grad(action[1], Cancellation(deadline=0.0))[0])
        except DeadlineExceededError:
            return None

    def run(program: list[tuple[Any, ...]]) -> None:
        together.wait(100)
        for action in program:
            called = next(clock)
            result = call(action)
            history.append(Done(action, called, next(clock), result))

    in_threads([lambda p=p: run(p) for p in programs])  # type: ignore[misc]
    assert len(history) == sum(map(len, programs))
    assert _explained(Model(reduction), tuple(history)), history


def test_aggregate_counts_distinct_workers() -> None:
    """An aggregate of two has the gradients of two workers, the latest of each."""
    accumulator = AccumulatorResource(F32, (2,))
    assert accumulator.apply_grad(_array(1), 0, "a")
    assert not accumulator.apply_grad(_array(3), 0, "a")
    got: list[np.ndarray] = []
    taker = threading.Thread(target=lambda: got.append(accumulator.take_grad(2, Cancellation())))
    taker.start()
    assert accumulator.apply_grad(_array(5), 0, "b")
    taker.join(60)
    np.testing.assert_array_equal(got[0], _array(3))


@pytest.mark.parametrize("end", [lambda a, c: c.set(), lambda a, c: a.clear()])
def test_cancelled_or_cleared_wait_ends(end: Callable[..., None]) -> None:
    """A wait for an aggregate ends with CancelledError when the wait is cancelled or the
    accumulator is cleared.
    """
    accumulator, cancellation = AccumulatorResource(F32, None), Cancellation()
    raised: list[Exception] = []

    def take() -> None:
        try:
            accumulator.take_grad(1, cancellation)
        except CancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    end(accumulator, cancellation)
    thread.join(60)
    assert len(raised) == 1


def test_wrong_gradients_are_named() -> None:
    """A gradient of another dtype or shape is refused by name."""
    accumulator = AccumulatorResource(F32, (None, 2))
    with pytest.raises(InvalidArgumentError, match="float32, not float64"):
        accumulator.apply_grad(np.zeros((1, 2)), 0, 0)
    with pytest.raises(InvalidArgumentError, match="shape"):
        accumulator.apply_grad(np.zeros(2, np.float32), 0, 0)
    accumulator.apply_grad(np.zeros((3, 2), np.float32), 0, 0)
    with pytest.raises(InvalidArgumentError, match="came after"):
        accumulator.apply_grad(np.zeros((4, 2), np.float32), 0, 1)
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        accumulator.take_grad(0, Cancellation())
    with pytest.raises(InvalidArgumentError, match="median"):
        AccumulatorResource(F32, None, "median")


def test_gradients_are_copied() -> None:
    """An accumulator keeps its own copy of a gradient."""
    accumulator, gradient = AccumulatorResource(F32, (2,)), _array(1)
    accumulator.apply_grad(gradient, 0, 0)
    gradient[:] = 9
    np.testing.assert_array_equal(accumulator.take_grad(1, Cancellation()), _array(1))


def test_narrow_floats_are_summed_in_float32() -> None:
    """Gradients of 16 bits are summed in 32 bits and keep their dtype."""
    ones = [np.ones(1, ml_dtypes.bfloat16)] * 1000
    assert float(reduce_in_order(ones, "sum")[0]) == 1000  # in bfloat16 the sum would stay at 256
    assert reduce_in_order(ones, "mean").dtype == ml_dtypes.bfloat16


def test_mean_of_equal_integers_is_exact() -> None:
    """The mean of equal integers is that integer."""
    assert reduce_in_order([np.array(7), np.array(7), np.array(7)], "mean") == 7
