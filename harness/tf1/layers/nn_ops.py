"""Neural network functions: activations, losses, convolutions, pooling, normalisation and embeddings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.graph.framework import stop_gradient
from harness.tf1.graph.partitions import PartitionedVariable
from harness.tf1.names.table import TABLE
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.indices import axis_size, check_known, inside
from harness.tf1.ops.join_ops import top_k_op
from harness.tf1.ops.lift import (
    Array,
    Arrays,
    Function,
    Public,
    Static,
    WrongType,
    either,
    from_table,
    is_tensor,
    op,
)
from harness.tf1.ops.math_ops import _abs, as_axes
from harness.tf1.ops.shapes import ShapeLike, TensorShape

public = Public("tf.nn")


def _relu6(features: Array) -> Array:
    """Limits ``features`` to 0 and 6."""
    return jax.nn.relu6(features).astype(jnp.result_type(features))


def _softsign(features: Array) -> Array:
    """Computes ``features / (1 + |features|)``."""
    return features / (1 + jnp.abs(features))


def _l2_loss(t: Array) -> Array:
    """Computes half the sum of squares."""
    return jnp.sum(jnp.square(t)) / 2


def _selu(features: Array) -> Array:
    """Computes ``scale * elu(features, alpha)`` with the constants of self-normalising networks."""
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    positive = features >= 0
    return scale * jnp.where(
        positive, features, alpha * jnp.expm1(jnp.where(positive, 0, features))
    )


def _zero_fraction(value: Array) -> Array:
    """Computes the share of the elements that are zero."""
    return jnp.mean(jnp.equal(value, 0).astype(np.float32))


_ACTIVATIONS: dict[str, tuple[str, Function, str, str]] = {
    "relu": ("Relu", jax.nn.relu, "features", "int float"),
    "relu6": ("Relu6", _relu6, "features", "int float"),
    "elu": ("Elu", jax.nn.elu, "features", "float"),
    "selu": ("Selu", _selu, "features", "float"),
    "softplus": ("Softplus", jax.nn.softplus, "features", "float"),
    "softsign": ("Softsign", _softsign, "features", "float"),
    "swish": ("Swish", jax.nn.silu, "features", "float"),
    "l2_loss": ("L2Loss", _l2_loss, "t", "float"),
    "zero_fraction": ("zero_fraction", _zero_fraction, "value", "int float complex bool"),
}
public.update(
    {
        name: from_table(kind, fn, x, name, takes)
        for name, (kind, fn, x, takes) in _ACTIVATIONS.items()
    }
)


@public.op("Softmax", takes="float")
def softmax(
    logits: Array, axis: Static = None, name: str | None = None, dim: Static = None
) -> Array:
    """Calls ``jax.nn.softmax``, along the last axis by default."""
    over = either(axis=axis, dim=dim)
    return jax.nn.softmax(logits, -1 if over is None else over)


@public.op("LogSoftmax", takes="float")
def log_softmax(
    logits: Array, axis: Static = None, name: str | None = None, dim: Static = None
) -> Array:
    """Calls ``jax.nn.log_softmax``, along the last axis by default."""
    over = either(axis=axis, dim=dim)
    return jax.nn.log_softmax(logits, -1 if over is None else over)


@public.op("LeakyRelu")
def leaky_relu(features: Array, alpha: float = 0.2, name: str | None = None) -> Array:
    """Returns ``features`` above 0, and ``alpha * features`` elsewhere."""
    # TensorFlow's attribute is a float32, whatever the dtype of the features.
    rounded = float(np.float32(alpha))
    return jnp.where(jnp.greater(features, 0), features, rounded * jnp.asarray(features))


@public.op("BiasAdd", takes="int float complex")
def bias_add(
    value: Array, bias: Array, data_format: str | None = None, name: str | None = None
) -> Array:
    """Adds a vector along the channels."""
    if data_format not in (None, "NHWC", "NCHW", "N...C", "NC..."):
        raise ValueError(f"data_format must be 'NHWC' or 'NCHW', not {data_format!r}")
    first = data_format is not None and data_format.startswith("NC")
    shape = jnp.shape(value)
    if len(shape) < 2 or jnp.shape(bias) != (shape[1 if first else -1],):
        raise ValueError(
            f"the bias must be one number for each channel of {shape}, not of shape "
            f"{jnp.shape(bias)}"
        )
    return value + (jnp.reshape(bias, (-1,) + (1,) * (jnp.ndim(value) - 2)) if first else bias)


@public.op("xw_plus_b", takes="int float complex")
def xw_plus_b(x: Array, weights: Array, biases: Array, name: str | None = None) -> Array:
    """Computes ``x @ weights + biases``."""
    return _affine_layer(x, weights, biases)


@public.op("relu_layer", takes="int float complex")
def relu_layer(x: Array, weights: Array, biases: Array, name: str | None = None) -> Array:
    """Computes ``relu(x @ weights + biases)``."""
    return jax.nn.relu(_affine_layer(x, weights, biases))


def _affine_layer(x: Array, weights: Array, biases: Array) -> Array:
    found = jnp.matmul(x, weights)
    if jnp.shape(biases) != found.shape[-1:]:
        raise ValueError(
            f"the biases must be one number for each column of {found.shape}, not "
            f"{jnp.shape(biases)}"
        )
    return found + biases


@public.op("l2_normalize")
def l2_normalize(
    x: Array,
    axis: Static = None,
    epsilon: float = 1e-12,
    name: str | None = None,
    dim: Static = None,
) -> Array:
    """Divides ``x`` by its Euclidean norm along ``axis``."""
    axes = as_axes(either(axis=axis, dim=dim))
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axes, keepdims=True), epsilon))


# -- losses ----------------------------------------------------------------------------------------


def _labels_and_logits(
    args: tuple[Any, ...], labels: rt.TensorLike, logits: rt.TensorLike, what: str
) -> tuple[Any, Any]:
    """Returns the two by name as in 1.0, or (logits, labels) by position as before."""
    if args and not (len(args) == 1 and args[0] is None):
        if labels is not None or logits is not None or len(args) != 2:
            raise ValueError(
                f"{what}: give labels= and logits= by name (by position the old order is logits, "
                "labels)"
            )
        logits, labels = args
    if labels is None or logits is None:
        raise ValueError(f"{what}: both labels and logits must be given")
    return labels, logits


@op("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_xent(labels: Array, logits: Array, name: str | None = None) -> Array:
    whole = jnp.asarray(labels)
    if whole.shape != jnp.shape(logits)[:-1]:
        raise ValueError(
            f"labels of shape {jnp.shape(logits)[:-1]} go with these logits, not {whole.shape}"
        )
    if whole.dtype.name not in ("int16", "int32", "int64"):
        raise WrongType(f"the labels must be int32 or int64, not {whole.dtype}")
    if not jnp.issubdtype(jnp.result_type(logits), np.floating):
        raise WrongType(f"the logits must be floating point numbers, not {jnp.result_type(logits)}")
    classes = jnp.shape(logits)[-1]
    # A compiled step cannot raise: TensorFlow's GPU kernel gives NaN for a label that is no class.
    valid = (whole >= 0) & (whole < classes)
    own = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.where(valid, whole, 0)[..., None], -1
    )[..., 0]
    return own * jnp.where(valid, -1.0, np.nan).astype(own.dtype)


@public.add()
def sparse_softmax_cross_entropy_with_logits(
    *args: Any, labels: Any = None, logits: Any = None, name: str | None = None
) -> rt.Tensor:
    """Cross entropy of class numbers: ``(labels=, logits=)``, or ``(logits, labels)`` by position as before 1.0.

    NaN, and so is its gradient, for a label that is no class, as TensorFlow has it on GPU.

    Raises:
        InvalidArgumentError: a literal label is no class.
    """
    labels, logits = _labels_and_logits(
        args, labels, logits, "sparse_softmax_cross_entropy_with_logits"
    )
    check_known(labels, axis_size(logits, -1), "sparse_softmax_cross_entropy_with_logits")
    return _sparse_xent(labels, logits, name)


@op("softmax_cross_entropy_with_logits")
def _softmax_xent(labels: Array, logits: Array, dim: Static, name: str | None = None) -> Array:
    wanted = jnp.asarray(labels).astype(jnp.result_type(logits))
    loss = -jnp.sum(wanted * jax.nn.log_softmax(logits, dim), dim)
    # TensorFlow's gradient is softmax - labels, also for labels that do not sum to 1. What is added
    # is 0.
    scale = jax.nn.logsumexp(logits, dim)
    return loss + (1 - jnp.sum(wanted, dim)) * (scale - jax.lax.stop_gradient(scale))


@public.add()
def softmax_cross_entropy_with_logits(
    *args: Any, labels: Any = None, logits: Any = None, dim: int = -1, name: str | None = None
) -> rt.Tensor:
    """Cross entropy of class probabilities, arguments as for the sparse one; ``labels`` get no gradient."""
    labels, logits = _labels_and_logits(args, labels, logits, "softmax_cross_entropy_with_logits")
    label = name or "softmax_cross_entropy_with_logits_sg"
    if is_tensor(labels):
        # The first version of the function gives labels no gradient; the v2 does.
        labels = stop_gradient(labels, f"{label}/labels_stop_gradient")
    return _softmax_xent(labels, logits, dim, label)


@public.add()
def softmax_cross_entropy_with_logits_v2(
    labels: rt.TensorLike,
    logits: rt.TensorLike,
    axis: int | None = None,
    name: str | None = None,
    dim: int | None = None,
) -> rt.Tensor:
    """Computes the same with a gradient for ``labels``, and labels first."""
    over = either(axis=axis, dim=dim)
    return _softmax_xent(labels, logits, -1 if over is None else over, name)


@op("logistic_loss", takes="float")
def _sigmoid_xent(labels: Array, logits: Array, name: str | None = None) -> Array:
    positive = jnp.greater_equal(logits, 0)
    # TensorFlow's formula, which neither overflows nor has another derivative at 0.
    relu, minus_abs = (
        jnp.where(positive, logits, 0),
        jnp.where(positive, jnp.negative(logits), logits),
    )
    return relu - logits * labels + jnp.log1p(jnp.exp(minus_abs))


@public.add()
def sigmoid_cross_entropy_with_logits(
    *args: Any, labels: Any = None, logits: Any = None, targets: Any = None, name: str | None = None
) -> rt.Tensor:
    """Cross entropy of independent probabilities, arguments as for the sparse one; ``targets`` is the old name."""
    labels = targets if labels is None else labels
    labels, logits = _labels_and_logits(args, labels, logits, "sigmoid_cross_entropy_with_logits")
    shapes = [value.shape if is_tensor(value) else np.shape(value) for value in (labels, logits)]
    if None not in shapes and not TensorShape(shapes[0]).is_compatible_with(shapes[1]):
        raise ValueError(f"logits and labels must have the same shape ({shapes[1]} vs {shapes[0]})")
    # a label of unknown shape may be any that broadcasts, as in TensorFlow
    return _sigmoid_xent(labels, logits, name)


@public.op("logistic_loss")
def weighted_cross_entropy_with_logits(
    targets: Array, logits: Array, pos_weight: Array, name: str | None = None
) -> Array:
    """Computes sigmoid cross entropy with the positive targets weighted by ``pos_weight``."""
    if jnp.shape(targets) != jnp.shape(logits):
        raise ValueError(
            f"targets and logits must have one shape: {jnp.shape(targets)}, {jnp.shape(logits)}"
        )
    weight = 1 + (pos_weight - 1) * targets
    return (1 - targets) * logits + weight * (
        jnp.log1p(jnp.exp(-_abs(logits))) + jax.nn.relu(-logits)
    )


@public.op("InTopK")
def in_top_k(predictions: Array, targets: Array, k: Static, name: str | None = None) -> Array:
    """Returns True where the target's prediction is among the ``k`` largest; ties count as in.

    False where a prediction of the row is not finite, or the target is no class.
    """
    wanted = jnp.asarray(targets)
    if wanted.shape != jnp.shape(predictions)[:1]:
        raise ValueError(
            f"{jnp.shape(predictions)[0]} targets go with these predictions, not {wanted.shape}"
        )
    valid = (wanted >= 0) & (wanted < jnp.shape(predictions)[1])
    own = jnp.take_along_axis(predictions, jnp.where(valid, wanted, 0)[:, None], 1)
    # Only strictly larger predictions push the target out, so a tie at place k counts as in.
    found: Array = (
        valid & jnp.all(jnp.isfinite(predictions), 1) & (jnp.sum(predictions > own, 1) < k)
    )
    return found


class TopKV2(NamedTuple):
    """The ``values`` of ``top_k`` and their int32 ``indices``; a fetch gives arrays of the same names."""

    values: rt.TensorLike
    indices: rt.TensorLike


@public.add()
def top_k(
    input: rt.TensorLike, k: rt.TensorLike = 1, sorted: bool = True, name: str | None = None
) -> TopKV2:  # noqa: A002
    """Calls ``jax.lax.top_k``: (values, indices) along the last axis."""
    return TopKV2(*top_k_op(input, k, name))


# -- dropout and normalisation ---------------------------------------------------------------------


@op("dropout")
def _dropout(
    key: Array, x: Array, keep_prob: Array, noise_shape: Static, name: str | None = None
) -> Array:
    shape = jnp.shape(x) if noise_shape is None else _with_sizes(noise_shape, jnp.shape(x))
    kept = jax.random.bernoulli(key, keep_prob, shape)
    return jnp.where(kept, x / jnp.asarray(keep_prob, jnp.result_type(x)), jnp.zeros_like(x))


def _with_sizes(shape: list[int | None], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d if s is None else s for s, d in zip(shape, sizes, strict=True))


@public.add()
def dropout(
    x: rt.TensorLike,
    keep_prob: Any = None,
    noise_shape: ShapeLike | None = None,
    seed: int | None = None,
    name: str | None = None,
    rate: Any = None,
) -> rt.Tensor:
    """Keeps each element with probability ``keep_prob`` (which may be fed), scaled up so that the sum stays.

    Raises:
        ValueError: neither ``keep_prob`` nor ``rate``, or a ``keep_prob`` outside (0, 1].
    """
    if keep_prob is None and rate is None:
        raise ValueError("dropout: keep_prob must be given")
    if not as_dtype(x.dtype if is_tensor(x) else to_array(x).dtype).is_floating:
        raise ValueError("dropout: x must be a floating point tensor, as it is scaled")
    keep = 1 - rate if keep_prob is None else keep_prob
    if isinstance(keep, int | float):
        if not 0 < keep <= 1:
            raise ValueError(f"dropout: keep_prob must be in (0, 1], not {keep}")
        # TensorFlow gives the tensor itself, and adds no operation.
        if keep == 1:
            return rt.as_tensor(x)
    key = rt.random_key(seed, f"{name or 'dropout'}/key")
    return _dropout(key, x, keep, noise_shape, name)


@op("moments", takes="int float complex")
def _moments(
    x: Array, axes: Static, keep_dims: bool, name: str | None = None
) -> tuple[Array, Array]:
    over, kind = as_axes(axes), jnp.result_type(x)
    return tuple(fn(x, over, keepdims=keep_dims).astype(kind) for fn in (jnp.mean, jnp.var))  # type: ignore[return-value]


@public.add()
def moments(
    x: rt.TensorLike,
    axes: rt.TensorLike,
    shift: rt.TensorLike | None = None,
    name: str | None = None,
    keep_dims: bool | None = None,
    keepdims: bool | None = None,
) -> tuple[rt.Tensor, rt.Tensor]:
    """Returns ``(mean, variance)`` over ``axes``; ``shift`` is not needed."""
    mean, variance = _moments(x, axes, bool(either(keep_dims=keep_dims, keepdims=keepdims)), name)
    return mean, variance


@public.op("batchnorm")
def batch_normalization(
    x: Array,
    mean: Array,
    variance: Array,
    offset: Array | None,
    scale: Array | None,
    variance_epsilon: float,
    name: str | None = None,
) -> Array:
    """Computes ``(x - mean) / sqrt(variance + variance_epsilon) * scale + offset``."""
    # TensorFlow's order of operations: the last bits are the same.
    factor = jax.lax.rsqrt(jnp.asarray(variance) + variance_epsilon)
    factor = factor if scale is None else factor * scale
    return x * factor + ((0 if offset is None else offset) - mean * factor)


@public.add("batch_norm_with_global_normalization")
def batch_norm_with_global_normalization(
    t: rt.TensorLike | None = None,
    m: rt.TensorLike | None = None,
    v: rt.TensorLike | None = None,
    beta: rt.TensorLike | None = None,
    gamma: rt.TensorLike | None = None,
    variance_epsilon: float = 0.0,
    scale_after_normalization: bool = False,
    name: str | None = None,
    input: rt.TensorLike | None = None,  # noqa: A002
    mean: rt.TensorLike | None = None,
    variance: rt.TensorLike | None = None,
) -> rt.Tensor:
    """Calls ``batch_normalization``; ``gamma`` counts when ``scale_after_normalization`` is set."""
    x, mean, variance = (
        either(t=t, input=input),
        either(m=m, mean=mean),
        either(v=v, variance=variance),
    )
    scale = gamma if scale_after_normalization else None
    return batch_normalization(x, mean, variance, beta, scale, variance_epsilon, name)


@public.op("LRN", "local_response_normalization", "lrn")
def local_response_normalization(
    input: Array,  # noqa: A002
    depth_radius: Static = 5,
    bias: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.5,
    name: str | None = None,
) -> Array:
    """Divides by a power of the sum of squares of the neighbouring channels."""
    # A window over the channels; the padding adds zeros, as TensorFlow cuts the sum off at the
    # first and last channel.
    window = (1, 1, 1, 2 * depth_radius + 1)
    squares = jax.lax.reduce_window(
        jnp.square(input), 0.0, jax.lax.add, window, (1, 1, 1, 1), "SAME"
    )
    divisor: Array = (bias + alpha * squares) ** beta
    return input / divisor


# -- embeddings ------------------------------------------------------------------------------------


@op("embedding_lookup")
def _lookup(
    tables: Arrays, ids: Array, by_rows: bool, max_norm: Array | None, name: str | None = None
) -> Array:
    ids = inside(ids, sum(t.shape[0] for t in tables))
    rows = jnp.take(
        tables[0] if len(tables) == 1 else _join_tables(tables, by_rows), ids, axis=0, mode="fill"
    )
    if max_norm is None:
        return rows
    norms = jnp.sqrt(jnp.sum(jnp.square(rows), tuple(range(ids.ndim, rows.ndim)), keepdims=True))
    return rows * jnp.minimum(1.0, max_norm / jnp.maximum(norms, 1e-12))


def _join_tables(tables: Arrays, by_rows: bool) -> Array:
    """Joins the parts to one table: row i is row i // n of part i % n ("mod"), or the parts follow ("div")."""
    if by_rows:
        return jnp.concatenate(tables)
    rows = max(t.shape[0] for t in tables)
    # Parts may differ by one row. The padding of the shorter ones lies behind the last row of the
    # table.
    padded = [jnp.pad(t, [(0, rows - t.shape[0]), *[(0, 0)] * (t.ndim - 1)]) for t in tables]
    return jnp.stack(padded, 1).reshape((-1, *tables[0].shape[1:]))


@public.add()
def embedding_lookup(
    params: rt.TensorLike,
    ids: rt.TensorLike,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: rt.TensorLike | None = None,
) -> rt.Tensor:
    """Looks up the rows ``ids`` of a table, or of a list of its parts.

    The whole parts travel to the worker; ``partition_strategy`` is "mod" (row i lies in part i % n)
    or "div". An id that the step computes and that is no row gives NaN.

    Raises:
        ValueError: no parts, or another strategy.
        InvalidArgumentError: a literal id is no row.
    """
    parts: Any = params if isinstance(params, list | tuple | PartitionedVariable) else [params]
    tables = list(parts)
    if not tables or partition_strategy not in ("mod", "div"):
        raise ValueError(
            f"embedding_lookup: strategy {partition_strategy!r} on {len(tables)} parts; use 'mod' "
            "or 'div'"
        )
    sizes = [axis_size(table) for table in tables]
    check_known(ids, None if None in sizes else sum(s or 0 for s in sizes), "embedding_lookup")
    return _lookup(tables, ids, partition_strategy == "div", max_norm, name)


public.update(
    {
        "sigmoid": TABLE["tf"]["sigmoid"],
        "tanh": TABLE["tf"]["tanh"],
    }
)
