"""The shapes of tensors, and making tensors: zeros, ranges, diagonals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.lift import Array, Public, Static, Type, WrongType, constant, either, op
from harness.tf1.ops.static import looks_at_shape_only

public = Public("tf", "Tensors")

_INT = np.dtype(np.int32)


# -- shapes ----------------------------------------------------------------------------------------


def _of_shape(kind: str, look: Callable[..., object]) -> Callable[..., rt.Tensor]:
    """Lifts a function of the shape of a tensor, whose result may be used where a function takes a shape."""

    @op(kind)
    def of_shape(input: Array, out_type: Type) -> Array:
        # numpy's array is a constant of the trace, so a shape may be computed from it.
        return jnp.asarray(np.asarray(look(input), out_type))

    return lambda value, out_type, name: looks_at_shape_only(
        of_shape(as_tensor(value), out_type, name)
    )


_shape, _size, _rank = (
    _of_shape("Shape", jnp.shape),
    _of_shape("Size", jnp.size),
    _of_shape("Rank", jnp.ndim),
)


@public.add()
def shape(input: rt.TensorLike, name: str | None = None, out_type: DTypeLike = _INT) -> rt.Tensor:
    """Returns the shape as a vector, which may be used where another function takes a shape."""
    return _shape(input, out_type, name)


@public.add()
def size(input: rt.TensorLike, name: str | None = None, out_type: DTypeLike = _INT) -> rt.Tensor:
    """Returns the number of elements."""
    return _size(input, out_type, name)


@public.add()
def rank(input: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Returns the number of dimensions."""
    return _rank(input, _INT, name)


@public.add()
def shape_n(
    input: Sequence[rt.TensorLike], out_type: DTypeLike = _INT, name: str | None = None
) -> list[rt.Tensor]:
    """Returns the shape of each of a list of tensors."""
    return [shape(i, name, out_type) for i in input]


def as_tensor(value: rt.TensorLike) -> rt.Tensor:
    """Returns ``value`` as a tensor: itself, or a constant."""
    return rt.as_tensor(constant(value))


@public.op("Reshape")
def reshape(tensor: Array, shape: Static) -> Array:
    """Calls ``jax.numpy.reshape``; -1 stands for what is left."""
    if isinstance(shape, int):
        raise ValueError(f"a shape is a list, as in [{shape}]")
    try:
        return jnp.reshape(tensor, shape)
    except TypeError:
        # The guess for an unknown size need not divide; the shape of the result counts alone then.
        if not rt.lowlevel.sizes_are_guesses():
            raise
        return jnp.zeros([tensor.size if n == -1 else n for n in shape], tensor.dtype)


@public.op("ExpandDims")
def expand_dims(
    input: Array, axis: Static = None, name: str | None = None, dim: Static = None
) -> Array:
    """Calls ``jax.numpy.expand_dims``."""
    where = either(axis=axis, dim=dim)
    if where is None:
        raise ValueError("give an axis")
    return jnp.expand_dims(input, where)


@public.op("Squeeze")
def squeeze(
    input: Array, axis: Static = None, name: str | None = None, squeeze_dims: Static = None
) -> Array:
    """Calls ``jax.numpy.squeeze``; all axes of size 1 by default."""
    # TensorFlow squeezes all axes for an empty list, and takes an axis twice.
    over = either(axis=axis, squeeze_dims=squeeze_dims)
    return jnp.squeeze(
        input, (tuple(dict.fromkeys(over)) or None) if isinstance(over, list) else over
    )


@public.op("Transpose")
def transpose(a: Array, perm: Static = None, name: str = "transpose") -> Array:
    """Calls ``jax.numpy.transpose``."""
    return jnp.transpose(a, perm)


public.rows({"matrix_transpose": ("matrix_transpose", jnp.matrix_transpose, "")}, "a")
public.rows({"broadcast_to": ("BroadcastTo", jnp.broadcast_to, "")}, "input, shape: Static")


# -- making ----------------------------------------------------------------------------------------


def as_sizes(shape: Static) -> tuple[int, ...]:
    """Returns a shape; a number stands for one dimension."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


@public.op("zeros")
def zeros(shape: Static, dtype: Type = np.float32) -> Array:
    """Calls ``jax.numpy.zeros``."""
    return jnp.zeros(as_sizes(shape), dtype)


@public.op("ones")
def ones(shape: Static, dtype: Type = np.float32) -> Array:
    """Calls ``jax.numpy.ones``."""
    return jnp.ones(as_sizes(shape), dtype)


@public.op("zeros_like")
def zeros_like(
    tensor: Array, dtype: Type | None = None, name: str | None = None, optimize: bool = True
) -> Array:
    """Calls ``jax.numpy.zeros_like``."""
    return jnp.zeros_like(tensor, dtype)


@public.op("ones_like")
def ones_like(
    tensor: Array, dtype: Type | None = None, name: str | None = None, optimize: bool = True
) -> Array:
    """Calls ``jax.numpy.ones_like``."""
    return jnp.ones_like(tensor, dtype)


@public.op("Fill")
def fill(dims: Static, value: Array) -> Array:
    """Calls ``jax.numpy.full``."""
    # jax.numpy.full would broadcast.
    if jnp.ndim(value):
        raise ValueError(f"the value must be a scalar, not of shape {jnp.shape(value)}")
    return jnp.full(as_sizes(dims), value)


@public.op("eye")
def eye(
    num_rows: Static,
    num_columns: Static = None,
    batch_shape: Static = None,
    dtype: Type = np.float32,
) -> Array:
    """Calls ``jax.numpy.eye``, once for each place of ``batch_shape``."""
    one = jnp.eye(num_rows, num_columns, dtype=dtype)
    return jnp.broadcast_to(one, (*(batch_shape or ()), *one.shape))


_LINSPACE = ("LinSpace", jnp.linspace, "")
public.rows({"lin_space": _LINSPACE, "linspace": _LINSPACE}, "start, stop, num: Static")


@public.add()
def range(
    start: rt.TensorLike,
    limit: rt.TensorLike | None = None,
    delta: rt.TensorLike = 1,
    dtype: DTypeLike | None = None,
    name: str = "range",
) -> rt.Tensor:
    """Calls ``jax.numpy.arange``: from ``start`` (0 when only one bound is given) up to ``limit``, excluded."""
    first, last = (0, start) if limit is None else (start, limit)
    wanted = as_dtype(_widest(first, last, delta) if dtype is None else dtype).dtype
    return _range_op(first, last, delta, wanted, name)


def _widest(*values: rt.TensorLike) -> rt.lowlevel.DType:
    """Returns the last of TensorFlow's types of a range that is among those of ``values``."""
    order = [np.dtype(t) for t in (np.int32, np.int64, np.float32, np.float64)]
    return max((own_dtype(v) for v in values), key=order.index)


@op("Range")
def _range_op(start: Static, limit: Static, delta: Static, dtype: Type) -> Array:
    # For a step away from the limit jax.numpy gives an empty range, TensorFlow an error.
    if not delta or (limit - start) * delta < 0:
        raise ValueError(f"from {start} to {limit} no steps of {delta} lead")
    return jnp.arange(start, limit, delta, dtype)


@public.op("one_hot")
def one_hot(
    indices: Array,
    depth: Static,
    on_value: Array | None = None,
    off_value: Array | None = None,
    axis: Static = None,
    dtype: Type | None = None,
) -> Array:
    """Calls ``jax.nn.one_hot`` with other values than 1 and 0 where asked for; float32 by default."""
    if not jnp.issubdtype(jnp.result_type(indices), np.integer):
        raise WrongType(f"the indices must be integers, not {jnp.result_type(indices)}")
    hot = jax.nn.one_hot(indices, depth, axis=-1 if axis is None else axis, dtype=bool)
    # TensorFlow's rule: the dtype comes from the values; only without any is it float32.
    given = [own_dtype(v) for v in (on_value, off_value) if v is not None]
    kind = dtype or (given[0] if given else np.dtype(np.float32))
    if set(given) - {kind}:
        raise WrongType(f"the values are {' and '.join(map(str, given))}, and wanted is {kind}")
    on, off = (1 if on_value is None else on_value), (0 if off_value is None else off_value)
    return jnp.where(hot, jnp.asarray(on, kind), jnp.asarray(off, kind))


def own_dtype(value: rt.TensorLike) -> rt.lowlevel.DType:
    """Returns the dtype that TensorFlow gives a value: int32 and float32 for Python numbers, whatever is beside."""
    return np.dtype(value.dtype) if hasattr(value, "dtype") else to_array(value).dtype


@public.op("Diag")
def diag(diagonal: Array) -> Array:
    """Returns a tensor of twice the rank with ``diagonal`` on the diagonal."""
    flat = jnp.ravel(diagonal)
    return jnp.diag(flat).reshape(jnp.shape(diagonal) * 2)


@public.op("DiagPart")
def diag_part(input: Array) -> Array:
    """Returns the diagonal that ``tf.diag`` makes."""
    # The first half of the axes equals the second, as tf.diag makes them.
    half = jnp.shape(input)[: jnp.ndim(input) // 2]
    side = int(np.prod(half))
    diagonal: Array = jnp.diagonal(jnp.reshape(input, (side, side)))
    return diagonal.reshape(half)


@public.op("MatrixDiag")
def matrix_diag(diagonal: Array) -> Array:
    """Matrices with the last axis of ``diagonal`` on their diagonals."""
    unit = jnp.eye(jnp.shape(diagonal)[-1], dtype=jnp.result_type(diagonal))
    return jnp.expand_dims(diagonal, -1) * unit


@public.op("MatrixDiagPart")
def matrix_diag_part(input: Array) -> Array:
    """Returns the diagonals of the matrices in the last two axes."""
    diagonals: Array = jnp.diagonal(input, axis1=-2, axis2=-1)
    return diagonals


@public.op("MatrixBandPart")
def matrix_band_part(input: Array, num_lower: Static, num_upper: Static) -> Array:
    """Returns the matrices with only so many diagonals below and above the main one; -1 keeps all."""
    rows, columns = jnp.shape(input)[-2:]
    if num_lower > rows or num_upper > columns:
        raise ValueError(
            f"{num_lower} and {num_upper} are more diagonals than [{rows}, {columns}] has"
        )
    # How far each element lies below the main diagonal; above it, less than 0.
    below = jnp.arange(rows)[:, None] - jnp.arange(columns)[None, :]
    kept = ((num_lower < 0) | (below <= num_lower)) & ((num_upper < 0) | (-below <= num_upper))
    return jnp.where(kept, input, jnp.zeros_like(input))


@public.op("SequenceMask")
def sequence_mask(lengths: Array, maxlen: Static = None, dtype: Type = np.bool_) -> Array:
    """Makes a row of ones for each length; ``maxlen`` must be given, because XLA needs the shape."""
    if maxlen is None:
        raise ValueError("sequence_mask needs maxlen: its shape must be known before the step runs")
    return (jnp.arange(maxlen) < jnp.expand_dims(jnp.asarray(lengths), -1)).astype(dtype)
