"""``tf.contrib``: the names that have a counterpart here, by module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

import runtime as rt
from harness.tf1.graph.framework import GraphKeys
from harness.tf1.graph.initializers import (
    glorot_normal_initializer,
    glorot_uniform_initializer,
    variance_scaling_initializer,
    zeros_initializer,
)
from harness.tf1.graph.scopes import get_variable
from harness.tf1.graph.variables import Variable, model_variables
from harness.tf1.inputs import data as _data  # noqa: F401 - adds names that tf.contrib.data has too
from harness.tf1.inputs.batching import prefetch_queue
from harness.tf1.layers import layers as _layers
from harness.tf1.layers import losses as _losses
from harness.tf1.layers import nn_ops
from harness.tf1.layers.metrics import STREAMING
from harness.tf1.layers.rnn import static_rnn
from harness.tf1.names.missing import Namespace, namespace
from harness.tf1.names.table import HEADINGS, TABLE, Later, add_names
from harness.tf1.ops.array_ops import one_hot
from harness.tf1.ops.lift import Array, Public, op
from harness.tf1.train import summary as _summary
from harness.training.start.global_step import (
    create_global_step,
    get_global_step,
    get_or_create_global_step,
)
from runtime import concurrency

_layers_names = Public("tf.contrib.layers")
_framework_names = Public("tf.contrib.framework")

Regularizer = Callable[[Any], Any]
Function = Any
"""A function of tensors; None for none."""
Initializer = Any
"""What makes an initial value."""


@op("l2_regularizer")
def _l2(weights: Array, scale: float, name: str | None = None) -> Array:
    return scale * jnp.sum(jnp.square(weights)) / 2


@op("l1_regularizer")
def _l1(weights: Array, scale: float, name: str | None = None) -> Array:
    return scale * jnp.sum(jnp.abs(weights))


@_layers_names.add()
def l2_regularizer(scale: float, scope: str | None = None) -> Regularizer:
    """Returns a regularizer: ``scale`` times half the sum of squares."""
    return lambda weights: _l2(weights, float(scale), name=scope)


@_layers_names.add()
def l1_regularizer(scale: float, scope: str | None = None) -> Regularizer:
    """Returns a regularizer: ``scale`` times the sum of the absolute values."""
    return lambda weights: _l1(weights, float(scale), name=scope)


@_layers_names.add("xavier_initializer", "xavier_initializer_conv2d")
def xavier_initializer(
    uniform: bool = True, seed: int | None = None, dtype: Any = "float32"
) -> Any:
    """Returns Glorot's initializer."""
    return (glorot_uniform_initializer if uniform else glorot_normal_initializer)(seed, dtype)


@_layers_names.add("variance_scaling_initializer")
def _variance_scaling(
    factor: float = 2.0,
    mode: str = "FAN_IN",
    uniform: bool = False,
    seed: int | None = None,
    dtype: Any = "float32",
) -> Any:
    """Calls ``tf.variance_scaling_initializer``, by the argument names of contrib."""
    distribution = "uniform" if uniform else "truncated_normal"
    return variance_scaling_initializer(factor, mode.lower(), distribution, seed, dtype)


# -- arguments for many calls ----------------------------------------------------------------------


class _Scoped(concurrency.local):
    given: Mapping[str, dict[str, Any]] = {}
    """By function, the arguments of the open scopes of this thread."""


_scoped = _Scoped()


@_framework_names.add()
def add_arg_scope(fn: Function) -> Function:
    """Lets ``arg_scope`` give a function arguments."""
    key = f"{fn.__module__}.{fn.__qualname__}"

    @functools.wraps(fn)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        # Arguments of the call itself go before those of the scope.
        return fn(*args, **(_scoped.given.get(key, {}) | kwargs))

    scoped._arg_scope_key = key  # type: ignore[attr-defined]
    return scoped


@_framework_names.add()
@contextlib.contextmanager
def arg_scope(list_ops_or_scope: Any, **kwargs: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Gives keyword arguments to every call of some functions inside.

    Args:
        list_ops_or_scope: the functions, or what another ``arg_scope`` gave, to open it again.
        **kwargs: the arguments; those at the call itself go first.

    Raises:
        ValueError: one of the functions takes no arguments from a scope, or arguments with a scope
            opened again.
    """
    before = _scoped.given
    if isinstance(list_ops_or_scope, Mapping):
        if kwargs:
            raise ValueError("arg_scope: a scope that is opened again takes no further arguments")
        given = dict(list_ops_or_scope)
    else:
        given = dict(before)
        for fn in list_ops_or_scope:
            key = getattr(fn, "_arg_scope_key", None)
            if key is None:
                raise ValueError(f"arg_scope: {fn!r} is not decorated with @add_arg_scope")
            given[key] = given.get(key, {}) | kwargs
    _scoped.given = given
    try:
        yield given
    finally:
        _scoped.given = before


# -- layers: those of tf.layers by other argument names, with other defaults -----------------------


def _normalize_value(
    value: Any, normalizer_fn: Function | None, params: Mapping[str, Any] | None, activation: Any
) -> Any:
    value = value if normalizer_fn is None else normalizer_fn(value, **(params or {}))
    return value if activation is None else activation(value)


@_layers_names.add("fully_connected", "relu")
@add_arg_scope
def fully_connected(
    inputs: rt.TensorLike,
    num_outputs: int,
    activation_fn: Function = TABLE["tf.nn"]["relu"],
    normalizer_fn: Function | None = None,
    normalizer_params: Mapping[str, Any] | None = None,
    weights_initializer: Initializer = None,
    weights_regularizer: Regularizer | None = None,
    biases_initializer: Initializer = zeros_initializer,
    biases_regularizer: Regularizer | None = None,
    reuse: Any = None,
    variables_collections: object = None,
    outputs_collections: object = None,
    trainable: bool = True,
    scope: Any = None,
) -> Any:
    """Calls ``tf.layers.dense`` with variables ``scope/weights`` and ``scope/biases``, and relu by default."""
    x = rt.as_tensor(inputs)
    with _layers.layer_scope(scope, "fully_connected", reuse):
        value = _layers.apply_kernel(
            x,
            _weights_variable(
                [_layers.last_size(x, "fully_connected"), num_outputs],
                x,
                weights_initializer,
                weights_regularizer,
                trainable,
            ),
        )
        if normalizer_fn is None and biases_initializer is not None:
            value = nn_ops.bias_add(
                value,
                _biases_variable(num_outputs, x, biases_initializer, biases_regularizer, trainable),
            )
        return _normalize_value(value, normalizer_fn, normalizer_params, activation_fn)


@_layers_names.add("conv2d", "convolution2d")
@add_arg_scope
def convolution2d(
    inputs: rt.TensorLike,
    num_outputs: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: str = "SAME",
    data_format: str | None = None,
    rate: int | Sequence[int] = 1,
    activation_fn: Function = TABLE["tf.nn"]["relu"],
    normalizer_fn: Function | None = None,
    normalizer_params: Mapping[str, Any] | None = None,
    weights_initializer: Initializer = None,
    weights_regularizer: Regularizer | None = None,
    biases_initializer: Initializer = zeros_initializer,
    biases_regularizer: Regularizer | None = None,
    reuse: Any = None,
    variables_collections: object = None,
    outputs_collections: object = None,
    trainable: bool = True,
    scope: Any = None,
) -> Any:
    """Calls ``tf.layers.conv2d`` with ``scope/weights`` and ``scope/biases``, relu and "SAME" by default."""
    x = rt.as_tensor(inputs)
    first = (data_format or "NHWC").startswith("NC")
    with _layers.layer_scope(scope, "Conv", reuse):
        shape = _layers.kernel_shape(x, kernel_size, num_outputs, first)
        kernel = _weights_variable(shape, x, weights_initializer, weights_regularizer, trainable)
        value = _layers.convolve(x, kernel, stride, padding, rate, first)
        if normalizer_fn is None and biases_initializer is not None:
            bias = _biases_variable(
                num_outputs, x, biases_initializer, biases_regularizer, trainable
            )
            value = nn_ops.bias_add(value, bias, "NCHW" if first else "NHWC")
        return _normalize_value(value, normalizer_fn, normalizer_params, activation_fn)


def _weights_variable(
    shape: list[int],
    x: rt.Tensor,
    initializer: Initializer,
    regularizer: Regularizer | None,
    trainable: bool,
) -> Any:
    chosen = xavier_initializer() if initializer is None else initializer
    return _model_variable("weights", shape, x, chosen, regularizer, trainable)


def _biases_variable(
    size: int,
    x: rt.Tensor,
    initializer: Initializer,
    regularizer: Regularizer | None,
    trainable: bool,
) -> Any:
    return _model_variable("biases", [size], x, initializer, regularizer, trainable)


def _model_variable(
    name: str,
    shape: list[int],
    x: rt.Tensor,
    initializer: Initializer,
    regularizer: Regularizer | None,
    trainable: bool,
) -> Any:
    collections = [GraphKeys.GLOBAL_VARIABLES, GraphKeys.MODEL_VARIABLES]
    return get_variable(name, shape, x.dtype, initializer, regularizer, trainable, collections)


def _add_pooling(shown: str, kind: str, default_name: str) -> None:
    def pool(
        inputs: rt.TensorLike,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 2,
        padding: str = "VALID",
        data_format: str = "NHWC",
        outputs_collections: object = None,
        scope: str | None = None,
    ) -> Any:
        layout = "channels_first" if data_format.startswith("NC") else "channels_last"
        return TABLE["tf.layers"][kind](
            inputs, kernel_size, stride, padding, layout, scope or default_name
        )

    pool.__name__ = pool.__qualname__ = default_name
    pool.__doc__ = (
        f"``tf.layers.{kind}`` by the argument names of contrib, with a stride of 2 by default."
    )
    _layers_names.update({shown: add_arg_scope(pool)})


_add_pooling("avg_pool2d", "average_pooling2d", "AvgPool2D")
_add_pooling("max_pool2d", "max_pooling2d", "MaxPool2D")


@_layers_names.add()
@add_arg_scope
def batch_norm(
    inputs: rt.TensorLike,
    decay: float = 0.999,
    center: bool = True,
    scale: bool = False,
    epsilon: float = 0.001,
    activation_fn: Function = None,
    param_initializers: Mapping[str, Any] | None = None,
    param_regularizers: Mapping[str, Any] | None = None,
    updates_collections: str | None = GraphKeys.UPDATE_OPS,
    is_training: Any = True,
    reuse: Any = None,
    variables_collections: object = None,
    outputs_collections: object = None,
    trainable: bool = True,
    batch_weights: None = None,
    fused: object = None,
    data_format: str = "NHWC",
    zero_debias_moving_mean: bool = False,
    scope: Any = None,
) -> Any:
    """Calls ``tf.layers.batch_normalization``, without gamma and in training by default.

    The updates of the moving averages go to ``updates_collections``; None makes them wherever the
    output is computed.

    Raises:
        ValueError: ``batch_weights`` or ``zero_debias_moving_mean`` is given.
    """
    if batch_weights is not None or zero_debias_moving_mean:
        raise ValueError(
            "batch_norm: batch_weights and zero_debias_moving_mean are not in harness.tf1"
        )
    initializers = {"beta": zeros_initializer, **(param_initializers or {})}
    kept = {f"{name}_initializer": value for name, value in initializers.items()}
    kept |= {f"{name}_regularizer": value for name, value in (param_regularizers or {}).items()}
    graph = rt.Graph.of(inputs)
    updates = graph.get_collection_ref(GraphKeys.UPDATE_OPS)
    before = len(updates)
    with graph.as_default(), _layers.layer_scope(scope, "BatchNorm", reuse) as opened:
        value = _layers.batch_normalization(
            inputs,
            axis=1 if data_format.startswith("NC") else -1,
            momentum=decay,
            epsilon=epsilon,
            center=center,
            scale=scale,
            training=is_training,
            trainable=trainable,
            name=opened,
            **kept,
        )
        # tf.layers knows one collection. Its updates are taken out again for a caller who wants
        # them elsewhere.
        if updates_collections != GraphKeys.UPDATE_OPS:
            made = updates[before:]
            del updates[before:]
            if updates_collections is None:
                with rt.control_dependencies(made):
                    value = rt.identity(value)
            else:
                for update in made:
                    graph.add_to_collection(updates_collections, update)
    return value if activation_fn is None else activation_fn(value)


@_layers_names.add()
@add_arg_scope
def dropout(
    inputs: rt.TensorLike,
    keep_prob: Any = 0.5,
    noise_shape: Any = None,
    is_training: Any = True,
    outputs_collections: object = None,
    scope: str | None = None,
    seed: int | None = None,
) -> Any:
    """Calls ``tf.layers.dropout`` by the share that is kept, in training by default."""
    return _layers.dropout(
        inputs, 1 - keep_prob, noise_shape, seed, is_training, scope or "Dropout"
    )


@_layers_names.add()
@add_arg_scope
def flatten(
    inputs: rt.TensorLike, outputs_collections: object = None, scope: str | None = None
) -> Any:
    """Calls ``tf.layers.flatten``."""
    return _layers.flatten(inputs, scope or "Flatten")


@_layers_names.add()
@add_arg_scope
def one_hot_encoding(
    labels: rt.TensorLike, num_classes: int, on_value: float = 1.0, off_value: float = 0.0
) -> Any:
    """Calls ``tf.one_hot``."""
    return one_hot(labels, num_classes, on_value, off_value)


@_framework_names.add()
def assert_global_step(global_step: rt.Variable) -> None:
    """Raises TypeError for what is no scalar integer variable."""
    if (
        not isinstance(global_step, rt.Variable)
        or global_step.shape != ()
        or global_step.dtype.kind not in "iu"
    ):
        raise TypeError(f"the global step is a scalar integer variable, not {global_step!r}")


@_framework_names.add()
def assert_or_get_global_step(graph: rt.Graph | None = None, global_step_tensor: Any = None) -> Any:
    """Returns the global step that is given, else the graph's."""
    return get_global_step(graph) if global_step_tensor is None else global_step_tensor


@_framework_names.add()
def local_variable(
    initial_value: Any, validate_shape: bool = True, name: str | None = None, **unused: Any
) -> Any:
    """Makes a variable of which each session has a copy, and that is not trained."""
    return Variable(initial_value, False, [rt.GraphKeys.LOCAL_VARIABLES], validate_shape, name=name)


@_layers_names.add()
def linear(inputs: rt.TensorLike, num_outputs: int, *args: Any, **kwargs: Any) -> Any:
    """Calls ``fully_connected`` without an activation."""
    return fully_connected(inputs, num_outputs, None, *args, **kwargs)


@op("accuracy")
def _accuracy(
    predictions: Array, labels: Array, weights: Array | None = None, name: str | None = None
) -> Array:
    """Computes the weighted share of predictions of one batch that are equal to their labels."""
    equal = (predictions == labels).astype(jnp.float32)
    return (
        jnp.mean(equal)
        if weights is None
        else jnp.sum(equal * weights) / jnp.sum(jnp.asarray(weights))
    )


_framework_names.update(
    {
        "create_global_step": create_global_step,
        "get_global_step": get_global_step,
        "get_model_variables": model_variables,
        "get_or_create_global_step": get_or_create_global_step,
        "get_trainable_variables": rt.trainable_variables,
        "get_variables": rt.global_variables,
    }
)

add_names("tf.contrib.data", TABLE["tf.data"] | TABLE["tf.data.experimental"])
add_names("tf.contrib.metrics", STREAMING | {"accuracy": _accuracy})
add_names("tf.contrib.rnn", TABLE["tf.nn.rnn_cell"] | {"static_rnn": static_rnn})
add_names("tf.contrib.slim.layers", TABLE["tf.contrib.layers"])
add_names("tf.contrib.slim.metrics", STREAMING)
add_names("tf.contrib.slim.prefetch_queue", {"prefetch_queue": prefetch_queue})
add_names(
    "tf.contrib.slim",
    {
        **TABLE["tf.contrib.layers"],
        **TABLE["tf.contrib.framework"],
        **{
            name: Namespace(f"tf.contrib.slim.{name}")
            for name in ("layers", "metrics", "prefetch_queue")
        },
        "losses": _losses,
    },
)
add_names(
    "tf.contrib.deprecated",
    {n: v for n, v in TABLE["tf"].items() if HEADINGS.get(n) == _summary.OLD_NAMES},
)
# Rows of modules that few programs need: each is imported at its first use.
for _where, _module, _names in (
    (
        "legacy_seq2seq",
        "tools.legacy_seq2seq",
        "basic_rnn_seq2seq embedding_rnn_decoder embedding_rnn_seq2seq model_with_buckets "
        "rnn_decoder sequence_loss sequence_loss_by_example tied_rnn_seq2seq",
    ),
    (
        "seq2seq",
        "tools.seq2seq",
        "BasicDecoder BasicDecoderOutput Decoder GreedyEmbeddingHelper Helper "
        "SampleEmbeddingHelper TrainingHelper dynamic_decode sequence_loss",
    ),
    (
        "learn.preprocessing",
        "inputs.vocabulary",
        "CategoricalVocabulary VocabularyProcessor tokenizer",
    ),
    (
        "slim.model_analyzer",
        "train.model_analyzer",
        "analyze_ops analyze_vars tensor_description",
    ),
    (
        "tensorboard.plugins.projector",
        "train.projector",
        "EmbeddingInfo ProjectorConfig SpriteMetadata visualize_embeddings",
    ),
):
    add_names(
        f"tf.contrib.{_where}",
        {name: Later(f"harness.tf1.{_module}.{name}") for name in _names.split()},
    )
    # The packages above it answer for it too.
    _full = f"tf.contrib.{_where}"
    while (_parent := _full.rpartition(".")[0]) != "tf.contrib":
        add_names(_parent, {_full.rpartition(".")[2]: Namespace(_full)})
        _full = _parent

_MODULES = """
    data deprecated framework layers learn legacy_seq2seq metrics rnn seq2seq slim tensorboard
    """.split()
add_names(
    "tf.contrib", {name: Namespace(f"tf.contrib.{name}") for name in _MODULES} | {"losses": _losses}
)

__getattr__, __dir__ = namespace("tf.contrib")
