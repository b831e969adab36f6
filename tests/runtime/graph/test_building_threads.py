"""A graph that several threads build at once."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt

THREADS, ROUNDS = 4, 60


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def made_by_threads(graph: rt.Graph, make: Callable[[], Any]) -> list[Any]:
    """What ``make`` gives, called at once by several threads, several times."""
    made: list[Any] = []
    start = threading.Barrier(THREADS)

    def build() -> None:
        with graph.as_default():
            for _ in range(ROUNDS):
                start.wait()
                made.append(make())

    threads = [threading.Thread(target=build) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == THREADS * ROUNDS
    return made


def test_each_variable_has_its_place() -> None:
    """Variables that threads make at once in one graph have different names."""
    graph = rt.Graph()
    made = made_by_threads(graph, lambda: rt.Variable(np.float32(0), name="w"))
    assert len({v.spec.name for v in made}) == len(made)
    assert all(v.spec.name == v.op.name for v in made)


def test_each_queue_has_its_name() -> None:
    """Queues that threads make at once in one graph have different names."""
    graph = rt.Graph()
    made = made_by_threads(graph, lambda: rt.FIFOQueue(1, np.float32, name="q"))
    assert len({q.name for q in made}) == len(made)
    assert all(q.name == q.op.name for q in made)


def test_each_random_key_draws_differently() -> None:
    """Random keys that threads make at once in one graph draw different numbers."""
    graph = rt.Graph()
    graph.seed = 7
    keys = made_by_threads(graph, lambda: rt.random_key(name="k"))[: 4 * THREADS]
    with rt.Session(graph=graph) as session:
        assert len({tuple(key) for key in session.run(keys)}) == len(keys)
