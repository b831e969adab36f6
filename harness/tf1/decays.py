"""Learning rates that change with the global step, as float32 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from harness.tf1.lift import Array, Function, Static, op


def _progress(global_step: Any, decay_steps: Any, staircase: bool) -> Any:
    p = jnp.asarray(global_step).astype(np.float32) / jnp.asarray(decay_steps).astype(np.float32)
    return jnp.floor(p) if staircase else p


def _rate(learning_rate: Any) -> Any:
    return jnp.asarray(learning_rate).astype(np.float32)


@op("ExponentialDecay")
def exponential_decay(
    learning_rate: Array,
    global_step: Array,
    decay_steps: Array,
    decay_rate: Array,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    """``learning_rate * decay_rate ** (global_step / decay_steps)``, in whole steps with ``staircase``."""
    rate = jnp.asarray(decay_rate).astype(np.float32)
    return _rate(learning_rate) * rate ** _progress(global_step, decay_steps, staircase)


@op("NaturalExpDecay")
def natural_exp_decay(
    learning_rate: Array,
    global_step: Array,
    decay_steps: Array,
    decay_rate: Array,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    """``learning_rate * exp(-decay_rate * global_step / decay_steps)``."""
    rate = jnp.asarray(decay_rate).astype(np.float32)
    return _rate(learning_rate) * jnp.exp(-rate * _progress(global_step, decay_steps, staircase))


@op("InverseTimeDecay")
def inverse_time_decay(
    learning_rate: Array,
    global_step: Array,
    decay_steps: Array,
    decay_rate: Array,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    """``learning_rate / (1 + decay_rate * global_step / decay_steps)``."""
    rate = jnp.asarray(decay_rate).astype(np.float32)
    return _rate(learning_rate) / (1 + rate * _progress(global_step, decay_steps, staircase))


@op("PolynomialDecay")
def polynomial_decay(
    learning_rate: Array,
    global_step: Array,
    decay_steps: Array,
    end_learning_rate: Array = 0.0001,
    power: Array = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> Any:
    """From ``learning_rate`` down to ``end_learning_rate`` in ``decay_steps``; ``cycle`` begins again, more slowly."""
    step = jnp.asarray(global_step).astype(np.float32)
    steps = jnp.asarray(decay_steps).astype(np.float32)
    if cycle:
        steps = steps * jnp.maximum(1.0, jnp.ceil(step / steps))
    end = _rate(end_learning_rate)
    return (_rate(learning_rate) - end) * (1 - jnp.minimum(step, steps) / steps) ** _rate(power) + end


@op("CosineDecay")
def cosine_decay(
    learning_rate: Array, global_step: Array, decay_steps: Array, alpha: Array = 0.0, name: str | None = None
) -> Any:
    """Half a cosine from ``learning_rate`` down to ``alpha * learning_rate``."""
    done = jnp.minimum(_progress(global_step, decay_steps, False), 1.0)
    return _rate(learning_rate) * ((1 - _rate(alpha)) * 0.5 * (1 + jnp.cos(np.pi * done)) + _rate(alpha))


@op("PiecewiseConstant")
def _piecewise(x: Array, boundaries: Static, values: Static, name: str | None = None) -> Any:
    place = jnp.sum(jnp.asarray(x) > jnp.asarray(boundaries))
    return jnp.asarray(values, np.float32)[place]


def piecewise_constant(x: Any, boundaries: Sequence[Any], values: Sequence[Any], name: str | None = None) -> Any:
    """``values[i]`` while ``x`` is at most ``boundaries[i]``, the last value after that.

    Raises:
        ValueError: there is not one more value than boundaries.
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(f"piecewise_constant: {len(boundaries)} boundaries go with one more value, not {len(values)}")
    return _piecewise(x, boundaries, values, name)


DECAYS: dict[str, Function] = {
    "cosine_decay": cosine_decay,
    "exponential_decay": exponential_decay,
    "inverse_time_decay": inverse_time_decay,
    "natural_exp_decay": natural_exp_decay,
    "piecewise_constant": piecewise_constant,
    "polynomial_decay": polynomial_decay,
}
"""TensorFlow's name in ``tf.train`` -> the function."""
