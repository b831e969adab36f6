"""Limits for values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.lift import Array, Arrays, Public, Static, is_tensor, op
from harness.tf1.ops.math_ops import as_axes, maximum, minimum

public = Public("tf", "Limits")


@public.op("clip_by_value", takes="int float")
def clip_by_value(t: Array, clip_value_min: Array, clip_value_max: Array) -> Array:
    """Limits ``t``; the derivative is 1 at the limits too."""
    return maximum(minimum(t, clip_value_max), clip_value_min)


@public.op("clip_by_norm")
def clip_by_norm(t: Array, clip_norm: Array, axes: Static = None) -> Array:
    """Scales ``t`` down where the Euclidean norm over ``axes`` (all) is above ``clip_norm``."""
    squares = jnp.sum(jnp.square(t), as_axes(axes), keepdims=True)
    # The derivative of a root at 0 is infinite, which makes NaN of the zero beside it.
    norm = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), squares)
    return t * clip_norm / maximum(norm, clip_norm)


@public.op("clip_by_average_norm")
def clip_by_average_norm(t: Array, clip_norm: Array) -> Array:
    """Scales ``t`` down where the norm divided by the number of elements is above ``clip_norm``."""
    # TensorFlow's average norm divides the norm, not the squares, by the number of elements.
    norm = jnp.sqrt(jnp.sum(jnp.square(t))) / jnp.size(t)
    return t * (clip_norm / jnp.maximum(norm, clip_norm))


@op("global_norm")
def _global_norm(t_list: Arrays) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(t)) for t in t_list))


@public.add()
def global_norm(t_list: Sequence[rt.TensorLike], name: str | None = None) -> rt.Tensor:
    """Computes the Euclidean norm of all elements of all tensors; None among them is left out."""
    return _global_norm([t for t in t_list if t is not None], name)


@op("clip_by_global_norm")
def _clip_all(t_list: Arrays, clip_norm: Array, norm: Array) -> tuple[Array, ...]:
    # An infinite norm would make zeros of the finite gradients, and hide that one is not.
    scale = jnp.where(jnp.isfinite(norm), clip_norm / maximum(norm, clip_norm), np.nan)
    return tuple((t * scale).astype(jnp.result_type(t)) for t in t_list)


@public.add()
def clip_by_global_norm(
    t_list: Sequence[rt.TensorLike],
    clip_norm: rt.TensorLike,
    use_norm: rt.TensorLike | None = None,
    name: str | None = None,
) -> tuple[list[Any], Any]:
    """Scales all tensors by one factor so that their norm is at most ``clip_norm``; returns the norm before too.

    All become NaN where the norm is not finite.
    """
    if is_tensor(t_list):
        raise TypeError("clip_by_global_norm: t_list must be a list of tensors")
    norm = global_norm(t_list, name) if use_norm is None else use_norm
    # Gradients of variables that take no part are None, and stay in their places.
    clipped = iter(_clip_all([t for t in t_list if t is not None], clip_norm, norm, name))
    return [None if t is None else next(clipped) for t in t_list], norm
