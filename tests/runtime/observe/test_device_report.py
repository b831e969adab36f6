"""The devices of a task in words and figures; no test needs an accelerator."""

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import runtime as rt
from runtime.observe import device_report
from runtime.plan.place import Device
from tests.kit.changes import SetVariables
from tests.runtime.kit import addresses


@dataclass(frozen=True)
class MadeUpDevice:
    """A device of JAX, as far as reports read one."""

    device_kind: str = "cpu"
    stats: dict[str, int] | None = field(default=None)

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


H100 = MadeUpDevice(
    "NVIDIA H100 80GB HBM3",
    {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 63_800_000_000},
)


def found(*gpus: MadeUpDevice) -> Any:
    """The devices of a worker with these GPUs."""
    named = {Device("worker", 0, "GPU", i, "cuda"): gpu for i, gpu in enumerate(gpus)}
    return {**named, Device("worker", 0): MadeUpDevice()}


@pytest.fixture
def with_plugin(tmp_path: pathlib.Path) -> Iterator[None]:
    """JAX looks installed with a plugin."""
    (tmp_path / "jax_plugins").mkdir()
    sys.path.append(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(tmp_path))


def test_description_names_kind_and_memory() -> None:
    """GPUs of one kind share a description, and a host's CPU is left out beside them."""
    assert device_report.describe(found(H100), {}) == "GPU:0 (NVIDIA H100 80GB HBM3, up to 63.8 GB)"
    small = MadeUpDevice("NVIDIA T4")
    assert (
        device_report.describe(found(H100, H100, small), {})
        == "GPU:0, GPU:1 (NVIDIA H100 80GB HBM3, up to 63.8 GB), GPU:2 (NVIDIA T4)"
    )


def test_cpu_has_its_cores() -> None:
    """A task without a GPU names the cores that it may use."""
    cores = len(os.sched_getaffinity(0))
    assert device_report.describe(found(), {"JAX_PLATFORMS": "cpu"}) == f"CPU:0 ({cores} cores)"


@pytest.mark.usefixtures("with_plugin")
def test_unused_plugin_is_explained() -> None:
    """A CUDA plugin without a GPU is no silent fallback; a chosen CPU is not explained."""
    assert "and on no GPU: CUDA_VISIBLE_DEVICES is empty" in device_report.describe(
        found(), {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert "driver and CUDA plugin must fit" in device_report.describe(found(), {})
    assert "no GPU" not in device_report.describe(found(), {"JAX_PLATFORMS": "cpu"})


def test_missing_plugin_is_explained() -> None:
    """Without a plugin the reason is the installation, and a platform that is set comes first."""
    if importlib.util.find_spec("jax_plugins") is None:
        assert device_report.why_no_gpu({}).startswith("JAX is installed without CUDA")
    assert device_report.why_no_gpu({"JAX_PLATFORMS": "cpu"}).startswith("JAX_PLATFORMS=cpu leaves")


def test_memory_figures_are_of_accelerators() -> None:
    """The figures have the names of the metrics; a CPU and a silent backend have none."""
    assert device_report.memory_figures(found(H100, MadeUpDevice("TPU v5e"))) == {
        "device_memory_bytes/GPU:0": 5.0,
        "device_peak_memory_bytes/GPU:0": 7.0,
        "device_limit_bytes/GPU:0": 63_800_000_000.0,
    }
    assert device_report.kinds(found(H100)) == {"GPU:0": "NVIDIA H100 80GB HBM3", "CPU:0": "cpu"}


def test_required_gpu_is_refused_once() -> None:
    """A worker that requires a GPU does not start without one, says why, and gives its port back."""
    cluster = addresses(ps=1, worker=1)
    with pytest.raises(
        rt.InvalidArgumentError, match="/job:worker/task:0: a GPU is required, and JAX has none: "
    ):
        rt.Server(cluster, "worker", 0, require_gpu=True)
    with rt.Server(cluster, "ps", 0, require_gpu=True), rt.Server(cluster, "worker", 0) as worker:
        assert worker.worker.computes_on.startswith("CPU:0 (")


def test_variable_requires_gpu(set_variables: SetVariables) -> None:
    """The launcher requires a GPU by an environment variable, which 0 takes back."""
    cluster = addresses(worker=1)
    set_variables({"BELLWETHER_REQUIRE_GPU": "1"})
    with pytest.raises(rt.InvalidArgumentError, match="a GPU is required"):
        rt.Server(cluster, "worker", 0)
    set_variables({"BELLWETHER_REQUIRE_GPU": "0"})
    rt.Server(cluster, "worker", 0).stop()
