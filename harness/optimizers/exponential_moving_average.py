"""Moving averages of variables, kept beside them by the update that changes them: nothing more crosses the wire."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import runtime as rt
from harness.optimizers.optimizer import Optimizer, WrappedOptimizer

SLOT = "ema/average"


class EmaState(NamedTuple):
    """What is kept of each variable: its average, and how often it was updated."""

    steps: jax.Array
    average: optax.Params


class ExponentialMovingAverage:
    """The average of each variable over its last updates: ``average = decay * average + (1 - decay) * value``.

        ema = harness.ExponentialMovingAverage(0.999)
        optimizer = harness.Optimizer(ema.after(optax.adam(1e-3)))
        train_op = optimizer.minimize(loss, global_step)
        accuracy = rt.call(accuracy_fn, ema.variables(optimizer, params), images, labels)

    It is saved with the variables under names of its own, ``mlp/w1/ema/average``; an evaluator reads it by
    ``harness.load_pytree(path, like=params, slot="ema/average")``.

    Args:
        decay: between 0 and 1.
        warm_up: begin with a smaller decay, ``(1 + n) / (10 + n)`` at update n, so that the first values are forgotten
            soon; as TensorFlow does with ``num_updates``.

    Raises:
        InvalidArgumentError: ``decay`` is not between 0 and 1.
    """

    def __init__(self, decay: float = 0.999, *, warm_up: bool = True) -> None:
        if not 0 <= decay <= 1:
            raise rt.InvalidArgumentError(f"the decay of a moving average is between 0 and 1, not {decay}")
        self._decay = decay
        self._warm_up = warm_up

    def after(self, transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """``transformation``, and then the average of the variable that comes of it."""
        averaged = optax.GradientTransformationExtraArgs(self._init, self._update)
        return optax.chain(transformation, averaged)

    def variables(self, optimizer: Optimizer | WrappedOptimizer, params: object) -> Any:
        """The averages of a pytree of variables that ``optimizer`` updates, in its structure.

        Raises:
            InvalidArgumentError: one has no average; names it.
        """

        def find(variable: rt.Variable) -> rt.Variable:
            slot = optimizer.get_slot(variable, SLOT)
            if slot is None:
                raise rt.InvalidArgumentError(
                    f"{variable.spec.name!r} has no moving average: give Optimizer ema.after(...), and minimize first"
                )
            return slot

        return jax.tree.map(find, params)

    def _init(self, params: optax.Params) -> EmaState:
        return EmaState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.asarray, params))

    def _update(
        self, updates: optax.Updates, state: EmaState, params: optax.Params | None = None, **_: object
    ) -> tuple[optax.Updates, EmaState]:
        done = state.steps.astype(jnp.float32)
        decay = jnp.minimum(self._decay, (1 + done) / (10 + done)) if self._warm_up else jnp.float32(self._decay)

        def moved(average: jax.Array, value: jax.Array) -> jax.Array:
            return average + ((1 - decay) * (value - average)).astype(average.dtype)

        average = jax.tree.map(moved, state.average, optax.apply_updates(params, updates))
        return updates, EmaState(optax.safe_increment(state.steps), average)
