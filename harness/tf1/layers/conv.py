"""Convolutions and pooling over images, [batch, height, width, channels] unless data_format says "NCHW"."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.lift import Array, Function, Public, Static, op

public = Public("tf.nn")


def _spatial_sizes(values: Sequence[int] | None, data_format: str | None) -> tuple[int, ...]:
    """Returns the two values of a four-element list that are for height and width.

    Raises:
        ValueError: the values for the batch and the channels are not 1.
    """
    if values is None:
        return (1, 1)
    if len(values) != 4:
        raise ValueError(f"strides and windows are four numbers, not {list(values)}")
    first = _channels_first(data_format)
    picked, others = (values[2:4], values[0:2]) if first else (values[1:3], (values[0], values[3]))
    if tuple(others) != (1, 1):
        raise ValueError(
            f"strides and windows over the batch and the channels must be 1, got {list(values)}"
        )
    return tuple(picked)


def _channels_first(data_format: str | None) -> bool:
    if data_format not in (None, "NHWC", "NCHW"):
        raise ValueError(f"data_format must be 'NHWC' or 'NCHW', not {data_format!r}")
    return data_format == "NCHW"


def _same_or_valid(padding: str) -> None:
    if padding not in ("SAME", "VALID"):
        raise ValueError(f"padding must be 'SAME' or 'VALID', not {padding!r}")


def _check_window(images: Array, window: Sequence[int], padding: str) -> None:
    """Raises ValueError when a window of ``[height, width]`` has no place: the result would be empty."""
    _same_or_valid(padding)
    # A size of 0 says nothing: an empty batch may pass.
    sizes = [s for s in jnp.shape(images) if s]
    if padding == "VALID" and len(sizes) == 4 and any(w > max(sizes[1:]) for w in window):
        raise ValueError(
            f"a window of {list(window)} is larger than the images, {jnp.shape(images)}"
        )


def _convolve_images(
    images: Array,
    kernel: Array,
    strides: Static,
    padding: str,
    data_format: str | None,
    dilations: Static = None,
    groups: int = 1,
) -> Array:
    layout = "NCHW" if _channels_first(data_format) else "NHWC"
    _check_window(images, jnp.shape(kernel)[:2], padding)
    return jax.lax.conv_general_dilated(
        jnp.asarray(images),
        jnp.asarray(kernel),
        _spatial_sizes(strides, data_format),
        padding,
        rhs_dilation=_spatial_sizes(dilations, data_format),
        dimension_numbers=(layout, "HWIO", layout),
        feature_group_count=groups,
    )


@public.op("Conv2D")
def conv2d(
    input: Array,  # noqa: A002
    filter: Array,  # noqa: A002
    strides: Static,
    padding: str,
    use_cudnn_on_gpu: bool | None = None,
    data_format: str | None = None,
    name: str | None = None,
    dilations: Static = None,
) -> Array:
    """Calls ``jax.lax.conv_general_dilated``; ``filter`` is [height, width, in, out], ``padding`` "SAME" or "VALID"."""
    return _convolve_images(input, filter, strides, padding, data_format, dilations)


@public.op("depthwise", "depthwise_conv2d", "depthwise_conv2d_native")
def depthwise_conv2d(
    input: Array,  # noqa: A002
    filter: Array,  # noqa: A002
    strides: Static,
    padding: str,
    rate: Static = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Array:
    """Convolves each channel by itself; ``filter`` is [height, width, in, multiplier]."""
    return _convolve_depthwise(input, filter, strides, padding, rate, data_format)


def _convolve_depthwise(
    images: Array,
    kernel: Array,
    strides: Static,
    padding: str,
    rate: Static,
    data_format: str | None,
) -> Array:
    kernel = jnp.asarray(kernel)
    height, width, channels, multiplier = kernel.shape
    dilations = (
        None if rate is None else [1, 1, *rate] if _channels_first(data_format) else [1, *rate, 1]
    )
    # XLA knows a depthwise convolution as a grouped one with a single input channel in each group.
    flat = kernel.reshape(height, width, 1, channels * multiplier)
    return _convolve_images(images, flat, strides, padding, data_format, dilations, channels)


@public.op("separable_conv2d")
def separable_conv2d(
    input: Array,  # noqa: A002
    depthwise_filter: Array,
    pointwise_filter: Array,
    strides: Static,
    padding: str,
    rate: Static = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Array:
    """Computes a depthwise convolution, then one of 1 x 1."""
    each = _convolve_depthwise(input, depthwise_filter, strides, padding, rate, data_format)
    return _convolve_images(each, pointwise_filter, [1, 1, 1, 1], "VALID", data_format)


@public.op("convolution", "atrous_conv2d")
def atrous_conv2d(
    value: Array, filters: Array, rate: Static, padding: str, name: str | None = None
) -> Array:
    """Computes a convolution with ``rate - 1`` zeros between the elements of the filter."""
    return _convolve_images(value, filters, [1, 1, 1, 1], padding, None, [1, rate, rate, 1])


@public.op("conv2d_transpose")
def conv2d_transpose(
    value: Array,
    filter: Array,  # noqa: A002
    output_shape: Static,
    strides: Static,
    padding: str = "SAME",
    data_format: str | None = None,
    name: str | None = None,
) -> Array:
    """Computes the transpose of ``conv2d`` from ``output_shape``, whose batch is that of ``value``.

    ``filter`` is [height, width, out, in].
    """
    value = jnp.asarray(value)
    if output_shape[0] != value.shape[0]:
        if not rt.lowlevel.sizes_are_guesses():
            raise rt.InvalidArgumentError(
                f"output_shape is for {output_shape[0]} images, value has {value.shape[0]}"
            )
        # of an unknown batch: it is to be this one
        return jnp.zeros(tuple(output_shape), value.dtype)
    # TensorFlow defines the operation as the derivative of conv2d by its input, which is the
    # transpose of a linear map.
    forward = jax.linear_transpose(
        lambda images: _convolve_images(images, filter, strides, padding, data_format),
        jax.ShapeDtypeStruct((value.shape[0], *output_shape[1:]), value.dtype),
    )
    images: Array = forward(value)[0]
    return images


def _pool_windows(
    value: Array,
    ksize: Static,
    strides: Static,
    padding: str,
    data_format: str | None,
    start: rt.TensorLike,
    join: Function,
) -> Array:
    _check_window(value, _spatial_sizes(ksize, data_format), padding)
    _spatial_sizes(strides, data_format)
    found: Array = jax.lax.reduce_window(value, start, join, tuple(ksize), tuple(strides), padding)
    return found


@public.op("MaxPool")
def max_pool(
    value: Array,
    ksize: Static,
    strides: Static,
    padding: str,
    data_format: str | None = "NHWC",
    name: str | None = None,
) -> Array:
    """Calls ``jax.lax.reduce_window`` with the maximum."""
    value = jnp.asarray(value)
    floating = jnp.issubdtype(value.dtype, np.floating)
    # The padding must never win: integers have no infinity.
    start = -np.inf if floating else int(np.iinfo(value.dtype).min)
    return _pool_windows(value, ksize, strides, padding, data_format, start, jax.lax.max)


@public.op("AvgPool")
def avg_pool(
    value: Array,
    ksize: Static,
    strides: Static,
    padding: str,
    data_format: str | None = "NHWC",
    name: str | None = None,
) -> Array:
    """Computes the mean of each window; the padding of "SAME" does not count."""
    value = jnp.asarray(value)
    total = _pool_windows(value, ksize, strides, padding, data_format, 0.0, jax.lax.add)
    # TensorFlow divides by the number of pixels inside the image, so padded places are counted out.
    return total / _pool_windows(
        jnp.ones_like(value), ksize, strides, padding, data_format, 0.0, jax.lax.add
    )


@op("pool")
def _pool_any(
    input: Array,  # noqa: A002
    window_shape: Static,
    pooling_type: str,
    padding: str,
    dilation_rate: Static = None,
    strides: Static = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Array:
    value = jnp.asarray(input)
    if data_format not in (None, "NWC", "NHWC", "NDHWC"):
        raise ValueError(f"data_format {data_format}: channels stand last here")
    if value.ndim != len(window_shape) + 2:
        raise ValueError(
            f"a window of {len(window_shape)} axes does not fit the shape {value.shape}"
        )
    ones = [1] * len(window_shape)
    steps, wide = strides or ones, dilation_rate or ones
    if any(s > 1 for s in steps) and any(w > 1 for w in wide):
        raise ValueError("strides > 1 not supported in conjunction with dilation_rate > 1")

    def joined(values: Array, start: float, join: Function) -> Array:
        window, moved, apart = ((1, *sizes, 1) for sizes in (window_shape, steps, wide))
        found: Array = jax.lax.reduce_window(
            values, start, join, window, moved, padding, window_dilation=apart
        )
        return found

    if pooling_type == "MAX":
        return joined(value, -np.inf, jax.lax.max)
    return joined(value, 0.0, jax.lax.add) / joined(jnp.ones_like(value), 0.0, jax.lax.add)


@public.add()
def pool(
    input: rt.TensorLike,  # noqa: A002
    window_shape: rt.TensorLike,
    pooling_type: str,
    padding: str,
    dilation_rate: rt.TensorLike | None = None,
    strides: rt.TensorLike | None = None,
    name: str | None = None,
    data_format: str | None = None,
) -> rt.Tensor:
    """Computes the maximum ("MAX") or mean ("AVG") of each window over all axes but batch and channels."""
    if pooling_type not in ("MAX", "AVG"):
        raise ValueError(f"pooling_type is MAX or AVG, not {pooling_type}")
    label = name or f"{pooling_type.lower()}_pool"
    pooled: rt.Tensor = _pool_any(
        input, window_shape, pooling_type, padding, dilation_rate, strides, label, data_format
    )
    return pooled
