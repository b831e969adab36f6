"""harness.ExponentialMovingAverage: beside its variables, under names of its own, of the values after each step."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tensorboardX.proto import summary_pb2

import harness
import runtime as rt

pytestmark = pytest.mark.cluster

START = {"w": np.array([1.0, -2.0], np.float32), "b": np.array(3.0, np.float32)}


def _loss(params: Any) -> jax.Array:
    return (params["w"] ** 2).sum() + params["b"] ** 2


def _expected(steps: int, decay: float, warm_up: bool) -> tuple[Any, Any]:
    values, averages = dict(START), dict(START)
    for n in range(steps):
        now = min(decay, (1 + n) / (10 + n)) if warm_up else decay
        values = {name: value * (1 - 2 * 0.1) for name, value in values.items()}
        averages = {name: now * averages[name] + (1 - now) * values[name] for name in values}
    return values, averages


@pytest.mark.parametrize("warm_up", [True, False])
def test_average_follows_values_after_each_step(warm_up: bool) -> None:
    """A moving average is taken of the values after each step, with and without warm-up."""
    with rt.Graph().as_default():
        params = rt.variables(START, name="model")
        ema = harness.ExponentialMovingAverage(0.9, warm_up=warm_up)
        optimizer = harness.Optimizer(ema.after(optax.sgd(0.1)))
        train = optimizer.minimize(rt.call(_loss, params))
        averages = ema.variables(optimizer, params)
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            jax.tree.map(np.testing.assert_array_equal, session.run(averages), START)
            for _ in range(5):
                session.run(train)
            found = session.run([params, averages])
    for one, other in zip(found, _expected(5, 0.9, warm_up), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


def test_average_is_saved_and_read_back(tmp_path: pathlib.Path) -> None:
    """A moving average is saved under names of its own, and load_pytree reads it as a tree."""
    with rt.Graph().as_default(), rt.Server.create_local_server() as server:
        step = harness.get_or_create_global_step()
        params = rt.variables(START, name="model")
        ema = harness.ExponentialMovingAverage(0.9)
        train = harness.Optimizer(ema.after(optax.sgd(0.1))).minimize(rt.call(_loss, params), step)
        with harness.Supervisor(logdir=tmp_path, summary_op=None).managed_session(
            server.target
        ) as session:
            for _ in range(3):
                session.run(train)
    values, averages = _expected(3, 0.9, True)
    names = [name for name, _ in harness.list_variables(str(tmp_path))]
    assert {"model/w", "model/w/ema/average", "model/b/ema/average"} <= set(names)
    for slot, wanted in (("", values), ("ema/average", averages)):
        for like, options in ((params, {}), (START, {"name": "model"})):
            found = harness.load_pytree(tmp_path, like, slot=slot, **options)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


def test_variable_without_average_is_named() -> None:
    """A variable without an average, and a decay above 1, are refused by name."""
    with rt.Graph().as_default():
        params = rt.variables(START, name="model")
        ema = harness.ExponentialMovingAverage()
        with pytest.raises(
            rt.InvalidArgumentError, match=r"'model/b' has no moving average: give Optimizer ema"
        ):
            ema.variables(harness.Optimizer(optax.sgd(0.1)), params)
        with pytest.raises(rt.InvalidArgumentError, match="between 0 and 1, not 1.5"):
            harness.ExponentialMovingAverage(1.5)


def test_training_summaries_show_usual_values() -> None:
    """training_summaries shows the gradient norm, the learning rate and the distance of the
    averages.
    """
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        params = rt.variables(START, name="model")
        ema = harness.ExponentialMovingAverage(0.9, warm_up=False)
        schedule = optax.linear_schedule(0.1, 0.0, 10)
        optimizer = harness.Optimizer(ema.after(optax.sgd(schedule)))
        pairs = optimizer.compute_gradients(rt.call(_loss, params))
        train = optimizer.apply_gradients(pairs, step)
        averages = ema.variables(optimizer, params)
        harness.training_summaries(
            pairs, learning_rate=schedule, global_step=step, averages=averages
        )
        merged = harness.summary.merge_all()
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(train)
            found = summary_pb2.Summary.FromString(session.run(merged))
            value, average = (jax.tree.leaves(tree) for tree in session.run([params, averages]))
        shown = {entry.tag: entry.simple_value for entry in found.value}
        gradient = np.sqrt(sum(((2 * v) ** 2).sum() for v in value))
        distance = np.sqrt(sum(((v - a) ** 2).sum() for v, a in zip(value, average, strict=True)))
        assert shown == {
            "training/gradient_norm": pytest.approx(gradient, rel=1e-5),
            "training/learning_rate": pytest.approx(0.09),
            "training/average_distance": pytest.approx(distance, rel=1e-5),
        }
        with pytest.raises(rt.InvalidArgumentError, match="a schedule needs global_step"):
            harness.training_summaries(pairs, learning_rate=schedule)
