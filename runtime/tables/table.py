"""Tables of embedding rows: lookups give tensors, gradients are rows."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, GraphKeys, Operation, Tensor, get_default_graph, group
from runtime.graph.op_kinds import (
    ArrayFn,
    Constant,
    Feed,
    Host,
    Shape,
)
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_dtype, as_tensor, constant, is_tensor
from runtime.graph.variable import Variable
from runtime.tables.configs import Initializer, convert_initializer, read_config
from runtime.tables.pages import INT64, SOME_IDS, PagedArray
from runtime.tables.paging import Paging
from runtime.tensor_spec import AnyArray, DType, dtype_name

_ROWS = 2**62
"""Limit of the rows of a table: ids are signed numbers of 64 bits."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """A lookup of a table in the graph.

    Attributes:
        result: the tensor of the rows.
        order: see ``runtime.tables.rows.Route``.
        starts: as above.
        blocks: the unique ids of each shard.
        bags: attributes of the kernels of bags; None for rows without bags.
        bag_inputs: the splits of the bags, and the weights if there are some.
    """

    result: Tensor
    order: Tensor
    starts: Tensor
    blocks: Sequence[Tensor]
    bags: Mapping[str, str] | None = None
    bag_inputs: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class RowGradient:
    """The gradient of a table: rows, those of the ids that a step has looked up.

    Attributes:
        table: the table.
        parts: the lookups with the gradients of their results.
    """

    table: Table
    parts: Sequence[tuple[Lookup, Tensor]]

    @property
    def device(self) -> str:
        """Returns the device that computes the gradient, a worker's."""
        return self.parts[0][1].device

    def sum(self) -> list[tuple[Tensor, Tensor]]:
        """Adds sums to the graph, and returns the unique ids and the sums of their gradients, for each shard."""
        shards = range(len(self.table.array.shards))
        some_rows: tuple[Shape, DType] = ((None, self.table.dim), self.table.dtype)
        found = []
        for lookup, values in self.parts:
            if lookup.bags is not None:
                values = self._divide(lookup, values)
            op = get_default_graph().add_operation(
                "TableSum",
                Host("table/sum"),
                [values, lookup.order, lookup.starts, *lookup.blocks],
                [some_rows for _ in shards],
                name="sum",
                colocate_with=lookup.result.op,
            )
            found.append(list(zip(lookup.blocks, op.outputs, strict=True)))
        if len(found) == 1:
            return found[0]
        joined = []
        for parts in zip(*found, strict=True):
            op = get_default_graph().add_operation(
                "TableJoin",
                Host("table/join"),
                [*(ids for ids, _ in parts), *(values for _, values in parts)],
                [SOME_IDS, some_rows],
                name="join",
                colocate_with=self.parts[0][0].result.op,
            )
            joined.append((op.outputs[0], op.outputs[1]))
        return joined

    def _divide(self, lookup: Lookup, gradients: Tensor) -> Tensor:
        """Makes the gradients of a lookup's rows, of those of its bags."""
        return (
            get_default_graph()
            .add_operation(
                "TableUnbag",
                Host("table/unbag", dict(lookup.bags or {})),
                [gradients, *lookup.bag_inputs],
                [((None, self.table.dim), self.table.dtype)],
                name="unbag",
                colocate_with=lookup.result.op,
            )
            .outputs[0]
        )


class TableSize(NamedTuple):
    """The size of a table on its ps, as tensors of 64 bits.

    Attributes:
        rows: number of the rows that have values.
        bytes: bytes of these rows and of their slots.
    """

    rows: Tensor
    bytes: Tensor


class Table:
    """A table of embedding rows, sharded over the parameter servers.

    The rows lie in pages, and each page is a variable on a ps, placed as variables are. A lookup
    moves the rows of its unique ids and no others, and the gradient of a table is rows, too.
    ``harness.Optimizer(..., tables=)`` trains them. Checkpoints have the table as one array, for
    any number of ps.

    Args:
        name: Name on the ps and in checkpoints. A graph has one table of the name.
        rows: Number of rows. The ids are 0 to ``rows - 1``.
        dim: Number of elements of a row.
        initializer: ``initializer(key, shape, dtype)`` makes the first row of an id, with a key that
            depends on ``seed``, the name and the id alone; a normal distribution with the standard
            deviation ``dim ** -0.5``, truncated, by default.
        dtype: Floating point dtype of the elements.
        seed: Seed of the first rows.
        trainable: True if optimizers update the table by default.

    Raises:
        InvalidArgumentError: The graph has the name already, or an argument is out of range.

    Examples:
        >>> import jax
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     words = rt.Table("words", rows=1000, dim=2, initializer=jax.nn.initializers.ones)
        ...     found = words.lookup([[3, 999, 3]])
        ...     session.run(rt.global_variables_initializer())
        ...     session.run(found).shape
        (1, 3, 2)
    """

    def __init__(
        self,
        name: str,
        *,
        rows: int,
        dim: int,
        initializer: Initializer | None = None,
        dtype: DTypeLike = np.float32,
        seed: int = 0,
        trainable: bool = True,
    ) -> None:
        graph = get_default_graph()
        self.name = name
        self.rows = int(rows)
        self.dim = int(dim)
        self.dtype: DType = as_dtype(dtype)
        self.trainable = trainable
        if not 0 < self.rows < _ROWS or self.dim < 1:
            raise InvalidArgumentError(
                f"table {name!r}: rows={rows} and dim={dim} must be 1 or more"
            )
        if not jax.numpy.issubdtype(self.dtype, np.floating):
            raise InvalidArgumentError(
                f"table {name!r}: {dtype_name(self.dtype)} is not floating point"
            )
        for table in graph.get_collection(GraphKeys.TABLES):
            if table.name == name:
                raise InvalidArgumentError(
                    f"the graph has a table {name!r} of {table.rows} rows and dim {table.dim}: "
                    "look up in that table, or give another name"
                )
        make = initializer or jax.nn.initializers.truncated_normal(1 / math.sqrt(self.dim))
        number = zlib.crc32(name.encode())

        def make_row(words: jax.Array) -> jax.Array:
            key = jax.random.key(seed)
            for word in (number, words[0], words[1]):
                key = jax.random.fold_in(key, word)
            # An initialiser may want a matrix.
            return make(key, (1, self.dim), self.dtype)[0]

        self.array = PagedArray(name, Paging.of(self.rows), (self.dim,), self.dtype, make_row)
        self.combiner: str | None = None
        self._graph = graph
        self._lookups: dict[Tensor, Lookup] = {}
        graph.add_to_collection(GraphKeys.TABLES, self)

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        name: str | None = None,
        initializer: Initializer | None = None,
        dtype: DTypeLike | None = None,
        seed: int = 0,
        trainable: bool = True,
    ) -> Table:
        """Returns the table of a ``TableConfig`` or ``FeatureConfig`` of Keras or TensorFlow.

        Features of one table get the same table. ``bag`` takes the combiner of the configuration by
        default. The optimizer and the placement of the configuration are not read.

        Args:
            config: An object with ``vocabulary_size`` and ``embedding_dim`` or ``dim``, or with such
                an object as its ``table``.
            name: Name in place of the configuration's.
            initializer: Initializer in place of the configuration's.
            dtype: Dtype in place of the configuration's.
            seed: As for ``Table``.
            trainable: As for ``Table``.

        Raises:
            InvalidArgumentError: The object has no such fields, or an initializer without an equal.
        """
        fields = read_config(config)
        name = name or fields.name
        if name is None or fields.rows is None or fields.dim is None:
            raise InvalidArgumentError(
                f"{config!r} is no TableConfig and no FeatureConfig with name, vocabulary_size and dim"
            )
        made: Table | None = None
        for table in get_default_graph().get_collection(GraphKeys.TABLES):
            if (table.name, table.rows, table.dim) == (name, fields.rows, fields.dim):
                made = table
        if made is None:
            make = initializer or convert_initializer(
                fields.initializer, name, fields.rows, fields.dim
            )
            wanted = dtype or fields.dtype or np.float32
            made = cls(
                name,
                rows=fields.rows,
                dim=fields.dim,
                initializer=make,
                dtype=wanted,
                seed=seed,
                trainable=trainable,
            )
        made.combiner = fields.combiner
        return made

    @property
    def graph(self) -> Graph:
        """Returns the graph in which the table was made."""
        return self._graph

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (rows, dim)."""
        return self.rows, self.dim

    def __repr__(self) -> str:
        return (
            f"<Table {self.name!r} rows={self.rows} dim={self.dim} dtype={dtype_name(self.dtype)}>"
        )

    def lookup(self, ids: TensorLike, name: str | None = None) -> Tensor:
        """Returns the rows of ids, a tensor of the shape of ``ids`` and one dimension of ``dim``.

        Args:
            ids: Integers of any shape: an array, or a tensor of the host, such as a placeholder or
                an element of a queue.
            name: Operation name.

        Raises:
            InvalidArgumentError: The ids are not integers, or a device computes them. In a step: an
                id is no row of the table; the error names the table and the id.
        """
        with self._graph.as_default(), self._graph.name_scope(name or f"{self.name}/lookup"):
            found = self._add_lookup(_as_integers(ids, "ids", self.name))
        self._lookups[found.result] = found
        return found.result

    def read(self, ids: TensorLike, name: str | None = None) -> Tensor:
        """Returns the rows of ids as ``lookup`` does, but as values that have no gradient."""
        with self._graph.as_default(), self._graph.name_scope(name or f"{self.name}/read"):
            return self._add_lookup(_as_integers(ids, "ids", self.name)).result

    def load(self, ids: TensorLike, rows: TensorLike, name: str | None = None) -> Operation:
        """Returns an operation that gives rows their values, such as rows that were trained elsewhere.

        The table must be initialised. The slots of its optimizer stay. Where an id comes twice, its
        last row counts.

        Args:
            ids: As for ``lookup``.
            rows: The new rows, of the shape of ``ids`` and one dimension of ``dim``.
            name: Operation name.

        Raises:
            InvalidArgumentError: As for ``lookup``, or the rows do not fit the ids.

        Examples:
            >>> import runtime as rt
            >>> with rt.Graph().as_default(), rt.Session() as session:
            ...     words = rt.Table("words", rows=9, dim=1)
            ...     load, found = words.load([3, 5], [[1.0], [2.0]]), words.read([5, 3])
            ...     session.run(rt.global_variables_initializer())
            ...     session.run(load)
            ...     session.run(found).tolist()
            [[2.0], [1.0]]
        """
        with self._graph.as_default(), self._graph.name_scope(name or f"{self.name}/load"):
            tensor = _as_integers(ids, "ids", self.name)
            places, order, starts, *blocks = self.array.route(tensor)
            values = as_tensor(rows, self.dtype)
            if not _fits(values.shape, tensor.shape, self.dim) or values.dtype != self.dtype:
                raise InvalidArgumentError(
                    f"table {self.name!r}: rows {values!r} do not fit ids {tensor!r}: rows of "
                    f"{dtype_name(self.dtype)}[{self.dim}] are wanted, one for each id"
                )
            last = self.array.take_last(tensor, values, order, starts, blocks)
            parts = list(zip(blocks, last, strict=True))
            return group(*self.array.push(parts, lambda row, new: (new,)), name="done")

    def size(self, name: str | None = None) -> TableSize:
        """Returns the number of rows and the bytes of the table on its ps, as tensors."""
        with self._graph.as_default(), self._graph.name_scope(name or f"{self.name}/size"):
            return TableSize(*self.array.measure())

    def bag(
        self,
        values: TensorLike,
        row_splits: TensorLike,
        *,
        combiner: str | None = None,
        weights: TensorLike | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Returns a row for each bag of ids, [bags, dim].

        Args:
            values: The ids of all bags behind each other, as for ``lookup``.
            row_splits: Integers, one more than bags: bag ``i`` has the ids from ``row_splits[i]``
                to ``row_splits[i + 1]``. An empty bag is zero.
            combiner: "sum", "mean", or "sqrtn", which divides the sum by the root of the number of
                ids. With weights the sum is weighted, and the divisor is the sum of the weights, or
                the root of the sum of their squares. A table of ``from_config`` may have a default.
            weights: A number for each id, as values of the host; they have no gradient.
            name: Operation name.

        Raises:
            InvalidArgumentError: As for ``lookup``, or the combiner is another. In a step: the
                splits or weights do not fit the ids.

        Examples:
            >>> import jax
            >>> import runtime as rt
            >>> with rt.Graph().as_default(), rt.Session() as session:
            ...     words = rt.Table("words", rows=9, dim=1, initializer=jax.nn.initializers.ones)
            ...     bags = words.bag([3, 5, 3], [0, 2, 2, 3], combiner="sum")
            ...     session.run(rt.global_variables_initializer())
            ...     session.run(bags).tolist()
            [[2.0], [0.0], [1.0]]
        """
        combiner = combiner or self.combiner
        if combiner not in ("sum", "mean", "sqrtn"):
            raise InvalidArgumentError(
                f"table {self.name!r}: combiner {combiner!r} is none of 'sum', 'mean' and 'sqrtn'"
            )
        attrs = {"table": self.name, "combiner": combiner}
        with self._graph.as_default(), self._graph.name_scope(name or f"{self.name}/bag"):
            lookup = self._add_lookup(_as_integers(values, "ids", self.name))
            inputs = [_as_integers(row_splits, "row_splits", self.name)]
            if weights is not None:
                inputs.append(_on_host(as_tensor(weights, self.dtype), "weights", self.name))
            (shape,) = self._find_bag_shape([None, inputs[0].shape])
            result = self._graph.add_operation(
                "TableBag",
                Host("table/bag", attrs, find_shapes=self._find_bag_shape),
                [lookup.result, *inputs],
                [(shape or (None, self.dim), self.dtype)],
                name="bags",
            ).outputs[0]
        self._lookups[result] = replace(lookup, result=result, bags=attrs, bag_inputs=inputs)
        return result

    def _find_bag_shape(self, given: Sequence[Shape | None]) -> list[Shape | None]:
        splits = given[1]
        return [None if not splits or splits[0] is None else (splits[0] - 1, self.dim)]

    def _add_lookup(self, tensor: Tensor) -> Lookup:
        """Adds the way of ids to their rows, in the open scope of names."""
        places, order, starts, *blocks = self.array.route(tensor)
        pulled = self.array.pull(blocks)
        shape = None if tensor.shape is None else (*tensor.shape, self.dim)
        body = Host(
            "table/spread",
            find_shapes=lambda given: [None if given[0] is None else (*given[0], self.dim)],
        )
        result = self._graph.add_operation(
            "TableLookup",
            body,
            [tensor, places, *pulled],
            [(shape, self.dtype)],
            name="rows",
        ).outputs[0]
        return Lookup(result, order, starts, blocks)

    def slot(
        self, name: str, row: Sequence[int], dtype: DTypeLike, make: Callable[[], AnyArray]
    ) -> PagedArray:
        """Makes an array with a row for each id, on the tasks of the table's pages.

        Args:
            name: name in checkpoints.
            row: shape of a row.
            dtype: dtype of the elements.
            make: a traceable function that makes the first value of each row.
        """
        places = [page.op for page in self.array.pages]
        with self._graph.as_default():
            slot = PagedArray(
                name, self.array.paging, row, as_dtype(dtype), lambda words: make(), places
            )
        self.array.arrays.append(slot.describe())
        return slot

    # -- gradients --------------------------------------------------------------------------------

    def lookup_results(self) -> list[Tensor]:
        """Returns the results of all lookups."""
        return list(self._lookups)

    def make_gradient(self, gradients: Mapping[Tensor, Tensor | None]) -> RowGradient | None:
        """Returns the gradient of the table by those of the results of lookups; None without any."""
        parts = [(self._lookups[t], g) for t, g in gradients.items() if g is not None]
        return RowGradient(self, parts) if parts else None

    def update(
        self,
        gradient: RowGradient,
        fn: ArrayFn,
        slots: Sequence[PagedArray] = (),
        shared: Sequence[Sequence[Variable]] = (),
        inputs: Sequence[Tensor] = (),
        name: str = "update",
    ) -> list[Operation]:
        """Updates the rows of a gradient, and their slots, on their tasks.

        Args:
            gradient: a gradient of the table.
            fn: JAX function of one row: ``fn(*shared values, row, *slots' rows, gradient, *inputs)``
                returns ``(*shared values, row, *slots' rows)``. The new shared values may depend on
                shared values and inputs only.
            slots: arrays beside the table, with a row for each id.
            shared: for each shard, variables on its task that all rows share.
            inputs: tensors for all rows.
            name: operation name.

        Returns:
            One operation for each task.
        """
        assert gradient.table is self, "the gradient is of another table"
        with self._graph.as_default(), self._graph.name_scope(f"{self.name}/{name}"):
            return self.array.push(gradient.sum(), fn, slots, shared, inputs)


def _as_integers(value: TensorLike, what: str, table: str) -> Tensor:
    """Returns integers of the host as a tensor."""
    if is_tensor(value):
        tensor = as_tensor(value)
    else:
        array = np.asarray(value)
        # An empty list has the dtype of floating point; integers keep their 64 bits.
        array = array if array.size else array.astype(INT64)
        tensor = constant(array, array.dtype if array.dtype.kind in "iu" else None, name=what)
    if tensor.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"table {table!r}: the {what} {tensor.name!r} are {dtype_name(tensor.dtype)}, "
            "and not integers"
        )
    return _on_host(tensor, what, table)


def _fits(rows: Shape | None, ids: Shape | None, dim: int) -> bool:
    """Returns False if shapes show that there is not a row of ``dim`` for each id."""
    if rows is None:
        return True
    pairs = zip(rows, (*ids, dim), strict=False) if ids is not None else [(rows[-1:], (dim,))]
    same_rank = ids is None or len(rows) == len(ids) + 1
    return same_rank and all(a == b or None in (a, b) for a, b in pairs)


def _on_host(tensor: Tensor, what: str, table: str) -> Tensor:
    if not isinstance(tensor.op.body, Feed | Constant | Host):
        raise InvalidArgumentError(
            f"table {table!r}: a device computes the {what} {tensor.name!r}, where 64 bits "
            f"become 32: compute {what} on the host and feed them"
        )
    return tensor
