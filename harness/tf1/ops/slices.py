"""Slices whose ends are tensors: ``x[i : i + 2]``, ``tf.slice(x, [i], [2])``, ``tf.strided_slice``.

What is computed from shapes is known when a step is traced. What is computed from values is the
place of a slice of a known size: numbers, or an end that is always as far from the beginning.
Outside of the tensor the slice is NaN, or the integer furthest from zero: a compiled program cannot
raise.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.affine import distance
from harness.tf1.ops.lift import Array, Arrays, Public, Static, is_tensor, op
from harness.tf1.ops.python_ops import host_op, strings
from harness.tf1.ops.static import known_while_tracing
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf", "Tensors")


@op("Slice")
def _slice_op(input_: Array, begin: Static, size: Static) -> Array:
    ends = [d if s == -1 else b + s for b, s, d in zip(begin, size, jnp.shape(input_), strict=True)]
    return jax.lax.slice(jnp.asarray(input_), begin, ends)


@op("strided_slice")
def _by_places(input_: Array, places: Static) -> Array:
    picked = (builtins.slice(*p) if isinstance(p, list) else p for p in places)
    return jnp.asarray(input_)[tuple(picked)]


@op("StridedSlice")
def _strided_op(input_: Array, begin: Static, end: Static, strides: Static = None) -> Array:
    steps = strides or [1] * len(begin)
    picked = (builtins.slice(*ends) for ends in zip(begin, end, steps, strict=True))
    return jnp.asarray(input_)[tuple(picked)]


@op("strided_slice")
def _computed(input_: Array, starts: Arrays, axes: Static, sizes: Static) -> Array:
    """Takes, of each of ``axes``, counted without new ones, a size from ``starts`` on; -1 is the last axis."""
    picked = jnp.asarray(input_)
    inside = []
    for start, axis, size in zip(starts, axes, sizes, strict=True):
        inside.append((start >= 0) & (start + size <= picked.shape[axis]))
        if size > picked.shape[axis]:
            raise ValueError(
                f"{size} elements are more than the axis {axis} has: {picked.shape[axis]}"
            )
        picked = jax.lax.dynamic_slice_in_dim(picked, start, size, axis)
    # A compiled step cannot raise, so a slice beyond the tensor is NaN or the integer furthest from
    # zero.
    nothing = jnp.take(jnp.zeros((1,), picked.dtype), 1, mode="fill")
    return jnp.where(jnp.all(jnp.stack(inside)), picked, nothing)


def _is_computed(place: object, defaults: bool = False) -> TypeGuard[rt.Tensor | rt.Variable]:
    """Returns True for a tensor whose value is known only in the step; see ``known_while_tracing``."""
    return is_tensor(place) and not known_while_tracing(rt.as_tensor(place), defaults)


def _size_unknown(what: str) -> rt.InvalidArgumentError:
    return rt.InvalidArgumentError(
        f"{what}: the size of the result depends on a value, and XLA needs it before the step: "
        "give tf.slice a size in numbers, or an end that is a fixed number behind the beginning; "
        "tf.where leaves elements out of a sum"
    )


@public.add()
def slice(
    input_: rt.TensorLike, begin: rt.TensorLike, size: rt.TensorLike, name: str | None = None
) -> rt.Tensor:
    """Takes ``size`` elements from ``begin`` on along each axis; -1 for all that is left.

    ``begin`` may be computed in the step; ``size`` is known before it, because XLA needs it.
    """
    firsts, sizes = _parts(begin), _parts(size)
    if _are_numbers_of_strings(input_, firsts, sizes):
        return _slice_strings(convert_to_tensor(input_), firsts, sizes, name)
    # A size becomes a part of the program, and a place need not.
    if any(_is_computed(size, defaults=True) for size in sizes):
        raise _size_unknown("tf.slice")
    moved = [axis for axis, b in enumerate(firsts) if _is_computed(b)]
    if not moved:
        return _slice_op(input_, begin, size, name)
    return _slice_from(input_, firsts, sizes, moved, name)


def _slice_from(
    input_: rt.TensorLike,
    firsts: Sequence[rt.TensorLike],
    sizes: Sequence[rt.TensorLike],
    moved: Sequence[int],
    name: str | None,
) -> rt.Tensor:
    """Takes ``tf.slice`` whose beginnings are computed on the axes ``moved``."""
    if len(firsts) != len(sizes):
        raise ValueError(f"tf.slice: {len(firsts)} places, but {len(sizes)} sizes")
    if any(_is_rest(sizes[axis]) for axis in moved):
        raise _size_unknown("tf.slice")
    cut = input_
    # Axes with numbers are cut first: the dynamic slice then moves less.
    if len(moved) < len(firsts):
        numbers = [0 if axis in moved else b for axis, b in enumerate(firsts)]
        lengths = [-1 if axis in moved else s for axis, s in enumerate(sizes)]
        cut = _slice_op(input_, numbers, lengths)
    starts, lengths = [firsts[axis] for axis in moved], [sizes[axis] for axis in moved]
    return _computed(cut, starts, moved, lengths, name or "Slice")


def _are_numbers_of_strings(input_: rt.TensorLike, *vectors: Sequence[object]) -> bool:
    """Returns True for a string tensor, or a list of strings, and places that are numbers."""
    dtype = input_.dtype if is_tensor(input_) else convert_to_tensor(input_).dtype
    return dtype.hasobject and not any(is_tensor(place) for vector in vectors for place in vector)


def _is_rest(size: rt.TensorLike) -> bool:
    return not is_tensor(size) and int(np.asarray(size)) == -1


def _parts(vector: rt.TensorLike) -> list[rt.TensorLike]:
    """Returns the elements of a vector; of a tensor of unknown length the tensor itself."""
    if not is_tensor(vector):
        return list(vector)  # type: ignore[arg-type]
    tensor = rt.as_tensor(vector)
    # A vector of unknown length cannot be taken apart.
    if known_while_tracing(tensor) or not tensor.shape or tensor.shape[0] is None:
        return [tensor]
    return [tensor[i] for i in range(tensor.shape[0])]


@public.add()
def strided_slice(
    input_: rt.TensorLike,
    begin: rt.TensorLike,
    end: rt.TensorLike,
    strides: rt.TensorLike | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Takes ``input_[begin:end:strides]`` for each axis; masks are not taken, write the index in Python."""
    firsts, ends = _parts(begin), _parts(end)
    steps = [1] * len(firsts) if strides is None else _parts(strides)
    of_strings = _are_numbers_of_strings(input_, firsts, ends, steps)
    if not of_strings and not any(map(_is_computed, (*firsts, *ends))):
        return _strided_op(input_, begin, end, strides, name)
    for vector in (begin, end):
        if is_tensor(vector) and (not vector.shape or vector.shape[0] is None):
            raise _size_unknown("tf.strided_slice")
    if not len(firsts) == len(ends) == len(steps):
        raise ValueError(
            f"tf.strided_slice: {len(firsts)} places, {len(ends)} ends and {len(steps)} strides"
        )
    places = tuple(map(builtins.slice, firsts, ends, steps))
    if of_strings:
        return _pick_strings(convert_to_tensor(input_), places, name)
    return _cut(rt.as_tensor(input_), places, name)


_ALL = [None, None, None]
"""Start, stop and step of a whole axis."""


def _as_list(place: object) -> object:
    """Returns a slice as a list, in which tensors of shapes are found while the step is traced."""
    if isinstance(place, builtins.slice):
        return [place.start, place.stop, place.step]
    return place


def _find_window(place: Any) -> tuple[Any, int, object] | None:
    """Returns the beginning and the size of a computed place, and what to take of these elements."""
    if _is_computed(place):
        return place, 1, 0
    ends = (place.start, place.stop) if isinstance(place, builtins.slice) else ()
    if not any(map(_is_computed, ends)):
        return None
    first = 0 if place.start is None else place.start
    known = place.stop is not None and place.step in (None, 1)
    size = distance(first, place.stop) if known else None
    if size is not None:
        return first, max(size, 0), _ALL
    if any(_is_computed(end, defaults=True) for end in ends):
        raise _size_unknown("x[a:b]")
    return None


def _cut(tensor: rt.Tensor, places: Sequence[object], name: str | None = None) -> rt.Tensor:
    """Takes ``tensor[places]``, where some place is computed."""
    taken = sum(place is not None and place is not ... for place in places)
    starts, axes, sizes = list[object](), list[int](), list[int]()
    left: list[object] = []
    axis = 0
    for place in places:
        window = _find_window(place)
        if window is not None:
            starts.append(window[0])
            axes.append(axis)
            sizes.append(window[1])
        left.append(_as_list(place) if window is None else window[2])
        assert window is None or window[1] >= 0
        # The number of axes that an ellipsis stands for is unknown, so those behind it are counted
        # from the end.
        axis += -taken if place is ... else place is not None
    cut: rt.Tensor = _computed(tensor, starts, axes, sizes, name) if starts else tensor
    if all(place == _ALL for place in left):
        return cut
    rest: rt.Tensor = _by_places(cut, left)
    return rest


def _slice_strings(
    tensor: rt.Tensor, firsts: Sequence[Any], sizes: Sequence[Any], name: str | None
) -> rt.Tensor:
    """Takes ``tf.slice`` of a string tensor, by numbers."""

    def cut(array: rt.lowlevel.Array) -> rt.lowlevel.Array:
        if not len(firsts) == len(sizes) == array.ndim or not all(
            0 <= first <= (length if size == -1 else length - size) and size >= -1
            for first, size, length in zip(firsts, sizes, array.shape, strict=True)
        ):
            raise rt.InvalidArgumentError(
                f"tf.slice: {[*sizes]} elements from {[*firsts]} on are not in {list(array.shape)}"
            )
        ends = (None if s == -1 else f + s for f, s in zip(firsts, sizes, strict=True))
        return array[tuple(map(builtins.slice, firsts, ends))]

    # A wrong place fails while the graph is built where the shape is known.
    known = tensor.shape is not None and None not in tensor.shape
    shape = cut(np.empty(tensor.shape, object)).shape if known else None
    return host_op(cut, [tensor], shape, object, name, "Slice")


def _pick_strings(tensor: rt.Tensor, places: tuple[Any, ...], name: str | None = None) -> rt.Tensor:
    """Adds ``tensor[places]`` of strings, on the host: programs share out lists of file names so."""

    def pick(array: rt.lowlevel.Array) -> rt.lowlevel.Array:
        picked = array[places]
        # numpy gives the string itself, not an array, for a single place.
        return picked if isinstance(picked, np.ndarray) else strings([picked], ())

    def pick_in_step(array: rt.lowlevel.Array) -> rt.lowlevel.Array:
        try:
            return pick(array)
        except IndexError as error:
            raise rt.InvalidArgumentError(f"strided_slice of {tensor.name!r}: {error}") from None

    known = tensor.shape is not None and None not in tensor.shape
    shape = pick(np.empty(tensor.shape, object)).shape if known else None
    return host_op(pick_in_step, [tensor], shape, object, name, "StridedSlice")


def pick_item(tensor: Any, item: object) -> rt.Tensor:
    """Adds the operation ``tensor[item]``; the ends of slices may be tensors."""
    places = item if isinstance(item, tuple) else (item,)
    ends = [
        end for p in places if isinstance(p, builtins.slice) for end in (p.start, p.stop, p.step)
    ]
    if tensor.dtype.hasobject and not any(is_tensor(part) for part in (*places, *ends)):
        return _pick_strings(rt.as_tensor(tensor), places)
    if not any(is_tensor(end) for end in ends):
        picked: rt.Tensor = rt.lowlevel.pick_item(tensor, item)
        return picked
    if any(map(_is_computed, ends)):
        return _cut(rt.as_tensor(tensor), places)
    return _by_places(tensor, [_as_list(place) for place in places])
