"""Tensors as bytes: fixed layouts that are read in place, and a self-describing form for all else.

A payload is a row of tensors, each at an offset that is a multiple of 64 bytes. So XLA can use the
tensors where they were received. With a `TensorLayout` both ends know the offsets beforehand, and only
the elements are sent. The dynamic form starts with a table (little-endian)::

    "BWD1"  count:u32  { name_length:u8 name ndim:u8 dim:u64*ndim nbytes:u64 } * count

The bytes of the tensors follow, each tensor again at a multiple of 64 from the start of the
payload. The bytes of a string tensor are the u64 lengths of its elements, then the elements.
Nothing is ever pickled. Every length is checked against the bytes present before anything is
allocated or read.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

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

_MASK = ALIGNMENT - 1
PADDING = tuple(bytes(n) for n in range(ALIGNMENT))
"""`PADDING[n]` is n zero bytes."""

_MAGIC = b"BWD1"
_HEAD = struct.Struct("<4sI")


class TensorLayout:
    """The places of a fixed row of tensors in a payload.

    Attributes:
        specs: Shape and dtype of each tensor.
        offsets: Byte offset of each tensor, a multiple of 64.
        nbytes: Length of the payload in bytes, without padding after the last tensor.

    Examples:
        >>> layout = TensorLayout([TensorSpec((3,), np.dtype("float32")), TensorSpec((), np.dtype("int64"))])
        >>> layout.offsets, layout.nbytes
        ((0, 64), 72)
    """

    __slots__ = ("_places", "nbytes", "offsets", "specs")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Lays the tensors out in order.

        Raises:
            InvalidArgumentError: A tensor holds strings, which need the dynamic form.
        """
        self.specs = tuple(specs)
        offsets = []
        end = 0
        for index, spec in enumerate(self.specs):
            if spec.is_string:
                raise InvalidArgumentError(
                    f"tensor {index} is {spec}; string tensors have no fixed layout"
                )
            start = end + (-end & _MASK)
            offsets.append(start)
            end = start + spec.nbytes
        self.offsets = tuple(offsets)
        self.nbytes = end
        self._places = [
            (spec.shape, spec.dtype, start) for spec, start in zip(self.specs, offsets, strict=True)
        ]

    def __repr__(self) -> str:
        """Returns the tensors and the total, for messages."""
        return f"Layout({', '.join(map(str, self.specs))}; {self.nbytes} bytes)"

    def views(self, buffer: Buffer, base: int = 0) -> list[Array]:
        """Returns the tensors as arrays over `buffer`, without a copy.

        Args:
            buffer: At least `base + nbytes` bytes. Arrays over read-only memory are read-only.
            base: Offset of the payload in the buffer, in bytes.
        """
        return [
            np.ndarray(shape, dtype, buffer, base + start) for shape, dtype, start in self._places
        ]


class TensorBuffer:
    """Aligned memory for a payload of a fixed layout, with its arrays.

    A caller with one buffer for every `Lane.receive` of a call saves the allocation, the page
    faults and the making of the arrays. The arrays change with every receive, so the last values
    must have been read by then: `jax.device_put` keeps such memory without a copy, for as long as
    the JAX array lives.

    Attributes:
        layout: Layout of the payload.
        data: Memory, uint8 [layout.nbytes].
        window: `data` as a writable memoryview.
        arrays: Tensors, as views of `data`.
    """

    __slots__ = ("arrays", "data", "layout", "window")

    def __init__(self, layout: TensorLayout) -> None:
        """Allocates the memory; the contents are arbitrary."""
        self.layout = layout
        self.data = data = aligned_buffer(layout.nbytes)
        self.window = data.data
        self.arrays = layout.views(data)


def encode_payload(buffers: Sequence[Buffer], dynamic: bool) -> tuple[Segments, int]:
    """Returns the pieces of a payload, with room for the header in front.

    Args:
        buffers: Tensors in order; the payload is padded like a `TensorLayout`.
        dynamic: True to send shapes and dtypes along.

    Returns:
        A list whose first element is an empty place for the frame header, and the number of bytes
        of the rest.

    Raises:
        InvalidArgumentError: An array holds Python objects (strings), which need the dynamic form.

    Examples:
        >>> pieces, nbytes = encode_payload([np.zeros(3, np.float32), np.zeros((), np.int64)], False)
        >>> [memoryview(piece).nbytes for piece in pieces], nbytes
        ([0, 12, 52, 8], 72)
    """
    if dynamic:
        described, nbytes = encode_dynamic(buffers)
        return [b"", *described], nbytes
    segments: Segments = [b""]
    end = 0
    for buffer in buffers:
        pad = -end & _MASK
        if pad:
            segments.append(PADDING[pad])
        segments.append(buffer)
        if isinstance(buffer, np.ndarray):
            # sendmsg would send the addresses of the objects.
            if buffer.dtype.hasobject:
                raise InvalidArgumentError(
                    "a string array has no fixed layout; send it with dynamic=True"
                )
            end += pad + buffer.nbytes
        else:
            end += pad + len(buffer)
    return segments, end


def encode_dynamic(arrays: Sequence[Any]) -> tuple[Segments, int]:
    """Encodes arrays of any shape and dtype, strings included, with their description.

    Args:
        arrays: Arrays, or values that `numpy.asarray` takes. Elements of object arrays are `bytes`
            or `str` (UTF-8).

    Returns:
        Buffers whose concatenation is the payload, and its number of bytes. Numeric data is
        referenced, not copied.

    Raises:
        InvalidArgumentError: Tensors cannot have the dtype of an array, or elements of an object
            array.

    Examples:
        >>> pieces, nbytes = encode_dynamic([np.ones(2), np.array([b"red", "blue"], object)])
        >>> decode_dynamic(b"".join(pieces))
        [array([1., 1.]), array([b'red', b'blue'], dtype=object)]
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
            # Other byte orders and strides are copied into the order of the wire.
            array = np.asarray(array, dtype, order="C")
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
    return segments, end


def _encode_strings(array: Array, index: int) -> tuple[Sequence[Buffer], int]:
    elements: list[bytes] = []
    for element in array.ravel():
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            raise InvalidArgumentError(
                f"array {index} holds a {type(element).__name__}; string tensors hold bytes"
            )
        elements.append(element)
    lengths = np.fromiter(map(len, elements), np.dtype("<u8"), len(elements))
    body = lengths.tobytes() + b"".join(elements)
    return [body], len(body)


def decode_dynamic(buffer: Buffer) -> list[Array]:
    """Decodes a payload of `encode_dynamic`.

    Args:
        buffer: The whole payload, with no byte before or after.

    Returns:
        The arrays. Numeric arrays are views of `buffer`, and read-only if `buffer` is. String
        arrays are object arrays
            of bytes.

    Raises:
        DataLossError: The bytes are no such payload. The check allocates nothing larger than
            `buffer`.
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
        # A hostile count ends at the end of the bytes, with struct.error or IndexError.
        for _ in range(count):
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
            raise DataLossError(
                f"array {index} of a dynamic payload needs {nbytes} bytes at {start} of {total}"
            )
        try:
            arrays.append(_read_array(view, name, shape, start, nbytes))
        except (ValueError, OverflowError) as error:
            raise DataLossError(
                f"array {index} of a dynamic payload, {name}{shape}: {error}"
            ) from error
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
    # A boolean with any other byte is undefined in numpy and XLA.
    if (
        dtype.kind == "b"
        and size
        and int(array.view(np.uint8).max() if array.ndim else view[start]) > 1
    ):
        raise ValueError("booleans that are neither 0 nor 1")
    return array


def _read_strings(view: memoryview, shape: list[int], size: int, start: int, nbytes: int) -> Array:
    # Both checks come before the allocation of an array for `size` elements.
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
