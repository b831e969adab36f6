"""Random tensors, drawn anew in every step, reproducibly from the graph's and the operation's seeds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.dtypes import as_dtype
from harness.tf1.lift import Array, Names, Static, Type, op
from harness.tf1.shapes import ShapeLike

OPS = Names()
"""TensorFlow's name -> what it is here, for all that this module defines."""


def _fractions(dtype: DTypeLike, what: str) -> None:
    if not as_dtype(dtype).is_floating:
        raise TypeError(f"{what}: it draws floating point numbers, not {as_dtype(dtype).name}")


def _key(seed: int | None, name: str | None, default: str) -> rt.Tensor:
    return rt.random_key(seed, f"{name or default}/key")


@op("RandomStandardNormal")
def _normal(key: Array, mean: Array, stddev: Array, shape: Static, dtype: Type, name: str | None = None) -> Array:
    return jax.random.normal(key, _dims(shape), dtype) * jnp.asarray(stddev, dtype) + jnp.asarray(mean, dtype)


@OPS.add()
def random_normal(
    shape: ShapeLike,
    mean: rt.TensorLike = 0.0,
    stddev: rt.TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """``jax.random.normal``, scaled and shifted."""
    _fractions(dtype, "random_normal")
    name = name or "random_normal"
    return _normal(_key(seed, name, name), mean, stddev, shape, dtype, name)


@op("TruncatedNormal")
def _truncated(key: Array, mean: Array, stddev: Array, shape: Static, dtype: Type, name: str | None = None) -> Array:
    drawn = jax.random.truncated_normal(key, -2.0, 2.0, _dims(shape), dtype)
    return drawn * jnp.asarray(stddev, dtype) + jnp.asarray(mean, dtype)


@OPS.add()
def truncated_normal(
    shape: ShapeLike,
    mean: rt.TensorLike = 0.0,
    stddev: rt.TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """``jax.random.truncated_normal`` within two standard deviations."""
    _fractions(dtype, "truncated_normal")
    name = name or "truncated_normal"
    return _truncated(_key(seed, name, name), mean, stddev, shape, dtype, name)


@op("RandomUniform")
def _uniform(key: Array, minval: Array, maxval: Array, shape: Static, dtype: Type, name: str | None = None) -> Array:
    if jnp.issubdtype(dtype, np.integer):
        return jax.random.randint(key, _dims(shape), minval, maxval, dtype)
    return jax.random.uniform(key, _dims(shape), dtype, minval, maxval)


@OPS.add()
def random_uniform(
    shape: ShapeLike,
    minval: rt.TensorLike = 0,
    maxval: rt.TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """``jax.random.uniform``, or ``randint`` for an integer dtype; ``maxval`` is not reached.

    Raises:
        ValueError: an integer dtype without ``maxval``.
    """
    if maxval is None and as_dtype(dtype).is_integer:
        raise ValueError("random_uniform of integers needs maxval")
    name = name or "random_uniform"
    return _uniform(_key(seed, name, name), minval, 1 if maxval is None else maxval, shape, dtype, name)


@op("RandomShuffle")
def _shuffle(key: Array, value: Array, name: str | None = None) -> Array:
    return jax.random.permutation(key, value)


@OPS.add()
def random_shuffle(value: rt.TensorLike, seed: int | None = None, name: str | None = None) -> rt.Tensor:
    """``jax.random.permutation`` of the rows."""
    return _shuffle(_key(seed, name, "RandomShuffle"), value, name)


@op("multinomial")
def _multinomial(key: Array, logits: Array, num_samples: Static, dtype: Type, name: str | None = None) -> Array:
    if jnp.ndim(logits) != 2:
        raise ValueError(f"logits are a matrix, not of shape {jnp.shape(logits)}")
    drawn = jax.random.categorical(key, logits, axis=-1, shape=(num_samples, jnp.shape(logits)[0]))
    return drawn.T.astype(dtype)


@OPS.add()
def multinomial(
    logits: rt.TensorLike, num_samples: rt.TensorLike, seed: int | None = None, name: str | None = None
) -> rt.Tensor:
    """``jax.random.categorical``: for each row of ``logits`` that many classes, int64."""
    return _multinomial(_key(seed, name, "multinomial"), logits, num_samples, np.int64, name)


@op("random_gamma")
def _gamma(key: Array, alpha: Array, beta: Array, shape: Static, dtype: Type, name: str | None = None) -> Array:
    alpha, beta = jnp.asarray(alpha, dtype), jnp.asarray(beta, dtype)
    full = _dims(shape) + jnp.broadcast_shapes(alpha.shape, beta.shape)
    return jax.random.gamma(key, alpha, full, dtype) / beta


@OPS.add()
def random_gamma(
    shape: ShapeLike,
    alpha: rt.TensorLike,
    beta: rt.TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """``jax.random.gamma``: ``shape`` draws for each of ``alpha`` and ``beta``."""
    return _gamma(_key(seed, name, "random_gamma"), alpha, 1.0 if beta is None else beta, shape, dtype, name)


@op("random_crop")
def _crop(key: Array, value: Array, size: Static, name: str | None = None) -> Array:
    value = jnp.asarray(value)
    room = jnp.asarray([d - s + 1 for d, s in zip(value.shape, size, strict=True)])
    return jax.lax.dynamic_slice(value, list(jax.random.randint(key, room.shape, 0, room)), size)


@OPS.add()
def random_crop(value: rt.TensorLike, size: ShapeLike, seed: int | None = None, name: str | None = None) -> rt.Tensor:
    """A block of ``size`` from a random place of ``value``."""
    return _crop(_key(seed, name, "random_crop"), value, size, name)


def _dims(shape: Static) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


OPS |= {
    "set_random_seed": rt.set_random_seed,
}
