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
def _slice_op(input_: Array, begin: Static, size: Static, name: str | None = None) -> Array:
    ends = [d if s == -1 else b + s for b, s, d in zip(begin, size, jnp.shape(input_), strict=True)]
    return jax.lax.slice(jnp.asarray(input_), begin, ends)


@op("strided_slice")
def _by_places(input_: Array, places: Static, name: str | None = None) -> Array:
    return jnp.asarray(input_)[
        tuple(builtins.slice(*place) if isinstance(place, list) else place for place in places)
    ]


@op("StridedSlice")
def _strided_op(
    input_: Array, begin: Static, end: Static, strides: Static = None, name: str | None = None
) -> Array:
    steps = strides or [1] * len(begin)
    return jnp.asarray(input_)[
        tuple(builtins.slice(b, e, s) for b, e, s in zip(begin, end, steps, strict=True))
    ]


@op("strided_slice")
def _computed(
    input_: Array, starts: Arrays, axes: Static, sizes: Static, name: str | None = None
) -> Array:
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


def _is_computed(place: object) -> TypeGuard[rt.Tensor | rt.Variable]:
    """Returns True for a tensor whose value is known only in the step."""
    return is_tensor(place) and not known_while_tracing(rt.as_tensor(place))


def _size_unknown(what: str) -> rt.InvalidArgumentError:
    return rt.InvalidArgumentError(
        f"{what}: the size of the result depends on a value, and XLA needs it before the step: "
        "give tf.slice a size in "
        "numbers, or an end that is a fixed number behind the beginning; tf.where leaves elements "
        "out of a sum"
    )


@public.add()
def slice(  # noqa: A001
    input_: rt.TensorLike, begin: rt.TensorLike, size: rt.TensorLike, name: str | None = None
) -> rt.Tensor:
    """Takes ``size`` elements from ``begin`` on along each axis; -1 for all that is left.

    Args:
        input_: a tensor.
        begin: a vector, or a list of numbers and scalars, which may be computed.
        size: a vector that is known before the step.
        name: operation name.

    Raises:
        InvalidArgumentError: a size depends on a value.
    """
    firsts, sizes = _parts(begin), _parts(size)
    if _are_numbers_of_strings(input_, firsts, sizes):
        return _slice_strings(convert_to_tensor(input_), firsts, sizes, name)
    if any(map(_is_computed, sizes)):
        raise _size_unknown("tf.slice")
    if not any(map(_is_computed, firsts)):
        return _slice_op(input_, begin, size, name)
    if len(firsts) != len(sizes):
        raise ValueError(f"tf.slice: {len(firsts)} places, but {len(sizes)} sizes")
    rests = [
        axis
        for axis, (b, s) in enumerate(zip(firsts, sizes, strict=True))
        if _is_computed(b) and _is_rest(s)
    ]
    if rests:
        raise _size_unknown("tf.slice")
    moved = [axis for axis, b in enumerate(firsts) if _is_computed(b)]
    numbers = [
        [0 if axis in moved else b for axis, b in enumerate(firsts)],
        [-1 if a in moved else s for a, s in enumerate(sizes)],
    ]
    # Axes with numbers are cut first: the dynamic slice then moves less.
    cut = input_ if len(moved) == len(firsts) else _slice_op(input_, *numbers)
    return _computed(
        cut, [firsts[a] for a in moved], moved, [sizes[a] for a in moved], name or "Slice"
    )


def _are_numbers_of_strings(input_: rt.TensorLike, *vectors: Sequence[object]) -> bool:
    """Returns True for a string tensor, or a list of strings, and places that are numbers."""
    strings_in = (
        convert_to_tensor(input_).dtype.hasobject
        if not is_tensor(input_)
        else input_.dtype.hasobject
    )
    return strings_in and not any(is_tensor(place) for vector in vectors for place in vector)


def _is_rest(size: rt.TensorLike) -> bool:
    return not is_tensor(size) and int(np.asarray(size)) == -1


def _parts(vector: rt.TensorLike) -> list[rt.TensorLike]:
    """Returns the elements of a vector; of a tensor of unknown length the tensor itself."""
    if not is_tensor(vector):
        return list(vector)  # type: ignore[arg-type]
    tensor = rt.as_tensor(vector)
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
    """Takes ``input_[begin:end:strides]`` for each axis; masks are not taken, write the index in Python.

    Raises:
        InvalidArgumentError: the size depends on a value.
    """
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


def _cut(tensor: rt.Tensor, places: Sequence[object], name: str | None = None) -> rt.Tensor:
    """Takes ``tensor[places]``, where some place is computed."""
    taken = sum(place is not None and place is not ... for place in places)
    starts: list[object] = []
    axes: list[int] = []
    sizes: list[int] = []
    left: list[object] = []
    axis, behind = 0, False
    for place in places:
        if isinstance(place, builtins.slice) and (
            _is_computed(place.start) or _is_computed(place.stop)
        ):
            first = 0 if place.start is None else place.start
            size = (
                None
                if place.stop is None or place.step not in (None, 1)
                else distance(first, place.stop)
            )
            if size is None:
                raise _size_unknown("x[a:b]")
            starts, axes, sizes = (
                [*starts, first],
                [*axes, axis - taken if behind else axis],
                [*sizes, max(size, 0)],
            )
            left.append([None, None, None])
        elif _is_computed(place):
            starts, axes, sizes = (
                [*starts, place],
                [*axes, axis - taken if behind else axis],
                [*sizes, 1],
            )
            left.append(0)
        else:
            left.append(
                [place.start, place.stop, place.step]
                if isinstance(place, builtins.slice)
                else place
            )
        behind = behind or place is ...
        axis += place is not None and place is not ...
    cut: rt.Tensor = _computed(tensor, starts, axes, sizes, name)
    if all(place == [None, None, None] for place in left):
        return cut
    rest: rt.Tensor = _by_places(cut, left)
    return rest


def _slice_strings(
    tensor: rt.Tensor, firsts: Sequence[Any], sizes: Sequence[Any], name: str | None
) -> rt.Tensor:
    """Takes ``tf.slice`` of a string tensor, by numbers.

    Raises:
        InvalidArgumentError: an element of the slice is not in the tensor; in the step where the
            shape is not known before.
    """

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

    known = tensor.shape is not None and None not in tensor.shape
    shape = cut(np.empty(tensor.shape, object)).shape if known else None
    return host_op(cut, [tensor], shape, object, name, "Slice")


def _pick_strings(tensor: rt.Tensor, places: tuple[Any, ...], name: str | None = None) -> rt.Tensor:
    """Adds ``tensor[places]`` of strings, on the host: programs share out lists of file names so."""

    def pick(array: rt.lowlevel.Array) -> rt.lowlevel.Array:
        picked = array[places]
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
    return _by_places(
        tensor, [[p.start, p.stop, p.step] if isinstance(p, builtins.slice) else p for p in places]
    )
