"""Static shapes: what is known of a tensor's shape before a step runs is never more than what is true of every step."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x[:100], (None, 3)),
        (lambda x: x[:2], (None, 3)),
        (lambda x: x[-7:, :2], (None, 2)),
        (lambda x: jnp.sort(x, axis=0)[: min(x.shape[0], 5000)], (None, 3)),
        (lambda x: x[:100].sum(axis=0), (3,)),
        (lambda x: x[:1], (1, 3)),
        (lambda x: x.reshape(-1, 3, 1), (None, 3, 1)),
        (lambda x: jnp.concatenate([x, x]), (None, 3)),
        (lambda x: x[1:], (None, 3)),
        (lambda x: x + jnp.ones((7, 1, 3)), (7, None, 3)),
        (lambda x: x @ jnp.ones((3, 10)), (None, 10)),
    ],
)
def test_of_a_function_of_an_unknown_number_of_rows(fn: Callable[[Any], Any], shape: Any) -> None:
    x = rt.placeholder(np.float32, [None, 3])
    y = rt.call(fn, x, name="y")
    assert y.shape == shape
    with rt.Session() as session:
        for rows in (1, 10, 200):
            found = session.run(y, {x: np.ones((rows, 3), np.float32)}).shape
            assert all(said in (None, real) for said, real in zip(y.shape, found, strict=True))


def test_what_is_cut_off_may_be_fed() -> None:
    x = rt.placeholder(np.float32, [None])
    y = x[:100]
    total = y.sum() if hasattr(y, "sum") else rt.numpy.sum(y)
    with rt.Session() as session:
        assert session.run(total, {y: np.ones(10, np.float32)}) == 10.0


def test_a_size_that_must_agree_with_a_known_one() -> None:
    x = rt.placeholder(np.float32, [None])
    assert (x + np.ones(3, np.float32)).shape == (3,)
