"""Byte ranges of variables: how a checkpoint crosses the tensor channel where the tasks share no directory.

The coordinator requests byte ranges that a job has taken, and sends byte ranges that a job shall
restore. A byte range has its place in the job. So a byte range that is sent twice, after a broken
connection, is neither lost nor doubled.
"""

from typing import NamedTuple

import numpy as np

from runtime.errors import DataLossError, InvalidArgumentError
from runtime.state.leadership import Leadership
from runtime.tensor_spec import Array, TensorSpec, aligned_buffer


class ByteRange(NamedTuple):
    """Some bytes of one slice of a job.

    Attributes:
        epoch: epoch of the leadership under which the bytes are requested.
        owner: owner of that leadership.
        job: random id of the save or restore.
        part: index of the slice among those of the job on the task.
        offset: offset of the first byte, in C order.
        size: number of bytes.
    """

    epoch: int
    owner: int
    job: int
    part: int = 0
    offset: int = 0
    size: int = 0

    @classmethod
    def of_job(cls, leadership: Leadership, job: int) -> "ByteRange":
        """Returns an empty byte range with the fields that all byte ranges of a job on a task share."""
        return cls(leadership.epoch, leadership.owner, job)

    @property
    def leadership(self) -> Leadership:
        """The leadership under which the bytes are requested."""
        return Leadership(self.epoch, self.owner)

    @classmethod
    def from_array(cls, array: Array) -> "ByteRange":
        """Returns the byte range of an array that ``to_array`` made.

        Raises:
            InvalidArgumentError: The array has another dtype or shape.
        """
        if array.dtype != np.uint64 or array.shape != (len(cls._fields),):
            raise InvalidArgumentError(
                f"a byte range of a checkpoint is asked for by {array.dtype}{list(array.shape)}"
            )
        return cls(*array.tolist())

    def to_array(self) -> Array:
        """Returns the byte range as uint64 [6], the form on the tensor channel."""
        return np.array(self, np.uint64)


BYTE_RANGE_SPEC = TensorSpec((len(ByteRange._fields),), np.dtype(np.uint64))
COUNT_SPEC = TensorSpec((1,), np.dtype(np.uint64))


def bytes_of(array: Array, byte_range: ByteRange) -> Array:
    """Returns the bytes of a byte range, uint8 [size]: a view if the array is contiguous.

    Raises:
        InvalidArgumentError: The array has fewer bytes.

    Examples:
        >>> bytes_of(np.array([1, 256], "<u2"), ByteRange(1, 7, job=3, offset=2, size=2))
        array([0, 1], dtype=uint8)
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if byte_range.offset + byte_range.size > raw.size:
        raise InvalidArgumentError(
            f"{byte_range.size} bytes at {byte_range.offset} of an array of {raw.size} bytes"
        )
    return raw[byte_range.offset : byte_range.offset + byte_range.size]


class IncomingArray:
    """An array that is received in byte ranges, in the order of its bytes.

    Args:
        size: size in bytes.

    Examples:
        >>> incoming = IncomingArray(3)
        >>> incoming.put(0, np.array([1, 2], np.uint8))
        >>> incoming.put(2, np.array([3], np.uint8))
        array([1, 2, 3], dtype=uint8)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._have = 0
        self._data: Array | None = None

    def put(self, offset: int, data: Array) -> Array | None:
        """Stores a byte range; a byte range that came before changes nothing.

        Args:
            offset: offset of the first byte.
            data: uint8 [n], copied.

        Returns:
            The whole array with the last byte, uint8 [size], aligned for XLA; None before.

        Raises:
            DataLossError: Earlier bytes are missing.
            InvalidArgumentError: The byte range goes beyond the end.
        """
        end = offset + data.size
        if end > self._size:
            raise InvalidArgumentError(
                f"{data.size} bytes at {offset} of an array of {self._size} bytes"
            )
        if offset > self._have:
            raise DataLossError(
                f"bytes {self._have} to {offset} of an array that is being restored did not come"
            )
        # The byte range was sent again after a broken connection.
        if end <= self._have:
            return None
        assert offset <= self._have < end <= self._size
        if self._data is None:
            # The memory is taken with the first byte: arrays are received one after the other.
            self._data = aligned_buffer(self._size)
        self._data[offset:end] = data
        self._have = end
        if end < self._size:
            return None
        whole, self._data = self._data, np.empty((0,), np.uint8)
        return whole
