"""Byte ranges of variables: how a checkpoint crosses the tensor channel where the tasks share no directory.

The coordinator asks for byte ranges of what a job has taken, and gives byte ranges of what it shall restore. A byte
range says where it belongs, so that one that is sent twice (after a broken connection) is neither lost nor doubled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from runtime.errors import DataLossError, InvalidArgumentError
from runtime.state.leadership import Leadership
from runtime.tensor_spec import Array, TensorSpec, aligned_buffer


class ByteRange(NamedTuple):
    """Some bytes of one slice of a job.

    Attributes:
        epoch: of the leadership under which it is asked for.
        owner: of that leadership.
        job: random id of the save or restore.
        part: which of the job's slices on the task.
        offset: the first byte, in C order.
        size: how many bytes.
    """

    epoch: int
    owner: int
    job: int
    part: int = 0
    offset: int = 0
    size: int = 0

    @classmethod
    def of_job(cls, leadership: Leadership, job: int) -> ByteRange:
        """What all byte ranges of a job on one task have in common."""
        return cls(leadership.epoch, leadership.owner, job)

    @property
    def leadership(self) -> Leadership:
        """Under which it is asked for."""
        return Leadership(self.epoch, self.owner)

    @classmethod
    def from_array(cls, array: Array) -> ByteRange:
        """Reads what ``to_array`` made.

        Raises:
            InvalidArgumentError: it is something else.
        """
        if array.dtype != np.uint64 or array.shape != (len(cls._fields),):
            raise InvalidArgumentError(f"a byte range of a checkpoint is asked for by {array.dtype}{list(array.shape)}")
        return cls(*array.tolist())

    def to_array(self) -> Array:
        """The byte range as uint64[6], as it is asked for over the tensor channel."""
        return np.array(self, np.uint64)


BYTE_RANGE_SPEC = TensorSpec((len(ByteRange._fields),), np.dtype(np.uint64))
COUNT_SPEC = TensorSpec((1,), np.dtype(np.uint64))


def bytes_of(array: Array, byte_range: ByteRange) -> Array:
    """The bytes of a byte range, uint8 [size]: a view where the array is contiguous.

    Raises:
        InvalidArgumentError: the array has fewer bytes.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if byte_range.offset + byte_range.size > raw.size:
        raise InvalidArgumentError(f"{byte_range.size} bytes at {byte_range.offset} of an array of {raw.size} bytes")
    return raw[byte_range.offset : byte_range.offset + byte_range.size]


class Incoming:
    """An array that comes in byte ranges, from its first byte to its last.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._have = 0
        self._data: Array | None = None

    def put(self, offset: int, data: Array) -> Array | None:
        """Takes a byte range; one that was here before changes nothing.

        Args:
            offset: of its first byte.
            data: uint8, copied.

        Returns:
            With the last byte the whole, uint8 [size], aligned for XLA; else None.

        Raises:
            DataLossError: bytes before it are missing.
            InvalidArgumentError: it goes beyond the end.
        """
        end = offset + data.size
        if end > self._size:
            raise InvalidArgumentError(f"{data.size} bytes at {offset} of an array of {self._size} bytes")
        if offset > self._have:
            raise DataLossError(f"bytes {self._have} to {offset} of an array that is being restored did not come")
        if end <= self._have:
            return None
        if self._data is None:
            self._data = aligned_buffer(self._size)
        self._data[offset:end] = data
        self._have = end
        if end < self._size:
            return None
        whole, self._data = self._data, np.empty((0,), np.uint8)
        return whole
