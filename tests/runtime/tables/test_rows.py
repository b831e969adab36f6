"""The pure functions of tables against NumPy's plainest code."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

import runtime as rt
from runtime.tables import rows
from runtime.tables.paging import PAGES, Paging

IDS = hnp.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 99))


@hypothesis.given(IDS, st.integers(1, 4), st.integers(0, 5))
def test_route_leads_there_and_back(ids: np.ndarray, shards: int, shift: int) -> None:
    """Every id finds its row among the blocks, and each shard has its own ids once, ascending."""
    owners = np.arange((99 >> shift) + 1) * 7 % shards
    found = rows.route(ids, owners, shift, shards)
    whole = np.concatenate(found.blocks)
    assert np.array_equal(whole[found.places], ids) and len(whole) == len({*ids.tolist()})
    for shard, block in enumerate(found.blocks):
        assert np.all(block[1:] > block[:-1]) and np.all(owners[block >> shift] == shard)


@hypothesis.given(IDS, st.integers(1, 3))
def test_sums_keep_the_order(ids: np.ndarray, shards: int) -> None:
    """The rows of equal ids are added in the order of the ids, bit by bit."""
    values = np.random.default_rng(len(ids)).normal(size=(len(ids), 3)).astype(np.float32)
    found = rows.route(ids, np.arange(100) % shards, 0, shards)
    summed = rows.sum_equal(values, found.order, found.starts)
    expected = np.zeros((len(summed), 3), np.float32)
    for place, value in zip(found.places, values, strict=True):
        expected[place] += value
    np.testing.assert_array_equal(summed, expected)


@hypothesis.given(st.integers(1, 10**12))
def test_pages_hold_each_row_once(count: int) -> None:
    """The pages follow each other, and together hold all rows."""
    paging = Paging.of(count)
    assert 1 <= paging.count <= PAGES
    ends = [sum(paging.span(page)) for page in range(paging.count)]
    assert [0, *ends[:-1]] == [paging.span(page)[0] for page in range(paging.count)]
    assert ends[-1] == count


@hypothesis.given(
    hnp.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 99), unique=True)
)
def test_pages_of_ids(ids: np.ndarray) -> None:
    """Ascending ids are split by page, and each keeps its place."""
    ids.sort()
    seen = np.full(len(ids), -1)
    for page, where, local in rows.split_pages(ids, 3):
        seen[where] = (page << 3) + local
    assert np.array_equal(seen, ids)


def test_wrong_ids_are_named() -> None:
    """An id that is no row is named with its table."""
    rows.check_ids(np.array([0, 9]), 10, "films")
    for bad in (-1, 10, 2**40):
        with pytest.raises(rt.InvalidArgumentError, match=rf"'films' has rows 0 to 9.* {bad}\b"):
            rows.check_ids(np.array([3, bad]), 10, "films")
