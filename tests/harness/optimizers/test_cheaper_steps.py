"""Options that make a step cheaper: fewer bits on the wire, several batches to a push; what they compute and send."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from tests.runtime.kit import TARGET, servers

PS = "/job:ps/task:0"
WIDTH = 10_000


def _bf16(value: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(value).astype(jnp.bfloat16).astype(jnp.float32))


def test_wire_halves_and_variable_keeps_bits() -> None:
    """With on_wire half the bytes cross the wire each way, and the variable keeps full precision."""
    start = np.linspace(1, 2, WIDTH, dtype=np.float32)
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        with rt.device(
            rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
        ):
            w = rt.Variable(start, name="w")
            x = rt.placeholder(np.float32, [WIDTH], name="x")
            loss = rt.numpy.sum(harness.on_wire(w) * x)
            train = harness.Optimizer(optax.sgd(1e-3)).minimize(loss)
        with rt.Session(cluster[TARGET].target) as session:
            session.run(rt.global_variables_initializer())
            gradient = np.full(WIDTH, 1 + 2**-10, np.float32)  # rounds to 1 on its way
            session.run(train, {x: gradient})
            before = cluster[PS].tensors.counters
            found = [session.run([train, loss], {x: gradient})[1] for _ in range(10)]
            after = cluster[PS].tensors.counters
            value = session.run(w)
    assert after.bytes_in - before.bytes_in < 10 * (2 * WIDTH + 500)
    assert after.bytes_out - before.bytes_out < 10 * (2 * WIDTH + 500)
    expected = start.copy()
    for k in range(11):
        if k:
            np.testing.assert_allclose(found[k - 1], np.sum(_bf16(expected) * gradient), rtol=1e-5)
        # 1e-3 is less than bfloat16 can add to 1.5
        expected = expected - np.float32(1e-3) * _bf16(gradient)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_wide_and_narrow_gradients_add_up() -> None:
    """A variable that a loss reads both narrow and wide receives both gradients."""
    with rt.Graph().as_default():
        w = rt.Variable(np.array([1.0, 2.0], np.float32), name="w")
        loss = rt.numpy.sum(harness.on_wire(w) * 3.0) + rt.numpy.sum(w * 5.0)
        ((gradient, _),) = harness.Optimizer(optax.sgd(1.0)).compute_gradients(loss)
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            np.testing.assert_allclose(session.run(gradient), [8.0, 8.0])


def test_clipping_precedes_rounding() -> None:
    """Clipping works on gradients before they are rounded for the wire."""
    with rt.Graph().as_default():
        w = rt.Variable(np.zeros(2, np.float32), name="w")
        loss = rt.numpy.sum(harness.on_wire(w) * np.array([3.0, 4.0], np.float32))
        train = harness.Optimizer(
            optax.sgd(1.0), before_push=optax.clip_by_global_norm(1.0)
        ).minimize(loss)
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(
                session.run(w), -_bf16(np.array([0.6, 0.8], np.float32)), rtol=1e-6
            )


def test_narrow_variables_stay_variables() -> None:
    """A variable no wider than the wire stays a variable, and a wire type that is not floating
    point is refused.
    """
    with rt.Graph().as_default():
        params = {
            "count": rt.Variable(np.int32(1), name="count", trainable=False),
            "half": rt.Variable(jnp.zeros(2, jnp.bfloat16), name="half"),
        }
        assert harness.on_wire(params) == params
        with pytest.raises(rt.InvalidArgumentError, match="int8 is not floating point"):
            harness.on_wire(params, np.int8)


def _loss(params: dict, x: np.ndarray, y: np.ndarray) -> jnp.ndarray:
    return jnp.mean((x @ params["w"] - y) ** 2)


def test_accumulated_batches_equal_one_batch() -> None:
    """Accumulated batches give the gradient of one large batch and cost the same two calls."""
    rng = np.random.default_rng(0)
    images, labels = (
        rng.standard_normal((12, 5)).astype(np.float32),
        rng.standard_normal(12).astype(np.float32),
    )
    values = {}
    calls = {}
    for name, loss_fn in (("large", _loss), ("accumulated", harness.accumulated(_loss, 4))):
        with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
            with rt.device(
                rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
            ):
                params = rt.variables({"w": np.ones(5, np.float32)}, name="m")
                x = rt.placeholder(np.float32, [None, 5], name="x")
                y = rt.placeholder(np.float32, [None], name="y")
                loss = rt.call(loss_fn, params, x, y, name="loss")
                train = harness.Optimizer(optax.sgd(0.1)).minimize(loss)
            with rt.Session(cluster[TARGET].target) as session:
                session.run(rt.global_variables_initializer())
                first = session.run([train, loss], {x: images, y: labels})[1]
                before = cluster[PS].tensors.counters.calls
                session.run(train, {x: images, y: labels})
                calls[name] = cluster[PS].tensors.counters.calls - before
                values[name] = (first, session.run(params["w"]))
    np.testing.assert_allclose(values["accumulated"][0], values["large"][0], rtol=1e-5)
    np.testing.assert_allclose(values["accumulated"][1], values["large"][1], rtol=1e-5)
    assert calls == {"large": 2, "accumulated": 2}


def test_accumulated_names_what_does_not_fit() -> None:
    """Batches that cannot be split into equal parts are refused with the reason."""
    assert harness.accumulated(_loss, 1) is _loss
    with pytest.raises(ValueError, match="steps is 0"):
        harness.accumulated(_loss, 0)
    with pytest.raises(ValueError, match="10 examples are not a multiple of 4"):
        harness.accumulated(_loss, 4)({"w": np.ones(5)}, np.ones((10, 5)), np.ones(10))
    with pytest.raises(ValueError, match="a scalar is no batch"):
        harness.accumulated(_loss, 4)({"w": np.ones(5)}, np.ones((12, 5)), np.float32(1))
