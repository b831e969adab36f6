"""Indices that must lie within an axis. What is known while the graph is built is checked then.

A compiled program cannot raise an error. What is computed in the step and lies outside is told
apart in the result: it picks NaN (or the integer furthest from zero), is left out of a sum, or,
where a variable would be changed, stops the step before (``tf.scatter_add``). It never counts from
the end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.dtypes import to_array
from harness.tf1.ops.lift import holds_tensors, is_tensor


def check_known(
    indices: rt.TensorLike, size: int | None, what: str, lowest: int | None = 0
) -> None:
    """Checks literal indices, numbers or constants, against an axis of known size; others pass.

    ``what`` names the function in the error. ``lowest`` is the smallest index; None for any.
    """
    known = literal(indices)
    if known is None or size is None:
        return
    outside = known[(known >= size) | (known < lowest if lowest is not None else False)]
    if outside.size:
        raise rt.InvalidArgumentError(
            f"{what}: the index {outside.flat[0]} is not in [{lowest or 0}, {size})"
        )


def literal(indices: Any) -> rt.lowlevel.Array | None:
    """Indices that are known while the graph is built, else None."""
    if is_tensor(indices):
        indices = getattr(indices.op.body, "value", None)
    # A list with a tensor in it is known only in the step.
    elif holds_tensors(indices):
        return None
    array = None if indices is None else to_array(indices)
    return array if array is not None and array.dtype.kind in "iu" else None


def axis_size(tensor: rt.TensorLike, axis: rt.TensorLike = 0, what: str = "") -> int | None:
    """Returns the static size of an axis, None when unknown. Raises ValueError, naming ``what``, for no axis."""
    shape = tensor.shape if is_tensor(tensor) else to_array(tensor).shape
    if shape is None or not isinstance(axis, int):
        return None
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{what}: there is no axis {axis} in the shape {shape}")
    return shape[axis]


def inside(indices: rt.TensorLike, size: int) -> jax.Array:
    """Returns int32 or int64 indices; indices outside of [0, size) become ``size``, outside for JAX too."""
    found = jnp.asarray(indices)
    # The size itself need not fit the dtype of the indices.
    found = found.astype(np.int32) if found.dtype.itemsize < 4 else found
    # JAX counts negative indices from the end, and drops or fills what lies beyond it.
    return jnp.where((found < 0) | (found >= size), jnp.asarray(size, found.dtype), found)
