"""RunOptions and RunMetadata: the request for a trace of a step, and the trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from runtime.graph.graph import Tensor
from runtime.proto import step_stats_pb2
from runtime.proto.step_stats_pb2 import RunMetadata as RunMetadata
from runtime.tensor_spec import DType, TensorSpec, dtype_name

_DATA_TYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "string": 7,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
}
"""TensorFlow's numbers of data types."""
assert len({*_DATA_TYPES.values()}) == len(_DATA_TYPES), "two data types have one number"

RunMetadata.__doc__ = """Statistics of a traced step. ``step_stats`` has the operations of each device and their times.

TensorBoard reads this protocol buffer message. ``harness.timeline`` draws a picture of the message.
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one step.

    Attributes:
        trace_level: ``FULL_TRACE``, or any other level but ``NO_TRACE``, fills the step's
            ``RunMetadata``. A traced step waits for every stage, and its first run registers the
            plan once more.
        timeout_in_ms: Time limit of the step in milliseconds; 0 for the session's own.

    Examples:
        >>> import runtime as rt
        >>> options = rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE, timeout_in_ms=60_000)
        >>> metadata = rt.RunMetadata()
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     session.run(rt.constant(1.0) + 1.0, options=options, run_metadata=metadata).item()
        2.0
        >>> len(metadata.step_stats.dev_stats) > 0
        True
    """

    NO_TRACE: ClassVar[int] = 0
    SOFTWARE_TRACE: ClassVar[int] = 1
    HARDWARE_TRACE: ClassVar[int] = 2
    FULL_TRACE: ClassVar[int] = 3

    trace_level: int = 0
    timeout_in_ms: int = 0

    def __post_init__(self) -> None:
        """Checks the values. Raises ValueError if a value is out of range."""
        if not self.NO_TRACE <= self.trace_level <= self.FULL_TRACE:
            raise ValueError(
                f"trace_level is {self.trace_level}: use RunOptions.NO_TRACE or "
                "RunOptions.FULL_TRACE"
            )
        if self.timeout_in_ms < 0:
            raise ValueError(f"timeout_in_ms is {self.timeout_in_ms}: use 0 for no limit")


def data_type_number(dtype: DType) -> int:
    """Returns TensorFlow's number of a dtype (``DataType``); 0 (``DT_INVALID``) for a dtype without a number."""
    return _DATA_TYPES.get(dtype_name(dtype), 0)


def describe_outputs(stats: step_stats_pb2.StepStats, specs: Mapping[Tensor, TensorSpec]) -> None:
    """Adds to each operation's node the shapes, dtypes and bytes of its outputs."""
    by_op: dict[str, list[tuple[int, TensorSpec]]] = {}
    for tensor, spec in specs.items():
        by_op.setdefault(tensor.op.name, []).append((tensor.index, spec))
    for device in stats.dev_stats:
        for node in device.node_stats:
            for slot, spec in sorted(by_op.get(node.node_name, ()), key=lambda item: item[0]):
                output = node.output.add(slot=slot)
                described = output.tensor_description
                described.dtype = data_type_number(spec.dtype)
                # Without a shape, even of a scalar, TensorBoard shows nothing of the step.
                described.shape.SetInParent()
                for size in spec.shape:
                    described.shape.dim.add(size=size)
                if not spec.is_string:
                    described.allocation_description.requested_bytes = spec.nbytes
                    described.allocation_description.allocated_bytes = spec.nbytes
                    described.allocation_description.allocator_name = device.device.rpartition(
                        "device:"
                    )[2]
