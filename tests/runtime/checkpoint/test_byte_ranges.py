"""Variables in pieces: blocks that share no chunk, and arrays that are whole whatever is sent twice."""

import dataclasses
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harness.checkpoints import names
from runtime.checkpoint.array_slice import ArraySlice
from runtime.checkpoint.byte_ranges import ByteRange, IncomingArray, bytes_of
from runtime.errors import DataLossError, InvalidArgumentError


@st.composite
def _slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(shape, chunk, offset) of a slice of a stored array."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    chunk = tuple(draw(st.integers(1, 5)) for _ in shape)
    offset = tuple(draw(st.integers(0, 6)) for _ in shape)
    return shape, chunk, offset


@hypothesis.given(_slices(), st.integers(1, 200), st.booleans())
def test_blocks_share_no_chunk(
    given: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], limit: int, aligned: bool
) -> None:
    """The blocks of a slice follow each other, keep their limit and share no chunk."""
    shape, chunk, offset = given
    if aligned:  # as when it is written: a slice begins where a chunk does
        offset = tuple(o * c for o, c in zip(offset, chunk, strict=True))
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    full_shape = tuple(o + n for o, n in zip(offset, shape, strict=True))
    blocks = list(ArraySlice("x", shape, whole.dtype, full_shape, offset, chunk).blocks(limit))
    parts = [whole[block.region(offset)] for block in blocks]
    assert [p.shape for p in parts] == [block.shape for block in blocks]
    assert [p.nbytes for p in parts] == [block.nbytes for block in blocks]
    assert b"".join(p.tobytes() for p in parts) == whole.tobytes()
    seen: set[tuple[int, ...]] = set()
    for block in blocks:
        touched = [
            range(o // c, -(-(o + n) // c))
            for o, n, c in zip(block.offset, block.shape, chunk, strict=True)
        ]
        chunks = set(itertools.product(*touched))
        assert not chunks & seen or not aligned
        seen |= chunks


@hypothesis.given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 300))
def test_chunks_keep_the_limit(shape: list[int], limit: int) -> None:
    """The chunks of any shape keep the limit of bytes."""
    one = ArraySlice.whole("x", tuple(shape), np.dtype(np.uint8))
    chunk = names.chunk_shape([one], limit)
    assert math.prod(chunk) <= limit
    assert all(
        block.nbytes <= limit for block in dataclasses.replace(one, chunk=chunk).blocks(limit)
    )


@hypothesis.given(
    st.binary(min_size=1, max_size=60), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)))
)
def test_repeated_pieces_count_once(data: bytes, cuts: list[tuple[int, int]]) -> None:
    """A piece that is sent twice is neither lost nor doubled."""
    array = np.frombuffer(data, np.uint8)
    incoming = IncomingArray(array.size)
    ends = sorted({min(c, array.size) for c, _ in cuts if c} | {array.size})
    got = None
    for i, end in enumerate(ends):
        start = ends[i - 1] if i else 0
        for _ in range(2):
            whole = incoming.put(start, array[start:end])
            got = whole if whole is not None else got
    assert got is not None and got.tobytes() == data


def test_foreign_pieces_are_refused() -> None:
    """A piece that leaves a gap or goes beyond its array is refused."""
    incoming = IncomingArray(10)
    with pytest.raises(DataLossError, match="bytes 0 to 4 .* did not come"):
        incoming.put(4, np.zeros(2, np.uint8))
    with pytest.raises(InvalidArgumentError, match="11 bytes at 0 of an array of 10"):
        incoming.put(0, np.zeros(11, np.uint8))
    with pytest.raises(InvalidArgumentError, match="4 bytes at 8 of an array of 10"):
        bytes_of(np.zeros(10, np.uint8), ByteRange(1, 2, 3, 0, 8, 4))
    with pytest.raises(InvalidArgumentError, match=r"int32\[3\]"):
        ByteRange.from_array(np.zeros(3, np.int32))


def test_part_is_a_view() -> None:
    """A part of an array is a view, and a byte range survives its wire form."""
    array = np.arange(20, dtype=np.float32).reshape(4, 5)
    byte_range = ByteRange(2**40, 2**63 + 1, 2**62, 3, 8, 16)
    assert ByteRange.from_array(byte_range.to_array()) == byte_range
    part = bytes_of(array, byte_range)
    assert part.base is not None and np.shares_memory(part, array)
    assert part.tobytes() == array.tobytes()[8:24]
