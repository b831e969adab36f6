"""JAX's 64-bit mode: who has it on when an operation is made gets what JAX gives."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


X32 = np.arange(50_000, 51_000, dtype=np.int32)
F32 = np.linspace(0.0, 1.0, 100_001, dtype=np.float32)


def squares(x: Any) -> Any:
    """Of 32-bit arrays, and to them, by way of 64 bits."""
    return ((x.astype(jnp.int64) ** 2).sum() // 10**6).astype(jnp.int32)


def mean(x: Any) -> Any:
    return x.astype(jnp.float64).sum().astype(jnp.float32)


@pytest.mark.parametrize(("fn", "value"), [(squares, X32), (mean, F32)])
def test_wide_mode_between_narrow_arrays(fn: Any, value: Any) -> None:
    """A call that was made in 64-bit mode computes in 64 bits between 32-bit arrays."""
    with jax.enable_x64(True):
        expected = np.asarray(jax.jit(fn)(value))
        result = rt.call(fn, rt.constant(value, value.dtype))
    assert result.dtype == expected.dtype
    # the mode is off again: what counts is how the operation was made
    with rt.Session() as session:
        np.testing.assert_array_equal(session.run(result), expected)


def test_wide_mode_keeps_wide_literals() -> None:
    """A call that was made in 64-bit mode keeps its literals of 64 bits."""
    with jax.enable_x64(True):
        x = rt.placeholder(np.float32, [])
        result = rt.call(lambda x: (x * np.float64(0.1) + np.int64(2**40)).astype(jnp.float32), x)
    with rt.Session() as session:
        assert session.run(result, {x: 1.0}) == np.float32(2**40)


def test_wide_mode_gradients_and_updates() -> None:
    """Gradients and updates of a 64-bit call compute in 64 bits."""
    with jax.enable_x64(True):
        x = rt.placeholder(np.float32, [None])
        y = rt.call(lambda x: (x.astype(jnp.float64) ** 2 * 1e-30).sum().astype(jnp.float32), x)
        w = rt.Variable(np.float32(0), name="w", dtype=np.float32)
        add = w.update(lambda old, x: (old.astype(jnp.float64) + mean(x)).astype(jnp.float32), x)
    grad = rt.gradients(y, [x])[0]  # made in 32-bit mode, of an operation of 64-bit mode
    with rt.Session() as session:
        session.run(w.initializer)
        np.testing.assert_allclose(session.run(grad, {x: F32}), 2e-30 * F32, rtol=1e-6)
        assert session.run(add, {x: F32}) == np.float32(F32.astype(np.float64).sum())


def test_without_wide_mode_narrow_is_default() -> None:
    """Without 64-bit mode the results of calls are of 32 bits."""
    x = rt.constant(X32)
    assert rt.call(lambda x: x.sum(), x).dtype == np.int32
    assert rt.call(lambda x: x * 1.5, x).dtype == np.float32
