"""Small arrays that travel between the host and a GPU as one, on the GPUs of ``tests.kit.stand_in_gpus``."""

import pathlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas

import harness
import runtime as rt
from runtime.master import tasks
from runtime.plan.packing import SMALL
from tests.runtime.kit import TARGET, servers

if "tests.kit.stand_in_gpus" not in sys.modules:
    pytest.skip("needs GPUs: make test-stand-ins", allow_module_level=True)

from tests.kit.stand_in_gpus import COPIES, clear

PS = 2
LARGE = SMALL // 4 + 1
"""Elements of a large variable."""
SHAPES = [(), (0, 3), (1,), (2, 5), (LARGE - 1,), (3,)] * 2
"""Shapes of the small variables of each dtype, the largest that is small among them."""
DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
GIVEN = 2
"""The batch and the id of the step."""
HOW = pytest.mark.parametrize("how", ["strict", "pipelined", "synchronous", "one process"])
REPEATABLE = pytest.mark.parametrize("how", ["strict", "synchronous", "one process"])
"""All but pipelined steps, whose parameters may or may not have the newest gradients."""


def first_values() -> list[Any]:
    """The first values of all variables, of which each ps has a part of each kind."""
    rng = np.random.default_rng(0)
    small = [rng.normal(size=shape).astype(dtype) for dtype in DTYPES for shape in SHAPES]
    return [*small, *np.ones((PS, LARGE), np.float32)]


def loss_fn(key: jax.Array, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Returns a loss that depends on each element."""
    noise = jax.random.uniform(key, x.shape)
    terms = [(jnp.sin(w.astype(np.float32) + (x + noise).mean()) ** 2).sum() for w in weights]
    return sum(terms, jnp.float32(0))


def train(how: str, device: str = "") -> tuple[list[float], list[Any], Counter[str]]:
    """Trains on a device of a worker; returns the losses, the variables, and the copies of the last step."""
    with servers(sockets=how != "one process", ps=PS, worker=1) as cluster, rt.Graph().as_default():
        rt.set_random_seed(1)
        spec = cluster[TARGET].cluster
        with rt.device(rt.replica_device_setter(cluster=spec, worker_device=TARGET + device)):
            count = harness.get_or_create_global_step()
            weights = [rt.Variable(value) for value in first_values()]
            x = rt.placeholder(np.float32, [4], name="x")
            loss = rt.call(loss_fn, rt.random_key(), x, *weights)
            optimizer: Any = harness.Optimizer(optax.sgd(0.125))
            if how == "synchronous":
                optimizer = harness.SyncReplicas(optimizer, 1, 1, worker=0)
            learn = optimizer.minimize(loss, global_step=count)
        config = rt.SessionConfig(prefetch=int(how == "pipelined"))
        supervisor = harness.Supervisor(is_chief=True, logdir=None, global_step=count)
        with supervisor.managed_session(cluster[TARGET].target, config=config) as session:
            losses = []
            for step in range(4):
                clear()
                losses.append(session.run([learn, loss], {x: np.full(4, step, np.float32)})[1])
            counted = COPIES.copy()
            found = session.run(weights)
    return losses, found, counted


def to_bytes(values: Sequence[Any]) -> list[bytes]:
    """Returns the bits of each value."""
    return [np.asarray(value).tobytes() for value in values]


@HOW
def test_small_arrays_travel_as_one(how: str) -> None:
    """The small arrays of one ps and one dtype are one copy, each way; a large array is a copy of its own."""
    copies = train(how)[2]
    moved = PS * len(DTYPES) + PS
    assert (copies["in"], copies["out"]) == (moved + GIVEN, moved + 1)
    assert copies["puts"] == 1 + PS
    assert (copies["late"], copies["waits"]) == (0, 1)


@REPEATABLE
def test_packs_change_no_bit(how: str) -> None:
    """Losses and variables have the bits of a step on the CPU, to which each array travels alone."""
    losses, values, _ = train(how)
    assert any((a != b).any() for a, b in zip(values, first_values(), strict=True) if a.size)
    losses_alone, values_alone, copies = train(how, "/cpu:0")
    assert not copies.total()
    assert to_bytes(losses) == to_bytes(losses_alone)
    assert to_bytes(values) == to_bytes(values_alone)


def halved(value: jax.Array) -> jax.Array:
    """Half of an array by a Pallas kernel, with a gradient by the same kernel."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 0.5

    def call(value: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        halves: jax.Array = pallas.pallas_call(kernel, shape, interpret=True)(value)
        return halves

    half = jax.custom_vjp(call)
    half.defvjp(lambda value: (call(value), None), lambda _, grad: (call(grad),))
    result: jax.Array = half(value)
    return result


def kernel_loss_fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Returns a loss of which each weight goes through the kernel."""
    terms = [(halved(w.astype(np.float32).reshape(-1, 1)) ** 2).sum() for w in weights if w.size]
    return sum(terms, jnp.float32(0)) * x.mean()


def values_after_death(logdir: pathlib.Path, device: str) -> list[Any]:
    """Returns the variables after six steps between which a ps is replaced by an empty one."""
    with servers(sockets=True, ps=PS, worker=1) as cluster, rt.Graph().as_default():
        spec = cluster[TARGET].cluster
        with rt.device(rt.replica_device_setter(cluster=spec, worker_device=TARGET + device)):
            count = harness.get_or_create_global_step()
            weights = [rt.Variable(value) for value in first_values()]
            x = rt.placeholder(np.float32, [4], name="x")
            loss = rt.call(kernel_loss_fn, x, *weights)
            learn = harness.Optimizer(optax.adam(0.125)).minimize(loss, global_step=count)
        supervisor = harness.Supervisor(
            is_chief=True, logdir=str(logdir), global_step=count, save_model_secs=0
        )
        feed = {x: np.ones(4, np.float32)}
        with supervisor.managed_session(cluster[TARGET].target) as session:
            for _ in range(3):
                session.run(learn, feed)
            supervisor.saver.save(session, supervisor.save_path, count)
            session.run(learn, feed)
            lost = cluster["/job:ps/task:1"]
            lost.stop()
            with rt.Server(spec, "ps", 1) as again:
                tasks.withdraw(again.address, again)
                while session.run(count) < 6:
                    session.run(learn, feed)
                found: list[Any] = session.run(weights)
                supervisor.stop()
    return found


def test_packs_serve_kernels_and_recovery(tmp_path: pathlib.Path) -> None:
    """With a kernel of the user's own, and after the loss of a ps, packed steps have the bits of single arrays."""
    packed = values_after_death(tmp_path / "gpu", "")
    assert any((a != b).any() for a, b in zip(packed, first_values(), strict=True) if a.size)
    clear()
    assert to_bytes(packed) == to_bytes(values_after_death(tmp_path / "cpu", "/cpu:0"))
    assert not COPIES.total()
