"""Values of variables for checkpoints: where restored values go, and which values have changed since."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from runtime import concurrency
from runtime.checkpoint import string_arrays
from runtime.checkpoint.snapshot import VariableSlice
from runtime.errors import InvalidArgumentError
from runtime.state.store import Values
from runtime.tensor_spec import AnyArray, Array

_JOBS = 8
"""Number of saves and restores of which a task remembers the values."""


@dataclass(frozen=True)
class ArrayPlacement:
    """The devices of a task, for the arrays of a restore.

    Attributes:
        task: name of the task, for errors.
        devices: devices of the task by (type, index).
    """

    task: str
    devices: Mapping[tuple[str, int], jax.Device]

    def place(self, s: VariableSlice, array: Array) -> AnyArray:
        """Returns the value of a variable on its device, of an array as on disk.

        Raises:
            InvalidArgumentError: The task does not have the device.
        """
        if s.spec.is_string:
            return string_arrays.decode_strings(array, s.spec.shape)
        device = self.devices.get((s.device.type, s.device.index))
        if device is None:
            raise InvalidArgumentError(
                f"no device {s.device.type}:{s.device.index} here for {s.variable.name!r}",
                task=self.task,
            )
        # Without x64, JAX would narrow arrays of 64 bits.
        with jax.enable_x64(True):
            placed: jax.Array = jax.device_put(array, device)
            return placed.block_until_ready()

    def place_bytes(self, s: VariableSlice, raw: Array) -> AnyArray:
        """Returns the value of a variable on its device, of all bytes of the array; see ``place``."""
        assert raw.nbytes == s.stored.nbytes, "bytes of an array are missing"
        return self.place(s, raw.view(s.stored.dtype).reshape(s.stored.shape))


class ValueMemory:
    """The values of the last saves and restores, by job, to answer the order ``changed``. Thread safe."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._values: OrderedDict[int, Values] = OrderedDict()

    def note(self, job: int, values: Values) -> None:
        """Remembers the values that a save has taken, or that a restore has given the variables."""
        with self._lock:
            self._values[job] = values
            while len(self._values) > _JOBS:
                self._values.popitem(last=False)

    def count_changed(self, job: int, count: int, now: Values) -> int | None:
        """Returns the number of variables that have changed since a job; None for an unknown job.

        Args:
            job: number of the job.
            count: number of the variables.
            now: present values; a variable without a value has changed.
        """
        with self._lock:
            values = self._values.get(job)
        if values is None:
            return None
        # Values are compared by identity: an update replaces the array, whatever the numbers are.
        same = [
            key in values and (value := values[key]()) is not None and value is present()
            for key, present in now.items()
        ]
        assert len(same) <= count, "a variable without a question"
        return count - same.count(True)
