"""Pages of tables in the graph, and the operations on the pages of all tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from runtime.checkpoint.array_slice import ArraySlice
from runtime.errors import InvalidArgumentError
from runtime.graph.graph import GraphKeys, Operation, Tensor, get_default_graph
from runtime.graph.op_kinds import ArrayFn, Host, HostProgram, Read, Shape, VariableSpec
from runtime.graph.variable import Variable
from runtime.tables.paging import CHUNK, Paging, page_name
from runtime.tensor_spec import AnyArray, DType, TensorSpec, dtype_name

INT64 = np.dtype(np.int64)
SOME_IDS: tuple[Shape, DType] = ((None,), INT64)
"""Shape and dtype of a number of ids that a step finds."""


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

    Attributes:
        arrays: descriptions of this array and of those that are made beside it later.
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
        self.arrays = [self.describe()]
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
        # The slots of an optimizer join the list of arrays before the graph runs.
        attrs = self._attrs(arrays=self.arrays, pages=list(shard.pages))
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

    def route(self, ids: Tensor) -> Sequence[Tensor]:
        """Adds the way of ids to the graph: places, order, starts and blocks of ``runtime.tables.rows.Route``."""
        shards = len(self.shards)
        return (
            get_default_graph()
            .add_operation(
                "TableRoute",
                Host("table/route", self._attrs(owners=self._owners(), shards=shards)),
                [ids],
                [SOME_IDS] * (3 + shards),
                name="route",
            )
            .outputs
        )

    def pull(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows of the unique ids of each shard."""
        return [
            get_default_graph()
            .add_operation(
                "TablePull",
                Host("table/pull", self._attrs(array=self.describe()), resource=self.name),
                [ids],
                [((None, *self.row), self.dtype)],
                name="pull",
                colocate_with=shard.beside,
            )
            .outputs[0]
            for shard, ids in zip(self.shards, blocks, strict=True)
        ]

    def take_last(
        self, ids: Tensor, rows: Tensor, order: Tensor, starts: Tensor, blocks: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Returns for each shard the last row of each unique id."""
        assert len(self.row) == 1, "the rows of a table are vectors"
        made = get_default_graph().add_operation(
            "TableLast",
            Host("table/last", {"table": self.name, "dim": self.row[0]}),
            [ids, rows, order, starts, *blocks],
            [((None, *self.row), self.dtype) for _ in blocks],
            name="last",
        )
        return made.outputs

    def measure(self) -> Sequence[Tensor]:
        """Returns the number of rows that have values, and the bytes of all ``arrays``."""
        graph = get_default_graph()
        parts = [
            graph.add_operation(
                "TableSize",
                Host("table/size", self._attrs(arrays=self.arrays, pages=list(shard.pages))),
                outputs=[((2,), INT64)],
                name="part",
                colocate_with=shard.beside,
            ).outputs[0]
            for shard in self.shards
        ]
        total = Host("table/total")
        return graph.add_operation(
            "TableTotal", total, parts, [((), INT64)] * 2, name="total"
        ).outputs

    def push(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        fn: ArrayFn,
        slots: Sequence[PagedArray] = (),
        shared: Sequence[Sequence[Variable]] = (),
        inputs: Sequence[Tensor] = (),
    ) -> list[Operation]:
        """Adds an update of rows to the graph, an operation for each shard.

        Args:
            parts: for each shard the unique ids, and an array with a row for each.
            fn: function of one row; see ``Table.update``.
            slots: arrays beside this one.
            shared: for each shard, variables on its task that all rows share.
            inputs: tensors for all rows.
        """
        per_shard = list(shared) or [()] * len(self.shards)
        rows = [self, *slots]
        fn = _by_row(fn, len(per_shard[0]), len(rows), len(inputs))
        arguments = [TensorSpec((), variable.dtype) for variable in per_shard[0]]
        arguments += [TensorSpec((CHUNK, *a.row), a.dtype) for a in (*rows, self)]
        arguments += [TensorSpec(_known(t), t.dtype) for t in inputs]
        described = [array.describe() for array in rows]
        done = []
        for shard, own, given in zip(self.shards, per_shard, parts, strict=True):
            attrs = self._attrs(arrays=described, shared=[v.spec.name for v in own])
            body = HostProgram("table/push", attrs, True, self.name, fn=fn, arguments=arguments)
            done.append(
                get_default_graph().add_operation(
                    "TableUpdate",
                    body,
                    [*given, *inputs],
                    name="push",
                    colocate_with=shard.beside,
                )
            )
        return done

    def _attrs(self, **more: object) -> dict[str, object]:
        return {
            "table": self.name,
            "container": "",
            "rows": self.paging.rows,
            "shift": self.paging.shift,
            **more,
        }

    def _owners(self) -> list[int]:
        """Returns the shard of each page."""
        owners = {p: number for number, s in enumerate(self.shards) for p in s.pages}
        return [owners[page] for page in range(self.paging.count)]


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
