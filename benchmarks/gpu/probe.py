"""Copies between host and GPU as JAX makes them: ``python -m benchmarks.gpu.probe [--fake]``.

Writes a line of JSON for each figure. With ``--fake`` a second CPU device takes the place of the GPU.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from runtime.tensor_spec import aligned_buffer

FAKE = "--fake" in sys.argv
MIB = 1 << 20
SIZES_MIB = (1, 16) if FAKE else (1, 16, 100, 400)
REPEATS = 5


def tell(probe: str, **figures: Any) -> None:
    """Prints the figures of a probe."""
    short = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"probe": probe, **short}), flush=True)


def median_secs(run: Callable[[], float]) -> float:
    """Returns the median of what a function measures, without its first time."""
    run()
    return statistics.median(run() for _ in range(REPEATS))


def timed(run: Callable[[], Any]) -> float:
    """Returns the seconds that a function takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def host_array(size: int) -> np.ndarray:
    """Returns an array of ``size`` bytes in memory as the runtime receives parameters into it."""
    memory = aligned_buffer(size)
    memory[:] = 1
    return memory.view(np.float32)


def probe_single(device: jax.Device) -> None:
    """Measures the copies of one array, there and back."""
    double = jax.jit(lambda value: value * 2)
    for size in SIZES_MIB:
        given = host_array(size * MIB)
        secs = median_secs(
            lambda given=given: timed(lambda: jax.device_put(given, device).block_until_ready())  # type: ignore[misc]
        )
        tell("to the device, one array", MiB=size, GBps=given.nbytes / secs / 1e9, ms=secs * 1e3)
        there = jax.device_put(given, device)

        def back(there: jax.Array = there) -> float:
            # JAX keeps the copy of an array that was on the host, so each time has a new array.
            value = double(there).block_until_ready()
            return timed(lambda: np.asarray(value))

        secs = median_secs(back)
        tell("to the host, one array", MiB=size, GBps=given.nbytes / secs / 1e9, ms=secs * 1e3)


def probe_many(device: jax.Device, arrays: int, size: int) -> None:
    """Measures the copies of many arrays that are results of one program, one by one and all begun at once."""
    there = [
        jax.device_put(host_array(size * MIB // arrays // 64 * 64), device) for _ in range(arrays)
    ]
    double = jax.jit(lambda *values: [value * 2 for value in values])

    def back(begin: bool) -> float:
        values = jax.block_until_ready(double(*there))

        def copy() -> None:
            if begin:
                for value in values:
                    value.copy_to_host_async()
            for value in values:
                np.asarray(value)

        return timed(copy)

    tell(
        "to the host, many arrays",
        arrays=arrays,
        MiB=size,
        one_by_one_ms=median_secs(lambda: back(False)) * 1e3,
        begun_at_once_ms=median_secs(lambda: back(True)) * 1e3,
    )


def main() -> None:
    """Measures copies and the launch of a program."""
    if FAKE:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    device = jax.local_devices()[1 if FAKE else 0]
    tell(
        "device",
        jax=jax.__version__,
        kind=device.device_kind,
        platform=device.platform,
        memories=[memory.kind for memory in device.addressable_memories()],
        limit=(device.memory_stats() or {}).get("bytes_limit"),
    )
    probe_single(device)
    for arrays in (160, 1000):
        probe_many(device, arrays, 16 if FAKE else 100)
    one, double = jax.device_put(np.float32(1), device), jax.jit(lambda value: value * 2)
    secs = median_secs(lambda: timed(lambda: double(one).block_until_ready()))
    tell("launch of an empty program and the wait", us=secs * 1e6)


if __name__ == "__main__":
    main()
