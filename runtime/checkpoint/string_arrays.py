"""Arrays of strings as arrays of bytes, their form on disk."""

import numpy as np

from runtime.errors import DataLossError, InvalidArgumentError
from runtime.tensor_spec import Array


def encode_strings(array: Array) -> Array:
    """Encodes a string array as uint8 [n]: the lengths as little-endian int64, then the bytes.

    Raises:
        InvalidArgumentError: An element is not bytes.
    """
    items = array.reshape(-1).tolist()
    for item in items:
        # A number is no string: bytes(2**31) would be 2 GiB of zeros.
        if not isinstance(item, bytes):
            raise InvalidArgumentError(
                f"a string array holds a {type(item).__name__}; strings are bytes"
            )
    lengths = np.array([len(i) for i in items], "<i8").tobytes()
    return np.frombuffer(lengths + b"".join(items), np.uint8)


def decode_strings(data: Array, shape: tuple[int, ...]) -> Array:
    """Decodes a string array that ``encode_strings`` encoded.

    Args:
        data: uint8 [n].
        shape: shape of the string array.

    Raises:
        DataLossError: The lengths do not fit the data.

    Examples:
        >>> decode_strings(encode_strings(np.array([b"a", b"bc"], object)), (2,))
        array([b'a', b'bc'], dtype=object)
    """
    count = int(np.prod(shape))
    raw = np.ascontiguousarray(data).tobytes()
    if len(raw) < 8 * count:
        raise DataLossError(f"a string array of shape {shape} is cut off")
    ends = np.cumsum(np.frombuffer(raw[: 8 * count], "<i8")) + 8 * count
    if count and int(ends[-1]) != len(raw):
        raise DataLossError(f"a string array of shape {shape} is damaged")
    starts = [8 * count, *ends[:-1].tolist()]
    out = np.empty((count,), object)
    out[:] = [raw[a:b] for a, b in zip(starts, ends.tolist(), strict=False)] if count else []
    return out.reshape(shape)
