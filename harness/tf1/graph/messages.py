"""The protocol buffers and small classes of ``tf`` that programs name: summaries, events, traces, devices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
from tensorboardX.proto import attr_value_pb2, event_pb2, graph_pb2, node_def_pb2, summary_pb2

from harness.monitoring.timeline import chrome_trace
from harness.tf1.graph.config import GPU_PLATFORMS
from harness.tf1.ops.lift import Public

public = Public("tf", "Messages")
public.update(
    {
        "AttrValue": attr_value_pb2.AttrValue,
        "Event": event_pb2.Event,
        "GraphDef": graph_pb2.GraphDef,
        "HistogramProto": summary_pb2.HistogramProto,
        "LogMessage": event_pb2.LogMessage,
        "NodeDef": node_def_pb2.NodeDef,
        "SessionLog": event_pb2.SessionLog,
        "Summary": summary_pb2.Summary,
    }
)


@public.add()
class AggregationMethod:
    """The ways to add up the gradients of one variable.

    XLA decides, so all values mean the same.
    """

    ADD_N = DEFAULT = 0
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


class Timeline:
    """A traced step as a Chrome trace; ``harness.timeline`` takes the ``RunMetadata`` itself."""

    def __init__(self, step_stats: Any, graph: Any = None) -> None:
        self._step_stats = step_stats

    def generate_chrome_trace_format(
        self, show_dataflow: bool = True, show_memory: bool = False
    ) -> str:
        """Returns the trace as JSON text, empty where nothing ran.

        Transfers are always shown, memory never.
        """
        # Programs write the trace of every step, traced or not.
        if not self._step_stats.dev_stats:
            return json.dumps({"traceEvents": []})
        return json.dumps(chrome_trace(SimpleNamespace(step_stats=self._step_stats)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class DeviceAttributes:
    """A device of this process.

    Attributes:
        name: ``/device:CPU:0``.
        device_type: "CPU", "GPU" or "TPU".
        memory_limit: bytes of the device that the process may take; 0 when unknown.
        physical_device_desc: the kind of device, in words.
    """

    name: str
    device_type: str
    memory_limit: int
    physical_device_desc: str


def list_local_devices(session_config: object = None) -> list[DeviceAttributes]:
    """Returns the devices that JAX has in this process, and ``/device:CPU:0`` as the first."""
    found: list[DeviceAttributes] = []
    cpus = jax.local_devices(backend="cpu")
    # JAX lists the CPU only where there is no accelerator.
    for device in [*cpus, *(d for d in jax.local_devices() if d not in cpus)]:
        kind = "GPU" if device.platform in GPU_PLATFORMS else device.platform.upper()
        index = sum(d.device_type == kind for d in found)
        limit = (device.memory_stats() or {}).get("bytes_limit", 0) if kind != "CPU" else 0
        found.append(DeviceAttributes(f"/device:{kind}:{index}", kind, limit, device.device_kind))
    return found
