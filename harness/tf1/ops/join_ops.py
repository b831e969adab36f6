"""Joining and cutting tensors, in TensorFlow 1.0's argument orders and, where they differ, 0.8's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.array_ops import as_tensor
from harness.tf1.ops.dtypes import to_array
from harness.tf1.ops.indices import axis_size, check_known, inside, literal
from harness.tf1.ops.lift import (
    ANY,
    Array,
    Arrays,
    Public,
    Static,
    WrongType,
    either,
    is_tensor,
    op,
    operand,
)
from harness.tf1.ops.python_ops import host_op
from harness.tf1.ops.shapes import ShapeLike
from harness.tf1.ops.static import Deferred, static, static_number
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf", "Tensors")


@op("concat", takes=ANY)
def _concat_op(values: Arrays, axis: Static) -> Array:
    return jnp.concatenate([jnp.asarray(v) for v in values], axis)


@public.add()
def concat(values: rt.TensorLike, axis: rt.TensorLike, name: str = "concat") -> rt.Tensor:
    """Calls ``jax.numpy.concatenate``: ``concat(values, axis)``, or ``concat(axis, values)`` as before 1.0."""
    # Before 1.0 the axis came first; an axis is never a list.
    if isinstance(axis, list | tuple) and not isinstance(values, list | tuple):
        values, axis = axis, values
    return _concat_op(values if isinstance(values, list | tuple) else [values], axis, name)


@public.add()
def concat_v2(values: rt.TensorLike, axis: rt.TensorLike, name: str = "concat_v2") -> rt.Tensor:
    """Calls ``concat``."""
    return concat(values, axis, name)


@public.op("stack", "stack", "pack", takes=ANY)
def stack(values: Arrays, axis: Static = 0, name: str = "stack") -> Array:
    """Calls ``jax.numpy.stack``."""
    # TensorFlow stacks nothing to an empty vector, where jax.numpy raises.
    if not values:
        return jnp.zeros((0,))
    return jnp.stack([jnp.asarray(v) for v in values], axis)


@public.add()
def parallel_stack(values: rt.TensorLike, name: str = "parallel_stack") -> rt.Tensor:
    """Calls ``stack``."""
    return stack(values, 0, name)


@op("unstack")
def _unstack_op(value: Array, axis: Static, count: Static) -> tuple[Array, ...]:
    return tuple(jnp.moveaxis(value, axis, 0)[i] for i in range(count))


@public.add("unstack", "unpack")
def unstack(
    value: rt.TensorLike, num: int | None = None, axis: int = 0, name: str = "unstack"
) -> list[rt.Tensor]:
    """Lists the slices along ``axis``; ``num`` is needed where the size is not known before the step runs."""
    tensor = as_tensor(value)
    rank = None if tensor.shape is None else len(tensor.shape)
    if rank is not None and not -rank <= axis < rank:
        raise ValueError(f"unstack: axis {axis} of {tensor.name!r}, which has {rank} axes")
    size = None if tensor.shape is None else tensor.shape[axis]
    if None not in (num, size) and num != size:
        raise ValueError(
            f"unstack: num is {num}, but the size of axis {axis} of {tensor.name!r} is {size}"
        )
    num = size if num is None else num
    if num is None:
        raise ValueError(
            f"unstack: the size of axis {axis} of {tensor.name!r} is not known before the step: "
            "give num"
        )
    return list(_unstack_op(tensor, axis, num, name))


@op("split")
def _split_op(
    value: Array, at: int | list[int], axis: Static, total: int | None
) -> tuple[Array, ...]:
    found = jnp.shape(value)[axis]
    if total is not None and found != total:
        raise ValueError(f"split: the sizes add up to {total}, axis {axis} has {found}")
    return tuple(jnp.split(value, at, axis))


@public.add("split", "split_v")
def split(*args: Any, **kwargs: Any) -> list[rt.Tensor]:
    """Splits by ``(value, num_or_size_splits, axis=0, name)``, or before 1.0 ``(split_dim, num_split, value, name)``.

    Sizes must add up to the size of the axis.
    """
    swapped = len(args) > 2 and _is_whole(args[0]) and not _is_whole(args[2])
    # Before 1.0 the axis came first and the value third.
    old = "split_dim" in kwargs or "num_split" in kwargs or swapped
    order = ["split_dim", "num_split", "value", "name"]
    order = order if old else ["value", "num_or_size_splits", "axis", "num", "name"]
    given = dict(zip(order, args, strict=False)) | kwargs
    unknown = set(given) - set(order)
    if unknown or len(args) > len(order):
        raise TypeError(
            f"split: takes {', '.join(order)}, not {', '.join(sorted(unknown)) or len(args)}"
        )
    axis = static_number(given.get("split_dim" if old else "axis", 0), "split: the axis")
    wanted = given["num_split" if old else "num_or_size_splits"]
    parts = static_number(wanted, "split: the number of parts")
    value, at, total = given["value"], parts, None
    if isinstance(parts, list):
        value = as_tensor(value)
        sizes = _find_sizes(parts, value, axis)
        at, total = np.cumsum(sizes)[:-1].tolist(), sum(sizes)
        value = _of_size(value, axis, total)
    return list(_split_op(value, at, axis, total, given.get("name")))


def _is_whole(value: rt.TensorLike) -> bool:
    return isinstance(value, int | np.integer)


def _find_sizes(parts: list[int], value: rt.Tensor, axis: int) -> list[int]:
    total = None if value.shape is None else value.shape[axis]
    if -1 in parts:
        if total is None:
            raise ValueError(
                f"split: the size of axis {axis} of {value.name!r} is not known, so -1 cannot be "
                "worked out"
            )
        # The sum of the others, with the -1 in it, is one less than they take.
        parts = [total - sum(parts) - 1 if p == -1 else p for p in parts]
    if min(parts) < 0 or total is not None and sum(parts) != total:
        raise ValueError(
            f"split: the sizes {parts} do not add up to {total}, the size of axis {axis}"
        )
    return parts


def _of_size(value: rt.Tensor, axis: int, size: int) -> rt.Tensor:
    """Gives ``value`` a static size in place of an unknown one: the step is traced with what is fed."""
    if value.shape is None or value.shape[axis] is not None:
        return value
    shape = list(value.shape)
    shape[axis] = size
    same: rt.Tensor = rt.identity(value)
    same.shape = tuple(shape)
    return same


@public.op("Tile")
def tile(input: Array, multiples: Static) -> Array:
    """Calls ``jax.numpy.tile``."""
    if len(multiples) != jnp.ndim(input) or min(multiples, default=0) < 0:
        raise ValueError(
            f"{multiples} is not one number, 0 or more, for each axis of {jnp.shape(input)}"
        )
    return jnp.tile(input, multiples)


@public.op("Pad")
def pad(
    tensor: Array,
    paddings: Static,
    mode: str = "CONSTANT",
    name: str | None = None,
    constant_values: Array | float = 0,
) -> Array:
    """Calls ``jax.numpy.pad``, in mode "CONSTANT", "REFLECT" or "SYMMETRIC"."""
    how = mode.lower()
    shape = jnp.shape(tensor)
    if len(paddings) != len(shape) or any(len(p) != 2 or min(p) < 0 for p in paddings):
        raise ValueError(f"{paddings} is not a pair, 0 or more, for each axis of {shape}")
    # REFLECT leaves the edge itself out of the mirror, SYMMETRIC repeats it.
    room = [size - (how == "reflect") for size in shape]
    if how != "constant" and any(max(p) > most for p, most in zip(paddings, room, strict=True)):
        raise ValueError(f"{paddings} is more than a mirror of {shape} gives")
    extra = {"constant_values": constant_values} if how == "constant" else {}
    return jnp.pad(tensor, paddings, how, **extra)


@public.op("ReverseV2", "reverse", "reverse_v2")
def reverse(tensor: Array, axis: Static) -> Array:
    """Calls ``jax.numpy.flip`` of the axes; before 1.0 a list of bools, one for each axis."""
    if not isinstance(axis, list):
        raise ValueError(f"axes are a list, as in [{axis}]")
    # True is an integer as well, so bools must be told apart from axes.
    flags = bool(axis) and all(isinstance(a, bool) for a in axis)
    over = [i for i, flag in enumerate(axis) if flag] if flags else axis
    return jnp.flip(tensor, tuple(over))


@public.op("ReverseSequence")
def reverse_sequence(
    input: Array,
    seq_lengths: Array,
    seq_axis: object = None,
    batch_axis: object = None,
    name: str | None = None,
    seq_dim: object = None,
    batch_dim: object = None,
) -> Array:
    """Reverses the first ``seq_lengths[i]`` elements of row ``i``; the rest stays."""
    along = either(seq_axis=seq_axis, seq_dim=seq_dim)
    rows = either(batch_axis=batch_axis, batch_dim=batch_dim) or 0
    if along is None:
        raise ValueError("reverse_sequence: give seq_axis")
    shape = jnp.shape(input)
    if not isinstance(along, int) or not isinstance(rows, int) or along == rows:
        raise ValueError(f"{along} and {rows} are not two axes")
    if jnp.shape(seq_lengths) != shape[rows : rows + 1]:
        raise ValueError(
            f"{jnp.shape(seq_lengths)} is not one length for each of the {shape[rows]} rows"
        )
    # Each element asks which element it becomes: within the length, the one as far from its end.
    place = jax.lax.broadcasted_iota(jnp.result_type(seq_lengths), shape, along)
    others = [axis for axis in range(len(shape)) if axis != rows]
    length = jnp.expand_dims(jnp.asarray(seq_lengths), others)
    return jnp.take_along_axis(input, jnp.where(place < length, length - 1 - place, place), along)


@op("Gather")
def _gather_op(params: Array, indices: Array, axis: Static) -> Array:
    # jax.numpy counts negative indices from the end, which TensorFlow does not.
    return jnp.take(params, inside(indices, jnp.shape(params)[axis]), axis=axis, mode="fill")


@public.add()
def gather(
    params: rt.TensorLike,
    indices: rt.TensorLike,
    validate_indices: bool | None = None,
    name: str | None = None,
    axis: rt.TensorLike = 0,
) -> rt.Tensor:
    """Calls ``jax.numpy.take``; a computed index outside gives NaN (integers: their limit).

    Strings are picked on the client's host, where such an index is an error.
    """
    _check_whole(indices, "gather")
    values = operand(params)
    check_known(indices, axis_size(values, axis, "gather"), "gather")
    if is_tensor(values) and values.dtype == object:
        return _gather_strings(
            convert_to_tensor(values), convert_to_tensor(indices), int(static(axis)), name
        )
    return _gather_op(params, indices, axis, name)


def _gather_strings(
    params: rt.Tensor, indices: rt.Tensor, axis: int, name: str | None
) -> rt.Tensor:
    # The host can raise, where a compiled program cannot.
    def pick(texts: Any, places: Any) -> Any:
        if ((places < 0) | (places >= texts.shape[axis])).any():
            raise rt.InvalidArgumentError(
                f"gather: an index of {places.tolist()} is not in [0, {texts.shape[axis]})"
            )
        return np.asarray(np.take(texts, places, axis), object)

    shape = None
    if params.shape is not None and indices.shape is not None:
        at = axis % len(params.shape)
        shape = (*params.shape[:at], *indices.shape, *params.shape[at + 1 :])
    return host_op(pick, [params, indices], shape, object, name, "Gather")


@op("GatherNd")
def _gather_nd_op(params: Array, indices: Array) -> Array:
    params, places = jnp.asarray(params), _find_places(indices, jnp.shape(params))
    # Indices without numbers point to the whole tensor.
    if not places:
        return jnp.broadcast_to(params, (*jnp.shape(indices)[:-1], *params.shape))
    return params.at[places].get(mode="fill")


@public.add()
def gather_nd(params: rt.TensorLike, indices: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Takes the slices of ``params`` that the last axis of ``indices`` points to; outside as with ``gather``."""
    _check_whole(indices, "gather_nd")
    _check_places(indices, operand(params).shape, "gather_nd")
    return _gather_nd_op(params, indices, name)


@op("ScatterNd")
def _scatter_nd_op(indices: Array, updates: Array, shape: Static) -> Array:
    places = _find_places(indices, tuple(shape))
    rows = (*jnp.shape(indices)[:-1], *shape[len(places) :])
    # The scatter of JAX would broadcast the updates.
    if jnp.shape(updates) != rows:
        raise ValueError(f"these indices go with updates of shape {rows}, not {jnp.shape(updates)}")
    return jnp.zeros(shape, jnp.result_type(updates)).at[places].add(updates, mode="drop")


@public.add()
def scatter_nd(
    indices: rt.TensorLike, updates: rt.TensorLike, shape: ShapeLike, name: str | None = None
) -> rt.Tensor:
    """Zeros of ``shape`` with ``updates`` added at ``indices``, except those that the step computes and lie outside."""
    known = static(shape)
    _check_whole(indices, "scatter_nd")
    _check_places(indices, None if isinstance(known, Deferred) else known, "scatter_nd")
    return _scatter_nd_op(indices, updates, shape, name)


def _find_places(indices: rt.TensorLike, shape: Sequence[int]) -> tuple[Array, ...]:
    """Returns an array of places for each axis that the last axis of ``indices`` has a number for."""
    columns = jnp.moveaxis(jnp.asarray(indices), -1, 0)
    if len(columns) > len(shape):
        raise ValueError(f"{len(columns)} numbers point to no place in the shape {tuple(shape)}")
    return tuple(inside(column, size) for column, size in zip(columns, shape, strict=False))


def _check_whole(indices: rt.TensorLike, what: str) -> None:
    """Raises TypeError for indices that are no integers; lists are converted, so they pass."""
    if isinstance(indices, list):
        return
    dtype = indices.dtype if is_tensor(indices) else to_array(indices).dtype
    if dtype.name not in ("int16", "int32", "int64"):
        raise TypeError(
            f"{what}: the indices are {dtype.name}, and they must be int32 or int64: use tf.cast"
        )


def _check_places(indices: rt.TensorLike, shape: Sequence[int | None] | None, what: str) -> None:
    known = literal(indices)
    if known is not None and shape is not None and known.ndim:
        for column, size in zip(np.moveaxis(known, -1, 0), shape, strict=False):
            check_known(column, size, what)


@public.op("Select", "select", "where")
def where(condition: Array, x: Array | None = None, y: Array | None = None) -> Array:
    """Calls ``jax.numpy.where``; a vector ``condition`` chooses rows.

    Without x and y there is no static shape.
    """
    if x is None or y is None:
        raise ValueError(
            "where(condition) alone has no static shape: use x and y, or fetch and use "
            "numpy.argwhere"
        )
    mask = jnp.asarray(condition)
    if mask.dtype != np.bool_:
        raise WrongType(f"the condition must be bool, not {mask.dtype}")
    if jnp.result_type(x) != jnp.result_type(y):
        raise WrongType(f"x is {jnp.result_type(x)}, and y is {jnp.result_type(y)}")
    shapes = [jnp.shape(x), jnp.shape(y)]
    # TensorFlow's rule: a vector chooses rows, and nothing else is broadcast.
    if mask.ndim > 1:
        shapes.append(mask.shape)
    shape = _common_shape(*shapes)
    if mask.ndim == 1:
        _common_shape(mask.shape, shape[:1])
        mask = mask.reshape(mask.shape + (1,) * (len(shape) - 1))
    # Sizes that differ are symbols, and the result has a shape but no value.
    if any(each != shape for each in shapes) or mask.ndim and mask.shape[0] != shape[0]:
        return jnp.zeros(shape, jnp.result_type(x))
    return jnp.where(mask, x, y)


def _common_shape(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape of arrays of one shape; a number counts before the symbol of an unknown size.

    Raises ValueError for different numbers, or ranks.
    """
    found = [
        {size for size in sizes if isinstance(size, int)} or set(sizes[:1])
        for sizes in zip(*shapes, strict=False)
    ]
    if len(set(map(len, shapes))) > 1 or any(len(sizes) > 1 for sizes in found):
        raise ValueError(f"these shapes do not go together: {', '.join(map(str, shapes))}")
    return tuple(size for sizes in found for size in sizes)


@op("TopKV2")
def top_k_op(input: Array, k: Static) -> tuple[Array, ...]:
    """Returns the ``k`` largest along the last axis: (values, indices)."""
    return tuple(jax.lax.top_k(input, k))


@op("InvertPermutation")
def _invert_permutation_op(x: Array) -> Array:
    return jnp.argsort(x).astype(jnp.result_type(x))


@public.add()
def invert_permutation(x: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Calls ``jax.numpy.argsort`` on a permutation, and on anything else that the step computes."""
    _check_whole(x, "invert_permutation")
    known = literal(x)
    if known is not None and sorted(known.tolist()) != list(range(known.size)):
        raise rt.InvalidArgumentError(f"invert_permutation: {known.tolist()} is no permutation")
    # The order that sorts a permutation is its inverse.
    return _invert_permutation_op(x, name)


@public.add()
def meshgrid(*args: rt.TensorLike, indexing: str = "xy", name: str = "meshgrid") -> list[rt.Tensor]:
    """Calls ``jax.numpy.meshgrid``."""
    return list(_meshgrid_op(list(args), indexing, name))


@op("meshgrid")
def _meshgrid_op(vectors: Arrays, indexing: str) -> tuple[Array, ...]:
    return tuple(jnp.meshgrid(*vectors, indexing=indexing))
