"""What a user feeds: any array-like value, made an array that fits its tensor, or refused by the tensor's name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Tensor
from runtime.graph.ops import as_array


def feed_value(tensor: Tensor, value: Any) -> Any:
    """``value`` as an array that fits ``tensor``.

    Args:
        tensor: what is fed; its static shape and dtype are what must fit.
        value: array, number, string, or nested lists of these.

    Raises:
        TypeError: a tensor, or a type or range that does not fit the dtype.
        InvalidArgumentError: the shape does not fit.
    """
    if type(value) is np.ndarray and value.dtype == tensor.dtype and not value.dtype.hasobject:
        array = value
    elif isinstance(value, Tensor) or hasattr(value, "_as_tensor"):
        raise TypeError(f"the value fed for {tensor.name!r} cannot be a tensor: feed an array, number or string")
    elif isinstance(value, jax.Array) and value.dtype == tensor.dtype:
        array = np.asarray(value)
    else:
        array = _converted(tensor, value)
    if tensor.shape is not None and not _fits(array.shape, tensor.shape):
        want = "(" + ", ".join("?" if d is None else str(d) for d in tensor.shape) + ")"
        raise InvalidArgumentError(
            f"Cannot feed value of shape {array.shape} for {tensor.name!r}, which has shape {want}"
        )
    return array


def _converted(tensor: Tensor, value: Any) -> np.ndarray[Any, Any]:
    what = f"the value fed for {tensor.name!r}"
    if tensor.dtype.hasobject:
        array = as_array(value, None, what)
        if not array.dtype.hasobject:
            raise TypeError(f"{what} is {array.dtype.name}, but the placeholder takes strings")
        return array
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{what} cannot be made an array: {error}") from None
    if array.dtype.kind in "SUO":
        raise TypeError(f"{what} is not numeric, but the placeholder takes {tensor.dtype.name}")
    if array.size == 0 and isinstance(value, list | tuple):
        array = array.astype(tensor.dtype)  # an empty list has no dtype of its own
    try:
        return as_array(array, tensor.dtype, what)
    except InvalidArgumentError as error:
        raise TypeError(error.message) from None


def _fits(shape: tuple[int, ...], static: tuple[int | None, ...]) -> bool:
    return len(shape) == len(static) and all(s is None or s == d for d, s in zip(shape, static, strict=True))
