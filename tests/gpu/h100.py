"""Compiles the programs of a run for an H100 as well, on a machine without a GPU.

    python -m tests.gpu.h100 REPORT MODULE [ARGUMENT...]
    python -m tests.gpu.h100 REPORT NOTEBOOK

The run itself computes on the CPU. Each program that a task but a ps compiles is compiled once more,
by the CUDA plugin of JAX, which needs no card for that. REPORT receives a line of JSON for each
program: seconds of the compiler, and bytes of the device. The choice of the fastest kernels needs a
card, so the figures leave out the memory of that choice.
"""

import json
import os
import pathlib
import runpy
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

# The versions of CUDA's libraries are compared with those of the driver, which is missing here.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.experimental import topologies

from runtime.task import compiler
from tests.docs import notebooks

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA must know of the card: a ``GpuTargetConfigProto`` with NVIDIA's figures of an H100 SXM."""


def compile_also(report: pathlib.Path) -> None:
    """Has each program of this process compiled for an H100, too."""
    described = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(described.devices[0])
    compile_one = compiler._compile_one
    seen = set()

    def compile_both(
        compute: Callable[..., Any],
        avals: Sequence[jax.ShapeDtypeStruct],
        donate: Collection[int],
        results_on: Sequence[Any] | None = None,
    ) -> Any:
        moved = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
        # A device that the tasks of one process set as the default is none of the topology.
        with jax.default_device(None):
            jitted = jax.jit(lambda *values: compute(*values), donate_argnums=tuple(donate))
            lowered = jitted.lower(*moved)
            if (text := lowered.as_text()) not in seen:
                seen.add(text)
                began = time.monotonic()
                used = lowered.compile().memory_analysis()
                total = (
                    used.argument_size_in_bytes
                    + used.output_size_in_bytes
                    + used.temp_size_in_bytes
                    - used.alias_size_in_bytes
                )
                with report.open("a") as out:
                    print(json.dumps({"bytes": total, "secs": time.monotonic() - began}), file=out)
        return compile_one(compute, avals, donate, results_on)

    compiler._compile_one = compile_both


def main(report: str, program: str, *arguments: str) -> None:
    """Runs a module or a notebook."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    if task.get("type") != "ps":
        compile_also(pathlib.Path(report))
    if program.endswith(".ipynb"):
        notebooks.run(pathlib.Path(program))
    else:
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
