"""The parts of a checkpoint for its coordinator: slices of variables, and snapshots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.checkpoint.array_slice import ArraySlice
from runtime.graph.op_kinds import VariableSpec
from runtime.plan.place import Device
from runtime.proto import services_pb2 as pb
from runtime.proto import stage_pb2
from runtime.state.leadership import Leadership
from runtime.state.times import RECENT_SECS
from runtime.state.write_gate import STEPS_UNDER_WAY
from runtime.tensor_spec import TensorSpec, canonical_dtype, dtype_name


@dataclass(frozen=True)
class VariableSlice:
    """A variable with its place in a checkpoint: an array, or a slice of an array.

    Attributes:
        variable: the variable.
        device: device of the variable; a task knows the device's type and index only.
        array: the slice.
        encoded: bytes of a string variable on disk; 0 until the snapshot.
    """

    variable: VariableSpec
    device: Device
    array: ArraySlice
    encoded: int = 0

    @property
    def task(self) -> str:
        """Name of the task that holds the variable."""
        return self.device.task_name

    @property
    def slot(self) -> tuple[str, str]:
        """Container and name of the variable."""
        return self.variable.container, self.variable.name

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the variable."""
        return TensorSpec(self.variable.shape, self.variable.dtype)

    @property
    def stored(self) -> ArraySlice:
        """The slice as it lies on disk."""
        return (
            ArraySlice.of_bytes(self.array.key, self.encoded) if self.spec.is_string else self.array
        )

    def to_proto(self) -> pb.SliceDef:
        """Returns the slice as a message."""
        return pb.SliceDef(
            key=self.array.key,
            container=self.variable.container,
            name=self.variable.name,
            spec=stage_pb2.TensorSpecDef(
                shape=self.variable.shape, dtype=dtype_name(self.variable.dtype)
            ),
            full_shape=self.array.full_shape,
            offset=self.array.offset,
            chunk=self.array.chunk,
            device_type=self.device.type,
            device_index=self.device.index,
            encoded=self.encoded,
        )

    @classmethod
    def from_proto(cls, message: pb.SliceDef) -> "VariableSlice":
        """Returns the slice of a message that ``to_proto`` made.

        Raises:
            InvalidArgumentError: The dtype of the variable is unknown.
        """
        shape, dtype = tuple(message.spec.shape), canonical_dtype(message.spec.dtype)
        full_shape, offset, chunk = (
            tuple(message.full_shape),
            tuple(message.offset),
            tuple(message.chunk),
        )
        return cls(
            VariableSpec(message.name, shape, dtype, message.container),
            # The task knows its own job and index.
            Device("", 0, message.device_type, message.device_index),
            ArraySlice(message.key, shape, dtype, full_shape, offset, chunk),
            message.encoded,
        )


def store_name(job: int, writer: str) -> str:
    """Returns the name of the store that a task, or the chief, writes for a job.

    The name differs from save to save, so that a late writer of another save is recognised.

    Examples:
        >>> store_name(255, "/job:ps/task:0")
        'ocdbt.process_ffjobpstask0'
    """
    return f"ocdbt.process_{job:x}{''.join(c for c in writer if c.isalnum())}"


def by_task(slices: Iterable[VariableSlice]) -> dict[str, list[VariableSlice]]:
    """Returns the slices of each task, by name of the task."""
    found: dict[str, list[VariableSlice]] = {}
    for s in slices:
        found.setdefault(s.task, []).append(s)
    return found


@dataclass(frozen=True)
class Snapshot:
    """References to variables as of one instant, held by their tasks until they are written or dropped.

    Attributes:
        job: random id.
        slices: slices that were taken.
        number: value of the slice that was requested as a number (the global step), or None.
        paused_secs: seconds during which writing stages were held back.
        leaderships: by task, the leadership under which the snapshot was taken and is written.
    """

    job: int
    slices: tuple[VariableSlice, ...]
    number: int | None
    paused_secs: float
    leaderships: Mapping[str, Leadership]

    @property
    def epoch(self) -> int:
        """Epoch of the chief that leads."""
        return max((leadership.epoch for leadership in self.leaderships.values()), default=0)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that hold the snapshot."""
        return list(by_task(self.slices))

    def stores(self, *, stream: bool) -> list[str]:
        """Returns the names of the stores that are written: of each task, or of the chief alone if it writes."""
        return [store_name(self.job, writer) for writer in (["stream"] if stream else self.tasks)]

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshot on disk."""
        return sum(s.stored.nbytes for s in self.slices)


def half_done_steps(
    reported: Mapping[str, Sequence[pb.StepWrites]],
) -> dict[str, list[pb.StepWrites]]:
    """Returns the steps that have done some of their writes, but not all.

    Args:
        reported: by paused task, the number of writes that each step has done there.

    Returns:
        By task, the steps that must still write there, with the number of writes when they are
        complete.
    """
    done: dict[tuple[int, int], dict[str, int]] = {}
    expected: dict[tuple[int, int], dict[str, int]] = {}
    recent: dict[int, set[int]] = {}
    for task, steps in reported.items():
        for s in steps:
            key = (s.session, s.step)
            done.setdefault(key, {})[task] = s.done
            # Every report of a step has the same expectation, which comes with the step.
            expected[key] = dict(s.expected)
            if s.age_secs < RECENT_SECS:
                recent.setdefault(s.session, set()).add(s.step)
    # Older steps than the last few of a session have ended, or lost their worker and never end.
    waiting: dict[str, list[pb.StepWrites]] = {}
    for session, numbers in recent.items():
        for step in sorted(numbers)[-STEPS_UNDER_WAY:]:
            for task, wanted in expected[session, step].items():
                # A task without variables to save is not paused, and its writes are not in the
                # snapshot.
                if task in reported and done[session, step].get(task, 0) < wanted:
                    waiting.setdefault(task, []).append(
                        pb.StepWrites(session=session, step=step, expected={task: wanted})
                    )
    return waiting
