"""Placement by the user: nested `device()` scopes, and the parameter server of each variable."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

from google.protobuf.message import Message

from runtime.cluster.device_spec import ANYWHERE
from runtime.cluster.device_spec import DeviceSpec as DeviceSpec
from runtime.cluster.spec import ClusterSpec, JobsLike
from runtime.tensor_spec import DType

_log = logging.getLogger(__name__)

STANDARD_PS_OPS = ("Variable", "ConditionalAccumulator")
"""Types of the operations that `replica_device_setter` puts on parameter servers by default."""


class OutputInfo(NamedTuple):
    """Static shape and dtype of one output of a new operation."""

    shape: tuple[int | None, ...] | None
    dtype: DType


@dataclass(frozen=True)
class OpInfo:
    """A new operation, as a device function sees the operation.

    Attributes:
        type: such as "Variable".
        name: unique in the graph.
        outputs: shape and dtype of each output.
        device: the device that the scopes inside of this function request, in short form; empty if
            they request none.
    """

    type: str
    name: str
    outputs: Sequence[OutputInfo] = ()
    device: str = ""

    @property
    def node_def(self) -> SimpleNamespace:
        """Returns the ``name``, the type as ``op``, and the ``device``, as TensorFlow 1 does."""
        return SimpleNamespace(name=self.name, op=self.type, device=self.device)


DeviceFunction = Callable[[OpInfo], "str | DeviceSpec | None"]
"""A function from an `OpInfo` to its device. None leaves the device unchanged."""

DeviceScopes = tuple[DeviceSpec | DeviceFunction, ...]

_stack: ContextVar[DeviceScopes] = ContextVar("device_stack", default=())


@contextmanager
def device(spec: str | DeviceSpec | DeviceFunction | None) -> Iterator[None]:
    """Places the operations of a block.

    Scopes nest, part by part, and the inner scope wins: `device("/cpu:0")` within
    `device("/job:ps")` is "/job:ps/cpu:0". A function is called for every operation. Its argument
    has the request of the inner scopes as `.device`. Its result replaces the request (as in TF1),
    so a function that respects inner scopes merges both.

    Args:
        spec: A device name; or a function from operation to device name, or to None for no opinion;
            or None to switch the outer scopes off.

    Raises:
        InvalidArgumentError: `spec` is not a device name.
        TypeError: `spec` is of another type.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.device("/job:ps"), rt.device("/cpu:0"):
        ...     print(rt.constant(1.0).device)
        /job:ps/cpu:0
    """
    stack: DeviceScopes
    if spec is None:
        stack = ()
    elif isinstance(spec, str | DeviceSpec) or callable(spec):
        stack = (*_stack.get(), DeviceSpec.parse(spec) if isinstance(spec, str) else spec)
    else:
        raise TypeError(
            f"device() takes a name, a DeviceSpec, a function or None, not {type(spec).__name__}"
        )
    with within_device_scopes(stack):
        yield


@contextmanager
def fixed_device(name: str) -> Iterator[None]:
    """Places the operations of a block on one device, whatever scopes are open or opened inside."""
    with device(None), device(lambda _: name):
        yield


def device_scopes() -> DeviceScopes:
    """Returns the open scopes, the outermost first."""
    return _stack.get()


@contextmanager
def within_device_scopes(scopes: DeviceScopes) -> Iterator[None]:
    """Replaces the open scopes for a block, since each graph has its own scopes.

    Args:
        scopes: the result of ``device_scopes`` at the last exit from the graph; empty at first.
    """
    token = _stack.set(scopes)
    try:
        yield
    finally:
        _stack.reset(token)


def current_device(op: OpInfo) -> str:
    """Returns the device of a new operation in the open scopes.

    Args:
        op: the operation. Its own request `.device` counts as the innermost scope.

    Returns:
        The merged device in short form; empty without a request.

    Raises:
        InvalidArgumentError: a device function returned a text that is not a device name.
        TypeError: a device function returned a value of another type.
    """
    requested = DeviceSpec.parse(op.device)
    # The innermost scope decides first, and outer scopes fill what is left open.
    for scope in reversed(_stack.get()):
        if isinstance(scope, DeviceSpec):
            requested = scope.merge(requested)
            continue
        answer = scope(replace(op, device=requested.to_string()))
        if isinstance(answer, str):
            requested = DeviceSpec.parse(answer)
        elif isinstance(answer, DeviceSpec):
            requested = answer
        elif answer is not None:
            raise TypeError(
                f"device function {scope!r} returned {answer!r} for {op.name!r}: not a device name "
                "or None"
            )
    return requested.to_string()


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str | None = "/job:ps",
    worker_device: str | None = "/job:worker",
    merge_devices: bool = True,
    cluster: "ClusterSpec | JobsLike | Message | None" = None,
    ps_ops: Sequence[str] | None = None,
    ps_strategy: Callable[[OpInfo], int] | None = None,
) -> DeviceFunction | None:
    """Makes a device function for between-graph replication.

    Variables go to the parameter servers, and all other operations to the worker. The choice
    depends only on the order of the variables. So workers with the same graph find each variable on
    the same task.

    Args:
        ps_tasks: Number of parameter servers; `cluster` overrides the number.
        ps_device: Device of variables. A device with a job receives a task number, unless an inner
            scope requests another job. The job is also the job of the parameter servers in
            `cluster`.
        worker_device: Device of all other operations. None or "" leaves these operations to the
            scopes.
        merge_devices: True to merge with the request of inner scopes; False to leave operations
            with any device alone.
        cluster: Cluster whose parameter servers are counted.
        ps_ops: Types of the operations for parameter servers; `STANDARD_PS_OPS` by default.
        ps_strategy: A function from operation to task index, called for the operations for
            parameter servers only; by default round robin.

    Returns:
        A function for `device`; None without parameter servers.

    Raises:
        TypeError: `ps_strategy` is not callable, or `cluster` is not a cluster.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.device(rt.replica_device_setter(ps_tasks=2)):
        ...     print([rt.Variable(0.0).device for _ in range(3)])
        ['/job:ps/task:0', '/job:ps/task:1', '/job:ps/task:0']
    """
    ps = DeviceSpec.parse(ps_device or "")
    worker = DeviceSpec.parse(worker_device or "")
    if cluster is not None:
        spec = ClusterSpec(cluster)
        ps_tasks = spec.num_tasks(ps.job) if ps.job in spec.jobs else 0
    if ps_tasks == 0:
        return None
    if not merge_devices:
        _log.warning(
            "replica_device_setter(merge_devices=False) is deprecated: operations with a device "
            "are left alone"
        )
    # Round robin follows the order of creation, which is equal on all workers.
    tasks = itertools.cycle(range(ps_tasks))
    choose = ps_strategy or (lambda op: next(tasks))
    if not callable(choose):
        raise TypeError(f"ps_strategy must be callable, got {type(ps_strategy).__name__}")
    types = frozenset(STANDARD_PS_OPS if ps_ops is None else ps_ops)

    def choose_device(op: OpInfo) -> DeviceSpec:
        requested = DeviceSpec.parse(op.device)
        # Such operations keep their device whole, as in TensorFlow 1.
        if not merge_devices and requested != ANYWHERE:
            return requested
        if op.type not in types or ps == ANYWHERE:
            return worker.merge(requested)
        # An inner scope that requests another job has its way, and takes no turn of the round
        # robin.
        if ps.job is not None and requested.job in (None, ps.job):
            return replace(ps, task=choose(op)).merge(requested)
        return ps.merge(requested)

    return choose_device
