"""Kernels of summaries: tensors in, one string with a serialized Summary protocol buffer out.

The message is TensorBoard's, from tensorboardX; values are encoded as TensorFlow 1 does, so that
every reader of event files understands them.
"""

import io
import struct
import wave
import zlib
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from tensorboardX.proto import summary_pb2, types_pb2

from runtime.errors import InvalidArgumentError
from runtime.task.host_kernels import Context, kernel
from runtime.tensor_spec import Array


def _string_array(message: bytes) -> Sequence[Array]:
    return [np.array(message, object)]


def _summary_message(*values: summary_pb2.Summary.Value) -> Sequence[Array]:
    return _string_array(summary_pb2.Summary(value=values).SerializeToString())


def _show_items(
    context: Context, kind: str, items: Array, made: Callable[[Array], object]
) -> Sequence[Array]:
    """Returns the summary of the first ``max_outputs`` items, each made to a message of a kind."""
    tag, most = context.attrs["tag"], int(context.attrs["max_outputs"])
    names = [
        f"{tag}/{kind}" if most == 1 else f"{tag}/{kind}/{i}" for i in range(min(most, len(items)))
    ]
    return _summary_message(
        *(
            summary_pb2.Summary.Value(tag=n, **{kind: made(i)})
            for n, i in zip(names, items, strict=False)
        )
    )


def _to_numbers(context: Context, tag: str, array: Array) -> Array:
    if array.dtype == object:
        raise InvalidArgumentError(f"summary {tag!r} takes numbers, not strings", task=context.task)
    return array.astype(np.float64)


@kernel("summary/scalar")
def _scalar_summary(context: Context) -> Sequence[Array]:
    tag = context.attrs["tag"]
    if context.inputs[0].size != 1:
        shape = list(context.inputs[0].shape)
        raise InvalidArgumentError(
            f"summary {tag!r} takes one number, not shape {shape}", task=context.task
        )
    value = float(_to_numbers(context, tag, context.inputs[0]).reshape(()))
    return _summary_message(summary_pb2.Summary.Value(tag=tag, simple_value=value))


@kernel("summary/histogram")
def _histogram_summary(context: Context) -> Sequence[Array]:
    tag = context.attrs["tag"]
    values = _to_numbers(context, tag, context.inputs[0]).ravel()
    if not np.isfinite(values).all():
        raise InvalidArgumentError(f"Nan or Inf in summary histogram for: {tag}", task=context.task)
    return _summary_message(summary_pb2.Summary.Value(tag=tag, histo=histogram_proto(values)))


@cache
def _bucket_limits() -> Array:
    """Returns TensorFlow's limits of buckets: 0, then 10 % steps from 1e-12 to 1e20, to both sides."""
    count = int(np.ceil(np.log(1e32) / np.log(1.1)))
    positive = 1e-12 * 1.1 ** np.arange(count)
    top = np.finfo(np.float64).max
    return np.concatenate([[-top], -positive[::-1], [0.0], positive, [top]])


def histogram_proto(values: Array) -> summary_pb2.HistogramProto:
    """Returns the HistogramProto of finite float64 values in TensorFlow's exponential buckets, without empty ends."""
    limits = _bucket_limits()
    if not values.size:
        return summary_pb2.HistogramProto(bucket_limit=[limits[-1]], bucket=[0.0])
    # A number lies in the first bucket whose upper limit is above the number. To sort all is
    # quicker than to look up each.
    below = np.searchsorted(np.sort(values), limits)
    # The largest number of all has no limit above it.
    below[-1] = values.size
    counts = np.diff(below, prepend=0)
    used = np.flatnonzero(counts)
    # A bucket begins at the limit of the bucket before, so one empty bucket stays in front.
    first, last = max(used[0] - 1, 0), used[-1] + 1
    return summary_pb2.HistogramProto(
        min=values.min(),
        max=values.max(),
        num=values.size,
        sum=values.sum(),
        sum_squares=np.dot(values, values),
        bucket_limit=limits[first:last],
        bucket=counts[first:last].astype(np.float64),
    )


@kernel("summary/image")
def _image_summary(context: Context) -> Sequence[Array]:
    tag, images = context.attrs["tag"], context.inputs[0]
    if images.ndim != 4 or images.shape[3] not in (1, 3, 4):
        raise InvalidArgumentError(
            f"image summary {tag!r} takes [batch, height, width, 1 or 3 or 4], not "
            f"{list(images.shape)}",
            task=context.task,
        )

    def made(pixels: Array) -> summary_pb2.Summary.Image:
        if pixels.dtype != np.uint8:
            pixels = to_pixels(_to_numbers(context, tag, pixels))
        height, width, channels = pixels.shape
        return summary_pb2.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=encode_png(pixels)
        )

    return _show_items(context, "image", images, made)


def to_pixels(image: Array) -> Array:
    """Scales one float image ([height, width, channels]) to bytes as TensorFlow does.

    Without negative values the largest becomes 255; with them 0 becomes 127. What is not finite
    becomes red, or black where there is one channel.
    """
    finite = np.isfinite(image).all(axis=2)
    known = image[finite]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    if low < 0:
        largest = max(abs(low), abs(high))
        # Zero lies in the middle, so that the sign of a value can be seen.
        scale, offset = 127.0 / largest, 128.0
    else:
        scale, offset = (255.0 / high if high > 0 else 0.0), 0.0
    pixels = np.zeros(image.shape, np.uint8)
    pixels[finite] = np.clip(known * scale + offset, 0, 255).astype(np.uint8)
    if image.shape[2] > 1:
        # Red, and opaque where there is an alpha channel.
        pixels[~finite, 0] = 255
        pixels[~finite, 3:] = 255
    return pixels


def encode_png(pixels: Array) -> bytes:
    """Returns a PNG file of uint8 ``[height, width, channels]`` with 1 (grey), 3 (RGB) or 4 (RGBA) channels."""
    height, width, channels = pixels.shape
    colour_type = {1: 0, 3: 2, 4: 6}[channels]
    # The 0 before each row means that the row has no filter.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    # The format is specified at https://www.w3.org/TR/png/
    body = chunk(b"IDAT", zlib.compress(rows.tobytes()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@kernel("summary/audio")
def _audio_summary(context: Context) -> Sequence[Array]:
    tag = context.attrs["tag"]
    sound = _to_numbers(context, tag, context.inputs[0])
    if sound.ndim == 2:
        # One channel.
        sound = sound[:, :, None]
    if sound.ndim != 3:
        shape = list(context.inputs[0].shape)
        raise InvalidArgumentError(
            f"audio summary {tag!r} takes [batch, frames] or [batch, frames, channels], not "
            f"{shape}",
            task=context.task,
        )
    rate = float(np.asarray(context.inputs[1]).reshape(()))

    def made(clip: Array) -> summary_pb2.Summary.Audio:
        return summary_pb2.Summary.Audio(
            sample_rate=rate,
            num_channels=clip.shape[1],
            length_frames=clip.shape[0],
            encoded_audio_string=_encode_wav(clip, rate),
            content_type="audio/wav",
        )

    return _show_items(context, "audio", sound, made)


def _encode_wav(clip: Array, rate: float) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(clip.shape[1])
        # Two bytes a sample, as TensorFlow writes.
        file.setsampwidth(2)
        file.setframerate(round(rate))
        file.writeframes((np.clip(np.nan_to_num(clip), -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


@kernel("summary/text")
def _text_summary(context: Context) -> Sequence[Array]:
    value = summary_pb2.Summary.Value(tag=context.attrs["tag"])
    value.metadata.plugin_data.plugin_name = "text"
    value.tensor.dtype = types_pb2.DT_STRING
    for size in context.inputs[0].shape:
        value.tensor.tensor_shape.dim.add(size=size)
    value.tensor.string_val.extend(context.inputs[0].ravel().tolist())
    return _summary_message(value)


@kernel("summary/merge")
def _merge_summaries(context: Context) -> Sequence[Array]:
    # A message with a repeated field is the concatenation of messages with its parts: nothing to
    # parse.
    return _string_array(
        b"".join(item for array in context.inputs for item in np.asarray(array).ravel().tolist())
    )
