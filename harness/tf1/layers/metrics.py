"""``tf.metrics``: numbers about all batches since a session began, kept in local variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.graph.scopes import variable_scope
from harness.tf1.graph.variables import Variable, assign_add
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import TABLE
from harness.tf1.ops.lift import Array, Public, Static, op

public = Public("tf.metrics")

Collections = str | Sequence[str] | None
Pair = tuple[rt.Tensor, rt.Tensor]
"""The value so far, and the operation that takes a batch in and gives the value then."""

METRIC_VARIABLES = "metric_variables"
"""The collection of what metrics count."""


# -- what is counted, and what becomes of it -------------------------------------------------------


def _divide_counts(total: jax.Array, count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


def _broadcast_weights(weights: jax.Array | float, values: jax.Array) -> jax.Array:
    """Returns weights: a number, or an array of the values' rank with 1 for an axis that shares them."""
    each = jnp.asarray(weights, jnp.float32)
    if each.ndim and each.ndim != values.ndim:
        raise rt.InvalidArgumentError(
            f"weights of shape {each.shape} do not fit values of shape {values.shape}"
        )
    return jnp.broadcast_to(each, values.shape)


@op("remove_squeezable_dimensions")
def _same_rank(labels: Array, predictions: Array, name: str | None = None) -> tuple[Array, ...]:
    """Returns both without a last dimension of 1 that only one of them has."""
    if predictions.ndim - labels.ndim == 1 and predictions.shape[-1] == 1:
        predictions = predictions[..., 0]
    elif labels.ndim - predictions.ndim == 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.shape != predictions.shape:
        raise rt.InvalidArgumentError(
            f"labels of shape {labels.shape}, predictions of shape {predictions.shape}"
        )
    return labels, predictions


@op("batch")
def _sums(values: Array, weights: Array | None, name: str | None = None) -> tuple[Array, ...]:
    values = jnp.asarray(values, jnp.float32)
    counted = _broadcast_weights(1.0 if weights is None else weights, values)
    return jnp.sum(values * counted), jnp.sum(counted)


@op("is_correct")
def _equal(labels: Array, predictions: Array, name: str | None = None) -> Array:
    return (predictions.astype(labels.dtype) == labels).astype(jnp.float32)


@op("confusion")
def _counts(
    labels: Array,
    predictions: Array,
    weights: Array | None,
    limits: Static,
    name: str | None = None,
) -> tuple[Array, ...]:
    """Counts the elements of each of ``_KINDS`` for each limit; of booleans, without limits, one number each."""
    counted = _broadcast_weights(1.0 if weights is None else weights, labels)
    # All limits at once, along a first axis: 200 of them make one operation.
    if limits is None:
        positive = predictions.astype(bool)
    else:
        positive = predictions > jnp.asarray(limits, jnp.float32).reshape(
            -1, *[1] * predictions.ndim
        )
    true = labels.astype(bool)
    axes = tuple(range(positive.ndim - true.ndim, positive.ndim))
    kinds = (positive & true, ~positive & true, ~positive & ~true, positive & ~true)
    return tuple(jnp.sum(kind * counted, axis=axes) for kind in kinds)


_KINDS = ("true_positives", "false_negatives", "true_negatives", "false_positives")


def _area_under_curve(
    curve: str, tp: jax.Array, fn: jax.Array, tn: jax.Array, fp: jax.Array
) -> jax.Array:
    """Computes the area under a curve of points, by trapezoids."""
    small = 1e-6  # instead of a division by zero, as TensorFlow has it
    recall = (tp + small) / (tp + fn + small)
    # Thresholds rise, so both rates fall: x[:-1] - x[1:] is positive.
    x, y = (
        (fp / (fp + tn + small), recall)
        if curve == "ROC"
        else (recall, (tp + small) / (tp + fp + small))
    )
    return jnp.sum((x[:-1] - x[1:]) * (y[:-1] + y[1:]) / 2)


# -- metrics ---------------------------------------------------------------------------------------


def _make_metric(
    counts: dict[str, rt.Tensor],
    result: Callable[..., jax.Array],
    metrics_collections: Collections,
    updates_collections: Collections,
) -> Pair:
    """Keeps ``counts`` in variables of these names, and makes a value of the sums."""
    # TensorFlow counts in local variables: each session by itself, and no checkpoint has them.
    collections = [rt.GraphKeys.LOCAL_VARIABLES, METRIC_VARIABLES]
    variables = [
        Variable(
            np.zeros(count.shape or (), np.float32),
            trainable=False,
            collections=collections,
            name=name,
        )
        for name, count in counts.items()
    ]
    value: rt.Tensor = rt.call(result, *variables, name="value")
    added = [
        assign_add(variable, count)
        for variable, count in zip(variables, counts.values(), strict=True)
    ]
    update: rt.Tensor = rt.call(result, *added, name="update_op")
    for tensor, wanted in ((value, metrics_collections), (update, updates_collections)):
        for collection in [wanted] if isinstance(wanted, str) else wanted or ():
            tensor.graph.add_to_collection(collection, tensor)
    return value, update


@public.add()
def mean(
    values: rt.TensorLike,
    weights: rt.TensorLike | None = None,
    metrics_collections: Collections = None,
    updates_collections: Collections = None,
    name: str | None = None,
) -> Pair:
    """Returns the weighted mean of all values, and the operation that takes a batch in."""
    with variable_scope(name, "mean"):
        total, count = _sums(values, weights)
        return _make_metric(
            {"total": total, "count": count},
            _divide_counts,
            metrics_collections,
            updates_collections,
        )


Counted = Callable[[Any, Any, Any], dict[str, rt.Tensor]]
"""What a metric counts of labels, predictions and weights, by the names of its variables."""


def _add_metric(
    shown: str, described: str, counted: Counted, result: Callable[..., jax.Array]
) -> None:
    """Adds a metric: ``result`` of the ``counted`` sums over all batches."""

    def metric(
        labels: rt.TensorLike,
        predictions: rt.TensorLike,
        weights: rt.TensorLike | None = None,
        metrics_collections: Collections = None,
        updates_collections: Collections = None,
        name: str | None = None,
    ) -> Pair:
        with variable_scope(name, shown):
            own, found = _same_rank(labels, predictions)
            return _make_metric(
                counted(own, found, weights), result, metrics_collections, updates_collections
            )

    metric.__name__ = metric.__qualname__ = shown
    metric.__doc__ = f"{described}; gives it and the operation that takes a batch in."
    public.update({shown: metric})


def _mean_of(
    shown: str,
    described: str,
    of_batch: Callable[[Any, Any], rt.Tensor],
    result: Callable[..., jax.Array] = _divide_counts,
) -> None:
    def counted(labels: Any, predictions: Any, weights: Any) -> dict[str, rt.Tensor]:
        return dict(
            zip(("total", "count"), _sums(of_batch(labels, predictions), weights), strict=True)
        )

    _add_metric(shown, f"{described} over all batches", counted, result)


_abs, _subtract, _squared = (
    TABLE["tf"][name] for name in ("abs", "subtract", "squared_difference")
)
_mean_of("accuracy", "How many predictions are equal to their labels,", _equal)
_mean_of("mean_absolute_error", "The mean absolute error", lambda y, p: _abs(_subtract(p, y)))
_mean_of("mean_squared_error", "The mean squared error", _squared)
_mean_of(
    "root_mean_squared_error",
    "The root of the mean squared error",
    _squared,
    lambda *a: jnp.sqrt(_divide_counts(*a)),
)


def _count_of(
    shown: str, kinds: Sequence[str], described: str, result: Callable[..., jax.Array]
) -> None:
    def counted(labels: Any, predictions: Any, weights: Any) -> dict[str, rt.Tensor]:
        found = dict(zip(_KINDS, _counts(labels, predictions, weights, None), strict=True))
        return {"count" if kind == shown else f"{kind}/count": found[kind] for kind in kinds}

    _add_metric(
        shown, f"{described} over all batches, of values that are true or not", counted, result
    )


_count_of(
    "precision",
    ["true_positives", "false_positives"],
    "True among all positives",
    lambda t, f: _divide_counts(t, t + f),
)
_count_of(
    "recall",
    ["true_positives", "false_negatives"],
    "Positives among all true",
    lambda t, f: _divide_counts(t, t + f),
)
for _kind in _KINDS:
    _count_of(_kind, [_kind], f"The {_kind.replace('_', ' ')}", lambda count: count)


@public.add()
def auc(
    labels: rt.TensorLike,
    predictions: rt.TensorLike,
    weights: rt.TensorLike | None = None,
    num_thresholds: int = 200,
    metrics_collections: Collections = None,
    updates_collections: Collections = None,
    curve: str = "ROC",
    name: str | None = None,
    summation_method: str = "trapezoidal",
) -> Pair:
    """Returns the area under the "ROC" or "PR" curve over all batches, and the operation that takes a batch in.

    Args:
        labels: whether each is true.
        predictions: from 0 to 1, of the same shape.
        weights: of each; 1 by default.
        num_thresholds: how many points of the curve are computed.
        metrics_collections: collections to add the value to.
        updates_collections: collections to add the operation to.
        curve: "ROC" or "PR".
        name: of the scope of its variables.
        summation_method: "trapezoidal".

    Raises:
        ValueError: another curve or method.
    """
    if curve not in ("ROC", "PR"):
        raise ValueError(f"auc: the curve is ROC or PR, not {curve!r}")
    if summation_method != "trapezoidal":
        raise ValueError(f"auc: the summation method is trapezoidal, not {summation_method!r}")
    # TensorFlow's thresholds: the outer two lie beyond 0 and 1, so that all points of the curve are
    # there.
    between = [(i + 1) / (num_thresholds - 1) for i in range(num_thresholds - 2)]
    with variable_scope(name, "auc"):
        counts = _counts(*_same_rank(labels, predictions), weights, [-1e-7, *between, 1 + 1e-7])
        found = dict(zip(_KINDS, counts, strict=True))
        return _make_metric(
            found,
            functools.partial(_area_under_curve, curve),
            metrics_collections,
            updates_collections,
        )


def streaming(metric: Callable[..., Pair]) -> Callable[..., Pair]:
    """Returns a metric as ``tf.contrib.metrics`` has it: predictions come before labels."""

    def predictions_first(
        predictions: rt.TensorLike, labels: rt.TensorLike, *args: Any, **kwargs: Any
    ) -> Pair:
        return metric(labels, predictions, *args, **kwargs)

    predictions_first.__name__ = predictions_first.__qualname__ = f"streaming_{metric.__name__}"
    predictions_first.__doc__ = f"``tf.metrics.{metric.__name__}``, which takes the labels first."
    return predictions_first


STREAMING: dict[str, Any] = {
    f"streaming_{name}": metric if name == "mean" else streaming(metric)
    for name, metric in TABLE["tf.metrics"].items()
}
"""The same by the names of ``tf.contrib.metrics``."""

__getattr__, __dir__ = namespace("tf.metrics")
