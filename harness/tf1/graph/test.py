"""``tf.test``: which devices there are. For tests, use pytest and numpy.testing."""

from __future__ import annotations

import tempfile

from harness.tf1.graph.messages import list_local_devices
from harness.tf1.names.missing import namespace
from harness.tf1.ops.lift import Public

public = Public("tf.test")


def _gpus() -> list[str]:
    return [device.name for device in list_local_devices() if device.device_type == "GPU"]


@public.add("is_built_with_cuda", "is_gpu_available")
def is_gpu_available(cuda_only: bool = False, min_cuda_compute_capability: object = None) -> bool:
    """Returns True if JAX has a GPU in this process."""
    return bool(_gpus())


@public.add()
def gpu_device_name() -> str:
    """Returns the name of the first GPU, or "" when there is none."""
    return next(iter(_gpus()), "")


@public.add()
def get_temp_dir() -> str:
    """Returns a directory for temporary files."""
    return tempfile.gettempdir()


__getattr__, __dir__ = namespace("tf.test")
