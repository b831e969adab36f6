"""Random numbers under each of JAX's key implementations."""

from typing import Any

import jax
import numpy as np
import pytest

import runtime as rt

WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


@pytest.mark.parametrize("implementation", WORDS)
def test_samplers_work_with_each_key_type(implementation: str) -> None:
    """Samplers and keys work with every generator of JAX."""
    with jax.default_prng_impl(implementation), rt.Graph().as_default() as graph:
        key = rt.random_key(seed=3)
        assert key.shape == (WORDS[implementation],)
        drawn: list[Any] = [
            rt.random.normal((1000,), seed=1),
            rt.call(jax.random.uniform, key, (1000,)),
            rt.random.uniform((1000,)),
        ]
        with rt.Session(graph=graph) as session:
            first, second = session.run(drawn), session.run(drawn)
        with rt.Session(graph=graph) as session:
            again = session.run(drawn)
    assert abs(first[0].mean()) < 0.2
    assert 0.8 < first[0].std() < 1.2
    assert 0.4 < first[1].mean() < 0.6
    for one, other in zip(first, second, strict=True):
        assert not np.array_equal(one, other)
    # of a seed: the n-th step of any session draws the same
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[2], again[2])
