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


@pytest.mark.parametrize("largest", [3, 2**40, 2**62 - 1])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_equal_ids_keep_their_order(largest: int, count: int) -> None:
    """The order is that of a stable sort, also of ids that leave no room for their places."""
    ids = np.random.default_rng(0).choice(np.array([0, 1, largest - 1, largest]), count)
    found = rows.route(ids, np.zeros(1, np.int64), 63, 1)
    np.testing.assert_array_equal(found.order, np.argsort(ids, kind="stable"))
    owners = np.array([1, 0])
    shift = largest.bit_length() - 1
    two = rows.route(ids, owners, shift, 2)
    np.testing.assert_array_equal(two.order, np.lexsort((ids, owners[ids >> shift])))


@hypothesis.given(IDS, st.integers(1, 3), st.sampled_from([1, 2, 3, 32]), st.sampled_from([1, 40]))
def test_sums_keep_the_order(ids: np.ndarray, shards: int, dim: int, often: int) -> None:
    """The rows of equal ids are added in the order of the ids, bit by bit, however many they are."""
    ids = np.tile(ids, often)
    values = np.random.default_rng(len(ids)).normal(size=(len(ids), dim)).astype(np.float32)
    found = rows.route(ids, np.arange(100) % shards, 0, shards)
    summed = rows.sum_equal(values, found.order, found.starts)
    expected = np.zeros((len(summed), dim), np.float32)
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


@hypothesis.given(st.data(), st.sampled_from(["sum", "mean", "sqrtn"]))
def test_bags_are_weighted_sums(data: st.DataObject, combiner: str) -> None:
    """Each bag is what its definition says, empty bags and weights of zero too."""
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    splits = np.cumsum([0, *sizes])
    drawn = np.random.default_rng(splits[-1]).integers(-3, 4, (splits[-1], 3)).astype(float)
    weights, values = drawn[:, 0], drawn[:, 1:]
    factors = rows.weigh_ids(splits, weights, combiner)
    found = rows.sum_bags(splits, values * factors[:, None])
    for i, (begin, end) in enumerate(zip(splits[:-1], splits[1:], strict=True)):
        w = weights[begin:end]
        norm = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[combiner]
        expected = (values[begin:end] * w[:, None]).sum(axis=0) / norm if norm else 0
        np.testing.assert_allclose(found[i], expected, atol=1e-12)


@pytest.mark.parametrize("splits", [[0, 3, 2], [1, 2], [0, 1], [], [[0, 2]]])
def test_wrong_bags_are_named(splits: list[int]) -> None:
    """Splits that do not fit the ids are shown with the table."""
    with pytest.raises(rt.InvalidArgumentError, match="'films': row_splits must ascend .* 2,"):
        rows.check_bags(np.array(splits, np.int64), 2, "films")
