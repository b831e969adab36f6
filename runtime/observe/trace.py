"""Traced steps: which operations ran where, when each stage began and ended, and what was sent for it.

A plan that is to be traced is registered a second time, under handles of its own, with the recording wrapped around the
stages and the exchange (``runtime/master/exchange.py``). So steps that are not traced pass no recording code at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runtime.proto import step_stats_pb2 as pb
from runtime.tensor_spec import AnyArray


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that happened on a device.

    Attributes:
        device: full name.
        name: "stage:<wave>", "send:<wave>", "recv:<wave>" or "fetch:<wave>".
        wave: of the stage that it belongs to.
        start_ns: when it began, nanoseconds since the epoch by the clock of the task's host.
        end_ns: when it ended.
        nbytes: bytes moved; for a stage, the bytes of its outputs.
        label: what a reader sees.
        operations: names of the operations of a stage.
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
    """The spans of one task, by session. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, list[Span]] = {}

    def add(self, session: int, *spans: Span) -> None:
        """Notes what happened."""
        with self._lock:
            self._spans.setdefault(session, []).extend(spans)

    def take(self, session: int) -> list[Span]:
        """What was noted for a session since it was last asked for."""
        with self._lock:
            return self._spans.pop(session, [])


def nbytes(arrays: Iterable[AnyArray]) -> int:
    """Bytes of the elements of arrays; of strings, their lengths."""
    total = 0
    for array in arrays:
        if array.dtype.hasobject:
            total += sum(len(item) for item in np.asarray(array).ravel().tolist() if isinstance(item, bytes))
        else:
            total += int(array.nbytes)
    return total


def step_stats(spans: Iterable[Span]) -> pb.StepStats:
    """The StepStats message of spans.

    Each stage gives a node of its own and one for each of its operations: these ran as one program, so they share its
    times.
    """
    devices: dict[str, pb.DeviceStepStats] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        device = devices.setdefault(span.device, pb.DeviceStepStats(device=span.device))
        device.thread_names[span.wave] = f"wave {span.wave}"
        node = device.node_stats.add()
        _times(node, span)
        node.node_name = span.name
        node.timeline_label = span.label
        described = node.output.add().tensor_description
        described.shape.SetInParent()  # TensorBoard shows nothing of a step where one is missing
        described.allocation_description.requested_bytes = span.nbytes
        for name in span.operations:
            _times(device.node_stats.add(node_name=name), span)
    return pb.StepStats(dev_stats=devices.values())


def _times(node: pb.NodeExecStats, span: Span) -> None:
    start, length = span.start_ns, span.end_ns - span.start_ns
    node.thread_id = span.wave
    node.scheduled_micros = node.all_start_micros = start // 1000
    node.op_end_rel_micros = node.all_end_rel_micros = max(1, round(length / 1000)) if length else 0
    node.all_start_nanos = start
    node.op_end_rel_nanos = node.all_end_rel_nanos = length


def shifted(stats: pb.StepStats, ahead_ns: int) -> pb.StepStats:
    """The stats with their times turned back by ``ahead_ns``."""
    if ahead_ns:
        for device in stats.dev_stats:
            for node in device.node_stats:
                node.all_start_nanos -= ahead_ns
                node.scheduled_micros = node.all_start_micros = node.all_start_nanos // 1000
    return stats


def merge(parts: Iterable[pb.StepStats]) -> pb.StepStats:
    """The stats of several tasks as one message, each device once."""
    devices: dict[str, pb.DeviceStepStats] = {}
    for part in parts:
        for device in part.dev_stats:
            devices.setdefault(device.device, pb.DeviceStepStats()).MergeFrom(device)
    return pb.StepStats(dev_stats=[devices[name] for name in sorted(devices)])
