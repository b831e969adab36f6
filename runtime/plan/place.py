"""Placement: each operation of a step receives the device on which it runs."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from absl import logging
from jax.sharding import Mesh

from runtime.cluster.device_spec import MESH, DeviceSpec
from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Operation
from runtime.graph.mesh import find_mesh
from runtime.graph.op_kinds import Host, Read, Update


@dataclass(frozen=True)
class Device:
    """One device of one task.

    Attributes:
        job: name of the job.
        task: index in the job.
        type: "CPU", "GPU" ...
        index: number among the task's devices of the type.
        platform: XLA's name of the device's platform ("cpu", "cuda", "rocm", "tpu"), for lowering.
        is_own: True for a device of the session's own process, which takes any JAX program. A
            device of another process takes expression lists.
        mesh: the devices of type MESH, on which a stage runs as on one.
    """

    job: str
    task: int
    type: str = "CPU"
    index: int = 0
    platform: str = "cpu"
    is_own: bool = False
    mesh: Mesh | None = None

    @property
    def is_accelerator(self) -> bool:
        """Returns True for a device that has memory of its own."""
        return self.type != "CPU"

    @property
    def task_name(self) -> str:
        """Returns the name of the task, ``/job:worker/task:1``."""
        return f"/job:{self.job}/task:{self.task}"

    @property
    def name(self) -> str:
        """Returns the full name, ``/job:worker/replica:0/task:1/device:GPU:0``."""
        return f"/job:{self.job}/replica:0/task:{self.task}/device:{self.type}:{self.index}"


@dataclass(frozen=True)
class DeviceChoices:
    """The devices from which the placer chooses.

    Attributes:
        all: the devices of every task of the session.
        target: (job, task) of the session's target, for operations without a device.
        home: (job, task) for variables without a device: one place for all sessions of a cluster.
        soft: True to take the best device of the same task where the requested device is missing,
            as TensorFlow's placer does.
    """

    all: tuple[Device, ...]
    target: tuple[str, int]
    home: tuple[str, int]
    soft: bool = True


def place_operations(
    operations: Iterable[Operation], devices: DeviceChoices
) -> Mapping[Operation, Device]:
    """Chooses a device for each operation from the requested and the existing devices.

    Variables without a job go to ``devices.home``, local variables to the target. All other
    operations without a job run on the target. A job without a task means the target's own task if
    the target is of the job, else the job's first task; for variables always the first, so that all
    sessions agree. Without a type, a computation takes the task's accelerator if the task has an
    accelerator.

    Raises:
        InvalidArgumentError: no device matches. The message names the operation, the request and
            the devices.
    """
    # A graph has thousands of operations and few requests, and a request takes time to parse.
    cache: dict[tuple[str, bool, bool], Device] = {}
    placed = {}
    for op in operations:
        shared, host = _is_shared(op), isinstance(op.body, Host)
        key = (op.device, shared, host)
        if key not in cache:
            cache[key] = _choose_device(op, devices, shared, host)
        placed[op] = cache[key]
    meshes = {str(d.mesh): None for d in cache.values() if d.mesh is not None}
    if len(meshes) > 1:
        raise InvalidArgumentError(
            f"the step computes on {' and '.join(meshes)}: make one mesh for the graph"
        )
    return placed


def _is_shared(op: Operation) -> bool:
    """Returns True if the operation works on state of the cluster, which all sessions share."""
    body = op.body
    if isinstance(body, Read):
        return not body.variable.local
    if isinstance(body, Update):
        return not any(v.local for v in body.variables)
    return (
        isinstance(body, Host)
        and bool(body.resource or "variables" in body.attrs)
        and not body.attrs.get("local")
    )


def _choose_device(op: Operation, devices: DeviceChoices, shared: bool, host: bool) -> Device:
    spec = DeviceSpec.parse(op.device)
    candidates = _find_candidates(spec, devices, shared)
    if not candidates:
        raise InvalidArgumentError(_describe_mismatch(op, devices.all))
    is_mesh = spec.device_type == MESH
    # A host kernel runs on the CPU, whatever type the device names. The host keeps variables whole,
    # and a mesh receives their values.
    if host or (is_mesh and isinstance(op.body, Read | Update)):
        return next((d for d in candidates if d.type == "CPU"), candidates[0])
    if is_mesh:
        return _choose_mesh(op, spec.device_index or 0, candidates)
    wanted = [
        d
        for d in candidates
        if spec.device_type in (None, d.type) and spec.device_index in (None, d.index)
    ]
    if not wanted and not devices.soft:
        raise InvalidArgumentError(_describe_mismatch(op, devices.all))
    # Of the devices that the request leaves open, an accelerator comes before the CPU.
    best = min(wanted or candidates, key=lambda d: (d.type == "CPU", d.index))
    if not wanted:
        _warn_of_missing(str(replace(spec, job=best.job, task=best.task)), best.name)
    return best


# The cache is the memory of the warnings: a session places operations anew for each new fetch.
@functools.cache
def _warn_of_missing(missing: str, best: str) -> None:
    logging.warning("There is no %s: operations for it run on %s", missing, best)


def _choose_mesh(op: Operation, number: int, candidates: Sequence[Device]) -> Device:
    if (mesh := find_mesh(number)) is None:
        raise InvalidArgumentError(
            f"operation {op.name!r} asks for {op.device!r}: take the name from rt.mesh_device(mesh)"
        )
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    like = next((d for d in candidates if d.is_own and is_cpu == (d.type == "CPU")), None)
    if like is None or like.job == "ps":
        raise InvalidArgumentError(
            f"operation {op.name!r} asks for a mesh on {candidates[0].task_name}: a mesh computes "
            "in the session's own worker only, so name that worker, or leave the task out"
        )
    return replace(like, type=MESH, index=number, mesh=mesh)


def _find_candidates(spec: DeviceSpec, devices: DeviceChoices, shared: bool) -> Sequence[Device]:
    """Finds the devices of the task that the request means."""
    job, task = spec.job, spec.task
    if job is None:
        # Shared variables have one home for all sessions. Local variables and computations stay on
        # the target.
        job, own_task = devices.home if shared else devices.target
        task = own_task if task is None else task
    there = [d for d in devices.all if d.job == job]
    if task is None and there:
        # All sessions must agree on a shared variable. So the first task has the variable, even if
        # the target is of the job.
        tasks = {d.task for d in there}
        is_target = not shared and devices.target[0] == job and devices.target[1] in tasks
        task = devices.target[1] if is_target else min(tasks)
    return [d for d in there if d.task == task]


def _describe_mismatch(op: Operation, devices: Sequence[Device]) -> str:
    there = ", ".join(d.name for d in devices) or "none"
    return f"Cannot assign a device for operation {op.name!r}: it asks for {op.device!r}, and there are: {there}"
