"""Traced steps: the times of stages and transfers, with their operations, devices and bytes.

A traced plan is registered a second time, under handles of its own. The recording is wrapped around
these stages and around the exchange (``runtime/master/exchange.py``). So steps without a trace run
no recording code at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runtime import concurrency
from runtime.proto import step_stats_pb2 as pb
from runtime.tensor_spec import AnyArray


@dataclass(frozen=True, slots=True)
class Span:
    """A stage or transfer in a traced step.

    Attributes:
        device: Full name of the device.
        name: "stage:<wave>", "send:<wave>", "recv:<wave>" or "fetch:<wave>"; on an accelerator also
            "h2d:<wave>", "compute:<wave>" and "d2h:<wave>", the parts of its stage.
        wave: Wave of the stage.
        start_ns: Begin, nanoseconds since the epoch by the clock of the task's host.
        end_ns: End, nanoseconds since the epoch by the same clock.
        nbytes: Bytes of a transfer, or of the outputs of a stage.
        label: Text for the timeline.
        operations: Names of the operations of a stage.
    """

    device: str
    name: str
    wave: int
    start_ns: int
    end_ns: int
    nbytes: int = 0
    label: str = ""
    operations: tuple[str, ...] = ()


class Tracer:
    """The store of one task's spans, by session. Thread safe."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._spans: dict[int, list[Span]] = {}

    def add(self, session: int, *spans: Span) -> None:
        """Adds spans to a session."""
        with self._lock:
            self._spans.setdefault(session, []).extend(spans)

    def take(self, session: int) -> list[Span]:
        """Returns and forgets the spans of a session."""
        with self._lock:
            return self._spans.pop(session, [])


def nbytes(arrays: Iterable[AnyArray]) -> int:
    """Returns the bytes of the elements of arrays. A string counts by its length."""
    total = 0
    for array in arrays:
        if array.dtype.hasobject:
            total += sum(
                len(item) for item in np.asarray(array).ravel().tolist() if isinstance(item, bytes)
            )
        else:
            total += int(array.nbytes)
    return total


def step_stats(spans: Iterable[Span]) -> pb.StepStats:
    """Returns spans as a StepStats message.

    A stage becomes a node, and so does each of its operations. The operations ran as one program,
    so all have the times of the stage.
    """
    devices: dict[str, pb.DeviceStepStats] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        device = devices.setdefault(span.device, pb.DeviceStepStats(device=span.device))
        # In the timeline each wave has a row of its own.
        device.thread_names[span.wave] = f"wave {span.wave}"
        node = device.node_stats.add()
        _times(node, span)
        node.node_name = span.name
        node.timeline_label = span.label
        described = node.output.add().tensor_description
        # TensorBoard shows nothing of a step in which a node has no shape.
        described.shape.SetInParent()
        described.allocation_description.requested_bytes = span.nbytes
        for name in span.operations:
            _times(device.node_stats.add(node_name=name), span)
    return pb.StepStats(dev_stats=devices.values())


def _times(node: pb.NodeExecStats, span: Span) -> None:
    start, length = span.start_ns, span.end_ns - span.start_ns
    # TensorBoard reads microseconds. A span of less than half a microsecond must not round to none.
    node.thread_id = span.wave
    node.scheduled_micros = node.all_start_micros = start // 1000
    node.op_end_rel_micros = node.all_end_rel_micros = max(1, round(length / 1000)) if length else 0
    node.all_start_nanos = start
    node.op_end_rel_nanos = node.all_end_rel_nanos = length


def shifted(stats: pb.StepStats, ahead_ns: int) -> pb.StepStats:
    """Moves the times of stats back, in place, and returns the stats.

    Args:
        stats: Stats of a task with a clock that is ahead.
        ahead_ns: Nanoseconds by which the clock is ahead; negative for a clock that is behind.
    """
    if ahead_ns:
        for device in stats.dev_stats:
            for node in device.node_stats:
                node.all_start_nanos -= ahead_ns
                node.scheduled_micros = node.all_start_micros = node.all_start_nanos // 1000
    return stats


def merge(parts: Iterable[pb.StepStats]) -> pb.StepStats:
    """Returns the stats of several tasks as one message, with each device once."""
    devices: dict[str, pb.DeviceStepStats] = {}
    for part in parts:
        for device in part.dev_stats:
            devices.setdefault(device.device, pb.DeviceStepStats()).MergeFrom(device)
    return pb.StepStats(dev_stats=[devices[name] for name in sorted(devices)])
