"""Place: the device that each operation of a step runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.cluster.device_spec import DeviceSpec
from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Operation
from runtime.graph.op_kinds import Host, Read, Update


@dataclass(frozen=True)
class Device:
    """One device of one task.

    Attributes:
        job: name of the job.
        task: index in the job.
        type: "CPU", "GPU" ...
        index: number among the task's devices of that type.
        platform: XLA's name of the platform programs are lowered for ("cpu", "cuda", "rocm", "tpu").
        is_own: True for a device of the session's own process, which takes any JAX program. A device of another
            process takes expression lists.
    """

    job: str
    task: int
    type: str = "CPU"
    index: int = 0
    platform: str = "cpu"
    is_own: bool = False

    @property
    def task_name(self) -> str:
        """Returns the name of the task, ``/job:worker/task:1``."""
        return f"/job:{self.job}/task:{self.task}"

    @property
    def name(self) -> str:
        """Returns the full name, ``/job:worker/replica:0/task:1/device:GPU:0``."""
        return f"/job:{self.job}/replica:0/task:{self.task}/device:{self.type}:{self.index}"


@dataclass(frozen=True)
class Devices:
    """The devices from which the placer chooses.

    Attributes:
        all: the devices of every task that the session may touch.
        target: (job, task) of the session's target: where operations without a device run.
        home: (job, task) where variables without a device live: one place for all sessions of a cluster.
        soft: fall back to a device of another type on the same task where the requested device is missing.
    """

    all: tuple[Device, ...]
    target: tuple[str, int]
    home: tuple[str, int]
    soft: bool = True


def place(operations: Iterable[Operation], devices: Devices) -> Mapping[Operation, Device]:
    """Chooses a device for each operation from what was asked for and what there is.

    Variables without a job go to ``devices.home``, local ones to the target; everything else without a job runs on the
    target. A job without a task means the target's own task if it is of that job, else the job's first task; for
    variables always the first, so that all sessions agree. Without a type, a computation takes the task's accelerator
    when it has one.

    Raises:
        InvalidArgumentError: nothing matches; names the operation, what was asked for and what there is.
    """
    cache: dict[tuple[str, bool, bool, bool], Device] = {}
    placed = {}
    for op in operations:
        body = op.body
        stateful = (
            isinstance(body, Read | Update)
            or isinstance(body, Host)
            and bool(body.resource or "variables" in body.attrs)
        )
        local = stateful and _is_local(op)
        host = isinstance(body, Host)
        key = (op.device, stateful, local, host)
        if key not in cache:
            cache[key] = _choose(op, devices, stateful, local, host)
        placed[op] = cache[key]
    return placed


def _is_local(op: Operation) -> bool:
    body = op.body
    if isinstance(body, Read):
        return body.variable.local
    if isinstance(body, Update):
        return any(v.local for v in body.variables)
    return isinstance(body, Host) and bool(body.attrs.get("local"))


def _choose(op: Operation, devices: Devices, stateful: bool, local: bool, host: bool) -> Device:
    spec = DeviceSpec.parse(op.device)
    # Shared variables have one home for all sessions of a cluster. Local variables and computations stay on the target.
    if spec.job is None:
        job, task = devices.target if local or not stateful else devices.home
        if spec.task is not None:
            task = spec.task
        candidates = [d for d in devices.all if (d.job, d.task) == (job, task)]
    else:
        candidates = [d for d in devices.all if d.job == spec.job and spec.task in (None, d.task)]
        if spec.task is None and candidates:
            # For a shared variable the first task is taken, even if the target is of the job: all sessions must agree.
            tasks = {d.task for d in candidates}
            own = devices.target if devices.target[0] == spec.job and devices.target[1] in tasks else None
            first = own[1] if own is not None and (local or not stateful) else min(tasks)
            candidates = [d for d in candidates if d.task == first]
    if not candidates:
        raise InvalidArgumentError(_nothing_matches(op, devices.all))
    # A host kernel runs on the CPU, whatever type the device names.
    if host:
        return next((d for d in candidates if d.type == "CPU"), candidates[0])
    if spec.device_type is None and spec.device_index is None:
        return _preferred(candidates)
    wanted = [d for d in candidates if spec.device_type in (None, d.type) and spec.device_index in (None, d.index)]
    if wanted:
        return _preferred(wanted)
    if devices.soft:
        return next((d for d in candidates if d.type == "CPU"), candidates[0])
    raise InvalidArgumentError(_nothing_matches(op, devices.all))


def _preferred(candidates: Sequence[Device]) -> Device:
    return min(candidates, key=lambda d: (d.type == "CPU", d.index))


def _nothing_matches(op: Operation, devices: Sequence[Device]) -> str:
    there = ", ".join(d.name for d in devices) or "none"
    return f"Cannot assign a device for operation {op.name!r}: it asks for {op.device!r}, and there are: {there}"
