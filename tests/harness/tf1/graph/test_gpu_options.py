"""``tf.GPUOptions``: the environment of JAX and CUDA, until JAX has started."""

import pytest

from tests.kit.processes import Program

pytestmark = pytest.mark.cluster

NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
PROGRAM = """
import os
from types import SimpleNamespace
import jax
import harness.tf1 as tf
from harness.tf1.graph import config as config_module
options = tf.GPUOptions(
    allow_growth=True, per_process_gpu_memory_fraction=0.25, visible_device_list="1,0")
config = tf.ConfigProto(gpu_options=options)
x = tf.constant(1.0)
before()
for _ in range(2):
    with tf.Session(config=config) as session:
        assert session.run(x) == 1.0
print("environment", {name: os.environ[name] for name in NAMES if name in os.environ})
"""
AFTER_START = """
def before():
    devices = [*jax.devices(), *[SimpleNamespace(platform="gpu")] * GPUS]
    config_module.jax = SimpleNamespace(config=jax.config, local_devices=lambda: devices)
"""


def run(before: str, **environment: str) -> list[str]:
    """Returns what the program has said."""
    values: dict[str, str | None] = {**dict.fromkeys(NAMES), **environment}
    with Program("python", "-c", f"NAMES = {NAMES}\n{before}\n{PROGRAM}", env=values) as program:
        assert program.wait() == 0, program.story()
        return program.lines("environment|gpu_options")


BEFORE_START = "before = lambda: None"


def test_gpu_options_become_environment() -> None:
    """The options of GPUs become variables of JAX and CUDA before JAX starts."""
    wanted = {
        "CUDA_VISIBLE_DEVICES": "1,0",
        "XLA_CLIENT_MEM_FRACTION": "0.25",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    assert run(BEFORE_START) == [f"environment {wanted}"]


def test_gpu_options_keep_what_is_set() -> None:
    """Variables that the user has set stay, and the fraction has one of its two names."""
    given = {
        "CUDA_VISIBLE_DEVICES": "3",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    assert run(BEFORE_START, **given) == [f"environment {given}"]


def test_late_gpu_options_warn_once() -> None:
    """Options of GPUs after the start of JAX have no effect, and one warning says so where a GPU is."""
    assert run(f"GPUS = 0{AFTER_START}") == ["environment {}"]
    warning, environment = run(f"GPUS = 1{AFTER_START}")
    assert "gpu_options come too late, because JAX has started" in warning
    assert "XLA_CLIENT_MEM_FRACTION=0.25" in warning and environment == "environment {}"
