"""Making, joining, cutting and reshaping tensors, in TensorFlow 1.0's argument orders and, where they differ, 0.8's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.dtypes import as_dtype
from harness.tf1.lift import Array, Arrays, Function, Static, Type, constant, is_tensor, op
from harness.tf1.static import looks_at_shape_only, static_number

_INT = np.dtype(np.int32)


# -- shapes --------------------------------------------------------------------------------------------------------


@op("Shape")
def _shape_op(input: Array, out_type: Type, name: str | None = None) -> Any:  # noqa: A002
    return jnp.asarray(np.asarray(jnp.shape(input), out_type))


def shape(input: Any, name: str | None = None, out_type: Any = _INT) -> Any:  # noqa: A002
    """The shape as a vector; it may be used where another function takes a shape."""
    return looks_at_shape_only(_shape_op(_tensor(input), out_type, name))


@op("Size")
def _size_op(input: Array, out_type: Type, name: str | None = None) -> Any:  # noqa: A002
    return jnp.asarray(np.asarray(jnp.size(input), out_type))


def size(input: Any, name: str | None = None, out_type: Any = _INT) -> Any:  # noqa: A002
    """The number of elements."""
    return looks_at_shape_only(_size_op(_tensor(input), out_type, name))


@op("Rank")
def _rank_op(input: Array, name: str | None = None) -> Any:  # noqa: A002
    return jnp.asarray(jnp.ndim(input), np.int32)


def rank(input: Any, name: str | None = None) -> Any:  # noqa: A002
    """The number of dimensions."""
    return looks_at_shape_only(_rank_op(_tensor(input), name))


def shape_n(input: Sequence[Any], out_type: Any = _INT, name: str | None = None) -> list[Any]:  # noqa: A002
    """The shape of each of a list of tensors."""
    return [shape(i, name, out_type) for i in input]


def _tensor(value: Any) -> rt.Tensor:
    return rt.as_tensor(value) if is_tensor(value) else rt.as_tensor(constant(value))


@op("Reshape")
def reshape(tensor: Array, shape: Static, name: str | None = None) -> Any:
    """``jax.numpy.reshape``; -1 stands for what is left."""
    return jnp.reshape(tensor, shape)


@op("ExpandDims")
def expand_dims(input: Array, axis: Static = None, name: str | None = None, dim: Static = None) -> Any:  # noqa: A002
    """``jax.numpy.expand_dims``."""
    return jnp.expand_dims(input, dim if axis is None else axis)


@op("Squeeze")
def squeeze(
    input: Array,  # noqa: A002
    axis: Static = None,
    name: str | None = None,
    squeeze_dims: Static = None,
) -> Any:
    """``jax.numpy.squeeze``; all axes of size 1 by default."""
    over = squeeze_dims if axis is None else axis
    return jnp.squeeze(input, tuple(over) if isinstance(over, list) else over)


@op("Transpose")
def transpose(a: Array, perm: Static = None, name: str = "transpose") -> Any:
    """``jax.numpy.transpose``."""
    return jnp.transpose(a, perm)


@op("MatrixTranspose")
def matrix_transpose(a: Array, name: str | None = None) -> Any:
    """The last two axes exchanged."""
    return jnp.swapaxes(a, -1, -2)


@op("BroadcastTo")
def broadcast_to(input: Array, shape: Static, name: str | None = None) -> Any:  # noqa: A002
    """``jax.numpy.broadcast_to``."""
    return jnp.broadcast_to(input, shape)


# -- making --------------------------------------------------------------------------------------------------------


@op("zeros")
def zeros(shape: Static, dtype: Type = np.float32, name: str | None = None) -> Any:
    """``jax.numpy.zeros``."""
    return jnp.zeros(_dims(shape), dtype)


@op("ones")
def ones(shape: Static, dtype: Type = np.float32, name: str | None = None) -> Any:
    """``jax.numpy.ones``."""
    return jnp.ones(_dims(shape), dtype)


def _dims(shape: Any) -> Any:
    return shape if isinstance(shape, int) else tuple(shape)


@op("zeros_like")
def zeros_like(tensor: Array, dtype: Type = None, name: str | None = None, optimize: bool = True) -> Any:
    """``jax.numpy.zeros_like``."""
    return jnp.zeros_like(tensor, dtype)


@op("ones_like")
def ones_like(tensor: Array, dtype: Type = None, name: str | None = None, optimize: bool = True) -> Any:
    """``jax.numpy.ones_like``."""
    return jnp.ones_like(tensor, dtype)


@op("Fill")
def fill(dims: Static, value: Array, name: str | None = None) -> Any:
    """``jax.numpy.full``."""
    return jnp.full(_dims(dims), value)


@op("eye")
def eye(num_rows: Static, num_columns: Static = None, dtype: Type = np.float32, name: str | None = None) -> Any:
    """``jax.numpy.eye``."""
    return jnp.eye(num_rows, num_columns, dtype=dtype)


@op("LinSpace")
def linspace(start: Array, stop: Array, num: Static, name: str | None = None) -> Any:
    """``jax.numpy.linspace``."""
    return jnp.linspace(start, stop, num)


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str = "range") -> Any:  # noqa: A001
    """``jax.numpy.arange``: from ``start`` (0 when only one bound is given) up to ``limit``, without it."""
    first, last = (0, start) if limit is None else (start, limit)
    return _range_op(first, last, delta, dtype, name)


@op("Range")
def _range_op(start: Static, limit: Static, delta: Static, dtype: Type, name: str | None = None) -> Any:
    return jnp.arange(start, limit, delta, dtype)


@op("OneHot")
def one_hot(
    indices: Array,
    depth: Static,
    on_value: Array | None = None,
    off_value: Array | None = None,
    axis: Static = None,
    dtype: Type = None,
    name: str | None = None,
) -> Any:
    """``jax.nn.one_hot`` with other values than 1 and 0 where asked for; float32 by default."""
    hot = jax.nn.one_hot(indices, depth, axis=-1 if axis is None else axis, dtype=bool)
    given = [v for v in (on_value, off_value) if v is not None]
    kind = dtype or (jnp.result_type(*given) if given else np.dtype(np.float32))
    on, off = (1 if on_value is None else on_value), (0 if off_value is None else off_value)
    return jnp.where(hot, jnp.asarray(on, kind), jnp.asarray(off, kind))


@op("Diag")
def diag(diagonal: Array, name: str | None = None) -> Any:
    """A tensor with ``diagonal`` on its diagonal, and twice its rank."""
    flat = jnp.ravel(diagonal)
    return jnp.diag(flat).reshape(jnp.shape(diagonal) * 2)


@op("DiagPart")
def diag_part(input: Array, name: str | None = None) -> Any:  # noqa: A002
    """The diagonal that ``tf.diag`` puts."""
    half = jnp.shape(input)[: jnp.ndim(input) // 2]
    side = int(np.prod(half))
    return jnp.diagonal(jnp.reshape(input, (side, side))).reshape(half)


@op("MatrixDiag")
def matrix_diag(diagonal: Array, name: str | None = None) -> Any:
    """Matrices with the last axis of ``diagonal`` on their diagonals."""
    return jnp.expand_dims(diagonal, -1) * jnp.eye(jnp.shape(diagonal)[-1], dtype=jnp.result_type(diagonal))


@op("MatrixDiagPart")
def matrix_diag_part(input: Array, name: str | None = None) -> Any:  # noqa: A002
    """The diagonals of the matrices in the last two axes."""
    return jnp.diagonal(input, axis1=-2, axis2=-1)


@op("MatrixBandPart")
def matrix_band_part(input: Array, num_lower: Static, num_upper: Static, name: str | None = None) -> Any:  # noqa: A002
    """The matrices with only so many diagonals below and above the main one; -1 keeps all."""
    rows, columns = jnp.shape(input)[-2:]
    below = jnp.arange(rows)[:, None] - jnp.arange(columns)[None, :]
    kept = ((num_lower < 0) | (below <= num_lower)) & ((num_upper < 0) | (-below <= num_upper))
    return jnp.where(kept, input, jnp.zeros_like(input))


@op("SequenceMask")
def sequence_mask(lengths: Array, maxlen: Static = None, dtype: Type = np.bool_, name: str | None = None) -> Any:
    """For each length a row of that many ones; ``maxlen`` must be given, because XLA needs the shape."""
    if maxlen is None:
        raise ValueError("sequence_mask needs maxlen: its shape must be known before the step runs")
    return (jnp.arange(maxlen) < jnp.expand_dims(jnp.asarray(lengths), -1)).astype(dtype)


# -- joining and cutting -------------------------------------------------------------------------------------------


@op("concat")
def _concat_op(values: Arrays, axis: Static, name: str | None = None) -> Any:
    return jnp.concatenate([jnp.asarray(v) for v in values], axis)


def concat(values: Any, axis: Any, name: str = "concat") -> Any:
    """``jax.numpy.concatenate``: ``concat(values, axis)``, or ``concat(axis, values)`` as before 1.0."""
    if isinstance(axis, list | tuple) and not isinstance(values, list | tuple):
        values, axis = axis, values
    return _concat_op(values if isinstance(values, list | tuple) else [values], axis, name)


def concat_v2(values: Any, axis: Any, name: str = "concat_v2") -> Any:
    """The same as ``concat``."""
    return concat(values, axis, name)


@op("stack")
def stack(values: Arrays, axis: Static = 0, name: str = "stack") -> Any:
    """``jax.numpy.stack``."""
    return jnp.stack([jnp.asarray(v) for v in values], axis)


def parallel_stack(values: Any, name: str = "parallel_stack") -> Any:
    """The same as ``stack``."""
    return stack(values, 0, name)


@op("unstack")
def _unstack_op(value: Array, axis: Static, count: Static, name: str | None = None) -> Any:
    return tuple(jnp.moveaxis(value, axis, 0)[i] for i in _count(count))


def _count(number: int) -> Any:
    return np.arange(number).tolist()


def unstack(value: Any, num: int | None = None, axis: int = 0, name: str = "unstack") -> list[Any]:
    """A list of the slices along ``axis``; ``num`` is needed where that size is not known before the step runs."""
    tensor = _tensor(value)
    if num is None:
        num = None if tensor.shape is None else tensor.shape[axis]
    if num is None:
        raise ValueError(f"unstack: the size of axis {axis} of {tensor.name!r} is not known before the step: give num")
    return list(_unstack_op(tensor, axis, num, name))


@op("split")
def _split_op(value: Array, at: Any, axis: Static, name: str | None = None) -> Any:
    return tuple(jnp.split(value, at, axis))


def split(*args: Any, **kwargs: Any) -> list[Any]:
    """``split(value, num_or_size_splits, axis=0, name)``, or ``split(split_dim, num_split, value, name)`` before 1.0.

    Args:
        *args: as above.
        **kwargs: as above; ``num`` is accepted and not needed.

    Returns:
        A list of tensors: that many of one size, or of the sizes given.
    """
    old = "split_dim" in kwargs or "num_split" in kwargs or (len(args) > 2 and _whole(args[0]) and not _whole(args[2]))
    order = (
        ("split_dim", "num_split", "value", "name") if old else ("value", "num_or_size_splits", "axis", "num", "name")
    )
    given = dict(zip(order, args, strict=False)) | kwargs
    unknown = set(given) - set(order)
    if unknown or len(args) > len(order):
        raise TypeError(f"split: takes {', '.join(order)}, not {', '.join(sorted(unknown)) or len(args)}")
    axis = static_number(given.get("split_dim" if old else "axis", 0), "split: the axis")
    parts = static_number(given["num_split" if old else "num_or_size_splits"], "split: the number of parts")
    at: Any = parts
    if isinstance(parts, list):
        value = _tensor(given["value"])
        at = np.cumsum(_sizes(parts, value, axis))[:-1].tolist()
    return list(_split_op(given["value"], at, axis, given.get("name")))


def split_v(*args: Any, **kwargs: Any) -> list[Any]:
    """The same as ``split``."""
    return split(*args, **kwargs)


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer)


def _sizes(parts: list[int], value: rt.Tensor, axis: int) -> list[int]:
    if -1 not in parts:
        return parts
    total = None if value.shape is None else value.shape[axis]
    if total is None:
        raise ValueError(f"split: the size of axis {axis} of {value.name!r} is not known, so -1 cannot be worked out")
    return [total - sum(parts) - 1 if p == -1 else p for p in parts]


@op("Slice")
def slice(input_: Array, begin: Static, size: Static, name: str | None = None) -> Any:  # noqa: A001
    """``size`` elements from ``begin`` on along each axis; -1 for all that is left."""
    ends = [d if s == -1 else b + s for b, s, d in zip(begin, size, jnp.shape(input_), strict=True)]
    return jax.lax.slice(jnp.asarray(input_), begin, ends)


@op("StridedSlice")
def strided_slice(input_: Array, begin: Static, end: Static, strides: Static = None, name: str | None = None) -> Any:
    """``input_[begin:end:strides]`` for each axis; masks are not taken, write the index in Python."""
    steps = strides or [1] * len(begin)
    return jnp.asarray(input_)[tuple(_slice(b, e, s) for b, e, s in zip(begin, end, steps, strict=True))]


def _slice(begin: int, end: int, step: int) -> Any:
    import builtins

    return builtins.slice(begin, end, step)


@op("Tile")
def tile(input: Array, multiples: Static, name: str | None = None) -> Any:  # noqa: A002
    """``jax.numpy.tile``."""
    return jnp.tile(input, multiples)


@op("Pad")
def pad(
    tensor: Array, paddings: Static, mode: str = "CONSTANT", name: str | None = None, constant_values: Any = 0
) -> Any:  # noqa: E501
    """``jax.numpy.pad``, in mode "CONSTANT", "REFLECT" or "SYMMETRIC"."""
    how = mode.lower()
    extra = {"constant_values": constant_values} if how == "constant" else {}
    return jnp.pad(tensor, paddings, how, **extra)


@op("ReverseV2")
def reverse(tensor: Array, axis: Static, name: str | None = None) -> Any:
    """``jax.numpy.flip`` of the axes; before 1.0 a list of bools, one for each axis."""
    flags = isinstance(axis, list) and bool(axis) and all(isinstance(a, bool) for a in axis)
    over = [i for i, flag in enumerate(axis) if flag] if flags else axis
    return jnp.flip(tensor, tuple(over) if isinstance(over, list) else over)


@op("Gather")
def gather(
    params: Array, indices: Array, validate_indices: bool | None = None, name: str | None = None, axis: Static = 0
) -> Any:
    """``jax.numpy.take``. An index out of range gives NaN (the limit, for integers), not an error."""
    return jnp.take(params, jnp.asarray(indices), axis=axis)


@op("GatherNd")
def gather_nd(params: Array, indices: Array, name: str | None = None) -> Any:
    """The slices of ``params`` that the last axis of ``indices`` points to."""
    places = jnp.moveaxis(jnp.asarray(indices), -1, 0)
    return jnp.asarray(params)[tuple(places)]


@op("ScatterNd")
def scatter_nd(indices: Array, updates: Array, shape: Static, name: str | None = None) -> Any:
    """Zeros of ``shape`` with ``updates`` added at ``indices``."""
    places = jnp.moveaxis(jnp.asarray(indices), -1, 0)
    return jnp.zeros(shape, jnp.result_type(updates)).at[tuple(places)].add(updates)


@op("Select")
def where(condition: Array, x: Array | None = None, y: Array | None = None, name: str | None = None) -> Any:
    """``jax.numpy.where``; a vector ``condition`` chooses rows. Without x and y it has no static shape: refused."""
    if x is None or y is None:
        raise ValueError("where(condition) alone has no static shape: use x and y, or fetch and use numpy.argwhere")
    mask = jnp.asarray(condition)
    mask = mask.reshape(mask.shape + (1,) * (jnp.ndim(x) - mask.ndim)) if mask.ndim == 1 else mask
    return jnp.where(mask, x, y)


@op("TopKV2")
def _top_k_op(input: Array, k: Static, name: str | None = None) -> Any:  # noqa: A002
    return tuple(jax.lax.top_k(input, k))


@op("InvertPermutation")
def invert_permutation(x: Array, name: str | None = None) -> Any:
    """``jax.numpy.argsort``."""
    return jnp.argsort(x).astype(jnp.result_type(x))


def meshgrid(*args: Any, indexing: str = "xy", name: str = "meshgrid") -> list[Any]:
    """``jax.numpy.meshgrid``."""
    return list(_meshgrid_op(list(args), indexing, name))


@op("meshgrid")
def _meshgrid_op(vectors: Arrays, indexing: Any, name: str | None = None) -> Any:
    return tuple(jnp.meshgrid(*vectors, indexing=indexing))


# -- values as they are --------------------------------------------------------------------------------------------


def identity(input: Any, name: str | None = None) -> Any:  # noqa: A002
    """The same value on the current device."""
    return rt.identity(input if is_tensor(input) else constant(input), name)


def convert_to_tensor(
    value: Any, dtype: Any = None, name: str | None = None, as_ref: bool = False, preferred_dtype: Any = None
) -> Any:
    """``value`` as a tensor. Raises ValueError when it is a tensor of another dtype."""
    if isinstance(value, list | tuple) and any(is_tensor(v) for v in value):
        value = stack(value, 0, name or "packed")
    if not is_tensor(value):
        return constant(value, dtype, name=name or "Const")
    tensor = rt.as_tensor(value)
    if dtype is not None and tensor.dtype != as_dtype(dtype).dtype:
        raise ValueError(f"{tensor.name!r} is {tensor.dtype.name}, not {as_dtype(dtype).name}: use tf.cast")
    return tensor


def placeholder(dtype: Any, shape: Any = None, name: str | None = None) -> Any:
    """A tensor to feed; see ``rt.placeholder``. A shape may hold None."""
    return rt.placeholder(as_dtype(dtype).dtype, None if shape is None else static_number(shape, "the shape"), name)


def placeholder_with_default(input: Any, shape: Any, name: str | None = None) -> Any:  # noqa: A002
    """A tensor that may be fed, and is ``input`` when it is not."""
    tensor = rt.identity(input if is_tensor(input) else constant(input), name or "PlaceholderWithDefault")
    tensor.shape = None if shape is None else tuple(static_number(shape, "the shape"))
    return tensor


OPS: dict[str, Function] = {
    "broadcast_to": broadcast_to,
    "concat": concat,
    "concat_v2": concat_v2,
    "constant": constant,
    "convert_to_tensor": convert_to_tensor,
    "diag": diag,
    "diag_part": diag_part,
    "expand_dims": expand_dims,
    "eye": eye,
    "fill": fill,
    "gather": gather,
    "gather_nd": gather_nd,
    "identity": identity,
    "invert_permutation": invert_permutation,
    "lin_space": linspace,
    "linspace": linspace,
    "matrix_band_part": matrix_band_part,
    "matrix_diag": matrix_diag,
    "matrix_diag_part": matrix_diag_part,
    "matrix_transpose": matrix_transpose,
    "meshgrid": meshgrid,
    "one_hot": one_hot,
    "ones": ones,
    "ones_like": ones_like,
    "pack": stack,
    "pad": pad,
    "parallel_stack": parallel_stack,
    "placeholder": placeholder,
    "placeholder_with_default": placeholder_with_default,
    "range": range,
    "rank": rank,
    "reshape": reshape,
    "reverse": reverse,
    "reverse_v2": reverse,
    "scatter_nd": scatter_nd,
    "select": where,
    "sequence_mask": sequence_mask,
    "shape": shape,
    "shape_n": shape_n,
    "size": size,
    "slice": slice,
    "split": split,
    "split_v": split_v,
    "squeeze": squeeze,
    "stack": stack,
    "strided_slice": strided_slice,
    "tile": tile,
    "transpose": transpose,
    "unpack": unstack,
    "unstack": unstack,
    "where": where,
    "zeros": zeros,
    "zeros_like": zeros_like,
}
"""TensorFlow's name -> the function, for all that this module defines."""
