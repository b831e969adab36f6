"""Checkpoints without a shared directory: the coordinator writes what the tasks send, and sends what it reads.

The coordinator holds a few blocks of the model at any time. A block is written to disk from the
memory in which the block was received, and sent from the memory into which the block was read.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from runtime.checkpoint import storage
from runtime.checkpoint.array_slice import ArraySlice
from runtime.checkpoint.byte_ranges import COUNT_SPEC, ByteRange
from runtime.checkpoint.participant import CheckpointParticipant
from runtime.checkpoint.snapshot import Snapshot, VariableSlice, by_task
from runtime.tensor_spec import Array, TensorSpec
from runtime.wire.channel import Lane
from runtime.wire.codec import TensorLayout
from runtime.wire.handles import PULL, PUSH

BLOCK_BYTES = 16 << 20
"""Bytes that are requested at once, and written when they have come."""
READ_BYTES = 8 << 20
"""Bytes that are read at once in a restore; for each task that is served, two such blocks are in memory."""
CHUNK_BYTES = 4 << 20
"""Bytes that are sent at once: few enough to be in the processor's cache when the receiver copies them."""
TASKS_AT_ONCE = 4
"""Number of tasks that receive arrays at a time."""
_BYTE = np.dtype(np.uint8)


class ByteStream(Protocol):
    """A way for byte ranges between this process and one task, for one thread at a time."""

    def pull(self, byte_range: ByteRange) -> tuple[Array, int]:
        """Returns the bytes of a byte range, uint8 [size], and the number of updates on the task so far."""

    def push(self, byte_range: ByteRange, data: Array) -> None:
        """Sends the bytes of a byte range."""

    def close(self) -> None:
        """Closes the stream."""


class LocalStream:
    """A stream to a task in this process.

    Args:
        participant: the task's part in checkpoints.
        client: session that owns the job.
    """

    def __init__(self, participant: CheckpointParticipant, client: int) -> None:
        self._participant = participant
        self._client = client

    def pull(self, byte_range: ByteRange) -> tuple[Array, int]:
        """Returns a view of the bytes of a byte range, and the number of updates."""
        return self._participant.pull(byte_range, self._client)

    def push(self, byte_range: ByteRange, data: Array) -> None:
        """Stores the bytes of a byte range."""
        self._participant.push(byte_range, data, self._client)

    def close(self) -> None:
        """Does nothing."""


class ChannelStream:
    """A stream over a connection of the tensor channel.

    After a broken connection a byte range may be sent twice. This does no harm, because the byte
    range has its place.

    Args:
        lane: connection for this stream alone, which the task serves in a thread of low priority.
        release: called with the lane at the end.
    """

    def __init__(self, lane: Lane, release: Callable[[Lane], None]) -> None:
        self.lane = lane
        self._release = release

    def pull(self, byte_range: ByteRange) -> tuple[Array, int]:
        """Receives the bytes of a byte range into memory of their own."""
        layout = TensorLayout([TensorSpec((byte_range.size,), _BYTE), COUNT_SPEC])
        data, updates = self.lane.call(PULL, 0, [byte_range.to_array()], layout)
        return data, int(updates[0])

    def push(self, byte_range: ByteRange, data: Array) -> None:
        """Sends the bytes of a byte range from their own memory."""
        self.lane.call(PUSH, 0, [byte_range.to_array(), data], TensorLayout([]), dynamic=True)

    def close(self) -> None:
        """Closes the connection."""
        self.lane.close(goodbye=True)
        self._release(self.lane)


class TaskStreams(contextlib.ExitStack):
    """The streams of one save, each opened at the first use and all closed at the end.

    Args:
        opened: opens the stream of a task.
    """

    def __init__(self, opened: Callable[[str], ByteStream]) -> None:
        super().__init__()
        self._open = opened
        self._streams: dict[str, ByteStream] = {}
        self._updates: dict[str, tuple[int, int]] = {}

    @property
    def updates(self) -> int:
        """Number of updates since the first reply of each task; grows while a worker trains."""
        return sum(last - first for first, last in self._updates.values())

    def pull(self, task: str, byte_range: ByteRange) -> Array:
        """Returns the bytes of a byte range that a task holds, uint8 [size]."""
        stream = self._streams.get(task)
        if stream is None:
            stream = self._streams[task] = self.enter_context(contextlib.closing(self._open(task)))
        data, updates = stream.pull(byte_range)
        self._updates[task] = (self._updates.get(task, (updates, updates))[0], updates)
        return data


def blocks(snapshot: Snapshot, streams: TaskStreams) -> Iterator[tuple[ArraySlice, Array]]:
    """Yields the arrays of a snapshot block by block, as the tasks send them.

    Args:
        snapshot: the snapshot to write.
        streams: streams to the tasks of the snapshot.
    """
    for task, held in by_task(snapshot.slices).items():
        common = ByteRange.of_job(snapshot.leaderships[task], snapshot.job)
        for index, s in enumerate(held):
            sent = 0
            for block in s.stored.blocks(BLOCK_BYTES):
                byte_range = common._replace(part=index, offset=sent, size=block.nbytes)
                raw = streams.pull(task, byte_range) if byte_range.size else np.empty((0,), _BYTE)
                sent += byte_range.size
                yield block, raw.view(block.dtype).reshape(block.shape)
            assert sent == s.stored.nbytes, "the blocks are not the whole slice"


def send(
    slices: Sequence[VariableSlice], source: storage.Source, stream: ByteStream, common: ByteRange
) -> None:
    """Reads the arrays of one task and sends their bytes.

    Args:
        slices: slices of the task.
        source: store of the arrays.
        stream: stream to the task.
        common: leadership and job, which all byte ranges have in common.
    """
    for index, s in enumerate(slices):
        chunk = storage.describe(source, s.array.key).chunk
        blocks = replace(s.stored, chunk=chunk).blocks(READ_BYTES)
        sent = 0
        for array in storage.read_each(source, blocks, at_once=2):
            raw = array.reshape(-1).view(np.uint8)
            for at in range(0, raw.size, CHUNK_BYTES):
                part = raw[at : at + CHUNK_BYTES]
                stream.push(common._replace(part=index, offset=sent, size=part.size), part)
                sent += part.size
        assert sent == s.stored.nbytes, "the blocks are not the whole slice"
