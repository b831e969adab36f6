"""The devices of this process, as the tasks of the process name them.

A task that computes takes all devices of JAX. A ps takes the CPU alone, because a ps adds numbers
and the workers of the host need the memory of the accelerators.
"""

import logging as std_logging
import os

import jax
from absl import logging
from jax.extend import backend

from runtime import concurrency
from runtime.errors import InvalidArgumentError
from runtime.observe import device_report
from runtime.plan.place import Device

_has_computing_task = concurrency.Event()
"""Set as soon as a task of this process computes: a ps beside it leaves the accelerators to it."""
_withheld: list[str] = []
"""The values of `jax_platforms` before each ps of this process has limited JAX to the CPU."""


def local_devices(job: str, task: int) -> dict[Device, jax.Device]:
    """Returns the devices of this process by their names as devices of a task.

    Args:
        job: name of the job.
        task: index of the task.

    Raises:
        InvalidArgumentError: JAX cannot start, lacks the CPU, or has no device of JAX_PLATFORMS.
    """
    found: dict[Device, jax.Device] = {}
    chosen = _choose_devices(job, task)
    for kind in dict.fromkeys(d.platform for d in chosen):
        for index, device in enumerate(d for d in chosen if d.platform == kind):
            name = "GPU" if kind in ("gpu", "cuda", "rocm") else kind.upper()
            platform = device.client.platform_version and _export_platform(device)
            found[Device(job, task, name, index, platform)] = device
    return found


def _choose_devices(job: str, task: int) -> list[jax.Device]:
    # JAX reads `jax_platforms` when it starts. A later change has no effect.
    asked: str = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    if is_lone_ps := job == "ps" and not _has_computing_task.is_set():
        _withheld.append(asked)
        jax.config.update("jax_platforms", "cpu")
    elif _withheld:
        asked = _withheld[0]
        _withheld.clear()
        jax.config.update("jax_platforms", asked or None)
        # The ps keep their devices, which belong to the CPU client that JAX had until now.
        if [*backend.backends()] == ["cpu"] and device_report.has_plugin():
            backend.clear_backends()
    lacks_cpu = bool(asked) and "cpu" not in asked.split(",")
    if lacks_cpu and not is_lone_ps:
        jax.config.update("jax_platforms", f"{asked},cpu")
    cpus, others = _start_jax(asked)
    if job != "ps":
        _has_computing_task.set()
        if lacks_cpu and not others:
            reason = device_report.why_no_gpu(os.environ)
            raise InvalidArgumentError(
                f"JAX_PLATFORMS={asked}, and JAX has no such device: {reason}; "
                f"JAX_PLATFORMS={asked},cpu takes the CPU in its place"
            )
        return [*others, *cpus]
    if others and is_lone_ps:
        logging.warning(
            "/job:ps/task:%d: JAX has started on %s before this ps, and holds memory that workers "
            "need: call join_cluster or make the Server before JAX computes, or start the ps with "
            "JAX_PLATFORMS=cpu",
            task,
            others[0],
        )
    return cpus


def _start_jax(asked: str) -> tuple[list[jax.Device], list[jax.Device]]:
    """Returns the CPU devices of JAX, and the other devices; JAX starts now, unless it has started before."""
    log = std_logging.getLogger("jax._src.xla_bridge")
    # At INFO, JAX's first look at the devices tells of every platform that is not installed.
    log.setLevel(std_logging.WARNING)
    log.addFilter(_shorten)
    try:
        clients = backend.backends()
    except RuntimeError as error:
        raise InvalidArgumentError(f"JAX cannot start: {_first_line(error)}") from None
    if "cpu" not in clients:
        raise InvalidArgumentError(
            f"JAX has started without the CPU, which a task needs: set JAX_PLATFORMS={asked},cpu, "
            "or call join_cluster or make the Server before JAX computes"
        )
    cpus = jax.local_devices(backend="cpu")
    return cpus, [device for device in jax.local_devices() if device not in cpus]


def _shorten(record: std_logging.LogRecord) -> bool:
    """Leaves one line of an error that JAX logs with its traceback, such as that of a plugin."""
    if record.exc_info and record.exc_info[1]:
        record.msg = f"{record.getMessage()}: {_first_line(record.exc_info[1])}"
        record.args, record.exc_info = (), None
    return True


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _export_platform(device: jax.Device) -> str:
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
