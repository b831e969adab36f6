"""Tensors that a task holds for others: produced by one stage, fetched straight by the task that needs them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psutil

from runtime.errors import AbortedError, NotFoundError, ResourceExhaustedError
from runtime.observe.trace import nbytes
from runtime.tensor_spec import AnyArray

KEEP_SECS = 600.0
"""How long a tensor is kept that is not fetched, because its step has failed or its session died."""

PART_OF_MEMORY = 0.5
"""The part of the machine's memory that held tensors may take."""

RendezvousKey = tuple[int, int, int]
"""(session, step, slot)."""


@dataclass(slots=True)
class _Held:
    value: AnyArray
    fetches: int  # that are still to come
    since: float
    nbytes: int


class Rendezvous:
    """The held tensors of one task. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[RendezvousKey, _Held] = {}
        self._bytes = 0
        self.limit_bytes = int(psutil.virtual_memory().total * PART_OF_MEMORY)
        self.resumed = False
        """Whether the task goes on from its backup: what it held before is lost."""

    def put(self, key: RendezvousKey, value: AnyArray, fetches: int) -> None:
        """Keeps ``value`` until it was taken ``fetches`` times."""
        now, size = time.monotonic(), nbytes([value])
        with self._lock:
            if key in self._entries:
                self._forget(key)
            self._entries[key] = _Held(value, fetches, now, size)
            self._bytes += size
            oldest = next(iter(self._entries))
            if now - self._entries[oldest].since > KEEP_SECS:
                self._forget(oldest)

    def check_room(self) -> None:
        """Before a stage runs whose outputs are to be held: raises ResourceExhaustedError when too much is held now."""
        if self._bytes > self.limit_bytes:
            raise ResourceExhaustedError(
                f"{self._bytes} bytes of tensors are held here for other tasks that have not fetched them: the limit "
                f"is {PART_OF_MEMORY:.0%} of the memory (limit_bytes = {self.limit_bytes})"
            )

    def _forget(self, key: RendezvousKey) -> None:
        self._bytes -= self._entries.pop(key).nbytes

    def take(self, key: RendezvousKey) -> AnyArray:
        """The value that was put under ``key``.

        Raises:
            NotFoundError: it is not there (any more).
            AbortedError: it may have been there before the task was started again.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None and self.resumed:
                raise AbortedError(f"restarted since step {key[1]} began, what it held for it is gone")
            if entry is None:
                raise NotFoundError(f"no tensor is held for slot {key[2]} of step {key[1]}")
            entry.fetches -= 1
            if entry.fetches <= 0:
                self._forget(key)
            return entry.value

    def drop_session(self, session: int) -> None:
        """Forgets everything that is held for one session."""
        with self._lock:
            for key in [k for k in self._entries if k[0] == session]:
                self._forget(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)
