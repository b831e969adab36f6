"""``x[a:b]`` where ``a`` or ``b`` is a tensor: what is computed from shapes is known when a step is traced."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import runtime as rt
from harness.tf1.lift import Array, Static, is_tensor, op

_by_numbers = rt.Tensor.__getitem__


@op("strided_slice")
def _by_places(input_: Array, places: Static, name: str | None = None) -> Array:
    return jnp.asarray(input_)[tuple(slice(*place) if isinstance(place, list) else place for place in places)]


def _getitem(tensor: Any, item: object) -> Any:
    """``tensor[item]``; the ends of slices may be tensors that depend on shapes only, such as ``tf.size(x) // 2``."""
    places = item if isinstance(item, tuple) else (item,)
    ends = [end for place in places if isinstance(place, slice) for end in (place.start, place.stop, place.step)]
    if not any(is_tensor(end) for end in ends):
        return _by_numbers(tensor, item)
    return _by_places(tensor, [[p.start, p.stop, p.step] if isinstance(p, slice) else p for p in places])


def install() -> None:
    """Lets tensors and variables be sliced so."""
    for target in (rt.Tensor, rt.Variable):
        setattr(target, "__getitem__", _getitem)  # noqa: B010 - both inherit it
