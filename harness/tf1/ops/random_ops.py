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
from harness.tf1.ops.lift import Array, Public, Seed, Static, Type, op
from harness.tf1.ops.shapes import ShapeLike

public = Public("tf", "Random tensors")


def _normal(
    shown: str, kind: str, doc: str, draw: Callable[..., Array]
) -> Callable[..., rt.Tensor]:
    """Adds a normal distribution; ``draw`` makes numbers of a deviation of 1 from a key, a shape and a dtype."""

    @op(kind)
    def drawn(key: Seed, mean: Array, stddev: Array, shape: Static, dtype: Type) -> Array:
        scaled = draw(key, as_sizes(shape), dtype) * jnp.asarray(stddev, dtype)
        return scaled + jnp.asarray(mean, dtype)

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
        return drawn(seed, mean, stddev, shape, dtype, name or shown)

    public.define(shown, random, doc)
    return random


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
def _uniform(key: Seed, minval: Array, maxval: Array, shape: Static, dtype: Type) -> Array:
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
    """Draws by ``jax.random.uniform``, or ``randint`` for an integer dtype; ``maxval`` is not reached."""
    # TensorFlow's rule: integers have no natural upper limit, as fractions have with 1.
    if maxval is None and as_dtype(dtype).is_integer:
        raise ValueError("random_uniform of integers needs maxval")
    high = 1 if maxval is None else maxval
    return _uniform(seed, minval, high, shape, dtype, name or "random_uniform")


@public.op("RandomShuffle")
def random_shuffle(value: Array, seed: Seed = None) -> Array:
    """Shuffles the rows by ``jax.random.permutation``."""
    return jax.random.permutation(seed, value)


@op("multinomial")
def _multinomial(logits: Array, num_samples: Static, seed: Seed, dtype: Type) -> Array:
    if jnp.ndim(logits) != 2:
        raise ValueError(f"logits are a matrix, not of shape {jnp.shape(logits)}")
    drawn = jax.random.categorical(seed, logits, axis=-1, shape=(num_samples, jnp.shape(logits)[0]))
    # JAX has the draws in front, TensorFlow the rows.
    return drawn.T.astype(dtype)


@public.add()
def multinomial(
    logits: rt.TensorLike,
    num_samples: rt.TensorLike,
    seed: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Draws by ``jax.random.categorical``: so many classes for each row of ``logits``, int64."""
    return _multinomial(logits, num_samples, seed, np.int64, name)


@public.op("random_gamma")
def random_gamma(
    shape: Static,
    alpha: Array,
    beta: Array | None = None,
    dtype: Type = np.float32,
    seed: Seed = None,
) -> Array:
    """Draws by ``jax.random.gamma``: ``shape`` values for each of ``alpha`` and ``beta``."""
    alpha, beta = jnp.asarray(alpha, dtype), jnp.asarray(1.0 if beta is None else beta, dtype)
    # TensorFlow draws ``shape`` numbers for each parameter, not numbers of this shape.
    full = as_sizes(shape) + jnp.broadcast_shapes(alpha.shape, beta.shape)
    return jax.random.gamma(seed, alpha, full, dtype) / beta


@public.op("random_crop")
def random_crop(value: Array, size: Static, seed: Seed = None) -> Array:
    """Cuts a block of ``size`` out of a random place of ``value``."""
    value = jnp.asarray(value)
    # The last place at which the block still fits counts too.
    room = jnp.asarray([d - s + 1 for d, s in zip(value.shape, size, strict=True)])
    return jax.lax.dynamic_slice(value, list(jax.random.randint(seed, room.shape, 0, room)), size)


public.update({"set_random_seed": rt.set_random_seed})
