"""Programs of TensorFlow 1 that name GPUs: towers, lists of devices, and options of GPUs.

``make test-stand-ins`` runs these tests with stand-in GPUs, other runs on the CPU.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np

import harness.tf1 as tf
from harness.tf1.graph import test as tf_test
from harness.tf1.graph.messages import list_local_devices
from tests.harness.tf1.oracle import programs

GPUS = 2 if "tests.kit.stand_in_gpus" in sys.modules else 0


def test_towers_compute_on_their_gpus() -> None:
    """Four towers compute on the GPUs that there are, and the variables stay on the CPU."""
    metadata = tf.RunMetadata()
    with tf.Graph().as_default():
        result = programs.four_towers(
            tf,
            options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
            run_metadata=metadata,
        )
        variables = [v.device for v in tf.trainable_variables()]
    assert result[programs.TOWER_STEPS] == programs.TOWER_STEPS
    assert np.mean(result[programs.TOWER_STEPS - 1]) < np.mean(result[0])
    assert variables == ["/cpu:0"] * 2
    ran = {stats.device.rpartition("/device:")[2] for stats in metadata.step_stats.dev_stats}
    assert {name for name in ran if name[3:4] == ":"} == {
        "CPU:0",
        *(f"GPU:{i}" for i in range(GPUS)),
    }


def device(platform: str, **memory: int) -> SimpleNamespace:
    """Returns a device of JAX, as far as a list of devices reads it."""
    return SimpleNamespace(
        platform=platform, device_kind=f"a {platform}", memory_stats=lambda: memory
    )


def test_cpu_is_first_in_list() -> None:
    """A list of devices begins with CPU:0, as in TensorFlow, and has the GPUs in their order."""
    cpu, gpus = device("cpu"), [device("gpu", bytes_limit=7), device("gpu")]
    with mock.patch.object(jax, "local_devices", lambda backend=None: [cpu] if backend else gpus):
        listed = list_local_devices()
        assert tf_test.gpu_device_name() == "/device:GPU:0"
    assert [(d.name, d.device_type, d.memory_limit) for d in listed] == [
        ("/device:CPU:0", "CPU", 0),
        ("/device:GPU:0", "GPU", 7),
        ("/device:GPU:1", "GPU", 0),
    ]


def test_cpu_is_listed_once() -> None:
    """A list of devices without a GPU has each CPU once."""
    listed = list_local_devices()
    assert [d.name for d in listed] == [f"/device:CPU:{i}" for i in range(len(jax.devices()))]
