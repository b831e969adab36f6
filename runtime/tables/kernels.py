"""Kernels of tables: on the worker the way of ids and gradients, on a ps the pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from runtime.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from runtime.graph.op_kinds import Attrs
from runtime.kernels.quorum_kernels import find_quorum, worker_number
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import NOBODY
from runtime.state.store import Key, VariableClaim, VariableSlot
from runtime.tables import rows
from runtime.tables.paging import CHUNK, Paging, page_name
from runtime.tables.rows import PageIds
from runtime.task.host_kernels import Context, DeferredProgram, kernel
from runtime.tensor_spec import AnyArray, Array, DType, TensorSpec, canonical_dtype

# -- on the worker --------------------------------------------------------------------------------


@kernel("table/route")
def _route_ids(context: Context) -> Sequence[Array]:
    """Returns the places, the order, the starts, and the unique ids of each shard."""
    attrs, (ids,) = context.attrs, context.inputs
    flat = ids.reshape(-1)
    rows.check_ids(flat, attrs["rows"], attrs["table"])
    # Unsigned ids of 64 bits would become floating point beside signed numbers.
    flat = flat.astype(np.int64, copy=False)
    found = rows.route(flat, np.asarray(attrs["owners"]), attrs["shift"], attrs["shards"])
    return [found.places, found.order, found.starts, *found.blocks]


@kernel("table/spread")
def _spread_rows(context: Context) -> Sequence[Array]:
    """Returns a row for each id, of the rows of the unique ids."""
    ids, places, *blocks = context.inputs
    whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return [whole[places].reshape(*ids.shape, whole.shape[1])]


@kernel("table/bag")
def _combine_rows(context: Context) -> Sequence[Array]:
    """Returns a row for each bag, of the rows of its ids."""
    found, splits, *weights = context.inputs
    factors = _find_factors(context, splits, len(found), weights, found.dtype)
    return [rows.sum_bags(splits, found * factors[:, None])]


@kernel("table/unbag")
def _divide_gradients(context: Context) -> Sequence[Array]:
    """Returns the gradient for each id, of the gradients of bags."""
    gradients, splits, *weights = context.inputs
    count = int(splits[-1]) if splits.size else 0
    factors = _find_factors(context, splits, count, weights, gradients.dtype)
    return [np.repeat(gradients, np.diff(splits), axis=0) * factors[:, None]]


def _find_factors(
    context: Context, splits: Array, count: int, weights: Sequence[Array], dtype: DType
) -> Array:
    rows.check_bags(splits, count, context.attrs["table"])
    given = weights[0].astype(dtype, copy=False) if weights else np.ones(count, dtype)
    if given.shape != (count,):
        raise InvalidArgumentError(
            f"table {context.attrs['table']!r}: weights of shape {list(given.shape)} for {count} ids"
        )
    return rows.weigh_ids(splits, given, context.attrs["combiner"])


@kernel("table/sum")
def _sum_gradients(context: Context) -> Sequence[Array]:
    """Returns the sums of the gradients of equal ids, by shard."""
    gradient, order, starts, *blocks = context.inputs
    summed = rows.sum_equal(gradient.reshape(-1, gradient.shape[-1]), order, starts)
    ends = np.cumsum([len(block) for block in blocks])
    return np.split(summed, ends[:-1])


@kernel("table/last")
def _last_rows(context: Context) -> Sequence[Array]:
    """Returns the last row of each unique id, by shard."""
    ids, values, order, starts, *blocks = context.inputs
    if values.shape != (*ids.shape, context.attrs["dim"]):
        raise InvalidArgumentError(
            f"table {context.attrs['table']!r}: rows of shape {list(values.shape)} for ids of shape "
            f"{list(ids.shape)} and dim {context.attrs['dim']}"
        )
    assert len(order) == ids.size, "each id has a place in the order"
    lasts = np.append(starts[1:], len(order))[: len(starts)] - 1
    ends = np.cumsum([len(block) for block in blocks])
    return np.split(values.reshape(-1, values.shape[-1])[order[lasts]], ends[:-1])


@kernel("table/total")
def _add_sizes(context: Context) -> Sequence[Array]:
    """Returns the sums of the parts of ``table/size``."""
    rows, size = np.sum(context.inputs, axis=0)
    return [np.asarray(rows), np.asarray(size)]


@kernel("table/join")
def _join_gradients(context: Context) -> Sequence[Array]:
    """Returns the unique ids of several gradients of one shard, and the sums of their rows."""
    half = len(context.inputs) // 2
    ids = np.concatenate(context.inputs[:half])
    found = rows.route(ids, np.zeros(1, np.int64), 63, 1)
    values = np.concatenate(context.inputs[half:])
    return [found.blocks[0], rows.sum_equal(values, found.order, found.starts)]


# -- on a ps --------------------------------------------------------------------------------------


class _PagedArray:
    """The pages of one array of a table that lie on this task.

    Args:
        context: call of a kernel.
        described: description of the array: "name", "row" (shape of a row) and "dtype".
    """

    def __init__(self, context: Context, described: Attrs) -> None:
        self._context = context
        self._name = str(described["name"])
        self._row = tuple(int(n) for n in described["row"])
        self._dtype = canonical_dtype(described["dtype"])
        self._specs: dict[int, TensorSpec] = {}
        self._paging = Paging(context.attrs["rows"], context.attrs["shift"])

    def slots(self, pages: Iterable[int]) -> list[VariableSlot]:
        """Returns the slots of pages."""
        find, container = self._context.store.slot, self._context.attrs["container"]
        return [find(container, page_name(self._name, page)) for page in pages]

    def spec(self, page: int) -> TensorSpec:
        """Returns shape and dtype of a page."""
        count = self._paging.span(page)[1]
        # Pages but the last are alike, and a call touches hundreds: a spec for each takes longer than its rows.
        if count not in self._specs:
            self._specs[count] = TensorSpec((count, *self._row), self._dtype)
        return self._specs[count]

    def empty(self, count: int) -> Array:
        """Returns memory for so many rows, all zero."""
        return np.zeros((count, *self._row), self._dtype)

    def gather(self, slots: Sequence[VariableSlot], pages: Sequence[PageIds], out: Array) -> None:
        """Copies rows of pages, whose slots are claimed.

        Raises:
            FailedPreconditionError: A page is not initialised.
            AbortedError: A page was lost.
            InvalidArgumentError: Another graph has the table with other shapes.
        """
        for slot, (page, where, local) in zip(slots, pages, strict=True):
            value = np.asarray(slot.checked(self.spec(page), self._context.task))
            # With this mode NumPy writes to the output without a buffer.
            np.take(value, local, axis=0, out=out[where], mode="clip")


def _split(context: Context, ids: Array) -> list[PageIds]:
    """Splits ids that another process has sent by page.

    Raises:
        InvalidArgumentError: The ids do not ascend, or are no rows of the table.
    """
    table = context.attrs["table"]
    if ids.ndim != 1 or ids.dtype != np.int64 or not np.all(ids[1:] > ids[:-1]):
        raise InvalidArgumentError(
            f"table {table!r}: the ids of a shard must ascend", task=context.task
        )
    rows.check_ids(ids, context.attrs["rows"], table)
    return list(rows.split_pages(ids, context.attrs["shift"]))


@kernel("table/pull")
@uninterrupted
def _pull_rows(context: Context) -> Sequence[Array]:
    """Returns the rows of unique ids, all as of one instant."""
    (ids,) = context.inputs
    pages, array = _split(context, ids), _PagedArray(context, context.attrs["array"])
    slots, found = array.slots(page for page, _, _ in pages), array.empty(len(ids))
    with VariableClaim(slots):
        array.gather(slots, pages, found)
    return [found]


@kernel("table/push")
@uninterrupted
def _push_gradients(context: Context) -> Sequence[Array]:
    """Updates the rows of unique ids by their gradients."""
    _update_rows(context, *context.inputs)
    return []


def _update_rows(context: Context, ids: Array, gradients: Array, *extra: Array) -> None:
    attrs, pages = context.attrs, _split(context, ids)
    arrays = [_PagedArray(context, described) for described in attrs["arrays"]]
    slots = [array.slots(page for page, _, _ in pages) for array in arrays]
    shared = [context.store.slot(attrs["container"], name) for name in attrs["shared"]]
    given = _fill_chunks(gradients)
    with VariableClaim([slot for group in [shared, *slots] for slot in group]):
        # A restore claims the pages, so it comes before this check or after the update.
        _program(context).check_generation()
        counts = [_shared_value(slot, context.task) for slot in shared]
        found = [array.empty(len(given)) for array in arrays]
        for array, group, out in zip(arrays, slots, found, strict=True):
            array.gather(group, pages, out)
        counts = _compute_rows(context, counts, found, given, extra)
        # All memory is there before the first row changes.
        owned = [[slot.take_over() for slot in group] for group in slots]
        with context.store.lock:
            for slot, count in zip(shared, counts, strict=True):
                slot.value = count
            for group, memories, new in zip(slots, owned, found, strict=True):
                _store_rows(group, memories, pages, new)


class _RowsTarget:
    """The rows of a table on this task, as the target of a quorum (``UpdateTarget``)."""

    def __init__(self, context: Context) -> None:
        # The mean is of several sessions, so its time counts for none of them.
        self._context = replace(context, inputs=(), client=NOBODY)
        self.generation = _program(context).generation

    def step(self) -> int:
        """Raises InternalError: rows have no counter, and lead no quorum."""
        raise InternalError("a table leads no quorum", task=self._context.task)

    @uninterrupted
    def apply(
        self,
        inputs: Sequence[AnyArray],
        key: tuple[int, int] = (0, 0),
        expected: Mapping[str, int] | None = None,
    ) -> None:
        """Updates rows by the mean of gradients; arguments as of ``PreparedStage.apply``."""
        gradients, ids, *extra = map(np.asarray, inputs)
        with _program(self._context).gate.passing(key, expected):
            _update_rows(self._context, ids, gradients, *extra)


@kernel("table/push_mean")
def _push_to_quorum(context: Context) -> Sequence[Array]:
    """Adds gradients to those of other workers, and waits until the rows are updated by the mean."""
    stamp, ids, gradients, *extra = context.inputs
    # The quorum joins rows by ascending ids, and one worker's fault must not fail the others.
    _split(context, ids)
    rows_wanted = _PagedArray(context, context.attrs["arrays"][0]).empty(len(ids))
    if gradients.shape != rows_wanted.shape or gradients.dtype != rows_wanted.dtype:
        raise InvalidArgumentError(
            f"table {context.attrs['table']!r}: the gradients are "
            f"{gradients.dtype}{list(gradients.shape)}, not {rows_wanted.dtype}{list(rows_wanted.shape)}"
        )
    step, counted = find_quorum(context).push(
        worker_number(context),
        int(stamp),
        [gradients, ids, *extra],
        _RowsTarget(context),
        context.cancelled,
        context.client,
    )
    return [np.asarray(step, np.int64), np.asarray(counted)]


def _fill_chunks(gradients: Array) -> Array:
    """Returns gradients with zeros behind, to whole chunks.

    A push without a row has a chunk, too, so that the counts on all ps stay equal.
    """
    count = max(1, -(-len(gradients) // CHUNK)) * CHUNK
    filled = np.zeros((count, *gradients.shape[1:]), gradients.dtype)
    filled[: len(gradients)] = gradients
    return filled


def _compute_rows(
    context: Context,
    counts: Sequence[Array],
    rows_of: Sequence[Array],
    gradients: Array,
    extra: Sequence[Array],
) -> list[Array]:
    """Replaces rows by the rows after an update, in chunks, and returns the new shared values."""
    program, new = _program(context), list(counts)
    assert len(gradients) and len(gradients) % CHUNK == 0, "the program takes whole chunks"
    for begin in range(0, len(gradients), CHUNK):
        chunk = [rows[begin : begin + CHUNK] for rows in (*rows_of, gradients)]
        results = program.compute([*counts, *chunk, *extra], context.client)
        # All chunks are of one update, so each begins with the same shared values.
        new = [np.array(result) for result in results[: len(counts)]]
        for out, result in zip(
            chunk, results[len(counts) : len(counts) + len(rows_of)], strict=False
        ):
            out[...] = result
    return new


def _store_rows(
    slots: Sequence[VariableSlot], memories: Sequence[Array], pages: Sequence[PageIds], new: Array
) -> None:
    """Stores the new rows of claimed pages in memory that ``take_over`` has returned."""
    for slot, memory, (_, where, local) in zip(slots, memories, pages, strict=True):
        memory[local] = new[where]
        # A new object, which tells backups and checkpoints of the change.
        slot.value = memory.view()


def _shared_value(slot: VariableSlot, task: str) -> Array:
    if slot.value is None:
        raise slot.missing(task)
    return np.asarray(slot.value)


def _program(context: Context) -> DeferredProgram:
    if context.deferred is None:
        raise InternalError(f"{context.op!r} came without its program", task=context.task)
    return context.deferred


@kernel("table/size")
def _measure(context: Context) -> Sequence[Array]:
    """Returns the number of rows on this task that have values, and the bytes of all arrays."""
    arrays = [_PagedArray(context, described) for described in context.attrs["arrays"]]
    pages = [[slot.value for slot in array.slots(context.attrs["pages"])] for array in arrays]
    count = sum(value.shape[0] for value in pages[0] if value is not None)
    assert count <= context.attrs["rows"], "each page is of one task"
    size = sum(value.nbytes for group in pages for value in group if value is not None)
    return [np.array([count, size], np.int64)]


@kernel("table/init")
def _make_rows(context: Context) -> Sequence[Array]:
    """Gives all rows of an array on this task their first values, which depend on the ids alone."""
    attrs, program = context.attrs, _program(context)
    arrays, pages = [_PagedArray(context, d) for d in attrs["arrays"]], attrs["pages"]
    array, values = arrays[0], dict[Key, tuple[AnyArray, TensorSpec]]()
    slots, specs = array.slots(pages), [array.spec(page) for page in pages]
    _count_memory(context, arrays)
    for slot, spec, page in zip(slots, specs, pages, strict=True):
        memory = np.empty(spec.shape, spec.dtype)
        for begin in range(0, len(memory), CHUNK):
            part = memory[begin : begin + CHUNK]
            ids = np.arange(CHUNK, dtype=np.uint64) + np.uint64((page << attrs["shift"]) + begin)
            (made,) = program.compute([split_words(ids)], context.client)
            part[...] = made[: len(part)]
        values[slot.key] = memory.view(), spec
    context.store.replace(values)
    return []


@uninterrupted
def _count_memory(context: Context, arrays: Sequence[_PagedArray]) -> None:
    """Counts the first array in the ledger, if the arrays beside the first array fit on this task, too.

    Raises:
        ResourceExhaustedError: The arrays do not fit; the error has the sum.
    """
    pages, ledger = context.attrs["pages"], context.store.ledger
    slots = [array.slots(pages) for array in arrays]
    sizes = [[array.spec(page).nbytes for page in pages] for array in arrays]
    total = sum(map(sum, sizes))
    try:
        with VariableClaim(slots[0]):
            ledger.check(NOBODY, total - sum(slot.counted for group in slots for slot in group))
            context.store.count(zip(slots[0], sizes[0], strict=True), checked=True)
    except ResourceExhaustedError as error:
        count = sum(arrays[0].spec(page).shape[0] for page in pages)
        refused = ResourceExhaustedError(
            f"table {context.attrs['table']!r}: {count} rows with {len(arrays) - 1} slots need "
            f"{total} bytes on this task; {error.message}",
            task=context.task,
        )
        refused.limit = error.limit
        raise refused from error


def split_words(ids: Array) -> Array:
    """Returns ids as pairs of 32 bits: XLA would cut numbers of 64 bits without a word."""
    return np.stack([ids >> np.uint64(32), ids & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
