"""A small model that a worker trains on a mesh of CPU devices, always with the same batch.

So the values after N steps are those of any other run, on any devices, as long as no step is lost or doubled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import harness
import runtime as rt

FIRST = {
    "w": np.linspace(-1, 1, 6 * 4, dtype=np.float32).reshape(6, 4),
    "b": np.zeros(4, np.float32),
}
BATCH = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


class Model(NamedTuple):
    """The tensors of a worker: a training step, the global step after it, and the feed."""

    learn: Any
    count: Any
    step: rt.Variable
    params: list[rt.Variable]
    feed: dict[rt.Tensor, np.ndarray]


def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return ((jnp.tanh(x @ params["w"]) + params["b"] - 1) ** 2).mean()


def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-2)


def mesh_of(devices: int) -> jax.sharding.Mesh | None:
    """Returns a mesh of so many devices; None for 0, which means one device without a mesh."""
    return jax.make_mesh((devices,), ("batch",)) if devices else None


def build(me: harness.Member, devices: int, synchronous: bool) -> Model:
    """Builds the graph of a worker."""
    with me.device(mesh=mesh_of(devices)):
        step = harness.get_or_create_global_step()
        params = rt.variables(FIRST, name="net")
        x = rt.placeholder(jnp.float32, [None, 6], name="x")
        loss = rt.call(loss_of, params, x, name="loss")
        chosen: Any = harness.Optimizer(optimizer())
        if synchronous:
            chosen = harness.SyncReplicas(chosen, 1, me.workers)
        learn = chosen.minimize(loss, global_step=step)
    return Model(learn, step, step, [params["b"], params["w"]], {x: BATCH})


def trained(steps: int) -> list[Any]:
    """Returns the bias and the weights after so many steps in plain JAX, on one device."""
    params: Any = FIRST
    state = optimizer().init(params)

    @jax.jit
    def advance(params: Any, state: Any) -> Any:
        updates, state = optimizer().update(jax.grad(loss_of)(params, BATCH), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = advance(params, state)
    return [params["b"], params["w"]]
