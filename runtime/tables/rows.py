"""Rows on the host: unique ids, and sums of the gradients of equal ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.tensor_spec import Array

_OFTEN = 16
"""Number of gradients of an id that are added together with those of other ids."""


class Route(NamedTuple):
    """The way from ids to their rows on the ps, and back.

    Attributes:
        blocks: the unique ids of each shard, ascending.
        places: for each id, its place in all blocks behind each other.
        order: the ids in the order of their places. Equal ids keep their order.
        starts: where each place begins in ``order``.
    """

    blocks: Sequence[Array]
    places: Array
    order: Array
    starts: Array


def route(ids: Array, owners: Array, shift: int, shards: int) -> Route:
    """Makes ids unique, and splits the unique ids by shard.

    Args:
        ids: one-dimensional integers, rows of the table.
        owners: shard of each page.
        shift: logarithm of the rows of a page.
        shards: number of shards.

    Examples:
        >>> found = route(np.array([7, 2, 7]), owners=np.array([0]), shift=11, shards=1)
        >>> [block.tolist() for block in found.blocks], found.places.tolist()
        ([[2, 7]], [1, 0, 1])
    """
    bits, shard_bits = int(ids.max(initial=0)).bit_length(), (shards - 1).bit_length()
    if not shard_bits:
        order = _sort_stably(ids, bits)
    elif bits + shard_bits > 63:
        # The last key is the first to sort by.
        order = np.lexsort((ids, owners[ids >> shift]))
    else:
        order = _sort_stably((owners[ids >> shift] << bits) | ids, bits + shard_bits)
    ordered = ids[order]
    is_first = np.empty(len(ids), bool)
    is_first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    places = np.empty(len(ids), np.int64)
    places[order] = np.cumsum(is_first) - 1
    unique = ordered[starts]
    ends = np.cumsum(np.bincount(owners[unique >> shift], minlength=shards))
    return Route(np.split(unique, ends[:-1]), places, order, starts)


def _sort_stably(keys: Array, bits: int) -> Array:
    """Returns the order of keys of so many bits; equal keys keep their order.

    Examples:
        >>> _sort_stably(np.array([7, 2, 7]), 3).tolist()
        [1, 0, 2]
    """
    more = len(keys).bit_length()
    if bits + more > 63:
        return np.argsort(keys, kind="stable")
    # NumPy sorts numbers by vector instructions, in a tenth of the time of a stable order.
    numbered = (keys << more) | np.arange(len(keys))
    numbered.sort()
    order: Array = numbered & ((1 << more) - 1)
    return order


def _add_in_turn(values: Array, axis: int) -> Array:
    last: Array = np.add.accumulate(values, axis=axis)[-1]
    return last


def sum_equal(values: Array, order: Array, starts: Array) -> Array:
    """Sums the rows of equal ids, in the order of the ids.

    Args:
        values: a row for each id.
        order: order of ``Route``.
        starts: starts of ``Route``.

    Examples:
        >>> sum_equal(np.array([[1.0], [2.0], [4.0]]), np.array([1, 0, 2]), np.array([0, 1])).tolist()
        [[2.0], [5.0]]
    """
    assert len(values) == len(order), "each id has a row"
    counts = np.diff(starts, append=len(order))
    total, few = values[order[starts]], np.where(counts > _OFTEN, 0, counts)
    # One addition for all ids that come so often keeps the order, unlike ``np.add.reduceat``.
    for turn in range(1, max(few, default=0)):
        left = np.flatnonzero(few > turn)
        total[left] += values[order[starts[left] + turn]]
    # NumPy adds whole rows one after the other, and the numbers of one column in pairs.
    add = np.add.reduce if values.shape[1] > 1 else _add_in_turn
    for place in np.flatnonzero(counts > _OFTEN).tolist():
        total[place] = add(values[order[starts[place] : starts[place] + counts[place]]], axis=0)
    return total


def check_bags(splits: Array, count: int, table: str) -> None:
    """Checks that bags divide so many ids.

    Raises:
        InvalidArgumentError: The splits do not begin with 0, do not ascend, or do not end with
            ``count``.
    """
    if splits.ndim == 1 and len(splits) and splits[0] == 0 and splits[-1] == count:
        if np.all(splits[1:] >= splits[:-1]):
            return
    shown = ", ".join(map(str, splits.reshape(-1)[:5].tolist()))
    raise InvalidArgumentError(
        f"table {table!r}: row_splits must ascend from 0 to the number of ids, {count}, and not be "
        f"{shown}{', ...' if splits.size > 5 else ''} of shape {list(splits.shape)}"
    )


def weigh_ids(splits: Array, weights: Array, combiner: str) -> Array:
    """Returns the factor of each id of a bag: a bag is the sum of its rows times their factors.

    Examples:
        >>> weigh_ids(np.array([0, 2, 2, 3]), np.array([1.0, 3.0, 5.0]), "mean").tolist()
        [0.25, 0.75, 1.0]
    """
    if combiner == "sum":
        return weights
    norms = sum_bags(splits, (weights if combiner == "mean" else weights * weights)[:, None])[:, 0]
    norms = norms if combiner == "mean" else np.sqrt(norms)
    # A bag whose weights add up to nothing is zero, as an empty bag is.
    factors = np.divide(1, norms, out=np.zeros_like(norms), where=norms != 0)
    weighed: Array = weights * np.repeat(factors, np.diff(splits))
    return weighed


def sum_bags(splits: Array, values: Array) -> Array:
    """Sums the rows of each bag; an empty bag is zero.

    Examples:
        >>> sum_bags(np.array([0, 2, 2, 3]), np.array([[1.0], [2.0], [4.0]])).tolist()
        [[3.0], [0.0], [4.0]]
    """
    assert len(splits), "there is a split more than bags"
    total = np.zeros((len(splits) - 1, *values.shape[1:]), values.dtype)
    filled = np.flatnonzero(splits[1:] > splits[:-1])
    if len(filled):
        total[filled] = np.add.reduceat(values, splits[filled], axis=0)
    return total


def check_ids(ids: Array, rows: int, table: str) -> None:
    """Checks that ids are rows of a table.

    Raises:
        InvalidArgumentError: An id is negative or too large; the error names the id.
    """
    if not ids.size:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= rows:
        bad = lowest if lowest < 0 else highest
        raise InvalidArgumentError(f"table {table!r} has rows 0 to {rows - 1}, and no row {bad}")


PageIds = tuple[int, slice, Array]
"""A page, the place of its ids among all ids, and the rows of the page with these ids."""


def split_pages(ids: Array, shift: int) -> Iterator[PageIds]:
    """Yields the pages of ascending ids.

    Examples:
        >>> for page, where, local in split_pages(np.array([1, 3, 5]), shift=2):
        ...     print(page, where, local)
        0 slice(0, 2, None) [1 3]
        1 slice(2, 3, None) [1]
    """
    if not len(ids):
        return
    pages, local = ids >> shift, ids & ((1 << shift) - 1)
    begins = [0, *(np.flatnonzero(pages[1:] != pages[:-1]) + 1).tolist()]
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        yield int(pages[begin]), slice(begin, end), local[begin:end]
