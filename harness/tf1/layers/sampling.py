"""Losses over a sample of the classes, for models with many: ``tf.nn.nce_loss``, ``tf.nn.sampled_softmax_loss``."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.graph.framework import stop_gradient
from harness.tf1.layers.nn_ops import embedding_lookup
from harness.tf1.names.table import TABLE
from harness.tf1.ops.join_ops import concat
from harness.tf1.ops.lift import Array, Public, Static, is_tensor, op

public = Public("tf.nn")

Sampled: TypeAlias = tuple[rt.Tensor, rt.Tensor, rt.Tensor]
"""The classes, and how often each true class and each of these was to be expected in the sample."""
Table: TypeAlias = rt.TensorLike
"""A table with a row for each class, or the parts of one."""


def _log_uniform_chances(count: int) -> jax.Array:
    classes = jnp.arange(count, dtype=np.float32)
    return jnp.log1p(1 / (classes + 1)) / jnp.log1p(jnp.asarray(count, np.float32))


def _uniform_chances(count: int) -> jax.Array:
    return jnp.full((count,), 1 / count, np.float32)


@op("CandidateSampler")
def _sample(
    true: Array,
    key: Array,
    log_uniform: Static,
    count: Static,
    unique: Static,
    range_max: Static,
    kind: Static,
    name: str | None = None,
) -> tuple[Array, Array, Array]:
    """Draws classes.

    Without repetition they are drawn until there are enough different ones. In which order the
    different ones come is a matter of Gumbel noise, and how many draws each takes is geometrically
    distributed.
    """
    assert not unique or count <= range_max, "there are not so many different classes"
    chances = (_log_uniform_chances if log_uniform else _uniform_chances)(range_max)
    noise, draws = jax.random.split(key)
    if unique:
        _, found = jax.lax.top_k(
            jnp.log(chances) + jax.random.gumbel(noise, (range_max,), np.float32), count
        )
        fresh = 1 - jnp.concatenate([jnp.zeros(1, np.float32), jnp.cumsum(chances[found])[:-1]])
        uniform = jax.random.uniform(draws, (count,), np.float32, minval=1e-12)
        tries = jnp.sum(
            jnp.ceil(jnp.maximum(jnp.log(uniform) / jnp.log1p(-jnp.minimum(fresh, 1 - 1e-7)), 1))
        )
    else:
        found, tries = jax.random.categorical(noise, jnp.log(chances), shape=(count,)), count

    def expected(classes: Array) -> Array:
        p = chances[classes]
        return -jnp.expm1(tries * jnp.log1p(-p)) if unique else p * tries

    return found.astype(kind), expected(jnp.asarray(true)), expected(found)


def _add_sampler(shown: str, log_uniform: bool) -> None:
    def sampler(
        true_classes: rt.TensorLike,
        num_true: int,
        num_sampled: int,
        unique: bool,
        range_max: int,
        seed: int | None = None,
        name: str | None = None,
    ) -> Sampled:
        if unique and num_sampled > range_max:
            raise rt.InvalidArgumentError(
                f"{shown}: {range_max} classes have no {num_sampled} different ones"
            )
        label = name or ("LogUniformCandidateSampler" if log_uniform else "UniformCandidateSampler")
        key = rt.random_key(seed, f"{label}/key")
        kind = np.dtype(np.int64)
        drawn, true, found = _sample(
            true_classes, key, log_uniform, num_sampled, unique, range_max, kind, label
        )
        return drawn, true, found

    sampler.__name__ = sampler.__qualname__ = shown
    more = (
        "; the first ones are more frequent, as words are that are sorted by their frequency"
        if log_uniform
        else ""
    )
    sampler.__doc__ = f"Draws ``num_sampled`` of ``range_max`` classes{more}."
    public.add(shown)(sampler)


_add_sampler("log_uniform_candidate_sampler", True)
_add_sampler("uniform_candidate_sampler", False)


@op("sampled_logits")
def _logits(
    inputs: Array,
    labels: Array,
    rows: Array,
    biases: Array,
    sampled: Array,
    true_expected: Array,
    sampled_expected: Array,
    without_hits: Static,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns the logits of the true and the sampled classes, [batch, num_true + num_sampled], and their labels."""
    batch, true = jnp.shape(labels)
    if rt.lowlevel.sizes_are_guesses():
        # The guess for the rows knows nothing of their number: those of the true classes and of the
        # sampled ones.
        count = batch * true + len(sampled)
        rows, biases = jnp.zeros((count, rows.shape[1]), rows.dtype), jnp.zeros(count, biases.dtype)
    own = jnp.reshape(rows[: batch * true], (batch, true, -1))
    of_true = jnp.einsum("bd,btd->bt", inputs, own) + jnp.reshape(
        biases[: batch * true], (batch, true)
    )
    of_sampled = jnp.matmul(inputs, rows[batch * true :].T) + biases[batch * true :]
    # TensorFlow takes the largest float away, so that a sampled true class has no share in the
    # softmax.
    if without_hits:
        hits = jnp.any(jnp.asarray(labels)[:, :, None] == jnp.asarray(sampled), axis=1)
        of_sampled = jnp.where(hits, of_sampled - np.finfo(np.float32).max, of_sampled)
    logits = jnp.concatenate(
        [of_true - jnp.log(true_expected), of_sampled - jnp.log(sampled_expected)], 1
    )
    wanted = jnp.concatenate([jnp.full_like(of_true, 1 / true), jnp.zeros_like(of_sampled)], 1)
    return logits, wanted


@op("nce_loss")
def _nce(logits: Array, wanted: Array, name: str | None = None) -> Array:
    losses = jnp.maximum(logits, 0) - logits * wanted + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    return jnp.sum(losses, 1)


@op("sampled_softmax_loss")
def _softmax(logits: Array, wanted: Array, name: str | None = None) -> Array:
    return -jnp.sum(wanted * jax.nn.log_softmax(logits), 1)


def _sampled_logits(
    weights: Table,
    biases: Table,
    labels: rt.TensorLike,
    inputs: rt.TensorLike,
    num_sampled: int,
    num_classes: int,
    num_true: int,
    sampled_values: Sampled | None,
    remove_accidental_hits: bool,
    partition_strategy: str,
    seed: int | None,
) -> tuple[rt.Tensor, rt.Tensor]:
    # Before 1.0 the inputs came first, and only labels are integers.
    if is_tensor(labels) and labels.dtype.kind == "f":
        labels, inputs = inputs, labels
    found = sampled_values or TABLE["tf.nn"]["log_uniform_candidate_sampler"](
        labels, num_true, num_sampled, True, num_classes, seed
    )
    sampled, *expected = (stop_gradient(t) for t in found)
    kind = sampled.dtype
    every = concat([_flat(labels, kind), sampled], 0)
    rows = embedding_lookup(weights, every, partition_strategy)
    offsets = embedding_lookup(biases, every, partition_strategy)
    logits, wanted = _logits(
        inputs, labels, rows, offsets, sampled, *expected, remove_accidental_hits
    )
    return logits, wanted


@op("labels")
def _flat(labels: Array, kind: Static, name: str | None = None) -> Array:
    return jnp.ravel(labels).astype(kind)


@public.add()
def nce_loss(
    weights: Table,
    biases: Table,
    labels: rt.TensorLike,
    inputs: rt.TensorLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Sampled | None = None,
    remove_accidental_hits: bool = False,
    partition_strategy: str = "mod",
    name: str = "nce_loss",
) -> rt.Tensor:
    """Computes noise-contrastive estimation (Gutmann and Hyvärinen, 2010): true classes against sampled ones.

    Args:
        weights: [num_classes, dim], or a list of parts.
        biases: [num_classes].
        labels: [batch, num_true] integers; before 1.0 they stood behind ``inputs``.
        inputs: [batch, dim].
        num_sampled: classes that are drawn for the whole batch.
        num_classes: all classes.
        num_true: true classes of each example.
        sampled_values: what a sampler gave; ``log_uniform_candidate_sampler`` by default.
        remove_accidental_hits: leave out sampled classes that are the true one.
        partition_strategy: how the parts make one table; see ``embedding_lookup``.
        name: name scope.

    Returns:
        [batch] losses.
    """
    with rt.Graph.of(inputs, labels).as_default(), rt.name_scope(name) as scope:
        logits, wanted = _sampled_logits(
            weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values,
            remove_accidental_hits, partition_strategy, None,
        )  # fmt: skip
        loss: rt.Tensor = _nce(logits, wanted, scope)
    return loss


@public.add()
def sampled_softmax_loss(
    weights: Table,
    biases: Table,
    labels: rt.TensorLike,
    inputs: rt.TensorLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Sampled | None = None,
    remove_accidental_hits: bool = True,
    partition_strategy: str = "mod",
    name: str = "sampled_softmax_loss",
    seed: int | None = None,
) -> rt.Tensor:
    """Computes softmax cross entropy over the true and the sampled classes (Jean et al., 2014), as ``nce_loss``."""
    with rt.Graph.of(inputs, labels).as_default(), rt.name_scope(name) as scope:
        logits, wanted = _sampled_logits(
            weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values,
            remove_accidental_hits, partition_strategy, seed,
        )  # fmt: skip
        loss: rt.Tensor = _softmax(logits, stop_gradient(wanted), scope)
    return loss
