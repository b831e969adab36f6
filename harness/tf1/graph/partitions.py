"""Partitioned variables: parts of one array, each a variable that may lie on a task of its own."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

import runtime as rt
from harness.checkpoints.names import partitioned
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public
from harness.tf1.ops.shapes import TensorShape

public = Public("tf", "Variables")

Partitioner = Callable[..., Sequence[int]]
"""A function of ``shape`` and ``dtype`` that returns the number of parts along each axis."""


class PartitionInfo(NamedTuple):
    """The place of a part in its variable, for initializers that take ``partition_info``.

    Attributes:
        full_shape: shape of the whole variable.
        var_offset: index of the first element of the part.
    """

    full_shape: tuple[int, ...]
    var_offset: tuple[int, ...]


@public.add()
class PartitionedVariable(rt.lowlevel.Operators[rt.Tensor]):
    """A variable in parts along the first axis. As a tensor, the variable is the joined parts.

    Iteration gives the parts. A checkpoint has one array, which fits any number of parts.
    """

    def __init__(self, name: str, parts: Sequence[Any]) -> None:
        self._name = name
        self._parts = list(parts)

    @property
    def name(self) -> str:
        """The name of the variable, without a number of an output."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole variable."""
        return (sum(part.shape[0] for part in self._parts), *self._parts[0].shape[1:])

    @property
    def dtype(self) -> rt.lowlevel.DType:
        """The dtype of the parts."""
        dtype: rt.lowlevel.DType = self._parts[0].dtype
        return dtype

    @property
    def graph(self) -> rt.Graph:
        """The graph of the parts."""
        graph: rt.Graph = self._parts[0].graph
        return graph

    @property
    def op(self) -> rt.Operation:
        """An operation that joins the parts."""
        return self.as_tensor().op

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def get_shape(self) -> TensorShape:
        """Returns the shape of the whole variable."""
        return TensorShape(self.shape)

    def as_tensor(self) -> rt.Tensor:
        """Returns the parts, joined."""
        if len(self._parts) == 1:
            part: rt.Tensor = self._parts[0].value()
            return part
        # Each reader joins the parts on the reader's own device.
        with rt.name_scope(f"{self.name}/ConcatPartitions/"):
            joined: rt.Tensor = rt.call(
                lambda *parts: jnp.concatenate(parts), *self._parts, name="concat"
            )
        return joined

    _as_tensor = _as_graph_element = as_tensor


def make_parts(
    name: str,
    shape: Sequence[int],
    counts: Sequence[int],
    initializer: Any,
    make_part: Callable[[str, tuple[int, ...], Any], Any],
) -> PartitionedVariable:
    """Makes a partitioned variable.

    Args:
        name: name of the variable.
        shape: shape of the variable.
        counts: number of parts along each axis, as a partitioner returns them.
        initializer: initializer, or None.
        make_part: function of the name, the shape and the initializer of a part.

    Raises:
        ValueError: The numbers of parts do not fit the shape, or divide another axis than the
            first.
    """
    counts = list(counts)
    if len(counts) != len(shape) or any(
        not 1 <= n <= max(1, size) for n, size in zip(counts, shape, strict=True)
    ):
        raise ValueError(f"variable {name}: {counts} parts of the shape {list(shape)}")
    if any(n > 1 for n in counts[1:]):
        raise ValueError(
            f"variable {name}: {counts} parts: a variable is divided along its first axis only"
        )
    size, longer = divmod(shape[0], counts[0])
    parts, first = [], 0
    for number in range(counts[0]):
        own = (size + (number < longer), *shape[1:])
        info = PartitionInfo(tuple(shape), (first, *(0 for _ in shape[1:])))
        made = make_part(f"{name}/part_{number}", own, _place_initializer(initializer, info))
        parts.append(made)
        first += own[0]
    assert first == shape[0], "the parts fill the variable"
    partitioned(name, parts)
    return PartitionedVariable(name, parts)


def _place_initializer(initializer: Any, info: PartitionInfo) -> Any:
    """Returns the initializer of one part, which may ask for the shape of the whole variable."""
    if isinstance(initializer, type):
        initializer = initializer()
    if callable(initializer) and "partition_info" in inspect.signature(initializer).parameters:
        return functools.partial(initializer, partition_info=info)
    return initializer


def count_parts(
    partitioner: Partitioner, shape: Sequence[int], dtype: rt.lowlevel.DType
) -> list[int]:
    """Returns the number of parts along each axis, as a partitioner counts them."""
    return list(partitioner(shape=TensorShape(shape), dtype=as_dtype(dtype)))


@public.add()
def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Partitioner:
    """Returns a partitioner into ``num_shards`` parts, or as many as the axis has elements."""

    def partition(shape: TensorShape, **unused: object) -> list[int]:
        sizes = _known_sizes(shape)
        return _along(sizes, axis, min(num_shards, sizes[axis]))

    return partition


@public.add()
def variable_axis_size_partitioner(
    max_shard_bytes: int,
    axis: int = 0,
    bytes_per_string_element: int = 16,
    max_shards: int | None = None,
) -> Partitioner:
    """Returns a partitioner into as few parts as have at most ``max_shard_bytes`` each."""
    if max_shard_bytes < 1 or bytes_per_string_element < 1 or (max_shards or 1) < 1:
        raise ValueError(
            f"variable_axis_size_partitioner: max_shard_bytes={max_shard_bytes}, "
            f"bytes_per_string_element={bytes_per_string_element} and max_shards={max_shards} must "
            "be positive"
        )

    def partition(shape: TensorShape, dtype: DTypeLike, **unused: object) -> list[int]:
        sizes = _known_sizes(shape)
        slice_bytes = _count_bytes(sizes, dtype, bytes_per_string_element) / sizes[axis]
        parts = math.ceil(sizes[axis] / max(1, math.floor(max_shard_bytes / slice_bytes)))
        return _along(sizes, axis, parts if max_shards is None else min(parts, max_shards))

    return partition


@public.add()
def min_max_variable_partitioner(
    max_partitions: int = 1,
    axis: int = 0,
    min_slice_size: int = 256 << 10,
    bytes_per_string_element: int = 16,
) -> Partitioner:
    """Returns a partitioner into as many parts as have ``min_slice_size`` bytes each, but for the last."""

    def partition(shape: TensorShape, dtype: DTypeLike, **unused: object) -> list[int]:
        sizes = _known_sizes(shape)
        most = math.ceil(_count_bytes(sizes, dtype, bytes_per_string_element) / min_slice_size)
        return _along(sizes, axis, max(1, min(sizes[axis], max_partitions, most)))

    return partition


def _known_sizes(shape: TensorShape) -> list[int]:
    sizes = [size for size in shape.as_list() if size is not None]
    assert len(sizes) == len(shape.as_list()), "the shape is fully defined"
    return sizes


def _along(sizes: Sequence[int], axis: int, parts: int) -> list[int]:
    counts = [1] * len(sizes)
    counts[axis] = parts
    return counts


def _count_bytes(sizes: Sequence[int], dtype: DTypeLike, string_bytes: int) -> int:
    kind = as_dtype(dtype).dtype
    return math.prod(sizes) * (string_bytes if kind.hasobject else kind.itemsize)
