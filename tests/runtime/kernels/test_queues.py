"""Queues against a plain model, their waits, their ends."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfRangeError,
)
from runtime.kernels.queues import QueueResource
from runtime.state.cancellation import Cancellation
from tests.runtime.kit import in_thread

F32 = np.dtype(np.float32)
GIVE_UP = 0.0  # a deadline that has passed: what would wait raises instead


def _queue(
    kind: str = "fifo", capacity: int = 4, shapes: Any = ((),), **options: Any
) -> QueueResource:
    return QueueResource(kind, "q", capacity, [F32] * len(shapes), shapes, **options)


def _element(value: float) -> tuple[np.ndarray, ...]:
    return (np.array(value, np.float32),)


def _now() -> Cancellation:
    return Cancellation(deadline=GIVE_UP)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 99)),
        st.tuples(st.just("put"), st.integers(0, 99)),
        st.tuples(st.just("take"), st.just(1)),
        st.tuples(st.just("many"), st.integers(0, 4)),
        st.tuples(st.just("up_to"), st.integers(1, 4)),
        st.tuples(st.just("close"), st.just(0)),
    ),
    max_size=40,
)


@given(ACTIONS, st.integers(1, 4))
def test_queue_is_first_in_first_out(actions: list[tuple[str, int]], capacity: int) -> None:
    """A queue does what a list does in any sequence of calls."""
    queue, closed = _queue(capacity=capacity), False
    model: list[int] = []
    for what, n in actions:
        if what == "put":
            if closed:
                with pytest.raises(CancelledError):
                    queue.enqueue_many([_element(n)], _now())
            elif len(model) == capacity:
                with pytest.raises(DeadlineExceededError):
                    queue.enqueue_many([_element(n)], _now())
            else:
                queue.enqueue_many([_element(n)], _now())
                model.append(n)
        elif what == "close":
            queue.close()
            closed = True
        else:
            wanted = min(n, len(model)) if what == "up_to" and closed and model else n
            if len(model) >= wanted:
                got = (
                    queue.dequeue(_now())[0]
                    if what == "take"
                    else queue.dequeue_many(n, _now(), up_to=what == "up_to")[0]
                )
                assert np.atleast_1d(got).tolist() == model[:wanted]
                model = model[wanted:]
            else:
                with pytest.raises(OutOfRangeError if closed else DeadlineExceededError):
                    queue.dequeue_many(n, _now(), up_to=what == "up_to")
        assert queue.size() == len(model)
        assert queue.is_closed() == closed


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(["fifo", "shuffle"]),
)
def test_queue_threads_lose_nothing(given_: list[list[int]], capacity: int, kind: str) -> None:
    """Threads lose no element of a queue and invent none."""
    queue = _queue(kind, capacity)
    took: list[float] = []

    def take() -> None:
        while True:
            try:
                took.append(float(queue.dequeue(Cancellation())[0]))
            except OutOfRangeError:
                return

    takers = [threading.Thread(target=take) for _ in range(2)]
    putters = [
        threading.Thread(
            target=lambda mine=mine: queue.enqueue_many([_element(v) for v in mine], Cancellation())
        )
        for mine in given_
    ]
    for thread in [*takers, *putters]:
        thread.start()
    for thread in putters:
        thread.join(60)
    queue.close()
    for thread in takers:
        thread.join(60)
    assert sorted(took) == sorted(v for mine in given_ for v in mine)


def test_shuffle_keeps_minimum_until_closed() -> None:
    """A shuffle queue keeps its minimum of elements until the queue is closed."""
    queue = _queue("shuffle", 10, min_after_dequeue=2, seed=3)
    queue.enqueue_many([_element(v) for v in range(4)], _now())
    first = [float(queue.dequeue(_now())[0]) for _ in range(2)]
    with pytest.raises(DeadlineExceededError):
        queue.dequeue(_now())
    queue.close()
    assert sorted(first + queue.dequeue_many(2, _now())[0].tolist()) == [0, 1, 2, 3]


def test_seeded_shuffle_repeats_itself() -> None:
    """A seeded shuffle repeats its order, and another seed gives another order."""

    def draw(seed: int) -> list[float]:
        queue = _queue("shuffle", 100, seed=seed)
        queue.enqueue_many([_element(v) for v in range(30)], _now())
        return list(queue.dequeue_many(30, _now())[0])

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1) != sorted(draw(1))


def test_padding_fills_with_zeros() -> None:
    """A padding queue fills short elements with zeros."""
    queue = _queue("padding", shapes=((None, 2),))
    queue.enqueue_many([(np.ones((n, 2), np.float32),) for n in (1, 3)], _now())
    got = queue.dequeue_many(2, _now())[0]
    assert got.shape == (2, 3, 2)
    assert got[:, :, 0].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_padding_of_strings_is_empty() -> None:
    """A padding queue fills short elements of strings with empty strings."""
    queue = QueueResource("padding", "q", 4, [np.dtype(object)], ((None,),))
    queue.enqueue_many([(np.array([b"a"], object),), (np.array([b"b", b"c"], object),)], _now())
    assert queue.dequeue_many(2, _now())[0].tolist() == [[b"a", b""], [b"b", b"c"]]


def test_batch_may_exceed_capacity() -> None:
    """A batch may have more elements than the queue has room for."""
    queue = _queue(capacity=2)
    thread, got = in_thread(lambda: queue.dequeue_many(5, Cancellation()))
    queue.enqueue_many([_element(v) for v in range(5)], Cancellation())
    thread.join(60)
    assert got[0][0].tolist() == [0, 1, 2, 3, 4]


def test_failed_batch_is_put_back() -> None:
    """A batch that fails at its deadline takes no element."""
    queue = _queue()
    queue.enqueue_many([_element(v) for v in (1, 2)], _now())
    with pytest.raises(DeadlineExceededError):
        queue.dequeue_many(3, _now())
    assert queue.dequeue_many(2, _now())[0].tolist() == [1, 2]


def test_closing_lets_waiting_enqueues_finish() -> None:
    """An enqueue that waits when the queue is closed still adds its element."""
    queue = _queue(capacity=1)
    queue.enqueue_many([_element(1)], _now())
    thread, done = in_thread(lambda: queue.enqueue_many([_element(2)], Cancellation()))
    while not queue.waiting()[1]:
        thread.join(0.001)
    queue.close()
    assert [float(queue.dequeue(Cancellation())[0]) for _ in range(2)] == [1, 2]
    thread.join(60)
    assert done == [None]
    with pytest.raises(OutOfRangeError):
        queue.dequeue(_now())


def test_closing_may_cancel_waiting_enqueues() -> None:
    """Closing with cancel_pending_enqueues cancels the enqueues that wait."""
    queue = _queue(capacity=1)
    queue.enqueue_many([_element(1)], _now())
    thread, done = in_thread(lambda: queue.enqueue_many([_element(2)], Cancellation()))
    while not queue.waiting()[1]:
        thread.join(0.001)
    queue.close(cancel_pending_enqueues=True)
    thread.join(60)
    assert isinstance(done[0], CancelledError)
    assert float(queue.dequeue(_now())[0]) == 1


@pytest.mark.parametrize("end", [lambda q, c: c.set("the caller hung up"), lambda q, c: q.clear()])
def test_waiting_dequeue_ends(end: Callable[..., None]) -> None:
    """A dequeue that waits ends when the caller hangs up or the queue is cleared."""
    queue, cancellation = _queue(), Cancellation()
    thread, done = in_thread(lambda: queue.dequeue(cancellation))
    end(queue, cancellation)
    thread.join(60)
    assert isinstance(done[0], CancelledError)


def test_dequeues_are_served_in_order() -> None:
    """Dequeues are served in the order of their arrival."""
    queue = _queue(capacity=8)
    large, got_large = in_thread(lambda: queue.dequeue_many(3, Cancellation()))
    while not queue.waiting()[0]:
        large.join(0.001)
    small, got_small = in_thread(lambda: queue.dequeue(Cancellation()))
    while queue.waiting()[0] < 2:
        small.join(0.001)
    queue.enqueue_many([_element(v) for v in range(4)], _now())
    large.join(60)
    small.join(60)
    assert got_large[0][0].tolist() == [0, 1, 2]
    assert float(got_small[0][0]) == 3


def test_wrong_elements_are_refused_by_name() -> None:
    """A batch with an element of another kind is refused by name, and none of its elements is
    added.
    """
    queue = _queue(shapes=((2,),))
    good, bad = np.zeros(2, np.float32), np.zeros(3, np.float32)
    with pytest.raises(InvalidArgumentError, match="component 0 has shape"):
        queue.enqueue_many([(good,), (bad,)], _now())
    with pytest.raises(InvalidArgumentError, match="float64"):
        queue.enqueue_many([(np.zeros(2),)], _now())
    with pytest.raises(InvalidArgumentError, match="1 components, not 2"):
        queue.enqueue_many([(good, good)], _now())
    assert queue.size() == 0
    with pytest.raises(InvalidArgumentError, match="fixed shape"):
        _queue(shapes=(None,)).dequeue_many(1, _now())
    with pytest.raises(InvalidArgumentError, match="capacity"):
        _queue("shuffle", 2, min_after_dequeue=2)
