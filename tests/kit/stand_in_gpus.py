"""GPUs for tests on a machine without a GPU: ``pytest -p tests.kit.stand_in_gpus``, or an import before JAX starts.

The process has three CPU devices of JAX. The first two are GPU:0 and GPU:1 of each worker, the last
is CPU:0 of each task. So the default device of JAX is a GPU, as with CUDA. The copies that a GPU
makes are made here too, and are counted.
"""

import os
import weakref
from collections import Counter
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=3"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from runtime.master.exchange import Exchange, StepRun
from runtime.plan.place import Device
from runtime.task import worker

COPIES: Counter[str] = Counter()
"""Copies since the last ``clear``.

"in": arrays from the host to a GPU. "puts": calls of ``jax.device_put`` for those of "in". "out":
arrays from a GPU to the host. "late": those of "out" that began when they were needed, and not
before. "waits": waits for the end of a program.
"""
PLACED: list[jax.Array] = []
"""The arrays that were copied to a GPU, since the last ``clear``."""
AT_MESSAGES: list[int] = []
"""The number of copies to GPUs at the begin of each send and each receive of a master, since the last ``clear``."""

AWAITED: list[jax.Array] = []
"""The arrays given to ``jax.block_until_ready``, since the last ``clear``."""
AT_RETURNS: list[list[jax.Array]] = []
"""``AWAITED`` when a step returned the memory of its replies, since the last ``clear``."""


def clear() -> None:
    """Forgets all copies."""
    for noted in (COPIES, PLACED, AT_MESSAGES, AWAITED, AT_RETURNS):
        noted.clear()


_device_put, _asarray, _array = jax.device_put, np.asarray, np.array
_ArrayImpl: Any = type(jax.numpy.zeros(()))
_copy_to_host_async = _ArrayImpl.copy_to_host_async
_block_until_ready = _ArrayImpl.block_until_ready
_block_all, _give_back = jax.block_until_ready, StepRun.give_back
_begun: dict[int, Any] = {}
_GPUS = jax.local_devices()[:-1]


def _local_devices(job: str, task: int) -> dict[Device, jax.Device]:
    *gpus, cpu = jax.local_devices()
    named = {Device(job, task, "CPU", 0, "cpu"): cpu}
    if job != "ps":
        named |= {Device(job, task, "GPU", i, "cpu"): gpu for i, gpu in enumerate(gpus)}
    return named


def _put(value: Any, device: Any = None, *arguments: Any, **options: Any) -> Any:
    if device not in _GPUS:
        return _device_put(value, device, *arguments, **options)
    arrays, form = jax.tree.flatten(value)
    from_host = [i for i, each in enumerate(arrays) if isinstance(each, np.ndarray)]
    for i in from_host:
        # JAX would read aligned memory in place, which no GPU does.
        given = arrays[i]
        room = np.empty(given.nbytes + 80, np.uint8)
        start = -room.ctypes.data % 64 + 16
        arrays[i] = room[start : start + given.nbytes].view(given.dtype).reshape(given.shape)
        arrays[i][...] = given
    placed = _device_put(arrays, device, *arguments, **options)
    COPIES["in"] += len(from_host)
    COPIES["puts"] += bool(from_host)
    PLACED.extend(placed[i] for i in from_host)
    return jax.tree.unflatten(form, placed)


def _is_new_on_host(value: Any) -> bool:
    """Returns True if an array lies on a GPU, and its copy to the host has not begun."""
    if not isinstance(value, _ArrayImpl) or not value.devices().intersection(_GPUS):
        return False
    if (known := _begun.get(id(value))) is not None and known() is value:
        return False
    number = id(value)
    _begun[number] = weakref.ref(value, lambda _: _begun.pop(number, None))
    COPIES["out"] += 1
    return True


def _counted(convert: Any) -> Any:
    def counting(value: Any, *arguments: Any, **options: Any) -> Any:
        COPIES["late"] += _is_new_on_host(value)
        return convert(value, *arguments, **options)

    return counting


def _noting(method: Any) -> Any:
    def noted(*arguments: Any) -> Any:
        AT_MESSAGES.append(COPIES["in"])
        return method(*arguments)

    return noted


def _wait(self: Any) -> Any:
    COPIES["waits"] += not self.devices().isdisjoint(_GPUS)
    return _block_until_ready(self)


def _wait_for_all(values: Any) -> Any:
    AWAITED.extend(each for each in jax.tree.leaves(values) if isinstance(each, _ArrayImpl))
    return _block_all(values)


def _give_memory_back(self: StepRun) -> None:
    if self.borrowed:
        AT_RETURNS.append([*AWAITED])
    _give_back(self)


def _begin_copy(self: Any) -> None:
    _is_new_on_host(self)
    _copy_to_host_async(self)


worker.local_devices = _local_devices
jax.device_put, np.asarray, np.array = _put, _counted(_asarray), _counted(_array)
_ArrayImpl.copy_to_host_async, _ArrayImpl.block_until_ready = _begin_copy, _wait
jax.block_until_ready, StepRun.give_back = _wait_for_all, _give_memory_back  # type: ignore[method-assign]
Exchange.send, Exchange.receive = _noting(Exchange.send), _noting(Exchange.receive)  # type: ignore[method-assign]
