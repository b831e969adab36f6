"""The place of a block of an array in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from runtime.tensor_spec import DType


@dataclass(frozen=True)
class ArraySlice:
    """An array of a checkpoint, or a block of a larger one.

    Attributes:
        key: path of the array in the checkpoint's key-value store.
        shape: shape of the block.
        dtype: dtype of the elements; ``object`` for strings, which lie on disk as bytes.
        full_shape: shape of the whole array.
        offset: index of the block's first element in the whole array.
        chunk: shape of a zarr chunk, for writing. Blocks begin and end at multiples of the chunk.

    Examples:
        >>> matrix = ArraySlice("w", (4, 2), np.dtype("float32"), (4, 2), (0, 0), chunk=(1, 2))
        >>> [block.region() for block in matrix.blocks(limit=16)]
        [(slice(0, 2, None), slice(0, 2, None)), (slice(2, 4, None), slice(0, 2, None))]
    """

    key: str
    shape: tuple[int, ...]
    dtype: DType
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    chunk: tuple[int, ...] = ()

    @classmethod
    def whole(cls, key: str, shape: tuple[int, ...], dtype: DType) -> ArraySlice:
        """Returns a whole array, without chunks."""
        return cls(key, shape, dtype, shape, (0,) * len(shape))

    @classmethod
    def of_bytes(cls, key: str, size: int) -> ArraySlice:
        """Returns a whole array of ``size`` bytes in one chunk, which is the form of strings on disk."""
        return cls(key, (size,), np.dtype(np.uint8), (size,), (0,), (max(size, 1),))

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return math.prod(self.shape) * self.dtype.itemsize

    def region(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Returns the block as an index of the whole array, or of a block that begins at ``origin``."""
        starts = (
            self.offset
            if origin is None
            else [o - p for o, p in zip(self.offset, origin, strict=True)]
        )
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))

    def blocks(self, limit: int) -> Iterator[ArraySlice]:
        """Cuts the block into smaller blocks that follow each other in memory and share no chunk.

        Args:
            limit: largest size of a block in bytes. A block is larger only if a chunk is.

        Yields:
            The blocks, in C order.
        """
        if self.nbytes <= limit or not self.shape:
            yield self
            return
        shape, chunk, offset = self.shape, self.chunk, self.offset
        assert len(shape) == len(chunk) == len(offset) == len(self.full_shape)
        # Cut along the first axis on which a row is small enough. On the axes before it a block has
        # length 1, so their chunks must have length 1 too, or several blocks would share a chunk.
        axis = 0
        row = math.prod(shape[1:]) * self.dtype.itemsize
        while axis + 1 < len(shape) and (chunk[axis] == 1 or shape[axis] == 1) and row > limit:
            axis += 1
            row = math.prod(shape[axis + 1 :]) * self.dtype.itemsize
        # A block ends at a multiple of the chunk in the whole array, as two writers of one chunk
        # would overwrite each other.
        unit = chunk[axis]
        step = max(1, limit // (row * unit)) * unit
        for before in np.ndindex(*shape[:axis]):
            first = 0
            while first < shape[axis]:
                end = min(shape[axis], (offset[axis] + first) // unit * unit + step - offset[axis])
                assert end > first, "a block without a row would repeat for ever"
                start = (
                    *(o + b for o, b in zip(offset, before, strict=False)),
                    offset[axis] + first,
                )
                yield replace(
                    self,
                    shape=(*(1,) * axis, end - first, *shape[axis + 1 :]),
                    offset=(*start, *offset[axis + 1 :]),
                )
                first = end
