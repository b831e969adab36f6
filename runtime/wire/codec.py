"""Tensors as bytes: fixed layouts that are read in place, and a self-describing form for everything else.

A payload is a row of tensors, each at an offset that is a multiple of 64 bytes, so that XLA can use them where
they were received. With a `Layout` both ends know the offsets beforehand and nothing but the elements is sent.
The dynamic form starts with a table (little-endian)::

    "BWD1"  count:u32  { name_length:u8 name ndim:u8 dim:u64*ndim nbytes:u64 } * count

and then carries every tensor's bytes, each again at a multiple of 64 from the start of the payload. A string
tensor's bytes are the u64 lengths of its elements followed by the elements. Nothing is ever pickled, and every
length is checked against the bytes that are there before anything is allocated or read.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from runtime.errors import DataLossError, InvalidArgumentError
from runtime.tensor_spec import (
    ALIGNMENT,
    NUMERIC_DTYPES,
    STRING,
    Array,
    TensorSpec,
    aligned_buffer,
    canonical_dtype,
    dtype_name,
)

Buffer = Array | bytes | bytearray | memoryview
Segments = list[Any]
"""Buffers that follow each other on the wire (numpy's stubs hide from Python 3.11 that arrays are buffers)."""

_MASK: Final = ALIGNMENT - 1
PADDING: Final = tuple(bytes(n) for n in range(ALIGNMENT))
"""`PADDING[n]` is n zero bytes."""

_MAGIC: Final = b"BWD1"
_HEAD: Final = struct.Struct("<4sI")


class Layout:
    """Where each tensor of a fixed row of tensors lies in a payload.

    Attributes:
        specs: shape and dtype of each tensor.
        offsets: byte offset of each, a multiple of 64.
        nbytes: length of the payload; there is no padding after the last tensor.
    """

    __slots__ = ("_places", "nbytes", "offsets", "specs")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Lays the tensors out one after the other.

        Raises:
            InvalidArgumentError: one is a string tensor; those need the dynamic form.
        """
        self.specs = tuple(specs)
        offsets = []
        end = 0
        for index, spec in enumerate(self.specs):
            if spec.is_string:
                raise InvalidArgumentError(f"tensor {index} is {spec}; string tensors have no fixed layout")
            start = end + (-end & _MASK)
            offsets.append(start)
            end = start + spec.nbytes
        self.offsets = tuple(offsets)
        self.nbytes = end
        self._places = [(spec.shape, spec.dtype, start) for spec, start in zip(self.specs, offsets, strict=True)]

    def __repr__(self) -> str:
        """The tensors and the total, for messages."""
        return f"Layout({', '.join(map(str, self.specs))}; {self.nbytes} bytes)"

    def views(self, buffer: Buffer, base: int = 0) -> list[Array]:
        """The tensors as arrays over `buffer`, without copying.

        Args:
            buffer: at least `base + nbytes` bytes; arrays over read-only memory are read-only.
            base: where in the buffer the payload starts.
        """
        return [np.ndarray(shape, dtype, buffer, base + start) for shape, dtype, start in self._places]


class TensorBuffer:
    """Aligned memory for one payload of a fixed layout, with the arrays over it made once.

    Handing the same one to every `Lane.receive` of a call saves the allocation, the page faults and the making
    of the arrays. The arrays change with every receive, so reuse it only when nobody reads the last values:
    `jax.device_put` keeps such memory without copying, for as long as the JAX array lives.

    Attributes:
        layout: what the buffer holds.
        data: the memory, uint8 [layout.nbytes].
        window: the same as a writable memoryview.
        arrays: the tensors, views of `data`.
    """

    __slots__ = ("arrays", "data", "layout", "window")

    def __init__(self, layout: Layout) -> None:
        """Allocates the memory; its contents are arbitrary."""
        self.layout = layout
        self.data = data = aligned_buffer(layout.nbytes)
        self.window = data.data
        self.arrays = layout.views(data)


def encode_payload(buffers: Sequence[Buffer], dynamic: bool) -> tuple[Segments, int]:
    """Returns the pieces of a payload with room for the header in front.

    Args:
        buffers: the tensors, which are padded as `Layout` says.
        dynamic: True sends their description along.

    Returns:
        A list whose first element is an empty place for the frame header, and the number of bytes of the rest.

    Raises:
        InvalidArgumentError: an array holds Python objects (strings); those need the dynamic form.
    """
    if dynamic:
        described = encode_dynamic(buffers)
        return [b"", *described], payload_nbytes(described)
    segments: Segments = [b""]
    end = 0
    for buffer in buffers:
        pad = -end & _MASK
        if pad:
            segments.append(PADDING[pad])
        segments.append(buffer)
        if isinstance(buffer, np.ndarray):
            if buffer.dtype.hasobject:  # sendmsg would send the addresses of the objects
                raise InvalidArgumentError("a string array has no fixed layout; send it with dynamic=True")
            end += pad + buffer.nbytes
        else:
            end += pad + len(buffer)
    return segments, end


def encode_dynamic(arrays: Sequence[Any]) -> Segments:
    """Encodes arrays of any shape and dtype, strings included, with their description.

    Args:
        arrays: numpy arrays (or what `numpy.asarray` takes); elements of object arrays are `bytes` or `str` (UTF-8).

    Returns:
        Buffers whose concatenation is the payload. Numeric data is referenced, not copied.

    Raises:
        InvalidArgumentError: a dtype that tensors cannot have, or an object array with other elements.
    """
    table = [_HEAD.pack(_MAGIC, len(arrays))]
    bodies: list[tuple[Sequence[Buffer], int]] = []
    for index, value in enumerate(arrays):
        array = np.asarray(value)
        dtype = canonical_dtype(array.dtype)
        if dtype is STRING:
            name = dtype_name(dtype)
            body, nbytes = _encode_strings(array, index)
        else:
            name = dtype.name
            array = np.asarray(array, dtype, order="C")  # brings foreign byte orders and strides into our form
            body, nbytes = [array], array.nbytes
        dims = struct.pack(f"<B{array.ndim}QQ", array.ndim, *array.shape, nbytes)
        table.append(bytes((len(name),)) + name.encode("ascii") + dims)
        bodies.append((body, nbytes))
    segments: Segments = [b"".join(table)]
    end = len(segments[0])
    for body, nbytes in bodies:
        pad = -end & _MASK
        if pad:
            segments.append(PADDING[pad])
        segments.extend(body)
        end += pad + nbytes
    return segments


def payload_nbytes(segments: Sequence[Buffer]) -> int:
    """Number of bytes of all pieces together."""
    return sum(segment.nbytes if isinstance(segment, np.ndarray) else len(segment) for segment in segments)


def _encode_strings(array: Array, index: int) -> tuple[Sequence[Buffer], int]:
    elements: list[bytes] = []
    for element in array.ravel():
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            raise InvalidArgumentError(f"array {index} holds a {type(element).__name__}; string tensors hold bytes")
        elements.append(element)
    lengths = np.fromiter(map(len, elements), np.dtype("<u8"), len(elements))
    body = lengths.tobytes() + b"".join(elements)
    return [body], len(body)


def decode_dynamic(buffer: Buffer) -> list[Array]:
    """Reads what `encode_dynamic` wrote.

    Args:
        buffer: the whole payload and nothing else.

    Returns:
        The arrays: numeric ones are views of `buffer` (read-only if it is), string ones are object arrays of bytes.

    Raises:
        DataLossError: the bytes are not such a payload. Nothing larger than `buffer` is allocated to find out.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    view = view.cast("B")
    total = view.nbytes
    try:
        magic, count = _HEAD.unpack_from(view, 0)
        if magic != _MAGIC:
            raise DataLossError("a dynamic payload starts with other bytes than expected")
        entries = []
        position = _HEAD.size
        for _ in range(count):  # a hostile count ends at the end of the bytes, in struct.error
            name_end = position + 1 + view[position]
            name = bytes(view[position + 1 : name_end]).decode("ascii", "replace")
            *shape, nbytes = struct.unpack_from(f"<{view[name_end] + 1}Q", view, name_end + 1)
            entries.append((name, shape, nbytes))
            position = name_end + 1 + 8 * (len(shape) + 1)
    except (struct.error, IndexError) as error:
        raise DataLossError("the table of a dynamic payload is cut short") from error
    arrays = []
    for index, (name, shape, nbytes) in enumerate(entries):
        start = position + (-position & _MASK)
        position = start + nbytes
        if position > total:
            raise DataLossError(f"array {index} of a dynamic payload needs {nbytes} bytes at {start} of {total}")
        try:
            arrays.append(_read_array(view, name, shape, start, nbytes))
        except (ValueError, OverflowError) as error:
            raise DataLossError(f"array {index} of a dynamic payload, {name}{shape}: {error}") from error
    if position != total:
        raise DataLossError(f"a dynamic payload has {total} bytes, its table describes {position}")
    return arrays


def _read_array(view: memoryview, name: str, shape: list[int], start: int, nbytes: int) -> Array:
    # Raises ValueError or OverflowError where the array cannot be.
    size = math.prod(shape)
    if name == dtype_name(STRING):
        return _read_strings(view, shape, size, start, nbytes)
    dtype = NUMERIC_DTYPES.get(name)
    if dtype is None:
        raise ValueError("unknown dtype")
    if size * dtype.itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes")
    array: Array = np.ndarray(shape, dtype, view, start)
    if dtype.kind == "b" and size and int(array.view(np.uint8).max() if array.ndim else view[start]) > 1:
        raise ValueError("booleans that are neither 0 nor 1")
    return array


def _read_strings(view: memoryview, shape: list[int], size: int, start: int, nbytes: int) -> Array:
    if size * 8 > nbytes:
        raise ValueError(f"{size} strings in {nbytes} bytes")
    lengths = np.frombuffer(view, np.dtype("<u8"), size, start).tolist()
    if sum(lengths) != nbytes - 8 * size:
        raise ValueError("strings of other lengths than its bytes")
    array: Array = np.empty(shape, STRING)
    position = start + 8 * size
    flat = array.reshape(-1)
    for element, length in enumerate(lengths):
        flat[element] = bytes(view[position : position + length])
        position += length
    return array
