"""What is made under ``control_dependencies`` comes after them: reads of variables and gradients too."""

from collections.abc import Iterator

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from tests.runtime.plan.test_planner_properties import waves_of

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def _started() -> rt.Session:
    session = rt.Session()
    session.run(rt.global_variables_initializer())
    return session


def test_dependent_variable_reads_after_update() -> None:
    """Operations under control dependencies see a variable as it is after them."""
    v, copy = rt.Variable(1.0, name="v"), rt.Variable(0.0, name="copy")
    with rt.control_dependencies([v.assign_add(10.0)]):
        same, more, called = rt.identity(v), v + 1.0, rt.call(lambda p: p["v"] * 2, {"v": v})
        copied = copy.assign(v)
        value = v.value()
    with _started() as session:
        assert session.run([same, more, called, value, copied]) == [11.0, 12.0, 22.0, 11.0, 11.0]
        assert session.run([v, copy]) == [11.0, 11.0]


def test_same_dependencies_share_one_read(graph: rt.Graph) -> None:
    """Operations under the same control dependencies share one read of a variable."""
    v = rt.Variable(1.0, name="v")
    update = v.assign_add(1.0)
    with rt.control_dependencies([update]):
        made = [v + 1.0, v + 2.0]
        once = v.value()
        assert v.read_value() is not once  # one of its own
    with rt.control_dependencies([update]):
        assert v.value() is once
        with rt.control_dependencies(None):
            assert v.value() is not once
    assert [t.op.inputs[0] for t in made] == [once, once]
    assert v.value().name == "v/read:0"
    assert once.op.device == v.device and once.op.control_inputs == (update.op,)


def test_chained_reads_see_one_update_each() -> None:
    """Each read of a chain of reads and updates sees one update more."""
    v = rt.Variable(0.0, name="v")
    seen = [v + 0.0]
    for _ in range(3):
        with rt.control_dependencies([seen[-1]]):
            update = v.assign_add(1.0)
        with rt.control_dependencies([update]):
            seen.append(v + 0.0)
    with _started() as session:
        assert session.run(seen) == [0.0, 1.0, 2.0, 3.0]


def test_gradient_passes_read_after_update() -> None:
    """A gradient flows through a read that comes after an update."""
    v = rt.Variable(3.0, name="v")
    with rt.control_dependencies([v.assign_add(1.0)]):
        loss = v * v
    gradient = rt.gradients(loss, v)
    with _started() as session:
        assert session.run([loss, gradient]) == [16.0, 8.0]


def test_gradient_awaits_open_dependencies() -> None:
    """A gradient is fetched only after the control dependencies that were open when it was made."""
    w, counter = rt.Variable(3.0, name="w"), rt.Variable(0, name="counter", trainable=False)
    loss, x = w * w, rt.constant(1.0)
    with rt.control_dependencies([counter.assign_add(1)]):
        ((pair, _),) = harness.Optimizer(optax.sgd(0.1)).compute_gradients(loss)
        direct, of_itself, none = rt.gradients([loss, x], [w, x, rt.constant(1.0)])
    after = rt.gradients(loss, w)
    assert none is None
    with _started() as session:
        for fetch, value, count in [
            (pair, 6.0, 1),
            (direct, 6.0, 2),
            (of_itself, 1.0, 3),
            (after, 6.0, 3),
        ]:
            assert session.run(fetch) == value
            assert session.run(counter) == count


def test_awaited_update_costs_no_round_trip() -> None:
    """An update that gradients wait for adds no wave to a step."""
    with rt.device(PS):
        w = rt.Variable(np.ones(4, np.float32), name="w")
        mean = rt.Variable(np.zeros(4, np.float32), name="mean", trainable=False)
    with rt.device(WORKER):
        x = rt.constant(np.full(4, 2.0, np.float32))
        hidden = w * x
        loss = rt.numpy.sum(hidden * hidden)
        update = mean.update(lambda m, batch: 0.9 * m + 0.1 * batch, hidden)
        with rt.control_dependencies([update]):
            train = harness.Optimizer(optax.sgd(0.1)).minimize(loss)
    assert waves_of([train, loss]) == [[PS], [WORKER], [PS]]
