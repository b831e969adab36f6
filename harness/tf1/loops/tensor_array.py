"""``tf.TensorArray``: rows that are written one by one, in a loop or elsewhere, kept as a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.loops.nests import Unwritten
from harness.tf1.ops.array_ops import as_tensor, zeros
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.join_ops import gather
from harness.tf1.ops.lift import Array, Public, Static, constant, is_tensor, op
from harness.tf1.ops.shapes import ShapeLike, TensorShape
from harness.tf1.ops.static import static

public = Public("tf", "Conditionals and loops")


@op("TensorArrayWrite")
def _write(rows: Array, index: Array, value: Array) -> Array:
    rows = jnp.asarray(rows)
    # Guesses for a row and for the rows of unknown rank do not fit together. The result has the
    # shape of the rows.
    if rt.lowlevel.sizes_are_guesses():
        return rows
    # JAX counts a negative index from the end, where TensorFlow has no row.
    return rows.at[jnp.where(jnp.asarray(index) < 0, rows.shape[0], index)].set(value, mode="drop")


@op("TensorArray")
def _rows_like(value: Array, size: Static) -> Array:
    return jnp.zeros((size, *jnp.shape(value)), jnp.result_type(value))


@op("TensorArrayConcat")
def _concat(rows: Array) -> Array:
    return jnp.reshape(rows, (-1, *jnp.shape(rows)[2:]))


class _Rows(Unwritten):
    """The properties that all versions of an array share: the data type, the size, the shape of a row."""

    def __init__(self, dtype: DTypeLike, size: rt.TensorLike, shape: ShapeLike | None) -> None:
        self.dtype, self.size = as_dtype(dtype).dtype, size
        self.shape = TensorShape(shape)
        self.written: rt.Tensor | None = None
        """What was written last, for its shape."""

    def content(self) -> rt.Tensor:
        """Rows of zeros. Raises ValueError when the shape of a row is not known."""
        if not self.shape.is_fully_defined():
            raise ValueError("tf.TensorArray: nothing was written yet: give element_shape")
        return rt.as_tensor(zeros([self.size, *self.shape.as_list()], self.dtype))

    def like(self, value: rt.Tensor) -> rt.Tensor:
        """Rows of zeros, each of the shape of ``value``."""
        return rt.as_tensor(_rows_like(value, self.size))


@public.add()
class TensorArray:
    """A number of rows of one shape. Each change gives a new one.

    The size may depend on shapes of tensors, not on values, because XLA needs it. Without
    ``element_shape``, rows have the shape of what is written first.

    A row that was not written is zero, and one beyond the size is left out.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        size: rt.TensorLike | None = None,
        dynamic_size: bool | None = None,
        clear_after_read: object = None,
        tensor_array_name: str | None = None,
        handle: object = None,
        flow: object = None,
        infer_shape: bool = True,
        element_shape: ShapeLike | None = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
    ) -> None:
        if size is None:
            raise ValueError("Size must be provided if flow is not provided")
        if dynamic_size:
            raise ValueError(
                "tf.TensorArray: XLA needs the size: give the largest number of rows, without "
                "dynamic_size"
            )
        static(size)  # so that what is wrong with it is told here
        self._of = _Rows(dtype, size, element_shape)
        self._content: Unwritten | rt.Tensor = self._of

    def _with(self, content: Unwritten | rt.Tensor) -> TensorArray:
        other: TensorArray = object.__new__(TensorArray)
        other._of, other._content = self._of, content
        return other

    @property
    def dtype(self) -> rt.lowlevel.DType:
        """The dtype of the rows."""
        return self._of.dtype

    @property
    def element_shape(self) -> TensorShape:
        """The shape of a row, as far as it is known."""
        return self._of.shape

    @property
    def flow(self) -> rt.Tensor:
        """The rows: what changes of the array depend on."""
        return self._rows()

    def _rows(self) -> rt.Tensor:
        return self._content if isinstance(self._content, rt.Tensor) else self._content.content()

    def _checked(self, value: rt.TensorLike) -> rt.Tensor:
        tensor = (
            rt.as_tensor(value) if is_tensor(value) else rt.as_tensor(constant(value, self.dtype))
        )
        if tensor.dtype != self.dtype:
            raise rt.InvalidArgumentError(
                f"tf.TensorArray of {self.dtype.name}: {tensor.name!r} is {tensor.dtype.name}"
            )
        return tensor

    def _row_like(self, shape: Sequence[int | None] | None) -> None:
        self._of.shape = self._of.shape.merge_with(shape)

    def write(
        self, index: rt.TensorLike, value: rt.TensorLike, name: str | None = None
    ) -> TensorArray:
        """Returns the array with ``value`` as row ``index``.

        Raises ValueError for another type or shape.
        """
        row = self._checked(value)
        self._row_like(row.shape)
        # A loop learns from it the shape of rows that were not written before.
        self._of.written = row
        rows = self._content if isinstance(self._content, rt.Tensor) else self._of.like(row)
        made: rt.Tensor = _write(rows, index, row, name)
        size = rows.shape[0] if rows.shape else None
        made.shape = None if row.shape is None else (size, *row.shape)
        return self._with(made)

    def read(self, index: rt.TensorLike, name: str | None = None) -> rt.Tensor:
        """Returns the row ``index``."""
        return gather(self._rows(), index, name=name)

    def gather(self, indices: rt.TensorLike, name: str | None = None) -> rt.Tensor:
        """Returns the rows ``indices``."""
        return self.read(indices, name)

    def stack(self, name: str | None = None) -> rt.Tensor:
        """Returns all rows as one tensor."""
        return rt.identity(self._rows(), name or "TensorArrayStack")

    def concat(self, name: str | None = None) -> rt.Tensor:
        """Joins the rows along their first axis."""
        joined: rt.Tensor = _concat(self._rows(), name)
        return joined

    def unstack(self, value: rt.TensorLike, name: str | None = None) -> TensorArray:
        """Returns the array with the rows of ``value``."""
        rows = self._checked(value)
        self._row_like(None if rows.shape is None else rows.shape[1:])
        return self._with(rows)

    def scatter(
        self, indices: rt.TensorLike, value: rt.TensorLike, name: str | None = None
    ) -> TensorArray:
        """Returns the array with the rows of ``value`` as the rows ``indices``."""
        rows = self._checked(value)
        self._row_like(None if rows.shape is None else rows.shape[1:])
        before = self._content if isinstance(self._content, rt.Tensor) else self._of.like(rows[0])
        made: rt.Tensor = _write(before, indices, rows, name)
        made.shape = before.shape
        return self._with(made)

    def size(self, name: str | None = None) -> rt.Tensor:
        """Returns the number of rows."""
        return as_tensor(self._of.size)

    def identity(self) -> TensorArray:
        """Returns the same array."""
        return self._with(self._content)

    def close(self, name: str | None = None) -> rt.Operation:
        """Does nothing: an array holds no resource here."""
        return rt.no_op(name=name or "TensorArrayClose")

    # old names
    pack, unpack = stack, unstack


def _flatten(array: TensorArray) -> tuple[tuple[object, ...], _Rows]:
    # The rows alone change in a loop; what all versions share is the structure.
    return (array._content,), array._of


def _unflatten(of: _Rows, children: Iterable[rt.Tensor]) -> TensorArray:
    made: TensorArray = object.__new__(TensorArray)
    made._of, (made._content,) = of, children
    return made


jax.tree_util.register_pytree_node(TensorArray, _flatten, _unflatten)  # type: ignore[misc]
