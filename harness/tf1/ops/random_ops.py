"""Random tensors, drawn anew in every step, reproducibly from the graph's and the operation's seeds."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.array_ops import as_sizes
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Array, Public, Static, Type, op
from harness.tf1.ops.shapes import ShapeLike

public = Public("tf", "Random tensors")


def _key(seed: int | None, name: str | None, default: str) -> rt.Tensor:
    return rt.random_key(seed, f"{name or default}/key")


def _normal(
    shown: str, kind: str, described: str, draw: Callable[..., Array]
) -> Callable[..., rt.Tensor]:
    """Adds a normal distribution; ``draw`` makes numbers of a deviation of 1 from a key, a shape and a dtype."""

    @op(kind)
    def drawn(
        key: Array, mean: Array, stddev: Array, shape: Static, dtype: Type, name: str | None = None
    ) -> Array:
        return draw(key, as_sizes(shape), dtype) * jnp.asarray(stddev, dtype) + jnp.asarray(
            mean, dtype
        )

    def random(
        shape: ShapeLike,
        mean: rt.TensorLike = 0.0,
        stddev: rt.TensorLike = 1.0,
        dtype: DTypeLike = np.float32,
        seed: int | None = None,
        name: str | None = None,
    ) -> rt.Tensor:
        if not as_dtype(dtype).is_floating:
            raise TypeError(f"{shown}: it draws floating point numbers, not {as_dtype(dtype).name}")
        return drawn(_key(seed, name, shown), mean, stddev, shape, dtype, name or shown)

    random.__name__ = random.__qualname__ = shown
    random.__doc__ = described
    return public.add(shown)(random)


random_normal = _normal(
    "random_normal",
    "RandomStandardNormal",
    "``jax.random.normal``, scaled and shifted.",
    jax.random.normal,
)
truncated_normal = _normal(
    "truncated_normal",
    "TruncatedNormal",
    "``jax.random.truncated_normal`` within two standard deviations.",
    lambda key, shape, dtype: jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype),
)


@op("RandomUniform")
def _uniform(
    key: Array, minval: Array, maxval: Array, shape: Static, dtype: Type, name: str | None = None
) -> Array:
    if jnp.issubdtype(dtype, np.integer):
        return jax.random.randint(key, as_sizes(shape), minval, maxval, dtype)
    return jax.random.uniform(key, as_sizes(shape), dtype, minval, maxval)


@public.add()
def random_uniform(
    shape: ShapeLike,
    minval: rt.TensorLike = 0,
    maxval: rt.TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Draws by ``jax.random.uniform``, or ``randint`` for an integer dtype; ``maxval`` is not reached.

    Raises:
        ValueError: an integer dtype without ``maxval``.
    """
    if maxval is None and as_dtype(dtype).is_integer:
        raise ValueError("random_uniform of integers needs maxval")
    high = 1 if maxval is None else maxval
    return _uniform(
        _key(seed, name, "random_uniform"), minval, high, shape, dtype, name or "random_uniform"
    )


@op("RandomShuffle")
def _shuffle(key: Array, value: Array, name: str | None = None) -> Array:
    return jax.random.permutation(key, value)


@public.add()
def random_shuffle(
    value: rt.TensorLike, seed: int | None = None, name: str | None = None
) -> rt.Tensor:
    """Shuffles the rows by ``jax.random.permutation``."""
    return _shuffle(_key(seed, name, "RandomShuffle"), value, name)


@op("multinomial")
def _multinomial(
    key: Array, logits: Array, num_samples: Static, dtype: Type, name: str | None = None
) -> Array:
    if jnp.ndim(logits) != 2:
        raise ValueError(f"logits are a matrix, not of shape {jnp.shape(logits)}")
    drawn = jax.random.categorical(key, logits, axis=-1, shape=(num_samples, jnp.shape(logits)[0]))
    return drawn.T.astype(dtype)


@public.add()
def multinomial(
    logits: rt.TensorLike,
    num_samples: rt.TensorLike,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Draws by ``jax.random.categorical``: so many classes for each row of ``logits``, int64."""
    return _multinomial(_key(seed, name, "multinomial"), logits, num_samples, np.int64, name)


@op("random_gamma")
def _gamma(
    key: Array, alpha: Array, beta: Array, shape: Static, dtype: Type, name: str | None = None
) -> Array:
    alpha, beta = jnp.asarray(alpha, dtype), jnp.asarray(beta, dtype)
    full = as_sizes(shape) + jnp.broadcast_shapes(alpha.shape, beta.shape)
    return jax.random.gamma(key, alpha, full, dtype) / beta


@public.add()
def random_gamma(
    shape: ShapeLike,
    alpha: rt.TensorLike,
    beta: rt.TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Draws by ``jax.random.gamma``: ``shape`` values for each of ``alpha`` and ``beta``."""
    return _gamma(
        _key(seed, name, "random_gamma"), alpha, 1.0 if beta is None else beta, shape, dtype, name
    )


@op("random_crop")
def _crop(key: Array, value: Array, size: Static, name: str | None = None) -> Array:
    value = jnp.asarray(value)
    room = jnp.asarray([d - s + 1 for d, s in zip(value.shape, size, strict=True)])
    return jax.lax.dynamic_slice(value, list(jax.random.randint(key, room.shape, 0, room)), size)


@public.add()
def random_crop(
    value: rt.TensorLike, size: ShapeLike, seed: int | None = None, name: str | None = None
) -> rt.Tensor:
    """Cuts a block of ``size`` out of a random place of ``value``."""
    return _crop(_key(seed, name, "random_crop"), value, size, name)


public.update({"set_random_seed": rt.set_random_seed})
