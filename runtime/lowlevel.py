"""The second face of the runtime: what a training harness is built on, and a training program does not need.

``import runtime`` gives programs what they are written with. What is here serves those who write
something like ``harness`` themselves: checkpoints across tasks, updates that wait for others,
operations on a host, metrics of a process.
"""

from runtime.checkpoint import durability, storage, string_arrays
from runtime.checkpoint.array_slice import ArraySlice
from runtime.checkpoint.coordinator import CheckpointCoordinator
from runtime.checkpoint.snapshot import Snapshot, VariableSlice
from runtime.checkpoint.states import register_state
from runtime.checkpoint.storage import CheckpointFile
from runtime.cluster.gpus import divide_memory
from runtime.cluster.spec import agree
from runtime.concurrency import in_thread
from runtime.errors import (
    DiskAwayError,
    DiskFullError,
    MissingFeedError,
    SnapshotError,
    TakeoverError,
    UninitializedError,
    one_line,
    printable,
)
from runtime.graph import op_kinds
from runtime.graph.deferred_update import ALL_WORKERS, Quorum, bounded_update
from runtime.graph.gradients import without_derivative
from runtime.graph.graph import set_default_graph_type
from runtime.graph.host_ops import host_call
from runtime.graph.operators import Operators, pick_item
from runtime.graph.python_calls import python_call
from runtime.graph.tracing import needs_64_bit, sizes_are_guesses
from runtime.graph.variable import path_name
from runtime.observe.process_metrics import METRICS, metrics
from runtime.proto.cluster_pb2 import ClusterDef, JobDef, ServerDef
from runtime.retired import check_environment, explain_flags, explain_name, explains_arguments
from runtime.rpc.unreached import why_not
from runtime.session.lead import Authority
from runtime.session.run_options import data_type_number
from runtime.session.run_records import RunRecords, RunRecordView
from runtime.tables.pages import PagedArray
from runtime.tensor_spec import Array, DType, canonical_dtype, dtype_name
from runtime.trust.roles import server_names
from runtime.trust.token_files import check_only_ours, make_private_directory
from runtime.wire.versions import version

__all__ = [
    "ALL_WORKERS",
    "ClusterDef",
    "JobDef",
    "ServerDef",
    "METRICS",
    "Array",
    "ArraySlice",
    "Authority",
    "CheckpointCoordinator",
    "CheckpointFile",
    "DType",
    "DiskAwayError",
    "DiskFullError",
    "MissingFeedError",
    "Operators",
    "PagedArray",
    "Quorum",
    "RunRecordView",
    "RunRecords",
    "Snapshot",
    "SnapshotError",
    "TakeoverError",
    "UninitializedError",
    "VariableSlice",
    "agree",
    "divide_memory",
    "bounded_update",
    "canonical_dtype",
    "check_environment",
    "check_only_ours",
    "data_type_number",
    "dtype_name",
    "durability",
    "explain_flags",
    "explain_name",
    "explains_arguments",
    "host_call",
    "in_thread",
    "make_private_directory",
    "metrics",
    "one_line",
    "path_name",
    "pick_item",
    "printable",
    "python_call",
    "register_state",
    "server_names",
    "set_default_graph_type",
    "sizes_are_guesses",
    "storage",
    "needs_64_bit",
    "op_kinds",
    "string_arrays",
    "why_not",
    "without_derivative",
    "version",
]
