"""Learning rates that change with the global step: float32, or of the dtype of a learning rate that is a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.dtypes import to_array
from harness.tf1.ops.lift import Array, Public, Static, Type, is_tensor, op

public = Public("tf.train")


def _progress(global_step: Array, decay_steps: Array, staircase: bool, kind: Type) -> Array:
    p = jnp.asarray(global_step).astype(kind) / jnp.asarray(decay_steps).astype(kind)
    return jnp.floor(p) if staircase else p


def _kind(learning_rate: rt.TensorLike) -> rt.lowlevel.DType:
    """Returns the dtype to compute in: that of a floating point learning rate, else float32."""
    own = getattr(learning_rate, "dtype", np.dtype(np.float32))
    return own if jnp.issubdtype(own, np.floating) else np.dtype(np.float32)


def _as(value: Array | float, kind: Type) -> Array:
    return jnp.asarray(value).astype(kind)


def _decay(
    shown: str, kind: str, described: str, value: Callable[[Array, Array, Array], Array]
) -> None:
    """Adds a decay: ``value`` of the learning rate, the decay rate, and ``global_step / decay_steps``."""

    def decay(
        learning_rate: Array,
        global_step: Array,
        decay_steps: Array,
        decay_rate: Array,
        staircase: bool = False,
        name: str | None = None,
    ) -> Array:
        own = _kind(learning_rate)
        done = _progress(global_step, decay_steps, staircase, own)
        return value(_as(learning_rate, own), _as(decay_rate, own), done)

    decay.__doc__ = f"``{described}``, in whole steps with ``staircase``."
    public.op(kind, shown)(decay)


_decay(
    "exponential_decay",
    "ExponentialDecay",
    "learning_rate * decay_rate ** (global_step / decay_steps)",
    lambda first, rate, done: first * rate**done,
)
_decay(
    "natural_exp_decay",
    "ExponentialDecay",
    "learning_rate * exp(-decay_rate * global_step / decay_steps)",
    lambda first, rate, done: first * jnp.exp(-rate * done),
)
_decay(
    "inverse_time_decay",
    "InverseTimeDecay",
    "learning_rate / (1 + decay_rate * global_step / decay_steps)",
    lambda first, rate, done: first / (1 + rate * done),
)


@public.op("PolynomialDecay")
def polynomial_decay(
    learning_rate: Array,
    global_step: Array,
    decay_steps: Array,
    end_learning_rate: Array | float = 0.0001,
    power: Array | float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> Array:
    """Decays from ``learning_rate`` to ``end_learning_rate`` in ``decay_steps``; ``cycle`` begins again, slower."""
    kind = _kind(learning_rate)
    step, steps = _as(global_step, kind), _as(decay_steps, kind)
    if cycle:
        steps = steps * jnp.maximum(1.0, jnp.ceil(step / steps))
    end = _as(end_learning_rate, kind)
    return (_as(learning_rate, kind) - end) * (1 - jnp.minimum(step, steps) / steps) ** _as(
        power, kind
    ) + end


@public.op("CosineDecay")
def cosine_decay(
    learning_rate: Array,
    global_step: Array,
    decay_steps: Array,
    alpha: Array | float = 0.0,
    name: str | None = None,
) -> Array:
    """Decays by half a cosine from ``learning_rate`` to ``alpha * learning_rate``."""
    kind = _kind(learning_rate)
    done = jnp.minimum(_progress(global_step, decay_steps, False, kind), 1.0)
    least = _as(alpha, kind)
    return _as(learning_rate, kind) * ((1 - least) * 0.5 * (1 + jnp.cos(np.pi * done)) + least)


@op("PiecewiseConstant")
def _piecewise(
    x: Array, boundaries: Static, values: Static, dtype: Type, name: str | None = None
) -> Array:
    place = jnp.sum(jnp.asarray(x) > jnp.asarray(boundaries))
    return jnp.asarray(values, dtype)[place]


@public.add()
def piecewise_constant(
    x: rt.TensorLike,
    boundaries: Sequence[rt.TensorLike],
    values: Sequence[rt.TensorLike],
    name: str | None = None,
) -> rt.Tensor:
    """Returns ``values[i]`` while ``x`` is at most ``boundaries[i]``, the last value after that, in their dtype.

    Raises:
        ValueError: there is not one more value than boundaries.
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise_constant: {len(boundaries)} boundaries go with one more value, not "
            f"{len(values)}"
        )
    kind, limits = _dtype_of(values[0]), _dtype_of(x)
    if any(_dtype_of(v) != kind for v in values) or any(
        limits.kind != _dtype_of(b).kind for b in boundaries
    ):
        raise ValueError(
            f"piecewise_constant: values of one dtype, and boundaries of that of x, {limits}, are "
            "wanted"
        )
    return _piecewise(x, boundaries, values, kind, name)


def _dtype_of(value: rt.TensorLike) -> rt.lowlevel.DType:
    return value.dtype if is_tensor(value) else to_array(value).dtype
