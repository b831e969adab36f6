"""The distributed runtime: graphs, variables, servers and sessions. ``import runtime as rt``."""

from runtime.checkpoint import storage as zarr
from runtime.checkpoint.coordinator import CheckpointCoordinator
from runtime.checkpoint.snapshot import CheckpointFile, Snapshot, VariableSlice
from runtime.checkpoint.states import register_state
from runtime.cluster.kubernetes import KubernetesClusterResolver
from runtime.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionClusterResolver,
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
from runtime.graph.collectives import group_broadcast, group_mean
from runtime.graph.debug_ops import Print, check
from runtime.graph.deferred_update import Quorum, bounded_update
from runtime.graph.gradients import gradients
from runtime.graph.graph import (
    Graph,
    GraphKeys,
    Operation,
    Tensor,
    control_dependencies,
    get_default_graph,
    group,
    name_scope,
    no_op,
    reset_default_graph,
)
from runtime.graph.host_ops import host_call
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
from runtime.graph.ops import as_tensor, call, constant, identity, placeholder
from runtime.graph.placement import (
    DeviceSpec,
    GreedyLoadBalancingStrategy,
    RandomStrategy,
    byte_size_load_fn,
    device,
    replica_device_setter,
)
from runtime.graph.random import random_key, set_random_seed
from runtime.graph.resources import ConditionalAccumulator, FIFOQueue, PaddingFIFOQueue, RandomShuffleQueue
from runtime.graph.variable import Variable, assign, assign_add, assign_sub, update, variables
from runtime.observe.process_metrics import metrics
from runtime.server.report import TaskReport, probe
from runtime.server.server import Server
from runtime.session.config import SessionConfig
from runtime.session.run_options import RunMetadata, RunOptions
from runtime.session.session import InteractiveSession, Session, get_default_session

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "ClusterResolver",
    "ClusterSpec",
    "ConditionalAccumulator",
    "Snapshot",
    "DataLossError",
    "DeadlineExceededError",
    "DeviceSpec",
    "FIFOQueue",
    "FailedPreconditionError",
    "Graph",
    "GraphKeys",
    "GreedyLoadBalancingStrategy",
    "InteractiveSession",
    "InternalError",
    "InvalidArgumentError",
    "KubernetesClusterResolver",
    "NotFoundError",
    "OpError",
    "Operation",
    "OutOfRangeError",
    "PaddingFIFOQueue",
    "PermissionDeniedError",
    "Print",
    "Quorum",
    "RandomShuffleQueue",
    "RandomStrategy",
    "ResourceExhaustedError",
    "RunMetadata",
    "RunOptions",
    "Server",
    "Session",
    "SessionConfig",
    "CheckpointFile",
    "CheckpointCoordinator",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TaskId",
    "TaskReport",
    "TaskLeftError",
    "Tensor",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnionClusterResolver",
    "UnknownError",
    "Variable",
    "VariableSlice",
    "as_tensor",
    "assign",
    "assign_add",
    "assign_sub",
    "bounded_update",
    "byte_size_load_fn",
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
    "group_broadcast",
    "group_mean",
    "host_call",
    "identity",
    "is_variable_initialized",
    "lax",
    "local_variables",
    "local_variables_initializer",
    "metrics",
    "name_scope",
    "nn",
    "no_op",
    "numpy",
    "placeholder",
    "probe",
    "random",
    "random_key",
    "register_state",
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
    "zarr",
]
