"""Placement by the user: nested `device()` scopes, and which variable goes to which parameter server."""

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
    """Static shape and dtype of one output of an operation that is being made."""

    shape: tuple[int | None, ...] | None
    dtype: DType


@dataclass(frozen=True)
class OpInfo:
    """An operation that is being made, as a device function sees the operation.

    Attributes:
        type: such as "Variable".
        name: unique in the graph.
        outputs: shape and dtype of each output.
        device: the device that the scopes inside of this function request, in short form; empty if they request none.
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
"""Given an `OpInfo`, returns its device; None leaves the device as it is."""

_stack: ContextVar[tuple[DeviceSpec | DeviceFunction, ...]] = ContextVar("device_stack", default=())


@contextmanager
def device(spec: str | DeviceSpec | DeviceFunction | None) -> Iterator[None]:
    """Places the operations made within.

    Scopes nest, part by part, and the inner one wins: `device("/cpu:0")` within `device("/job:ps")` is
    "/job:ps/cpu:0". A function is called for every operation, with what the scopes inside of it asked for as
    `.device`; what it returns replaces that (as in TF1), so a function that respects inner scopes merges it.

    Args:
        spec: a device name; or a function from operation to device name (or None, for no opinion);
            or None, which switches the outer scopes off.

    Raises:
        InvalidArgumentError: not a device name.
        TypeError: `spec` is of another type.
    """
    stack: tuple[DeviceSpec | DeviceFunction, ...]
    if spec is None:
        stack = ()
    elif isinstance(spec, str | DeviceSpec) or callable(spec):
        stack = (*_stack.get(), DeviceSpec.parse(spec) if isinstance(spec, str) else spec)
    else:
        raise TypeError(f"device() takes a name, a DeviceSpec, a function or None, not {type(spec).__name__}")
    token = _stack.set(stack)
    try:
        yield
    finally:
        _stack.reset(token)


DeviceScopes = tuple[DeviceSpec | DeviceFunction, ...]


def device_scopes() -> DeviceScopes:
    """Returns the open scopes, outer ones first."""
    return _stack.get()


@contextmanager
def within_device_scopes(scopes: DeviceScopes) -> Iterator[None]:
    """Puts other scopes in the place of the open ones: each graph has its own.

    Args:
        scopes: what ``device_scopes`` gave where the graph was left; none to begin with.
    """
    token = _stack.set(scopes)
    try:
        yield
    finally:
        _stack.reset(token)


def current_device(op: OpInfo) -> str:
    """Returns the device that the open scopes give to an operation that is being made.

    Args:
        op: the operation; its `.device` is what it asks for itself, which counts as the innermost scope.

    Returns:
        The merged device in short form; empty when nobody asked for any.

    Raises:
        InvalidArgumentError: a device function returned something that is not a device name.
        TypeError: a device function returned something of another type.
    """
    requested = DeviceSpec.parse(op.device)
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
            raise TypeError(f"device function {scope!r} returned {answer!r} for {op.name!r}: not a device name or None")
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

    Variables go to the parameter servers, everything else to the worker.

    The choice depends only on the order in which variables are made, so every worker that builds the same graph
    finds the same variable on the same task.

    Args:
        ps_tasks: number of parameter servers; `cluster` overrides it.
        ps_device: device of variables; gets a task number when it has a job, unless an inner scope asks for
            another job. The job's name is also that of the parameter servers in `cluster`.
        worker_device: device of everything else; None or "" leaves that where the scopes put it.
        merge_devices: merge with what inner scopes ask for; False leaves an operation alone that has any device.
        cluster: whose parameter servers to count.
        ps_ops: types of the operations that go to parameter servers, by default `STANDARD_PS_OPS`.
        ps_strategy: from operation to task index, called only for operations that go to parameter servers;
            by default round robin in the order of creation.

    Returns:
        A function for `device`; None when there are no parameter servers.

    Raises:
        TypeError: `ps_strategy` is not callable, or `cluster` is not a cluster.
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
            "replica_device_setter(merge_devices=False) is deprecated: operations with a device are left alone"
        )
    tasks = itertools.cycle(range(ps_tasks))
    choose = ps_strategy or (lambda op: next(tasks))
    if not callable(choose):
        raise TypeError(f"ps_strategy must be callable, got {type(ps_strategy).__name__}")
    types = frozenset(STANDARD_PS_OPS if ps_ops is None else ps_ops)

    def device_of(op: OpInfo) -> DeviceSpec:
        requested = DeviceSpec.parse(op.device)
        if not merge_devices and requested != ANYWHERE:
            return requested
        if op.type not in types or ps == ANYWHERE:
            return worker.merge(requested)
        if ps.job is not None and requested.job in (None, ps.job):
            return replace(ps, task=choose(op)).merge(requested)
        return ps.merge(requested)

    return device_of
