"""Sparse tensors, as far as input pipelines make them: three tensors each, and the way to a dense tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Array, Public, Static
from harness.tf1.ops.python_ops import host_op, host_ops
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime.lowlevel import Array as HostArray
from runtime.lowlevel import DType

public = Public("tf", "Examples, text and sparse tensors")


@public.add()
class SparseTensorValue(NamedTuple):
    """The value of a sparse tensor that was fetched: int64[n, rank], [n] and int64[rank]."""

    indices: HostArray
    values: HostArray
    dense_shape: HostArray


@public.add()
class SparseTensor:
    """A tensor that is zero but for some values."""

    def __init__(
        self, indices: rt.TensorLike, values: rt.TensorLike, dense_shape: rt.TensorLike
    ) -> None:
        self.indices: rt.Tensor = convert_to_tensor(indices, np.int64)
        self.values: rt.Tensor = convert_to_tensor(values)
        self.dense_shape: rt.Tensor = convert_to_tensor(dense_shape, np.int64)

    @property
    def dtype(self) -> rt.lowlevel.DType:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def graph(self) -> rt.Graph:
        """The graph of its tensors."""
        return self.values.graph

    @property
    def op(self) -> rt.Operation:
        """The operation that makes the values."""
        return self.values.op

    @property
    def shape(self) -> TensorShape:
        """The static shape, as far as the number of dimensions is known."""
        # A literal shape is known now; of others only the number of axes may be.
        given = getattr(self.dense_shape.op.body, "value", None)
        if given is not None:
            return TensorShape(np.asarray(given).tolist())
        sizes = self.dense_shape.shape
        return TensorShape(None if sizes is None or sizes[0] is None else [None] * sizes[0])

    def get_shape(self) -> TensorShape:
        """Returns the same as ``shape``."""
        return self.shape


def _join_parts(_: object, parts: Sequence[Any]) -> Any:
    # The leaves are arrays when the session puts a fetched value together.
    return (SparseTensor if isinstance(parts[0], rt.Tensor) else SparseTensorValue)(*parts)


# A session fetches what JAX can take apart into tensors and put together again.
jax.tree_util.register_pytree_node(
    SparseTensor,
    lambda sparse: ((sparse.indices, sparse.values, sparse.dense_shape), None),
    _join_parts,
)


def matrix_of_rows(rows: Sequence[HostArray], dtype: DType) -> list[HostArray]:
    """Returns the indices, values and dense shape of a sparse matrix with these rows."""
    places = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    # The empty array gives the dtype where there is no row.
    values = np.concatenate([np.empty(0, dtype), *rows])
    longest = max(map(len, rows), default=0)
    shape = np.array([len(rows), longest], np.int64)
    return [np.array(places, np.int64).reshape(-1, 2), values, shape]


def to_dense(indices: HostArray, values: HostArray, shape: HostArray, default: object) -> HostArray:
    """Returns the dense array. Raises InvalidArgumentError for an index beyond the shape."""
    dense = np.full(tuple(int(n) for n in shape), default, values.dtype)
    if ((indices < 0) | (indices >= shape)).any():
        raise rt.InvalidArgumentError(
            f"Indices are not valid (out of bounds).  Shape: {shape.tolist()}"
        )
    dense[tuple(indices.T)] = values
    return dense


@public.add()
def sparse_tensor_to_dense(
    sp_input: SparseTensor,
    default_value: object = 0,
    validate_indices: bool = True,
    name: str | None = None,
) -> rt.Tensor:
    """Returns the dense tensor, on the host; ``default_value`` where there is no value ("" for strings)."""
    kind = sp_input.values.dtype
    # The default of 0 is no string.
    default = b"" if kind.hasobject and default_value == 0 else default_value
    default = default.encode() if isinstance(default, str) else default
    sizes = sp_input.shape
    shape = None if sizes.dims is None else sizes.as_list()
    inputs = [sp_input.indices, sp_input.values, sp_input.dense_shape]
    return host_op(
        lambda i, v, s: to_dense(i, v, s, default), inputs, shape, kind, name, "SparseToDense"
    )


@public.op("SparseToDense", "sparse_to_dense")
def _sparse_to_dense(
    sparse_indices: Array,
    output_shape: Static,
    sparse_values: Array,
    default_value: Array | float = 0,
    validate_indices: bool = True,
) -> Array:
    """Makes a dense tensor of ``default_value`` with ``sparse_values`` at ``sparse_indices``; others are left out."""
    values = jnp.asarray(sparse_values)
    places = jnp.asarray(sparse_indices)
    # A vector, or one number, is the places in a vector.
    places = places.reshape(-1, 1) if places.ndim < 2 else places
    dense = jnp.full(tuple(output_shape), default_value, values.dtype)
    # A compiled program cannot raise, so places beyond the shape are left out.
    return dense.at[tuple(places.T)].set(values, mode="drop")


@public.add()
def sparse_placeholder(
    dtype: DTypeLike, shape: Sequence[int | None] | None = None, name: str | None = None
) -> SparseTensor:
    """Makes a sparse tensor to be fed: a ``SparseTensorValue``, or indices, values and shape.

    ``shape`` is the dense shape; the number of its axes is known then, and the shape is fed too.
    """
    rank = None if shape is None else len(shape)
    with rt.name_scope(name or "SparsePlaceholder"):
        return SparseTensor(
            rt.placeholder(np.int64, [None, rank], name="indices"),
            rt.placeholder(as_dtype(dtype).dtype, [None], name="values"),
            rt.placeholder(np.int64, [rank], name="shape"),
        )


@public.add("sparse_tensor_dense_matmul")
def sparse_matmul(
    sp_a: SparseTensor,
    b: rt.TensorLike,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    name: str | None = None,
) -> rt.Tensor:
    """Multiplies a sparse matrix by a dense one; the gradients are those of the values and of ``b``.

    Indices beyond the shape are left out, as a compiled program cannot raise.
    """
    sizes = sp_a.shape.dims
    known = None if sizes is None else sp_a.shape.as_list()[1 if adjoint_a else 0]
    # The array has the length of the result, which a program must know before the program runs.
    (length,) = host_ops(
        lambda shape: [np.zeros(int(shape[1 if adjoint_a else 0]), bool)],
        [sp_a.dense_shape],
        [((known,), np.bool_)],
        None,
        "Rows",
    )

    def multiply(indices: Array, values: Array, dense: Array, length: Array) -> Array:
        into, of = (indices[:, 1], indices[:, 0]) if adjoint_a else (indices[:, 0], indices[:, 1])
        factors = jnp.conj(values) if adjoint_a else values
        right = jnp.conj(dense).T if adjoint_b else dense
        rows = factors[:, None] * jnp.take(right, of, axis=0, mode="fill", fill_value=0)
        return jnp.zeros((length.shape[0], right.shape[1]), rows.dtype).at[into].add(rows)

    product: rt.Tensor = rt.call(
        multiply,
        sp_a.indices,
        sp_a.values,
        convert_to_tensor(b),
        length,
        name=name or "SparseTensorDenseMatMul",
    )
    return product


@public.add()
def sparse_reorder(sp_input: SparseTensor, name: str | None = None) -> SparseTensor:
    """Sorts the values of a sparse tensor by row, then by column."""
    return _pick(sp_input, lambda indices: np.lexsort(indices.T[::-1]), [], name, "SparseReorder")


@public.add()
def sparse_retain(sp_input: SparseTensor, to_retain: rt.TensorLike) -> SparseTensor:
    """Keeps the values where ``to_retain``, a bool for each value, is True."""
    keep = convert_to_tensor(to_retain)
    return _pick(sp_input, lambda indices, kept: np.flatnonzero(kept), [keep], None, "SparseRetain")


def _pick(
    sparse: SparseTensor,
    choose: Callable[..., HostArray],
    inputs: Sequence[rt.Tensor],
    name: str | None,
    kind: str,
) -> SparseTensor:
    """Returns a sparse tensor of the values at the places that ``choose`` finds on the host."""
    axes = sparse.indices.shape[1] if sparse.indices.shape else None

    def pick(indices: HostArray, *more: HostArray) -> list[HostArray]:
        places = choose(indices, *more).astype(np.int64)
        return [places, indices[places]]

    places, indices = host_ops(
        pick,
        [sparse.indices, *inputs],
        [((None,), np.int64), ((None, axes), np.int64)],
        name,
        kind,
    )
    # Values of a compiled program keep their gradient.
    values: rt.Tensor = (
        host_op(lambda v, p: v[p], [sparse.values, places], (None,), sparse.dtype, None, "Values")
        if sparse.dtype.hasobject
        else rt.call(lambda v, p: v[p], sparse.values, places, name="values")
    )
    return SparseTensor(indices, values, sparse.dense_shape)
