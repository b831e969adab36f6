"""The devices of a task in reports and in the log: their kinds, their memory, and reasons for a missing GPU."""

import importlib.util
import os
from collections.abc import Mapping

import jax

from runtime.observe.process_metrics import METRICS
from runtime.plan.place import Device

_MEMORY = {
    "memory": "bytes_in_use",
    "peak_memory": "peak_bytes_in_use",
    "limit": "bytes_limit",
}
"""Figures of a device's memory, by the names of their metrics, with JAX's names."""
assert {f"device_{figure}_bytes" for figure in _MEMORY} <= METRICS.keys()


def accelerators(devices: Mapping[Device, jax.Device]) -> dict[str, jax.Device]:
    """Returns the devices of a task but its CPUs, by names such as ``GPU:0``."""
    return {f"{d.type}:{d.index}": local for d, local in devices.items() if d.type != "CPU"}


def kinds(devices: Mapping[Device, jax.Device]) -> dict[str, str]:
    """Returns the kind of each device, such as ``NVIDIA H100 80GB HBM3``, by name."""
    return {f"{d.type}:{d.index}": local.device_kind for d, local in devices.items()}


def memory_figures(devices: Mapping[Device, jax.Device]) -> dict[str, float]:
    """Returns the memory figures of all accelerators with a backend that reports memory."""
    # CPU devices use the memory of the process, which the report has already.
    return {
        f"device_{figure}_bytes/{name}": float(stats[key])
        for name, device in accelerators(devices).items()
        for stats in [device.memory_stats() or {}]
        for figure, key in _MEMORY.items()
        if key in stats
    }


def describe(devices: Mapping[Device, jax.Device], environ: Mapping[str, str]) -> str:
    """Returns the devices on which a task computes, in words.

    The CPU counts only for a task without accelerators. If a GPU could have been expected, the
    words name the reason why there is none.

    Args:
        devices: Devices of the task.
        environ: Environment of the process.
    """
    found = accelerators(devices)
    if not found:
        # A container or a batch system may give the process fewer cores than the host has.
        text = f"CPU:0 ({len(os.sched_getaffinity(0))} cores)"
        expected = has_plugin() and not _leaves_gpus_out(environ)
        return f"{text}, and on no GPU: {why_no_gpu(environ)}" if expected else text
    names: dict[str, list[str]] = {}
    for name, device in found.items():
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        most = f", up to {limit / 1e9:.1f} GB" if limit else ""
        names.setdefault(f"({device.device_kind}{most})", []).append(name)
    return ", ".join(f"{', '.join(each)} {kind}" for kind, each in names.items())


def why_no_gpu(environ: Mapping[str, str]) -> str:
    """Returns the likely reason why JAX has no GPU, with the cure.

    Args:
        environ: Environment of the process.
    """
    if _leaves_gpus_out(environ):
        return f"JAX_PLATFORMS={environ['JAX_PLATFORMS']} leaves GPUs out, unset it"
    if not has_plugin():
        return "JAX is installed without CUDA, see docs/gpu.md"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES is empty, unset it or name a GPU"
    return "driver and CUDA plugin must fit, compare `nvidia-smi` with `pip list | grep jax`"


def has_plugin() -> bool:
    """Returns True if JAX is installed with a backend of accelerators."""
    # JAX finds the backends of accelerators as modules of this package.
    return importlib.util.find_spec("jax_plugins") is not None


def _leaves_gpus_out(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    return bool(platforms) and {"cuda", "rocm", "gpu"}.isdisjoint(platforms.split(","))
