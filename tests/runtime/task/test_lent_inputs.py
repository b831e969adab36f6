"""Inputs of a call are lent: they lie in the connection's buffer, which the next call overwrites.

Nobody keeps them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.wire.connection import Connection
from tests.runtime.kit import TARGET, servers

N = 1000  # large enough to travel with the step, in the buffer


@pytest.fixture
def overwriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrites each connection's buffer when its call is over, as the next call will."""
    real = Connection._call

    def call(self: Connection, *arguments: Any) -> None:
        real(self, *arguments)
        self._raw[:] = 0x2A

    monkeypatch.setattr(Connection, "_call", call)


@pytest.fixture
def session() -> Iterator[rt.Session]:
    with (
        servers(sockets=True, ps=2, worker=1) as made,
        rt.Graph().as_default(),
        rt.Session(made[TARGET].target) as sess,
    ):
        yield sess


def ramp(factor: float = 1.0) -> np.ndarray[Any, Any]:
    return np.arange(N, dtype=np.float32) * np.float32(factor)


def test_initial_value_follows_another(session: rt.Session) -> None:
    """An initial value may depend on that of another variable."""
    with rt.device("/job:ps/task:0"):
        w = rt.Variable(ramp(), name="w")
        v = rt.Variable(w.initialized_value() * 2.0, name="v")
    session.run(rt.global_variables_initializer())
    np.testing.assert_array_equal(session.run(w), ramp())
    np.testing.assert_array_equal(session.run(v), ramp(2.0))


@pytest.mark.usefixtures("overwriting")
class TestNobodyKeepsAnInput:
    def test_lent_input_reaches_another_stage(self, session: rt.Session) -> None:
        """A value that was lent to a step is right in another stage of its task."""
        fed = rt.placeholder(np.float32, [N])
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(fed, name="w")
            v = rt.Variable(w.initialized_value() * 2.0, name="v")
        session.run(rt.group(w.initializer, v.initializer), {fed: ramp()})
        np.testing.assert_array_equal(session.run(v), ramp(2.0))

    def test_lent_input_reaches_another_task(self, session: rt.Session) -> None:
        """A value of a step is right in a stage of another task, strings too."""
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(ramp(), name="w")
        with rt.device("/job:ps/task:1"):
            v = rt.Variable(w.initialized_value() * 2.0, name="v")
            text = rt.Variable(rt.constant(["a" * 5000, "b"]), name="text")
        session.run(rt.global_variables_initializer())
        np.testing.assert_array_equal(session.run(v), ramp(2.0))
        assert session.run(text).tolist() == [b"a" * 5000, b"b"]

    def test_lent_input_stays_in_queue(self, session: rt.Session) -> None:
        """A value that was fed stays right in a queue."""
        fed = rt.placeholder(np.float32, [N])
        with rt.device("/job:ps/task:0"):
            queue = rt.FIFOQueue(10, np.float32, [(N,)])
            many = rt.FIFOQueue(10, [np.float32, object], [(), ()], name="many")
        session.run(queue.enqueue(fed), {fed: ramp()})
        session.run(queue.enqueue(fed), {fed: ramp(2.0)})
        session.run(many.enqueue_many((rt.constant(ramp()[:3]), rt.constant(["x", "y", "z"]))))
        np.testing.assert_array_equal(
            session.run(queue.dequeue_many(2)), np.stack([ramp(), ramp(2.0)])
        )
        numbers, names = session.run(many.dequeue_many(3))
        np.testing.assert_array_equal(numbers, ramp()[:3])
        assert names.tolist() == [b"x", b"y", b"z"]

    def test_lent_input_stays_in_accumulator(self, session: rt.Session) -> None:
        """A gradient that was fed stays right in an accumulator."""
        fed = rt.placeholder(np.float32, [N])
        with rt.device("/job:ps/task:0"):
            sums = rt.ConditionalAccumulator(np.float32, [N], reduction="sum")
            first, second = sums.apply_grad(fed, worker=0), sums.apply_grad(fed, worker=1)
            taken = sums.take_grad(2)
        session.run(first, {fed: ramp()})
        session.run(second, {fed: ramp(2.0)})
        np.testing.assert_array_equal(session.run(taken), ramp(3.0))

    def test_lent_input_stays_in_quorum(self, session: rt.Session) -> None:
        """A gradient that was fed stays right in a quorum."""
        fed, stamp = rt.placeholder(np.float32, [N]), rt.placeholder(np.int64, [])
        with rt.device("/job:ps/task:0"):
            step = rt.Variable(np.int64(0), dtype=np.int64, name="step")
            w = rt.Variable(np.zeros(N, np.float32), name="w")
            # the first of the two gradients is kept
            quorum = rt.lowlevel.Quorum(step, needed=2, total=1, alone=True)
            push = quorum.push(
                [w.assign_add(fed).op, step.assign_add(np.int64(1)).op], stamp, worker=0
            )
        session.run(rt.global_variables_initializer())
        session.run(push, {fed: ramp(2.0), stamp: 0})
        session.run(push, {fed: ramp(4.0), stamp: 0})
        np.testing.assert_array_equal(session.run(w), ramp(3.0))
