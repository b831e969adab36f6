"""Distributed training with one worker is the same arithmetic as a loop in one process."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from tests.runtime.kit import TARGET, addresses, processes, servers

pytestmark = pytest.mark.chaos

STEPS = 30
BATCH = 32


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    hidden = jax.nn.sigmoid(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def initial() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "w1": (random.normal(size=(20, 16)) * 0.3).astype(np.float32),
        "b1": np.zeros(16, np.float32),
        "w2": (random.normal(size=(16, 5)) * 0.3).astype(np.float32),
        "b2": np.zeros(5, np.float32),
    }


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        yield (
            random.normal(size=(BATCH, 20)).astype(np.float32),
            random.integers(0, 5, BATCH).astype(np.int32),
        )


def plain_losses(transformation: optax.GradientTransformation) -> tuple[list[float], Any]:
    params: Any = jax.tree.map(jnp.asarray, initial())
    state = transformation.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for x, y in batches():
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
    return losses, params


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[str, int]]:
    """A worker in this process, two ps in others; and how many ps there are."""
    cluster = addresses(ps=2, worker=1)
    with processes(cluster, ("ps", 0), ("ps", 1)), rt.Server(cluster, "worker", 0) as server:
        yield server.target, 2


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.5),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(1e-2),
    "a schedule": lambda: optax.sgd(optax.exponential_decay(0.5, 10, 0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loss_curve_equals_one_process(target: tuple[str, int], name: str) -> None:
    """Training over ps gives the loss curve of one process."""
    wanted, parameters = plain_losses(OPTIMIZERS[name]())
    with rt.Graph().as_default(), contextlib.ExitStack() as stack:
        stack.enter_context(
            rt.device(rt.replica_device_setter(ps_tasks=target[1], worker_device=TARGET))
        )
        step = rt.Variable(0, dtype=np.int64, name="global_step", trainable=False)
        params = rt.variables(initial(), f"curve_{name.replace(' ', '_')}")
        x, y = rt.placeholder(np.float32, [None, 20]), rt.placeholder(np.int32, [None])
        loss = rt.call(loss_fn, params, x, y, name="loss")
        train = harness.Optimizer(OPTIMIZERS[name]()).minimize(loss, step)
        config = rt.SessionConfig(start_timeout_secs=60)
        session = stack.enter_context(rt.Session(target[0], config=config))
        session.run(rt.global_variables_initializer())
        found = []
        for images, labels in batches():
            _, value, count = session.run([train, loss, step], {x: images, y: labels})
            found.append(float(value))
        assert count == STEPS
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        for key, value in session.run(params).items():
            np.testing.assert_allclose(value, parameters[key], rtol=1e-5, atol=1e-6, err_msg=key)


def test_workers_in_turn_share_curve() -> None:
    """Two workers in turn give one loss curve."""
    wanted, _ = plain_losses(optax.adam(1e-2))
    with servers(sockets=True, ps=1, worker=2) as made, contextlib.ExitStack() as stack:
        steps = []
        for index in (0, 1):
            graph = rt.Graph()
            with (
                graph.as_default(),
                rt.device(
                    rt.replica_device_setter(ps_tasks=1, worker_device=f"/job:worker/task:{index}")
                ),
            ):
                params = rt.variables(initial(), "turns")
                x, y = rt.placeholder(np.float32, [None, 20]), rt.placeholder(np.int32, [None])
                loss = rt.call(loss_fn, params, x, y, name="loss")
                train = harness.Optimizer(optax.adam(1e-2)).minimize(loss)
                init = rt.global_variables_initializer()
                session = rt.Session(made[f"/job:worker/task:{index}"].target, graph)
                # it outlives these scopes, so it must not be entered inside them
                stack.callback(session.close)
                steps.append((session, [train, loss], x, y))
                if index == 0:
                    session.run(init)
        found = []
        for i, (images, labels) in enumerate(batches()):
            session, fetches, x, y = steps[i % 2]
            found.append(float(session.run(fetches, {x: images, y: labels})[1]))
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
