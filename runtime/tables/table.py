"""Tables of embedding rows: lookups give tensors, gradients are rows."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.typing import DTypeLike

from runtime.checkpoint.array_slice import ArraySlice
from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, GraphKeys, Operation, Tensor, get_default_graph
from runtime.graph.op_kinds import (
    ArrayFn,
    Constant,
    Feed,
    Host,
    HostProgram,
    Read,
    Shape,
    VariableSpec,
)
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_dtype, as_tensor, constant, is_tensor
from runtime.graph.variable import Variable
from runtime.tables.paging import CHUNK, Paging, page_name
from runtime.tensor_spec import AnyArray, DType, TensorSpec, dtype_name

Initializer = Callable[[jax.Array, Sequence[int], DType], jax.Array]
"""A function of key, shape and dtype, such as those of ``jax.nn.initializers``."""
_ROWS = 2**62
"""Limit of the rows of a table: ids are signed numbers of 64 bits."""
_INT64 = np.dtype(np.int64)
_SOME_IDS: tuple[Shape, DType] = ((None,), _INT64)


class Page(Variable):
    """A page of a table: a variable whose value no operation of a step reads as a whole.

    The pages of a task share one initialiser.

    Args:
        array: the array of which the page is a slice.
        page: number of the page.
        beside: a page on whose device this page lies; None to take the device of the scopes.
    """

    def __init__(self, array: PagedArray, page: int, beside: Operation | None) -> None:
        graph = get_default_graph()
        first, count = array.paging.span(page)
        shape = (count, *array.row)
        self.spec = VariableSpec(page_name(array.name, page), shape, array.dtype)
        self.op = graph.add_operation(
            "Variable",
            Read(self.spec),
            outputs=[(shape, array.dtype)],
            name=self.spec.name + "/",
            colocate_with=beside,
        )
        self.trainable = False
        self._snapshot = self.op.outputs[0]
        self._reads_after = {}
        self.save_slice_info = ArraySlice(
            array.name,
            shape,
            array.dtype,
            (array.paging.rows, *array.row),
            (first, *(0 for _ in array.row)),
        )
        graph.add_to_collection(GraphKeys.GLOBAL_VARIABLES, self)


@dataclass(frozen=True)
class Shard:
    """The pages of a table on one task.

    Attributes:
        pages: their numbers.
        beside: the operation of the first page, which has the device of all.
    """

    pages: Sequence[int]
    beside: Operation


class PagedArray:
    """An array with a row for each id of a table: the table's rows, or a slot of its optimizer.

    Args:
        name: name in checkpoints, and first part of the names of the pages.
        paging: the division into pages.
        row: shape of a row.
        dtype: dtype of the elements.
        make: traceable function from one id, two words of 32 bits, to its first row.
        places: operations of the pages beside which these pages lie; None to take the devices of
            the scopes.
    """

    def __init__(
        self,
        name: str,
        paging: Paging,
        row: Sequence[int],
        dtype: DType,
        make: Callable[[jax.Array], AnyArray],
        places: Sequence[Operation] | None = None,
    ) -> None:
        self.name = name
        self.paging = paging
        self.row = tuple(row)
        self.dtype = dtype
        graph = get_default_graph()
        # The pages outlive each step, so their operations wait for none.
        with graph.control_dependencies(None), graph.name_scope(None):
            self.pages = [
                Page(self, page, None if places is None else places[page])
                for page in range(paging.count)
            ]
            by_device: dict[str, list[int]] = {}
            for number, page in enumerate(self.pages):
                by_device.setdefault(page.device, []).append(number)
            self.shards = [Shard(n, self.pages[n[0]].op) for n in by_device.values()]
            for shard in self.shards:
                initializer = self._make_initializer(shard, make)
                for number in shard.pages:
                    self.pages[number].initializer = initializer

    def describe(self) -> dict[str, object]:
        """Returns the description of the array for kernels."""
        return {"name": self.name, "row": list(self.row), "dtype": dtype_name(self.dtype)}

    def _make_initializer(self, shard: Shard, make: Callable[[jax.Array], AnyArray]) -> Operation:
        attrs = {
            "table": self.name,
            "container": "",
            "rows": self.paging.rows,
            "shift": self.paging.shift,
            "array": self.describe(),
            "pages": list(shard.pages),
        }
        body = HostProgram(
            "table/init",
            attrs,
            True,
            self.name,
            fn=lambda ids: (jax.vmap(make)(ids),),
            arguments=[TensorSpec((CHUNK, 2), np.dtype(np.uint32))],
        )
        return get_default_graph().add_operation(
            "TableInit", body, name=f"{self.name}/Init", colocate_with=shard.beside
        )


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
        self._graph = graph
        self._lookups: dict[Tensor, Lookup] = {}
        graph.add_to_collection(GraphKeys.TABLES, self)

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

    def bag(
        self,
        values: TensorLike,
        row_splits: TensorLike,
        *,
        combiner: str,
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
                the root of the sum of their squares.
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
        shards = self.array.shards
        routed = self._graph.add_operation(
            "TableRoute",
            Host("table/route", self._attrs(owners=self._owners(), shards=len(shards))),
            [tensor],
            [_SOME_IDS] * (3 + len(shards)),
            name="route",
        )
        places, order, starts, *blocks = routed.outputs
        pulled = [self._pull(shard, block) for shard, block in zip(shards, blocks, strict=True)]
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
            return PagedArray(
                name, self.array.paging, row, as_dtype(dtype), lambda words: make(), places
            )

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
        per_shard = list(shared) or [()] * len(self.array.shards)
        rows = [self.array, *slots]
        fn = _by_row(fn, len(per_shard[0]), len(rows), len(inputs))
        arguments = [TensorSpec((), variable.dtype) for variable in per_shard[0]]
        arguments += [TensorSpec((CHUNK, *a.row), a.dtype) for a in (*rows, self.array)]
        arguments += [TensorSpec(_known(t), t.dtype) for t in inputs]
        described = [array.describe() for array in rows]
        done = []
        with self._graph.as_default(), self._graph.name_scope(f"{self.name}/{name}"):
            sums = self._sum(gradient)
            for shard, own, given in zip(self.array.shards, per_shard, sums, strict=True):
                attrs = self._attrs(arrays=described, shared=[v.spec.name for v in own])
                body = HostProgram("table/push", attrs, True, self.name, fn=fn, arguments=arguments)
                done.append(
                    self._graph.add_operation(
                        "TableUpdate",
                        body,
                        [*given, *inputs],
                        name="push",
                        colocate_with=shard.beside,
                    )
                )
        return done

    def _sum(self, gradient: RowGradient) -> list[tuple[Tensor, Tensor]]:
        """Makes the unique ids and the sums of their gradients, for each shard."""
        shards = range(len(self.array.shards))
        some_rows: tuple[Shape, DType] = ((None, self.dim), self.dtype)
        found = []
        for lookup, values in gradient.parts:
            if lookup.bags is not None:
                values = self._divide(lookup, values)
            op = self._graph.add_operation(
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
            op = self._graph.add_operation(
                "TableJoin",
                Host("table/join"),
                [*(ids for ids, _ in parts), *(values for _, values in parts)],
                [_SOME_IDS, some_rows],
                name="join",
                colocate_with=gradient.parts[0][0].result.op,
            )
            joined.append((op.outputs[0], op.outputs[1]))
        return joined

    def _divide(self, lookup: Lookup, gradients: Tensor) -> Tensor:
        """Makes the gradients of a lookup's rows, of those of its bags."""
        return self._graph.add_operation(
            "TableUnbag",
            Host("table/unbag", dict(lookup.bags or {})),
            [gradients, *lookup.bag_inputs],
            [((None, self.dim), self.dtype)],
            name="unbag",
            colocate_with=lookup.result.op,
        ).outputs[0]

    def _attrs(self, **more: object) -> dict[str, object]:
        paging = self.array.paging
        return {
            "table": self.name,
            "container": "",
            "rows": paging.rows,
            "shift": paging.shift,
            **more,
        }

    def _owners(self) -> list[int]:
        """Returns the shard of each page."""
        owners = {p: number for number, s in enumerate(self.array.shards) for p in s.pages}
        return [owners[page] for page in range(self.array.paging.count)]

    def _pull(self, shard: Shard, ids: Tensor) -> Tensor:
        return self._graph.add_operation(
            "TablePull",
            Host("table/pull", self._attrs(array=self.array.describe()), resource=self.name),
            [ids],
            [((None, self.dim), self.dtype)],
            name="pull",
            colocate_with=shard.beside,
        ).outputs[0]


def _as_integers(value: TensorLike, what: str, table: str) -> Tensor:
    """Returns integers of the host as a tensor."""
    if is_tensor(value):
        tensor = as_tensor(value)
    else:
        array = np.asarray(value)
        # An empty list has the dtype of floating point; integers keep their 64 bits.
        array = array if array.size else array.astype(_INT64)
        tensor = constant(array, array.dtype if array.dtype.kind in "iu" else None, name=what)
    if tensor.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"table {table!r}: the {what} {tensor.name!r} are {dtype_name(tensor.dtype)}, "
            "and not integers"
        )
    return _on_host(tensor, what, table)


def _on_host(tensor: Tensor, what: str, table: str) -> Tensor:
    if not isinstance(tensor.op.body, Feed | Constant | Host):
        raise InvalidArgumentError(
            f"table {table!r}: a device computes the {what} {tensor.name!r}, where 64 bits "
            f"become 32: compute {what} on the host and feed them"
        )
    return tensor


def _by_row(fn: ArrayFn, shared: int, rows: int, inputs: int) -> ArrayFn:
    """Returns the function of many rows, of which each is computed by itself.

    Args:
        fn: function of one row; see ``Table.update``.
        shared: number of shared values, which come out once.
        rows: number of rows of each id: the table's and those of slots.
        inputs: number of values that are given to all rows.
    """
    once, each = (None,) * shared, (0,) * rows
    found: ArrayFn = jax.vmap(
        fn, in_axes=(*once, *each, 0, *(None,) * inputs), out_axes=(*once, *each)
    )
    return found


def _known(tensor: Tensor) -> tuple[int, ...]:
    shape = tensor.shape
    if shape is None or None in shape:
        raise InvalidArgumentError(f"{tensor.name!r} has no known shape")
    return tuple(d for d in shape if d is not None)
