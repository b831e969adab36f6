"""``tf.image``: reading pictures, and making them of one size and of many kinds.

Where height and width of a picture are known before the step, an operation is a part of the step's
program and has a gradient. Where they are not, as with pictures from files, it runs on the client's
host: XLA would compile it anew for each size.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.names.missing import namespace
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.lift import Public, is_tensor
from harness.tf1.ops.python_ops import host_op
from harness.tf1.ops.random_ops import random_uniform
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.static import static_number
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime.lowlevel import Array, DType

public = Public("tf.image")

Xp = Any
"""``numpy`` or ``jax.numpy``."""
Pixels = Any
"""An array of either."""
Value = Any
"""What TensorFlow takes for a size, a number or a dtype: numbers, tensors, names."""
Sizes = tuple[int | None, ...] | None


@public.add()
class ResizeMethod:
    """The ways to find pixels between pixels."""

    BILINEAR = 0
    NEAREST_NEIGHBOR = 1
    BICUBIC = 2


# -- files -----------------------------------------------------------------------------------------


def _import_pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise rt.UnimplementedError(
            "reading pictures needs Pillow, which is not installed: pip install pillow"
        ) from None


_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def _decode_pixels(contents: bytes, channels: int, dtype: DType) -> Array:
    """Decodes the pixels of a picture, [height, width, channels]."""
    pillow = _import_pillow()
    try:
        picture = pillow.open(io.BytesIO(contents))
        if picture.mode == "I;16" and dtype == np.uint16:
            return np.asarray(picture, np.uint16)[:, :, None]
        own = {"1": "L", "P": "RGBA" if "transparency" in picture.info else "RGB", "CMYK": "RGB"}
        mode = _MODES[channels] if channels else own.get(picture.mode, picture.mode)
        pixels = np.asarray(picture.convert(mode) if mode != picture.mode else picture)
    except (OSError, ValueError, SyntaxError) as error:
        raise rt.InvalidArgumentError(
            f"this is no picture that can be read: {rt.lowlevel.one_line(error)}"
        ) from None
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    # 257 * 255 is the largest uint16: white stays white.
    return pixels.astype(np.uint16) * 257 if dtype == np.uint16 else pixels.astype(np.uint8)


def _decode_op(
    contents: rt.TensorLike, channels: int | None, dtype: Value, name: str | None, kind: str
) -> rt.Tensor:
    wanted = as_dtype(dtype).dtype
    if channels not in (None, 0, 1, 3, 4):
        raise ValueError(f"channels must be 0, 1, 3 or 4, not {channels}")
    if wanted not in (np.uint8, np.uint16):
        raise ValueError(f"dtype must be tf.uint8 or tf.uint16, not {wanted.name}")
    return host_op(
        lambda text: _decode_pixels(text.item(), channels or 0, wanted),
        [contents],
        (None, None, channels or None),
        wanted,
        name,
        kind,
    )


@public.add()
def decode_png(
    contents: rt.TensorLike,
    channels: int | None = None,
    dtype: Value = np.uint8,
    name: str | None = None,
) -> rt.Tensor:
    """Decodes a picture in a string to [height, width, channels].

    ``channels`` 0 or None keeps those of the file.
    """
    return _decode_op(contents, channels, dtype, name, "DecodePng")


@public.add()
def decode_jpeg(
    contents: rt.TensorLike,
    channels: int | None = None,
    ratio: int | None = None,
    fancy_upscaling: bool | None = None,
    try_recover_truncated: bool | None = None,
    acceptable_fraction: float | None = None,
    dct_method: str | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Decodes a JPEG file as ``decode_png`` does.

    Pillow decodes: the arguments about decoding have no effect.
    """
    if ratio not in (None, 1):
        raise ValueError("decode_jpeg: ratio is not in harness.tf1: use tf.image.resize_images")
    return _decode_op(contents, channels, np.uint8, name, "DecodeJpeg")


@public.add()
def decode_image(
    contents: rt.TensorLike,
    channels: int | None = None,
    dtype: Value = np.uint8,
    name: str | None = None,
) -> rt.Tensor:
    """Decodes a PNG, JPEG or BMP file, or the first picture of a GIF; the shape is unknown."""
    tensor = _decode_op(contents, channels, dtype, name, "decode_image")
    tensor.shape = None
    return tensor


@public.add()
def decode_bmp(
    contents: rt.TensorLike, channels: int | None = None, name: str | None = None
) -> rt.Tensor:
    """Decodes a BMP file as ``decode_png`` does."""
    return _decode_op(contents, channels, np.uint8, name, "DecodeBmp")


def _encode_op(picture: rt.TensorLike, form: str, name: str | None, **options: Any) -> rt.Tensor:
    def encode(pixels: Array) -> bytes:
        out = io.BytesIO()
        _import_pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(
            out, form, **options
        )
        return out.getvalue()

    return host_op(encode, [picture], (), object, name, f"Encode{form.capitalize()}")


@public.add()
def encode_png(image: rt.TensorLike, compression: int = -1, name: str | None = None) -> rt.Tensor:
    """Encodes uint8 [height, width, channels] as a PNG file, a string."""
    return _encode_op(
        image, "PNG", name, **({"compress_level": compression} if compression >= 0 else {})
    )


@public.add()
def encode_jpeg(
    image: rt.TensorLike, format: str = "", quality: int = 95, name: str | None = None
) -> rt.Tensor:  # noqa: A002
    """Encodes uint8 [height, width, channels] as a JPEG file, a string."""
    return _encode_op(image, "JPEG", name, quality=quality)


# -- how an operation is made ----------------------------------------------------------------------


def _as_picture(value: rt.TensorLike) -> rt.Tensor:
    tensor: rt.Tensor = convert_to_tensor(value)
    if tensor.shape is not None and len(tensor.shape) not in (3, 4):
        raise ValueError(
            f"an image has 3 or 4 dimensions, and {tensor.name!r} has shape {tensor.shape}"
        )
    return tensor


def _add_picture_op(
    kind: str,
    function: Callable[..., Pixels],
    *inputs: rt.Tensor,
    sizes: Sizes | EllipsisType = ...,
    dtype: DType | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Adds ``function(xp, *arrays)``: to the step where the sizes of the picture are known, else on the host.

    Args:
        kind: type of the operation.
        function: of ``numpy`` or ``jax.numpy``, and arrays.
        *inputs: the picture, and numbers.
        sizes: static shape of the result; that of the picture by default.
        dtype: of the result; that of the picture by default.
        name: of the operation; ``kind`` by default.
    """
    shape, wanted = inputs[0].shape, dtype or inputs[0].dtype
    # XLA would compile the step again for each size of a picture in a file.
    if shape is not None and None not in shape[-3:]:
        body = functools.partial(function, jnp)
        body.__name__ = kind  # type: ignore[attr-defined]
        made: rt.Tensor = rt.call(
            lambda *arrays: body(*arrays).astype(wanted), *inputs, name=name or kind
        )
        return made
    return host_op(
        lambda *arrays: np.asarray(function(np, *arrays)).astype(wanted, copy=False),
        list(inputs),
        shape if isinstance(sizes, EllipsisType) else sizes,
        wanted,
        name,
        kind,
    )


def _with_size(sizes: Sizes, height: int | None, width: int | None) -> Sizes:
    return None if sizes is None else (*sizes[:-3], height, width, sizes[-1])


# -- size ------------------------------------------------------------------------------------------


def _scale_factor(size: int, new: int, align_corners: bool) -> float:
    return (size - 1) / (new - 1) if align_corners and new > 1 else size / new


def _resize_weights(size: int, new: int, method: int, align_corners: bool) -> Array:
    """Returns the share of each old pixel of a row in each new pixel, [new, size], by TensorFlow 1's rules."""
    places = np.arange(new, dtype=np.float32) * np.float32(_scale_factor(size, new, align_corners))
    out = np.zeros((new, size), np.float32)
    rows = np.arange(new)
    if method == ResizeMethod.NEAREST_NEIGHBOR:
        # TensorFlow 1 rounds to the nearest pixel with aligned corners only.
        found = np.floor(places + 0.5) if align_corners else np.floor(places)
        out[rows, np.minimum(found.astype(int), size - 1)] = 1
        return out
    low = np.floor(places).astype(int)
    if method == ResizeMethod.BILINEAR:
        part = places - low
        np.add.at(out, (rows, np.minimum(low, size - 1)), 1 - part)
        np.add.at(out, (rows, np.minimum(low + 1, size - 1)), part)
        return out
    # TensorFlow has a table of 1024 weights.
    part = np.rint((places - low) * 1024) / 1024
    for step, weight in _cubic_weights(part):
        np.add.at(out, (rows, np.clip(low + step, 0, size - 1)), weight)
    return out


def _cubic_weights(part: Array) -> Iterator[tuple[int, Array]]:
    """Yields the weight of each of four neighbours, by Keys' cubic convolution (1981) with a = -0.75."""
    for step, distance in ((-1, part + 1), (0, part), (1, 1 - part), (2, 2 - part)):
        near = ((1.25 * distance - 2.25) * distance) * distance + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        yield step, far if step in (-1, 2) else near


def _resize_pixels(
    xp: Xp, picture: Pixels, height: int, width: int, method: int, align_corners: bool
) -> Pixels:
    rows = _resize_weights(picture.shape[-3], height, method, align_corners)
    columns = _resize_weights(picture.shape[-2], width, method, align_corners)
    if method == ResizeMethod.NEAREST_NEIGHBOR:
        return xp.take(xp.take(picture, rows.argmax(1), axis=-3), columns.argmax(1), axis=-2)
    # Rows and columns are resized one after the other: the weights of a pixel are a product.
    across = xp.einsum("xw,...hwc->...hxc", columns, picture.astype(np.float32))
    return xp.einsum("yh,...hxc->...yxc", rows, across)


_METHODS = {
    "bilinear": ResizeMethod.BILINEAR,
    "nearest": ResizeMethod.NEAREST_NEIGHBOR,
    "bicubic": ResizeMethod.BICUBIC,
}


@public.add()
def resize_images(
    images: rt.TensorLike,
    size: Value,
    method: Value = ResizeMethod.BILINEAR,
    align_corners: bool = False,
    preserve_aspect_ratio: bool = False,
    name: str | None = None,
) -> rt.Tensor:
    """Pictures of another size; float32, but of their own dtype with NEAREST_NEIGHBOR or when the size stays.

    Args:
        images: [height, width, channels], or a batch of them.
        size: the new height and width.
        method: a ``ResizeMethod``.
        align_corners: the corners stay where they are.
        preserve_aspect_ratio: must be False.
        name: operation name.

    Raises:
        ValueError: no such method, or ``size`` is not two numbers.
    """
    if preserve_aspect_ratio:
        raise ValueError(
            "resize_images: preserve_aspect_ratio is not in harness.tf1: compute the size in Python"
        )
    wanted = static_number(size, "the new size")
    if not isinstance(wanted, list) or len(wanted) != 2:
        raise ValueError(
            "resize_images: 'size' must be a 1-D Tensor of 2 elements: new_height, new_width, not "
            f"{size!r}"
        )
    picture = _as_picture(images)
    # TensorFlow gives the picture itself where the size stays, also of whole numbers.
    if picture.shape is not None and list(picture.shape[-3:-1]) == wanted:
        return picture
    return _resize_op(picture, wanted, _METHODS.get(method, method), align_corners, name, "resize")


def _resize_op(
    picture: rt.Tensor,
    size: list[int],
    method: Value,
    align_corners: bool,
    name: str | None,
    kind: str,
) -> rt.Tensor:
    if method not in _METHODS.values():
        raise ValueError(
            f"Resize method is not implemented: {method!r}; there are {', '.join(_METHODS)}"
        )
    height, width = (int(n) for n in size)
    dtype = picture.dtype if method == ResizeMethod.NEAREST_NEIGHBOR else np.dtype(np.float32)

    def resized(xp: Xp, pixels: Pixels) -> Pixels:
        return _resize_pixels(xp, pixels, height, width, method, align_corners)

    sizes = _with_size(picture.shape, height, width)
    return _add_picture_op(kind, resized, picture, sizes=sizes, dtype=dtype, name=name)


def _add_resizing(shown: str, method: int, kind: str) -> None:
    """Adds the resizing of a batch by one method."""

    def resize(
        images: rt.TensorLike, size: Value, align_corners: bool = False, name: str | None = None
    ) -> rt.Tensor:
        wanted = static_number(size, "the new size")
        return _resize_op(_as_picture(images), wanted, method, align_corners, name, kind)

    resize.__name__ = resize.__qualname__ = shown
    resize.__doc__ = f"``resize_images`` of a batch with {shown.removeprefix('resize_').upper()}."
    public.update({shown: resize})


_add_resizing("resize_bilinear", ResizeMethod.BILINEAR, "ResizeBilinear")
_add_resizing("resize_nearest_neighbor", ResizeMethod.NEAREST_NEIGHBOR, "ResizeNearestNeighbor")
_add_resizing("resize_bicubic", ResizeMethod.BICUBIC, "ResizeBicubic")


def _cut_window(xp: Xp, pixels: Pixels, top: int, left: int, height: int, width: int) -> Pixels:
    """Cuts a window out of a picture; outside of the picture the window is 0."""
    tall, wide = pixels.shape[-3:-1]
    inside = pixels[..., max(top, 0) : top + height, max(left, 0) : left + width, :]
    above, before = max(-top, 0), max(-left, 0)
    below, after = max(top + height - tall, 0), max(left + width - wide, 0)
    pads = [(0, 0)] * (pixels.ndim - 3) + [(above, below), (before, after), (0, 0)]
    cut = xp.pad(inside, pads)
    assert cut.shape[-3:-1] == (height, width), "a window has its size wherever it lies"
    return cut


def _add_boxing(shown: str, larger: bool, described: str) -> None:
    """Adds the cutting out of a box, or the placing in a larger one."""

    def part_of(
        image: rt.TensorLike,
        offset_height: int,
        offset_width: int,
        target_height: int,
        target_width: int,
    ) -> rt.Tensor:
        picture = _as_picture(image)
        given = (offset_height, offset_width, target_height, target_width)
        top, left, height, width = (int(static_number(n, "the box")) for n in given)
        if top < 0 or left < 0:
            raise ValueError("offset_height and offset_width must be >= 0")
        box = f"a box of {height} x {width} at {top}, {left} does not fit"

        def fits(tall: int, wide: int) -> bool:
            if larger:
                return top + tall <= height and left + wide <= width
            return top + height <= tall and left + width <= wide

        def part(xp: Xp, pixels: Pixels) -> Pixels:
            if not fits(*pixels.shape[-3:-1]):
                raise rt.InvalidArgumentError(f"{box} {pixels.shape}")
            start = (-top, -left) if larger else (top, left)
            return _cut_window(xp, pixels, *start, height, width)

        shape = picture.shape
        known = () if shape is None else tuple(n for n in shape[-3:-1] if n is not None)
        if len(known) == 2 and not fits(*known):
            raise ValueError(f"{box} the image's shape {shape}")
        return _add_picture_op(shown, part, picture, sizes=_with_size(shape, height, width))

    part_of.__name__ = part_of.__qualname__ = shown
    part_of.__doc__ = f"""{described}.

    Raises:
        ValueError: they do not fit, where the size is known; InvalidArgumentError, in the step,
            elsewhere.
    """
    public.update({shown: part_of})


_add_boxing("crop_to_bounding_box", False, "Cuts a part out of a picture")
_add_boxing("pad_to_bounding_box", True, "Places a picture within a larger one that is 0")


@public.add()
def resize_image_with_crop_or_pad(
    image: rt.TensorLike, target_height: int, target_width: int
) -> rt.Tensor:
    """Cuts out the middle of a picture, or places the picture in the middle of a larger one that is 0."""
    picture = _as_picture(image)
    height, width = (int(static_number(n, "the size")) for n in (target_height, target_width))
    if height <= 0 or width <= 0:
        raise ValueError("target_height and target_width must be > 0.")

    def place(size: int, wanted: int) -> int:
        return (size - wanted) // 2 if size > wanted else -((wanted - size) // 2)

    def part(xp: Xp, pixels: Pixels) -> Pixels:
        tall, wide = pixels.shape[-3:-1]
        return _cut_window(xp, pixels, place(tall, height), place(wide, width), height, width)

    sizes = _with_size(picture.shape, height, width)
    return _add_picture_op("resize_image_with_crop_or_pad", part, picture, sizes=sizes)


@public.add()
def central_crop(image: rt.TensorLike, central_fraction: float) -> rt.Tensor:
    """Cuts out the middle of a picture: this fraction of each side.

    Raises:
        ValueError: the fraction is not above 0 and at most 1.
    """
    if not 0 < central_fraction <= 1:
        raise ValueError("central_fraction must be within (0, 1]")
    picture = _as_picture(image)
    if central_fraction == 1:
        return picture

    def span(size: int) -> tuple[int, int]:
        start = int((size - size * central_fraction) / 2)
        return start, size - 2 * start

    def part(xp: Xp, pixels: Pixels) -> Pixels:
        (top, height), (left, width) = (span(n) for n in pixels.shape[-3:-1])
        return _cut_window(xp, pixels, top, left, height, width)

    sides = [
        None if n is None else span(n)[1] for n in (picture.shape or (None, None, None))[-3:-1]
    ]
    return _add_picture_op("central_crop", part, picture, sizes=_with_size(picture.shape, *sides))


# -- turned over -----------------------------------------------------------------------------------


def _add_flips(shown: str, axis: int, described: str) -> None:
    """Adds a flip of every picture, and one of every other picture."""

    def flip(image: rt.TensorLike) -> rt.Tensor:
        return _add_picture_op(shown, lambda xp, p: xp.flip(p, axis), _as_picture(image))

    def random_flip(image: rt.TensorLike, seed: int | None = None) -> rt.Tensor:
        picture = _as_picture(image)
        batch = picture.shape[:1] if picture.shape is not None and len(picture.shape) == 4 else ()
        if None in batch:
            raise ValueError(f"random_{shown}: the size of the batch must be known")
        drawn = random_uniform(TensorShape(batch), seed=seed)

        def flipped(xp: Xp, pixels: Pixels, chance: Pixels) -> Pixels:
            chosen = chance.reshape(*chance.shape, *(1,) * (pixels.ndim - chance.ndim)) < 0.5
            return xp.where(chosen, xp.flip(pixels, axis), pixels)

        return _add_picture_op(f"random_{shown}", flipped, picture, drawn)

    flip.__name__ = flip.__qualname__ = shown
    random_flip.__name__ = random_flip.__qualname__ = f"random_{shown}"
    flip.__doc__ = f"A picture {described}."
    random_flip.__doc__ = f"``{shown}`` of every other picture, by chance."
    public.update({flip.__name__: flip, random_flip.__name__: random_flip})


_add_flips("flip_left_right", -2, "in a mirror")
_add_flips("flip_up_down", -3, "upside down")


@public.add()
def transpose_image(image: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Swaps the rows and the columns of a picture."""
    picture = _as_picture(image)
    sizes = _with_sides_swapped(picture.shape)
    return _add_picture_op(
        "transpose_image", lambda xp, p: xp.swapaxes(p, -3, -2), picture, sizes=sizes, name=name
    )


@public.add()
def rot90(image: rt.TensorLike, k: int = 1, name: str | None = None) -> rt.Tensor:
    """Turns a picture to the left, by 90 degrees ``k`` times."""
    picture, turns = _as_picture(image), int(static_number(k, "k")) % 4
    sizes = _with_sides_swapped(picture.shape) if turns % 2 else picture.shape
    return _add_picture_op(
        "rot90", lambda xp, p: xp.rot90(p, turns, (-3, -2)), picture, sizes=sizes, name=name
    )


def _with_sides_swapped(sizes: Sizes) -> Sizes:
    return None if sizes is None else _with_size(sizes, sizes[-2], sizes[-3])


# -- light and colour ------------------------------------------------------------------------------


@public.add("per_image_standardization", "per_image_whitening")
def per_image_standardization(image: rt.TensorLike) -> rt.Tensor:
    """Scales each picture to the mean 0 and the variance 1, float32; a picture of a single colour becomes 0."""

    def standard(xp: Xp, pixels: Pixels) -> Pixels:
        values = pixels.astype(np.float32)
        axes, count = (-3, -2, -1), np.prod(pixels.shape[-3:])
        mean = xp.mean(values, axes, keepdims=True)
        spread = xp.std(values, axes, keepdims=True)
        return (values - mean) / xp.maximum(spread, np.float32(1 / np.sqrt(count)))

    dtype = np.dtype(np.float32)
    return _add_picture_op("per_image_standardization", standard, _as_picture(image), dtype=dtype)


def _convert_pixels(xp: Xp, pixels: Pixels, dtype: DType, saturate: bool) -> Pixels:
    """Pixels of another type; whole numbers go up to the largest, fractions from 0 to 1."""
    old = np.dtype(pixels.dtype)
    if old == dtype:
        return pixels
    whole = old.kind in "iu", dtype.kind in "iu"
    if all(whole):
        shift = (
            np.iinfo(old).bits - (old.kind == "i") - (np.iinfo(dtype).bits - (dtype.kind == "i"))
        )
        if shift > 0:
            return (pixels // old.type(1 << shift)).astype(dtype)
        wide = pixels.astype(dtype) * dtype.type(1 << -shift)
        return wide.astype(dtype)
    if whole[0]:
        return pixels.astype(dtype) * dtype.type(1 / np.iinfo(old).max)
    if whole[1]:
        # Half a step more: TensorFlow cuts off, and 1.0 must become the largest number.
        scaled = pixels * old.type(np.iinfo(dtype).max + 0.5)
        return (
            xp.clip(scaled, np.iinfo(dtype).min, np.iinfo(dtype).max) if saturate else scaled
        ).astype(dtype)
    return pixels.astype(dtype)


@public.add()
def convert_image_dtype(
    image: rt.TensorLike, dtype: Value, saturate: bool = False, name: str | None = None
) -> rt.Tensor:
    """Pixels of another type: whole numbers go up to the largest of their type, fractions from 0 to 1."""
    wanted = as_dtype(dtype).dtype
    picture: rt.Tensor = convert_to_tensor(image if is_tensor(image) else to_array(image))

    def converted(xp: Xp, pixels: Pixels) -> Pixels:
        return _convert_pixels(xp, pixels, wanted, saturate)

    # Numbers and rows are no pictures, and TensorFlow converts them too.
    if picture.shape is not None and len(picture.shape) < 3:
        in_step: rt.Tensor = rt.call(
            functools.partial(converted, jnp), picture, name=name or "convert_image"
        )
        return in_step
    return _add_picture_op("convert_image", converted, picture, dtype=wanted, name=name)


def _in_floats(
    kind: str,
    change: Callable[..., Pixels],
    image: rt.TensorLike,
    *numbers: Value,
    sizes: Sizes | EllipsisType = ...,
) -> rt.Tensor:
    """Changes the light of a picture on fractions; whole numbers are converted before and after."""
    picture = _as_picture(image)
    float32, own = np.dtype(np.float32), picture.dtype

    def changed(xp: Xp, pixels: Pixels, *arrays: Pixels) -> Pixels:
        fractions = _convert_pixels(xp, pixels, own if own.kind == "f" else float32, False)
        return _convert_pixels(xp, change(xp, fractions, *arrays), own, True)

    return _add_picture_op(kind, changed, picture, *map(_as_number, numbers), sizes=sizes)


def _as_number(value: Value) -> rt.Tensor:
    return convert_to_tensor(value if is_tensor(value) else np.float32(value))


@public.add()
def adjust_brightness(image: rt.TensorLike, delta: Value) -> rt.Tensor:
    """Adds ``delta`` to each fraction."""
    return _in_floats("adjust_brightness", lambda xp, p, d: p + d.astype(p.dtype), image, delta)


@public.add()
def adjust_contrast(images: rt.TensorLike, contrast_factor: Pixels) -> rt.Tensor:
    """Multiplies the distance from the mean of each channel by ``contrast_factor``."""

    def change(xp: Xp, pixels: Pixels, factor: Pixels) -> Pixels:
        mean = xp.mean(pixels, (-3, -2), keepdims=True)
        return (pixels - mean) * factor.astype(pixels.dtype) + mean

    return _in_floats("adjust_contrast", change, images, contrast_factor)


@public.add()
def adjust_gamma(image: rt.TensorLike, gamma: float = 1, gain: float = 1) -> rt.Tensor:
    """Computes ``gain * image ** gamma``. Raises ValueError for a negative ``gamma``."""
    if gamma < 0:
        raise ValueError("Gamma should be a non-negative real number.")
    return _in_floats("adjust_gamma", lambda xp, p: gain * p ** np.float32(gamma), image)


def _to_hsv(xp: Xp, pixels: Pixels) -> Pixels:
    red, green, blue = (pixels[..., i] for i in range(3))
    value = xp.max(pixels, -1)
    spread = value - xp.min(pixels, -1)
    some = xp.where(spread > 0, spread, 1)
    hue = xp.where(
        red == value,
        (green - blue) / some,
        xp.where(green == value, 2 + (blue - red) / some, 4 + (red - green) / some),
    )
    hue = xp.where(spread > 0, (hue / 6) % 1, 0)
    saturation = xp.where(value > 0, spread / xp.where(value > 0, value, 1), 0)
    return xp.stack([hue, saturation, value], -1).astype(pixels.dtype)


def _to_rgb(xp: Xp, pixels: Pixels) -> Pixels:
    hue, saturation, value = (pixels[..., i] for i in range(3))
    turns = xp.stack(
        [xp.abs(hue * 6 - 3) - 1, 2 - xp.abs(hue * 6 - 2), 2 - xp.abs(hue * 6 - 4)], -1
    )
    full = xp.clip(turns, 0, 1)
    return (((full - 1) * saturation[..., None] + 1) * value[..., None]).astype(pixels.dtype)


@public.add()
def rgb_to_hsv(images: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Converts red, green and blue to hue, saturation and value, each from 0 to 1."""
    return _add_picture_op("RGBToHSV", _to_hsv, _as_picture(images), name=name)


@public.add()
def hsv_to_rgb(images: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Converts hue, saturation and value to red, green and blue."""
    return _add_picture_op("HSVToRGB", _to_rgb, _as_picture(images), name=name)


def _in_hsv(
    xp: Xp, pixels: Pixels, change: Callable[[Pixels, Pixels], tuple[Pixels, Pixels]]
) -> Pixels:
    """Changes hue and saturation of a picture in red, green and blue."""
    hue, saturation, value = (_to_hsv(xp, pixels)[..., i] for i in range(3))
    return _to_rgb(xp, xp.stack([*change(hue, saturation), value], -1).astype(pixels.dtype))


@public.add()
def adjust_saturation(
    image: rt.TensorLike, saturation_factor: Pixels, name: str | None = None
) -> rt.Tensor:
    """Multiplies the saturation by ``saturation_factor``, to at most 1."""

    def change(xp: Xp, pixels: Pixels, factor: Pixels) -> Pixels:
        return _in_hsv(xp, pixels, lambda hue, most: (hue, xp.clip(most * factor, 0, 1)))

    return _in_floats("adjust_saturation", change, image, saturation_factor)


@public.add()
def adjust_hue(image: rt.TensorLike, delta: Value, name: str | None = None) -> rt.Tensor:
    """Moves the hue by ``delta``, round a circle of 1."""

    def change(xp: Xp, pixels: Pixels, moved: Pixels) -> Pixels:
        return _in_hsv(xp, pixels, lambda hue, saturation: ((hue + moved) % 1, saturation))

    return _in_floats("adjust_hue", change, image, delta)


@public.add()
def random_brightness(image: rt.TensorLike, max_delta: float, seed: int | None = None) -> rt.Tensor:
    """Calls ``adjust_brightness`` by up to ``max_delta``.

    Raises ValueError when that is negative.
    """
    if max_delta < 0:
        raise ValueError("max_delta must be non-negative.")
    return adjust_brightness(image, random_uniform([], -max_delta, max_delta, seed=seed))


@public.add()
def random_hue(image: rt.TensorLike, max_delta: float, seed: int | None = None) -> rt.Tensor:
    """Calls ``adjust_hue`` by up to ``max_delta``.

    Raises ValueError when that is not from 0 to 0.5.
    """
    if not 0 <= max_delta <= 0.5:
        raise ValueError("max_delta must be from 0 to 0.5.")
    return adjust_hue(image, random_uniform([], -max_delta, max_delta, seed=seed))


def _by_a_factor(adjust: Callable[..., rt.Tensor]) -> None:
    """Adds a change of light by a factor that is drawn."""

    def changed(
        image: rt.TensorLike, lower: float, upper: float, seed: int | None = None
    ) -> rt.Tensor:
        if upper <= lower or lower < 0:
            raise ValueError(f"upper must be > lower, and lower non-negative: {lower}, {upper}")
        return adjust(image, random_uniform([], lower, upper, seed=seed))

    changed.__name__ = changed.__qualname__ = adjust.__name__.replace("adjust", "random")
    changed.__doc__ = f"``{adjust.__name__}`` by a factor between two. Raises ValueError when they are not in order."
    public.update({changed.__name__: changed})


_by_a_factor(adjust_contrast)
_by_a_factor(adjust_saturation)


@public.add()
def rgb_to_grayscale(images: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Converts three channels to one."""
    picture = _as_picture(images)
    sizes = None if picture.shape is None else (*picture.shape[:-1], 1)

    def change(xp: Xp, pixels: Pixels) -> Pixels:
        return xp.tensordot(
            pixels, np.array([0.2989, 0.5870, 0.1140], pixels.dtype), ((-1,), (0,))
        )[..., None]

    return _in_floats(name or "rgb_to_grayscale", change, picture, sizes=sizes)


@public.add()
def grayscale_to_rgb(images: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Converts one channel to three equal ones."""
    picture = _as_picture(images)
    sizes = None if picture.shape is None else (*picture.shape[:-1], 3)
    return _add_picture_op(
        "grayscale_to_rgb", lambda xp, p: xp.repeat(p, 3, -1), picture, sizes=sizes, name=name
    )


__getattr__, __dir__ = namespace("tf.image")
