"""Checkpoints without a shared directory: the coordinator writes what the tasks send, and sends what it reads.

Arrays travel in pieces of a few MiB, so that the coordinator never holds more than a few chunks of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.execution import zarr
from runtime.proto import services_pb2 as pb

if TYPE_CHECKING:
    from runtime.server.cut import VariableSlice

PIECE_BYTES = 4 << 20
"""Bytes that one message carries."""
BLOCK_BYTES = 16 << 20
"""Bytes after which what has come is written."""

Ask = Callable[[str, pb.ShardOrder], pb.ShardReply]
"""``(task, order) -> reply``."""
_STRING_BYTES = np.dtype(np.uint8)


def _is_string(s: VariableSlice) -> bool:
    return s.variable.dtype == object


def _rows(s: VariableSlice, shape: tuple[int, ...], itemsize: int, align: int) -> int:
    """How many rows of an array make a block: whole chunks."""
    row = math.prod(shape[1:]) * itemsize
    wanted = max(1, BLOCK_BYTES // max(row, 1))
    return max(align, wanted // align * align)


def blocks(
    slices: Mapping[str, Sequence[VariableSlice]], sizes: Mapping[str, Sequence[int]], ask: Ask, order: pb.ShardOrder
) -> Iterator[tuple[zarr.Placed, np.ndarray[Any, Any]]]:
    """The arrays of a cut, block by block, as their tasks send them.

    Args:
        slices: by task.
        sizes: by task, bytes of each slice.
        ask: sends an order.
        order: what all pieces' orders have in common.
    """
    for task, held in slices.items():
        for index, (s, size) in enumerate(zip(held, sizes[task], strict=True)):
            if _is_string(s):
                data = np.frombuffer(_pull(ask, order, task, index, 0, size), np.uint8)
                yield zarr.Placed(s.key, (size,), _STRING_BYTES, (size,), (0,), (max(size, 1),)), data
                continue
            shape, dtype = s.variable.shape, s.variable.dtype
            if not shape or not size:
                data = np.frombuffer(_pull(ask, order, task, index, 0, size), dtype).reshape(shape)
                yield zarr.Placed(s.key, shape, dtype, s.full_shape, s.offset, s.chunk), data
                continue
            step = _rows(s, shape, dtype.itemsize, s.chunk[0])
            row = math.prod(shape[1:]) * dtype.itemsize
            for first in range(0, shape[0], step):
                count = min(step, shape[0] - first)
                block = (count, *shape[1:])
                raw = _pull(ask, order, task, index, first * row, count * row)
                offset = (s.offset[0] + first, *s.offset[1:])
                yield (
                    zarr.Placed(s.key, block, dtype, s.full_shape, offset, s.chunk),
                    np.frombuffer(raw, dtype).reshape(block),
                )


def _pull(ask: Ask, common: pb.ShardOrder, task: str, index: int, offset: int, size: int) -> bytearray:
    data = bytearray(size)
    for at in range(0, size, PIECE_BYTES):
        order = pb.ShardOrder()
        order.CopyFrom(common)
        order.index, order.offset, order.size = index, offset + at, min(PIECE_BYTES, size - at)
        data[at : at + order.size] = ask(task, order).data
    return data


def send(
    slices: Sequence[VariableSlice], directory: str, *, ocdbt: bool, zarr3: bool, ask: Ask, order: pb.ShardOrder
) -> int:
    """Reads what one task needs and sends it; the task turns it into values.

    Args:
        slices: of the task.
        directory: of the arrays.
        ocdbt: whether they lie in an OCDBT store.
        zarr3: whether they are of zarr's third version.
        ask: sends an order.
        order: what all pieces' orders have in common.

    Returns:
        Bytes sent.
    """
    task = slices[0].task
    begin = pb.ShardOrder()
    begin.CopyFrom(order)
    begin.slices.extend(s.to_proto() for s in slices)
    ask(task, begin)
    sent = 0
    for index, s in enumerate(slices):
        shape = s.full_shape if _is_string(s) else s.variable.shape
        dtype = _STRING_BYTES if _is_string(s) else s.variable.dtype
        row = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, BLOCK_BYTES // max(row, 1)) if shape else 1
        for first in range(0, shape[0] if shape else 1, step):
            block = (min(step, shape[0] - first), *shape[1:]) if shape else ()
            offset = (s.offset[0] + first, *s.offset[1:]) if shape else ()
            placed = zarr.Placed(s.key, block, dtype, s.full_shape, offset, ())
            array = zarr.read_arrays(directory, [placed], ocdbt=ocdbt, zarr3=zarr3)[0]
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for at in range(0, len(raw), PIECE_BYTES):
                piece = pb.ShardOrder()
                piece.CopyFrom(order)
                piece.index, piece.offset = index, first * row + at
                piece.data = raw[at : at + PIECE_BYTES].tobytes()
                ask(task, piece)
            sent += len(raw)
    ask(task, order)
    return sent
