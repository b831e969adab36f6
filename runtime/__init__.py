"""The distributed runtime: graphs, variables, servers and sessions. ``import runtime as rt``.

``rt.lowlevel`` is its second face, for those who build a training harness.
"""

from runtime import collector as _collector

# isort: split
from runtime import lowlevel
from runtime.cluster.jobset import JobSetClusterResolver
from runtime.cluster.resolvers import (
    ClusterResolver,
    TFConfigClusterResolver,
)
from runtime.cluster.slurm import SlurmClusterResolver
from runtime.cluster.spec import ClusterSpec, TaskId
from runtime.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    TaskLeftError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from runtime.graph.debug_ops import Print, check
from runtime.graph.gradients import gradients
from runtime.graph.graph import (
    Graph,
    GraphKeys,
    Operation,
    SessionLike,
    Tensor,
    control_dependencies,
    get_default_graph,
    get_default_session,
    group,
    name_scope,
    no_op,
    reset_default_graph,
)
from runtime.graph.initialization import (
    global_variables,
    global_variables_initializer,
    is_variable_initialized,
    local_variables,
    local_variables_initializer,
    report_uninitialized_variables,
    trainable_variables,
    variables_initializer,
    wait_until_initialized,
)
from runtime.graph.jax_functions import lax, nn, numpy, random, stop_gradient
from runtime.graph.mesh import mesh_device
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor, call, constant, identity, placeholder
from runtime.graph.placement import (
    DeviceSpec,
    device,
    replica_device_setter,
)
from runtime.graph.random import random_key, set_random_seed
from runtime.graph.resources import (
    ConditionalAccumulator,
    FIFOQueue,
    PaddingFIFOQueue,
    RandomShuffleQueue,
)
from runtime.graph.variable import Variable, assign, assign_add, assign_sub, update, variables
from runtime.limits import Limits
from runtime.master.config import SessionConfig
from runtime.server.local_cluster import local_cluster
from runtime.server.report import TaskReport, probe
from runtime.server.server import Server
from runtime.session.run_options import RunMetadata, RunOptions
from runtime.session.session import InteractiveSession, Session
from runtime.tables.table import RowGradient, Table
from runtime.trust.security import Security

_collector.resume()


def __getattr__(name: str) -> str:
    if name == "__version__":  # asked for seldom, and looking it up takes as long as an import
        return lowlevel.version()
    if line := lowlevel.explain_name(f"runtime.{name}"):
        raise ImportError(line)  # an AttributeError would lose the line in a from-import
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "ClusterResolver",
    "ClusterSpec",
    "ConditionalAccumulator",
    "DataLossError",
    "DeadlineExceededError",
    "DeviceSpec",
    "FIFOQueue",
    "FailedPreconditionError",
    "Graph",
    "GraphKeys",
    "InteractiveSession",
    "InternalError",
    "InvalidArgumentError",
    "JobSetClusterResolver",
    "Limits",
    "NotFoundError",
    "OpError",
    "Operation",
    "OutOfRangeError",
    "PaddingFIFOQueue",
    "PermissionDeniedError",
    "Print",
    "RandomShuffleQueue",
    "ResourceExhaustedError",
    "RowGradient",
    "RunMetadata",
    "RunOptions",
    "Security",
    "Server",
    "Session",
    "SessionConfig",
    "SessionLike",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "Table",
    "TaskId",
    "TaskReport",
    "TaskLeftError",
    "Tensor",
    "TensorLike",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "Variable",
    "as_tensor",
    "assign",
    "assign_add",
    "assign_sub",
    "call",
    "check",
    "constant",
    "control_dependencies",
    "device",
    "get_default_graph",
    "get_default_session",
    "global_variables",
    "global_variables_initializer",
    "gradients",
    "group",
    "identity",
    "is_variable_initialized",
    "lax",
    "local_cluster",
    "local_variables",
    "local_variables_initializer",
    "lowlevel",
    "mesh_device",
    "name_scope",
    "nn",
    "no_op",
    "numpy",
    "placeholder",
    "probe",
    "random",
    "random_key",
    "replica_device_setter",
    "report_uninitialized_variables",
    "reset_default_graph",
    "set_random_seed",
    "stop_gradient",
    "trainable_variables",
    "update",
    "variables",
    "variables_initializer",
    "wait_until_initialized",
]
