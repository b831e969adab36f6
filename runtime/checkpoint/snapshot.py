"""What checkpoints are made of, as their coordinator sees it: slices of variables, snapshots, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.graph.op_kinds import VariableSpec
from runtime.plan.place import Device
from runtime.proto import services_pb2 as pb
from runtime.proto import stage_pb2
from runtime.state.write_gate import RECENT_SECS, STEPS_UNDER_WAY


@dataclass(frozen=True)
class VariableSlice:
    """A variable, or the slice of a partitioned one that a variable holds, and its place in a checkpoint.

    Attributes:
        variable: the variable.
        device: where it lives.
        key: path of the array in the checkpoint's key-value store.
        full_shape: shape of the whole array; for strings, of the encoded uint8 array (restore only).
        offset: where the slice begins in it.
        chunk: zarr chunk shape (save only).
    """

    variable: VariableSpec
    device: Device
    key: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    chunk: tuple[int, ...] = ()

    @property
    def task(self) -> str:
        """The task that holds it."""
        return self.device.task_name

    def to_proto(self) -> pb.SliceDef:
        """The slice as a message."""
        dtype = "string" if self.variable.dtype == object else self.variable.dtype.name
        return pb.SliceDef(
            key=self.key,
            container=self.variable.container,
            name=self.variable.name,
            spec=stage_pb2.TensorSpecDef(shape=self.variable.shape, dtype=dtype),
            full_shape=self.full_shape,
            offset=self.offset,
            chunk=self.chunk,
            device_type=self.device.type,
            device_index=self.device.index,
        )


@dataclass(frozen=True)
class Snapshot:
    """References to variables as of one instant, held by their tasks until they are written or dropped.

    Attributes:
        job: random id.
        slices: by task.
        sizes: by task, bytes of each slice on disk.
        number: value of the slice that was asked for as a number (the global step), or None.
        paused_secs: how long writing stages were held back.
        cores: of the smallest machine among the tasks'.
    """

    job: int
    slices: Mapping[str, tuple[VariableSlice, ...]]
    sizes: Mapping[str, tuple[int, ...]]
    number: int | None
    paused_secs: float
    cores: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(sum(sizes) for sizes in self.sizes.values())


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint.

    Attributes:
        path: relative to the directory that was written.
        size: in bytes.
        crc32: CRC-32 of its content.
    """

    path: str
    size: int
    crc32: int


def half_done_steps(reported: Mapping[str, Sequence[pb.StepWrites]]) -> dict[str, list[pb.StepWrites]]:
    """The steps that have written somewhere, but not everywhere.

    Args:
        reported: by paused task, how far the steps' writes have come there.

    Returns:
        By task, the steps that must still write there, with how many writes they will have made then.
    """
    done: dict[tuple[int, int], dict[str, int]] = {}
    expected: dict[tuple[int, int], dict[str, int]] = {}
    recent: dict[int, set[int]] = {}
    for task, steps in reported.items():
        for s in steps:
            key = (s.session, s.step)
            done.setdefault(key, {})[task] = s.done
            expected[key] = dict(s.expected)
            if s.age_secs < RECENT_SECS:
                recent.setdefault(s.session, set()).add(s.step)
    waiting: dict[str, list[pb.StepWrites]] = {}
    for session, numbers in recent.items():
        for step in sorted(numbers)[-STEPS_UNDER_WAY:]:
            for task, wanted in expected[session, step].items():
                if task in reported and done[session, step].get(task, 0) < wanted:
                    waiting.setdefault(task, []).append(
                        pb.StepWrites(session=session, step=step, expected={task: wanted})
                    )
    return waiting
