"""``tf.layers``: variables and operations of the usual layers, made together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import runtime as rt
from harness.tf1.graph import framework
from harness.tf1.graph.initializers import ones_initializer, zeros_initializer
from harness.tf1.graph.scopes import VariableScope, get_variable, variable_scope
from harness.tf1.graph.variables import assign_sub
from harness.tf1.layers import conv, nn_ops
from harness.tf1.names.table import TABLE
from harness.tf1.ops.lift import Array, Public, Static, is_tensor, op

public = Public("tf.layers")

Activation = Callable[[Any], Any]
Regularizer = Callable[[Any], Any]
Sizes = int | Sequence[int]


def layer_scope(
    name: str | VariableScope | None, default_name: str, reuse: Any
) -> contextlib.AbstractContextManager[VariableScope]:
    """Opens the variable scope of a layer: ``name``, or the first free of ``default_name``, ``default_name_1`` ..."""
    return variable_scope(name, default_name, reuse=reuse)


def _as_pair(value: Sizes) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _check_rank(inputs: rt.Tensor, layer: str, rank: int) -> tuple[int | None, ...]:
    if inputs.shape is None or len(inputs.shape) != rank:
        raise ValueError(
            f"Input 0 of layer {layer} is incompatible with the layer: it needs {rank} dimensions, "
            f"and {inputs.name!r} has shape {inputs.shape}"
        )
    return tuple(inputs.shape)


def last_size(inputs: rt.Tensor, layer: str) -> int:
    """Returns the size of the last dimension, which a kernel needs."""
    size = inputs.shape[-1] if inputs.shape else None
    if size is None:
        raise ValueError(
            f"The last dimension of the inputs to {layer} must be known: {inputs.name!r} has "
            f"shape {inputs.shape}; give it one with tf.reshape"
        )
    return int(size)


@op("MatMul")
def apply_kernel(inputs: Array, kernel: Array, name: str | None = None) -> Array:
    """Multiplies [..., n] by [n, units]."""
    return jnp.tensordot(inputs, kernel, 1)


@op("flatten/Reshape")
def _flattened(inputs: Array, name: str | None = None) -> Array:
    return jnp.reshape(inputs, (inputs.shape[0], -1))


def _finish_layer(
    value: Any, activation: Activation | None, activity_regularizer: Regularizer | None
) -> Any:
    value = value if activation is None else activation(value)
    if activity_regularizer is not None:
        graph = rt.get_default_graph()
        graph.add_to_collection(
            framework.GraphKeys.REGULARIZATION_LOSSES, activity_regularizer(value)
        )
    return value


@public.add()
def dense(
    inputs: rt.TensorLike,
    units: int,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = zeros_initializer,
    kernel_regularizer: Regularizer | None = None,
    bias_regularizer: Regularizer | None = None,
    activity_regularizer: Regularizer | None = None,
    kernel_constraint: None = None,
    bias_constraint: None = None,
    trainable: bool = True,
    name: str | VariableScope | None = None,
    reuse: Any = None,
) -> Any:
    """Computes ``activation(inputs @ kernel + bias)`` with variables ``name/kernel`` and ``name/bias``.

    Args:
        inputs: [..., n]; n must be known.
        units: size of the last dimension of the result.
        activation: a function of the result.
        use_bias: whether there is a bias.
        kernel_initializer: of the kernel, [n, units]; Glorot's uniform one by default.
        bias_initializer: of the bias, [units].
        kernel_regularizer: gives a loss that is added to ``REGULARIZATION_LOSSES``.
        bias_regularizer: as well, of the bias.
        activity_regularizer: as well, of the result.
        kernel_constraint: must be None.
        bias_constraint: must be None.
        trainable: whether optimizers update the variables by default.
        name: of the layer; "dense", "dense_1" ... by default.
        reuse: take the variables of a layer of this name.

    Raises:
        ValueError: the last dimension of ``inputs`` is not known, or a constraint is given.
    """
    _no_constraints(kernel_constraint, bias_constraint)
    x = rt.as_tensor(inputs)
    with layer_scope(name, "dense", reuse):
        kernel = get_variable(
            "kernel",
            [last_size(x, "dense"), int(units)],
            x.dtype,
            kernel_initializer,
            kernel_regularizer,
            trainable,
        )
        value = apply_kernel(x, kernel)
        if use_bias:
            bias = get_variable(
                "bias", [int(units)], x.dtype, bias_initializer, bias_regularizer, trainable
            )
            value = nn_ops.bias_add(value, bias)
        return _finish_layer(value, activation, activity_regularizer)


@public.add()
class Dense:
    """``dense`` as an object, whose calls share the variables that the first call makes.

    The arguments are those of ``dense`` behind the inputs.
    """

    def __init__(
        self,
        units: int,
        activation: Activation | None = None,
        use_bias: bool = True,
        kernel_initializer: Any = None,
        bias_initializer: Any = zeros_initializer,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self.units, self._name = units, name
        self._given = {"activation": activation, "use_bias": use_bias, **options}
        self._given |= {
            "kernel_initializer": kernel_initializer,
            "bias_initializer": bias_initializer,
        }
        self._scopes: weakref.WeakKeyDictionary[rt.Graph, VariableScope] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, inputs: rt.TensorLike) -> Any:
        """Computes ``activation(inputs @ kernel + bias)``."""
        graph = rt.Graph.of(inputs)
        with graph.as_default():
            reuse: bool | None = True
            # Opened once for its name: a second call in another scope must find these variables.
            if graph not in self._scopes:
                with layer_scope(self._name, "dense", None) as self._scopes[graph]:
                    reuse = None
            return dense(inputs, self.units, name=self._scopes[graph], reuse=reuse, **self._given)


@public.add()
def conv2d(
    inputs: rt.TensorLike,
    filters: int,
    kernel_size: Sizes,
    strides: Sizes = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: Sizes = (1, 1),
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = zeros_initializer,
    kernel_regularizer: Regularizer | None = None,
    bias_regularizer: Regularizer | None = None,
    activity_regularizer: Regularizer | None = None,
    kernel_constraint: None = None,
    bias_constraint: None = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
) -> Any:
    """Convolves with the variables ``name/kernel``, [height, width, channels, filters], and ``name/bias``.

    ``inputs`` are [batch, height, width, channels], or [batch, channels, height, width] with the
    ``data_format`` "channels_first". Sizes are (height, width), or one number for both; ``padding``
    is "valid" or "same". The other arguments are those of ``dense``.

    Raises:
        ValueError: ``inputs`` has not 4 dimensions, the number of channels is not known, or a
            constraint is given.
    """
    _no_constraints(kernel_constraint, bias_constraint)
    x = rt.as_tensor(inputs)
    first = _channels_first(data_format)
    shape = kernel_shape(x, kernel_size, filters, first)
    with layer_scope(name, "conv2d", reuse):
        kernel = get_variable(
            "kernel", shape, x.dtype, kernel_initializer, kernel_regularizer, trainable
        )
        value = convolve(x, kernel, strides, padding, dilation_rate, first)
        if use_bias:
            bias = get_variable(
                "bias", [int(filters)], x.dtype, bias_initializer, bias_regularizer, trainable
            )
            value = nn_ops.bias_add(value, bias, "NCHW" if first else "NHWC")
        return _finish_layer(value, activation, activity_regularizer)


def kernel_shape(images: rt.Tensor, kernel_size: Sizes, filters: int, first: bool) -> list[int]:
    """Returns [height, width, channels, filters]; the channels of ``images`` are the ``first`` or last axis.

    Raises:
        ValueError: they have not 4 dimensions, or the number of channels is not known.
    """
    channels = _check_rank(images, "conv2d", 4)[1 if first else 3]
    if channels is None:
        raise ValueError(
            f"The channel dimension of the inputs to conv2d must be known: {images.name!r} has "
            f"shape {images.shape}"
        )
    return [*_as_pair(kernel_size), int(channels), int(filters)]


def convolve(
    images: rt.Tensor, kernel: Any, strides: Sizes, padding: str, dilations: Sizes, first: bool
) -> Any:
    """Calls ``tf.nn.conv2d`` with sizes of height and width alone."""
    layout = "NCHW" if first else "NHWC"
    return conv.conv2d(
        images,
        kernel,
        _spatial_window(strides, first),
        padding.upper(),
        data_format=layout,
        dilations=_spatial_window(dilations, first),
    )


def _channels_first(data_format: str) -> bool:
    if data_format not in ("channels_first", "channels_last"):
        raise ValueError(f"data_format is channels_first or channels_last, not {data_format!r}")
    return data_format == "channels_first"


def _spatial_window(sizes: Sizes, first: bool) -> list[int]:
    return [1, 1, *_as_pair(sizes)] if first else [1, *_as_pair(sizes), 1]


def _no_constraints(*constraints: object) -> None:
    if any(constraint is not None for constraint in constraints):
        raise ValueError(
            "constraints are not in harness.tf1: assign the projected value after the update"
        )


def _make_pooling(kind: str, default_name: str) -> Callable[..., Any]:
    def pool(
        inputs: rt.TensorLike,
        pool_size: Sizes,
        strides: Sizes,
        padding: str = "valid",
        data_format: str = "channels_last",
        name: str | None = None,
    ) -> Any:
        x = rt.as_tensor(inputs)
        _check_rank(x, default_name, 4)
        first = _channels_first(data_format)
        with rt.name_scope(name or default_name):
            return TABLE["tf.nn"][kind](
                x,
                _spatial_window(pool_size, first),
                _spatial_window(strides, first),
                padding.upper(),
                "NCHW" if first else "NHWC",
            )

    pool.__name__ = pool.__qualname__ = default_name
    pool.__doc__ = (
        f'``tf.nn.{kind}`` with sizes of height and width alone; ``padding`` is "valid" or "same".'
    )
    return pool


public.update(
    {
        "max_pooling2d": _make_pooling("max_pool", "max_pooling2d"),
        "average_pooling2d": _make_pooling("avg_pool", "average_pooling2d"),
    }
)


@public.add()
def flatten(inputs: rt.TensorLike, name: str | None = None) -> Any:
    """Reshapes [batch, ...] to [batch, n]."""
    return _flattened(inputs, name=name)


@public.add()
def dropout(
    inputs: rt.TensorLike,
    rate: Any = 0.5,
    noise_shape: Any = None,
    seed: int | None = None,
    training: Any = False,
    name: str | None = None,
) -> Any:
    """Drops each element with probability ``rate`` in training, and scales the others so that the sum stays.

    Args:
        inputs: what is dropped from.
        rate: a number or a tensor.
        noise_shape: as in ``tf.nn.dropout``.
        seed: of the draw.
        training: a bool, or a tensor that may be fed.
        name: of the operation.
    """
    if not is_tensor(training):
        if not training:
            return rt.as_tensor(inputs)
        return nn_ops.dropout(inputs, 1 - rate, noise_shape, seed, name or "dropout")
    kept = _choose(training, 1.0 - rate, 1.0, name="dropout/keep_prob")
    return nn_ops.dropout(inputs, kept, noise_shape, seed, name or "dropout")


@op("cond/Merge")
def _choose(condition: Array, yes: Array, no: Array, name: str | None = None) -> Array:
    return jnp.where(condition, yes, no)


@op("moments")
def _statistics(inputs: Array, axis: Static, name: str | None = None) -> tuple[Array, Array]:
    over = tuple(i for i in range(jnp.ndim(inputs)) if i != axis % jnp.ndim(inputs))
    return jnp.mean(inputs, over), jnp.var(inputs, over)


@op("batchnorm")
def _normalized(
    inputs: Array,
    mean: Array,
    variance: Array,
    gamma: Array | None,
    beta: Array | None,
    axis: Static,
    epsilon: float,
    name: str | None = None,
) -> Array:
    shape = [1] * jnp.ndim(inputs)
    shape[axis] = -1
    factor = jax.lax.rsqrt(variance + epsilon)
    factor = factor if gamma is None else factor * gamma
    offset = -mean * factor if beta is None else beta - mean * factor
    return inputs * jnp.reshape(factor, shape) + jnp.reshape(offset, shape)


@public.add()
def batch_normalization(
    inputs: rt.TensorLike,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Any = zeros_initializer,
    gamma_initializer: Any = ones_initializer,
    moving_mean_initializer: Any = zeros_initializer,
    moving_variance_initializer: Any = ones_initializer,
    beta_regularizer: Regularizer | None = None,
    gamma_regularizer: Regularizer | None = None,
    beta_constraint: None = None,
    gamma_constraint: None = None,
    training: Any = False,
    trainable: bool = True,
    name: str | VariableScope | None = None,
    reuse: Any = None,
    fused: object = None,
) -> Any:
    """Normalises over all dimensions but ``axis``, by the batch in training and by moving averages otherwise.

    The updates of the moving averages are added to ``tf.GraphKeys.UPDATE_OPS``: run them with the
    training step. The variables are ``name/gamma`` (with ``scale``), ``name/beta`` (with
    ``center``), ``name/moving_mean`` and ``name/moving_variance``, each with its initializer and
    regularizer. ``training`` is a bool, or a tensor that may be fed; ``fused`` is not needed.

    Raises:
        ValueError: the size of ``axis`` is not known, or a constraint is given.
    """
    _no_constraints(beta_constraint, gamma_constraint)
    x = rt.as_tensor(inputs)
    # XLA could learn the size in the step, but the variables are made now.
    size = None if x.shape is None else x.shape[axis]
    if size is None:
        raise ValueError(
            f"batch_normalization needs the size of dimension {axis}: {x.name!r} has shape "
            f"{x.shape}"
        )
    shape = [int(size)]
    with layer_scope(name, "batch_normalization", reuse):
        gamma = (
            get_variable("gamma", shape, x.dtype, gamma_initializer, gamma_regularizer, trainable)
            if scale
            else None
        )
        beta = (
            get_variable("beta", shape, x.dtype, beta_initializer, beta_regularizer, trainable)
            if center
            else None
        )
        mean = get_variable("moving_mean", shape, x.dtype, moving_mean_initializer, trainable=False)
        variance = get_variable(
            "moving_variance", shape, x.dtype, moving_variance_initializer, trainable=False
        )
        used: tuple[rt.TensorLike, ...] = (mean, variance)
        if is_tensor(training) or training:
            batch = _statistics(x, axis)
            # A fed "training" leaves both kinds of statistics in the step; a rate of 0 is no
            # update.
            rate: rt.TensorLike = 1.0 - momentum
            if is_tensor(training):
                used = tuple(_choose(training, b, m) for b, m in zip(batch, used, strict=True))
                rate = _choose(training, rate, 0.0)
            else:
                used = batch
            for moving, now in zip((mean, variance), batch, strict=True):
                update = assign_sub(moving, (moving - now) * rate, name="AssignMovingAvg")
                rt.get_default_graph().add_to_collection(framework.GraphKeys.UPDATE_OPS, update)
        return _normalized(x, *used, gamma, beta, axis, epsilon)
