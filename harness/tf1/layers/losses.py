"""``tf.losses``: losses of a batch as one number, each weighted, and added to a collection."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.graph.framework import GraphKeys
from harness.tf1.layers import nn_ops
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import TABLE
from harness.tf1.ops.array_ops import squeeze
from harness.tf1.ops.lift import Array, Public, op
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf.losses")

LOSSES = "losses"
"""The collection that a loss is added to."""


@public.add()
class Reduction:
    """The ways in which the losses of the examples become one number, or stay."""

    NONE = "none"
    SUM = "weighted_sum"
    MEAN = "weighted_mean"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    SUM_OVER_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"

    @classmethod
    def all(cls) -> tuple[str, ...]:
        """Returns the values that ``reduction`` may have."""
        return tuple(_REDUCTIONS)

    @classmethod
    def validate(cls, key: str) -> None:
        """Raises ValueError for any other value."""
        if key not in _REDUCTIONS:
            raise ValueError(f"Invalid ReductionKey {key}: it is none of {', '.join(_REDUCTIONS)}")


def _divide_safely(total: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the quotient; 0 where nothing counts."""
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


_REDUCTIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    Reduction.NONE: lambda values, weights: values * weights,
    Reduction.SUM: lambda values, weights: jnp.sum(values * weights),
    Reduction.MEAN: lambda values, weights: _divide_safely(
        jnp.sum(values * weights), jnp.sum(weights)
    ),
    Reduction.SUM_OVER_BATCH_SIZE: lambda values, weights: jnp.sum(values * weights) / values.size,
    Reduction.SUM_BY_NONZERO_WEIGHTS: lambda values, weights: _divide_safely(
        jnp.sum(values * weights), jnp.sum(weights != 0).astype(values.dtype)
    ),
}


@op("value")
def _weighted(losses: Array, weights: Array, reduction: str, name: str | None = None) -> Array:
    values = jnp.asarray(losses)
    values = values if jnp.issubdtype(values.dtype, np.floating) else values.astype(np.float32)
    factors = jnp.asarray(weights).astype(values.dtype)
    # A weight for each example counts for all its elements, where numpy would align the last axes.
    if factors.ndim and factors.ndim < values.ndim:
        factors = jnp.reshape(factors, factors.shape + (1,) * (values.ndim - factors.ndim))
    elif factors.ndim == values.ndim + 1 and factors.shape[-1] == 1:
        factors = jnp.squeeze(factors, -1)
    return _REDUCTIONS[reduction](values, jnp.broadcast_to(factors, values.shape))


@public.add()
def compute_weighted_loss(
    losses: rt.TensorLike,
    weights: rt.TensorLike = 1.0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> rt.Tensor:
    """Reduces ``losses * weights`` to one number, by ``reduction``, and adds it to ``loss_collection``.

    Args:
        losses: of the examples.
        weights: a number, or one for each example or element; those with 0 do not count.
        scope: name of the operations.
        loss_collection: None adds it nowhere.
        reduction: one of ``Reduction``.

    Raises:
        ValueError: another reduction.
    """
    Reduction.validate(reduction)
    with rt.name_scope(scope or "weighted_loss"):
        label = {Reduction.NONE: "Mul", Reduction.SUM: "Sum"}.get(reduction, "value")
        loss: rt.Tensor = _weighted(losses, weights, reduction, name=label)
    add_loss(loss, loss_collection)
    return loss


@public.add()
def add_loss(loss: rt.Tensor, loss_collection: str | None = LOSSES) -> None:
    """Adds a loss of your own to the collection."""
    if loss_collection:
        loss.graph.add_to_collection(loss_collection, loss)


@public.add()
def get_losses(scope: str | None = None, loss_collection: str = LOSSES) -> list[rt.Tensor]:
    """Returns the losses of the default graph; with ``scope`` those whose names begin with it."""
    return rt.get_default_graph().get_collection(loss_collection, scope)


@public.add()
def get_regularization_losses(scope: str | None = None) -> list[rt.Tensor]:
    """Returns the losses of the regularizers of the variables."""
    return rt.get_default_graph().get_collection(GraphKeys.REGULARIZATION_LOSSES, scope)


@public.add()
def get_regularization_loss(
    scope: str | None = None, name: str = "total_regularization_loss"
) -> Any:
    """Returns the sum of the losses of the regularizers; 0 when there are none."""
    found = get_regularization_losses(scope)
    return TABLE["tf"]["add_n"](found, name=name) if found else rt.constant(0.0, name=name)


@public.add()
def get_total_loss(
    add_regularization_losses: bool = True, name: str = "total_loss", scope: str | None = None
) -> rt.Tensor:
    """Returns the sum of all losses.

    Raises:
        ValueError: there are none.
    """
    found = get_losses(scope)
    if add_regularization_losses:
        found = found + get_regularization_losses(scope)
    if not found:
        raise ValueError(
            "tf.losses.get_total_loss: the graph has no losses: call one of tf.losses first"
        )
    total: rt.Tensor = TABLE["tf"]["add_n"](found, name=name)
    return total


def _by_element(
    shown: str,
    described: str,
    fn: Callable[..., jax.Array],
    predicted: str = "predictions",
    **more: float,
) -> None:
    """Adds the loss that is ``fn`` of each element of labels and predictions, in the predictions' floating point type.

    Args:
        shown: the name of the loss.
        described: the loss in words.
        fn: a function of two arrays of one shape, and of ``more``.
        predicted: the name of the second argument.
        more: further arguments, with their defaults.
    """
    defaults = {"weights": 1.0, **more, "scope": None, "loss_collection": LOSSES}
    required = [inspect.Parameter(n, _ANYHOW) for n in ("labels", predicted)]
    given = [
        inspect.Parameter(n, _ANYHOW, default=value)
        for n, value in (defaults | {"reduction": _DEFAULT}).items()
    ]
    signature = inspect.Signature([*required, *given])

    def loss(*args: Any, **kwargs: Any) -> rt.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        labels, predictions, weights, *options, scope, collection, reduction = (
            bound.arguments.values()
        )
        known, wanted = rt.as_tensor(labels).shape, rt.as_tensor(predictions).shape
        if (
            known is not None
            and wanted is not None
            and not TensorShape(known).is_compatible_with(wanted)
        ):
            raise ValueError(f"tf.losses.{shown}: Shapes {known} and {wanted} are incompatible")

        # Defined here, because the options are Python numbers of the program and not tensors.
        @op("elements")
        def elements(labels: Array, predictions: Array, name: str | None = None) -> Array:
            given = jnp.asarray(predictions)
            wide = given if jnp.issubdtype(given.dtype, np.floating) else given.astype(np.float32)
            return fn(jnp.asarray(labels).astype(wide.dtype), wide, *options)

        with rt.name_scope(scope or shown) as opened:
            return compute_weighted_loss(
                elements(labels, predictions), weights, opened, collection, reduction
            )

    loss.__name__ = loss.__qualname__ = shown
    loss.__doc__ = f"{described}. The other arguments are those of ``compute_weighted_loss``."
    loss.__signature__ = signature  # type: ignore[attr-defined]
    public.update({shown: loss})


_ANYHOW = inspect.Parameter.POSITIONAL_OR_KEYWORD
_DEFAULT = Reduction.SUM_BY_NONZERO_WEIGHTS

_by_element("mean_squared_error", "The squared difference", lambda y, p: jnp.square(p - y))
_by_element("absolute_difference", "The absolute difference", lambda y, p: jnp.abs(p - y))
_by_element(
    "log_loss",
    "The cross entropy of probabilities; ``epsilon`` keeps the logarithms finite",
    lambda y, p, epsilon: -y * jnp.log(p + epsilon) - (1 - y) * jnp.log(1 - p + epsilon),
    epsilon=1e-7,
)
_by_element(
    "huber_loss",
    "Half the square of the difference up to ``delta``, and linear beyond",
    lambda y, p, delta: jnp.where(
        jnp.abs(p - y) <= delta, jnp.square(p - y) / 2, delta * jnp.abs(p - y) - delta**2 / 2
    ),
    delta=1.0,
)
_by_element(
    "hinge_loss",
    "``max(0, 1 - y * logits)`` with y -1 for the label 0 and 1 for the label 1",
    lambda y, logits: jnp.maximum(0, 1 - (2 * y - 1) * logits),
    "logits",
)


def _smooth_labels(labels: rt.TensorLike, smoothing: float, classes: Callable[[int], int]) -> Any:
    """Labels mixed with equal parts of all classes."""

    @op("smooth")
    def smooth(labels: Array, name: str | None = None) -> Array:
        wide = jnp.asarray(labels).astype(np.float32)
        return wide * (1 - smoothing) + smoothing / classes(wide.shape[-1])

    return smooth(labels)


@public.add()
def softmax_cross_entropy(
    onehot_labels: rt.TensorLike,
    logits: rt.TensorLike,
    weights: rt.TensorLike = 1.0,
    label_smoothing: float = 0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> rt.Tensor:
    """Reduces ``tf.nn.softmax_cross_entropy_with_logits`` of [batch, classes] to one number.

    Args:
        onehot_labels: [batch, classes].
        logits: [batch, classes].
        weights: a number, or one for each example.
        label_smoothing: this part of the labels is spread over all classes.
        scope: name of the operations.
        loss_collection: None adds it nowhere.
        reduction: one of ``Reduction``.
    """
    labels = (
        _smooth_labels(onehot_labels, label_smoothing, lambda classes: classes)
        if label_smoothing
        else onehot_labels
    )
    values = nn_ops.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return compute_weighted_loss(
        values, weights, scope or "softmax_cross_entropy_loss", loss_collection, reduction
    )


@public.add()
def sparse_softmax_cross_entropy(
    labels: rt.TensorLike,
    logits: rt.TensorLike,
    weights: rt.TensorLike = 1.0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> rt.Tensor:
    """Reduces ``tf.nn.sparse_softmax_cross_entropy_with_logits`` of [batch] or [batch, 1] to one number."""
    classes, scores = convert_to_tensor(labels), convert_to_tensor(logits)
    if (
        classes.shape is not None
        and scores.shape is not None
        and len(classes.shape) == len(scores.shape)
    ):
        classes = squeeze(classes, [-1])
    values = nn_ops.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=scores)
    return compute_weighted_loss(
        values, weights, scope or "sparse_softmax_cross_entropy_loss", loss_collection, reduction
    )


@public.add()
def sigmoid_cross_entropy(
    multi_class_labels: rt.TensorLike,
    logits: rt.TensorLike,
    weights: rt.TensorLike = 1.0,
    label_smoothing: float = 0,
    scope: str | None = None,
    loss_collection: str | None = LOSSES,
    reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> rt.Tensor:
    """Reduces ``tf.nn.sigmoid_cross_entropy_with_logits``; ``label_smoothing`` moves labels towards a half."""
    labels = (
        _smooth_labels(multi_class_labels, label_smoothing, lambda classes: 2)
        if label_smoothing
        else multi_class_labels
    )
    values = nn_ops.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    return compute_weighted_loss(
        values, weights, scope or "sigmoid_cross_entropy_loss", loss_collection, reduction
    )


__getattr__, __dir__ = namespace("tf.losses")
