"""Lookups by sparse ids: the rows of each example are summed, or averaged."""

from __future__ import annotations

from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np
from absl import logging

import runtime as rt
from harness.tf1.layers.nn_ops import embedding_lookup
from harness.tf1.ops.lift import Array, Public
from harness.tf1.ops.python_ops import host_ops
from harness.tf1.ops.sparse import SparseTensor
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime.lowlevel import Array as HostArray

public = Public("tf.nn")

Combiner = Literal["sum", "mean", "sqrtn"]


@public.add()
def embedding_lookup_sparse(
    params: Any,
    sp_ids: SparseTensor,
    sp_weights: SparseTensor | None,
    partition_strategy: str = "mod",
    name: str | None = None,
    combiner: str | None = None,
    max_norm: rt.TensorLike | None = None,
) -> rt.Tensor:
    """Looks up the rows of the ids of each example, and combines the rows of an example.

    Args:
        params: table [rows, ...], or a list of its parts.
        sp_ids: ids, a matrix with a row for each example.
        sp_weights: weights of the same indices, or None for weights of 1.
        partition_strategy: as for ``embedding_lookup``.
        name: name scope.
        combiner: "sum", "mean" (the sum, divided by the sum of the weights) or "sqrtn" (divided by
            the root of the sum of their squares); "mean" if None.
        max_norm: largest norm of a row.

    Returns:
        A row for each example, up to the last example with an id; zeros for one without an id.

    Raises:
        ValueError: another combiner.
    """
    if combiner is None:
        logging.warning('The default value of combiner will change from "mean" to "sqrtn".')
    chosen = _check_combiner("embedding_lookup_sparse", combiner or "mean")

    def group(indices: HostArray, shape: HostArray, ids: HostArray, *_: HostArray) -> list[Any]:
        segments = indices[:, 0]
        count = int(segments.max()) + 1 if len(segments) else 0
        return [np.arange(len(segments)), segments, ids, np.zeros(count, bool)]

    with rt.name_scope(name or "embedding_lookup_sparse"):
        return _combine(
            params, sp_ids, sp_weights, group, (None,), partition_strategy, chosen, max_norm
        )[0]


@public.add()
def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: SparseTensor,
    sparse_weights: SparseTensor | None = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: rt.TensorLike | None = None,
) -> rt.Tensor:
    """Calls ``embedding_lookup_sparse`` without negative ids, for any number of dimensions.

    Args:
        embedding_weights: table, or a list of its parts.
        sparse_ids: ids [d_0, ..., d_n]; those of the last axis are combined.
        sparse_weights: weights. An id whose weight is not positive is left out, unless the combiner
            is "sum".
        combiner: as for ``embedding_lookup_sparse``.
        default_id: the row of an example without an id; zeros if None.
        name: name scope.
        partition_strategy: as for ``embedding_lookup``.
        max_norm: largest norm of a row.

    Returns:
        Combined rows [d_0, ..., d_(n-1), ...].

    Raises:
        ValueError: another combiner.
    """
    chosen = _check_combiner("safe_embedding_lookup_sparse", combiner or "mean")

    def group(
        indices: HostArray, shape: HostArray, ids: HostArray, *weights: HostArray
    ) -> list[Any]:
        outer = tuple(int(size) for size in shape[:-1])
        positive = weights[0] > 0 if weights and chosen != "sum" else True
        kept = np.flatnonzero((ids >= 0) & positive)
        segments = np.ravel_multi_index(tuple(indices[kept, :-1].T), outer)
        empty = np.ones(outer, bool)
        empty.reshape(-1)[segments] = False
        return [kept, segments, ids[kept], empty]

    rank = sparse_ids.indices.shape[1] if sparse_ids.indices.shape else None
    outer = None if rank is None else (sparse_ids.shape.as_list() or [None] * rank)[:-1]
    with rt.name_scope(name or "safe_embedding_lookup_sparse"):
        combined, empty = _combine(
            embedding_weights, sparse_ids, sparse_weights, group,
            None if outer is None else tuple(outer), partition_strategy, chosen, max_norm,
        )  # fmt: skip
        if default_id is None:
            return combined
        row = embedding_lookup(
            embedding_weights, [default_id], partition_strategy, None, True, max_norm
        )

        def fill(empty: Array, row: Array, combined: Array) -> Array:
            shown = empty.reshape(*empty.shape, *(1 for _ in row.shape[1:]))
            return jnp.where(shown, row[0], combined)

        filled: rt.Tensor = rt.call(fill, empty, row, combined, name="defaults")
    return filled


def _combine(
    params: Any,
    ids: SparseTensor,
    weights: SparseTensor | None,
    group: Any,
    outer: tuple[int | None, ...] | None,
    strategy: str,
    combiner: Combiner,
    max_norm: rt.TensorLike | None,
) -> tuple[rt.Tensor, rt.Tensor]:
    """Returns the combined rows, and an array of the examples that are empty.

    Args:
        params: table, or its parts.
        ids: sparse ids.
        weights: sparse weights, or None.
        group: function on the host of indices, shape, ids, and weights if any. The function returns
            the places of the ids that count, the example of each, these ids, and the empty
            examples.
        outer: static shape of the examples, as far as known.
        strategy: strategy of the parts.
        combiner: combiner.
        max_norm: largest norm of a row.
    """
    given = [ids.indices, ids.dense_shape, ids.values]
    given += [] if weights is None else [weights.values]
    kept, segments, chosen, empty = host_ops(
        group,
        given,
        [((None,), np.int64), ((None,), np.int64), ((None,), ids.values.dtype), (outer, np.bool_)],
        None,
        "SparseSegments",
    )
    rows = embedding_lookup(params, chosen, strategy, None, True, max_norm)

    def combine(rows: Array, segments: Array, empty: Array, kept: Array, *weights: Array) -> Array:
        factors = weights[0][kept] if weights else jnp.ones(kept.shape, rows.dtype)
        factors = factors.astype(rows.dtype).reshape(-1, *(1 for _ in rows.shape[1:]))

        def add(values: Array) -> Array:
            sums = jnp.zeros((empty.size, *values.shape[1:]), rows.dtype)
            return sums.at[segments].add(values)

        total = add(rows * factors)
        if combiner != "sum":
            divisor = add(factors) if combiner == "mean" else jnp.sqrt(add(factors**2))
            # The quotient is 0 where the divisor is, and has no NaN in its gradient.
            total = jnp.where(divisor == 0, 0, total / jnp.where(divisor == 0, 1, divisor))
        return total.reshape(*empty.shape, *rows.shape[1:])

    more = [] if weights is None else [convert_to_tensor(weights.values)]
    combined: rt.Tensor = rt.call(combine, rows, segments, empty, kept, *more, name="combine")
    return combined, empty


def _check_combiner(what: str, combiner: str) -> Combiner:
    if combiner not in ("sum", "mean", "sqrtn"):
        raise ValueError(
            f"{what}: combiner must be one of 'mean', 'sqrtn' or 'sum', not {combiner!r}"
        )
    return cast(Combiner, combiner)
