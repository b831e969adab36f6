"""Operations belong to the graph of their inputs, whichever graph is the default one; scopes belong to their graph."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import harness.tf1 as tf
import runtime as rt

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def default() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


class Model:
    """Made in a graph whose block has ended."""

    def __init__(self) -> None:
        self.graph = rt.Graph()
        with self.graph.as_default():
            self.w = rt.Variable(np.arange(3, dtype=np.float32), name="w")
            self.v = rt.Variable(np.float32(2), name="v")
            self.x = rt.placeholder(np.float32, [3], name="x")
            self.queue = rt.FIFOQueue(3, np.float32, [()])
            self.init = rt.global_variables_initializer()


MAKE: dict[str, Callable[[Model], Any]] = {
    "assign": lambda m: m.w.assign([1.0, 1.0, 1.0]),
    "assign_add": lambda m: m.w.assign_add(np.ones(3, np.float32)),
    "rt.assign_sub": lambda m: rt.assign_sub(m.v, 1.0),
    "update": lambda m: m.w.update(lambda old, d: old * d, 2.0),
    "operator": lambda m: m.w + 2.0,
    "operator with a large array": lambda m: 3.0 * m.x[0] + np.ones(1000, np.float32),
    "index": lambda m: m.w[None],
    "call": lambda m: rt.call(
        lambda tree, y: tree["a"] + y, {"a": m.w}, np.ones(1000, np.float32)[:3]
    ),
    "numpy": lambda m: rt.numpy.sum(m.w),
    "random": lambda m: rt.random.poisson(m.v),
    "gradients": lambda m: rt.gradients(m.w * m.w, [m.w])[0],
    "gradients with a start": lambda m: rt.gradients(m.w * m.w, [m.w], [np.ones(3, np.float32)])[0],
    "group": lambda m: rt.group(m.w.op, [m.init, m.w.assign(m.x)]),
    "initializer": lambda m: rt.variables_initializer([m.w]),
    "is initialized": lambda m: rt.is_variable_initialized(m.w),
    "uninitialized": lambda m: rt.report_uninitialized_variables([m.w]),
    "await": lambda m: rt.wait_until_initialized([m.w], 0.1),
    "initialized_value": lambda m: m.w.initialized_value(),
    "read": lambda m: m.w.read_value(),
    "print": lambda m: rt.Print(m.w, [m.v, "text"]),
    "check": lambda m: rt.check(m.v > 0.0, "not positive", ["text"]),
    "enqueue": lambda m: m.queue.enqueue(1.0),
    "dequeue": lambda m: m.queue.dequeue(),
    "tf.add": lambda m: tf.add(m.w, 3.0),
    "tf.add of 64 bits": lambda m: tf.add(tf.cast(m.w, tf.float64), np.float64(3)),
    "tf.reduce_sum": lambda m: tf.reduce_sum(m.w),
    "tf.assign": lambda m: tf.assign(m.w, [1.0, 2.0, 3.0]),
    "tf.identity": lambda m: tf.identity(m.w),
    "tf.reshape": lambda m: tf.reshape(m.w, [3, 1]),
    "tf.stack": lambda m: tf.stack([m.v, 2.0]),
    "tf.concat": lambda m: tf.concat([m.w, [1.0]], 0),
    "tf.cast": lambda m: tf.cast(m.w, tf.int32),
    "tf.gradients": lambda m: tf.gradients(tf.square(m.w), [m.w])[0],
}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("what", MAKE)
def test_graph_is_that_of_inputs(what: str, elsewhere: bool, default: rt.Graph) -> None:
    """A new operation belongs to the graph of its inputs, whatever graph is the default."""
    model = Model()
    with rt.Graph().as_default() if elsewhere else default.as_default() as other:
        made = MAKE[what](model)
        assert made.graph is model.graph
        assert rt.get_default_graph() is other
        assert other.get_operations() == []
    if what != "dequeue":
        with rt.Session(graph=model.graph) as session:
            session.run(model.init)
            session.run(made, {model.x: np.ones(3, np.float32)})


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a.w + b.w,
        lambda a, b: rt.call(lambda x, y: x, a.w, [b.w]),
        lambda a, b: rt.group(a.w.op, b.w.op),
        lambda a, b: a.w.assign(b.x),
        lambda a, b: rt.update([a.w], lambda old, new: ([new], ()), [b.x]),
        lambda a, b: tf.add(a.w, b.w),
        lambda a, b: a.queue.enqueue(b.v),
        lambda a, b: rt.Print(a.w, [b.w]),
    ],
)
def test_inputs_of_two_graphs_are_refused(mix: Callable[[Model, Model], Any]) -> None:
    """Inputs of two graphs are refused with the names of both."""
    first, second = Model(), Model()
    with pytest.raises(ValueError, match="'.*' is of another graph than '.*'"):
        mix(first, second)


def test_default_graph_constant_is_an_input() -> None:
    """A constant of the default graph counts as an input of that graph."""
    model = Model()
    with pytest.raises(ValueError, match="'w.*' is of another graph than 'here:0'"):
        rt.constant(np.ones(3, np.float32), name="here") + model.w


def test_scopes_are_those_of_the_graph() -> None:
    """Device and name scopes apply to the graph in which they were opened."""
    model = Model()
    with rt.device("/job:ps"), rt.name_scope("ours"):
        assert ((model.w + 1.0).device, (model.w + 1.0).name) == ("", "add_1:0")
        assert tf.identity(model.w).device == ""
    with model.graph.as_default(), rt.device("/job:worker"), rt.name_scope("theirs"):
        assert ((model.w + 1.0).device, (model.w + 1.0).name) == ("/job:worker", "theirs/add_1:0")
        with rt.Graph().as_default():
            assert rt.constant(1.0).device == ""
            with rt.device("/job:ps"):
                assert rt.constant(1.0).device == "/job:ps"
                assert ((model.w + 1.0).device, (model.w + 1.0).name) == (
                    "/job:worker",
                    "theirs/add_3:0",
                )
                with model.graph.as_default():  # as in TensorFlow, what was opened in it holds
                    assert rt.constant(1.0).device == "/job:worker"
        assert (model.w + 1.0).device == "/job:worker"
    assert (model.w + 1.0).device == ""


def test_dependencies_are_those_of_the_graph() -> None:
    """Control dependencies apply to the graph in which they were opened."""
    model = Model()
    with model.graph.as_default():
        first = rt.no_op("first")
        with rt.control_dependencies([first]), rt.Graph().as_default():
            assert (model.w + 1.0).op.control_inputs == (first,)
    with pytest.raises(ValueError, match="'first' is not an element of this graph"):
        with rt.control_dependencies([first]):
            pass


def test_without_inputs_default_graph_counts(default: rt.Graph) -> None:
    """An operation without inputs belongs to the default graph."""
    assert rt.no_op().graph is default
    assert rt.call(lambda: jnp.zeros(3)).graph is default
    assert rt.Graph.of(1, "w", [None]) is default
