"""Tensors that a task holds for others: produced by one stage, fetched straight by the task that needs them."""

from __future__ import annotations

import threading
import time
from typing import Any

from runtime.errors import AbortedError, NotFoundError

KEEP_SECS = 600.0
"""How long a tensor that nobody fetched is kept: its step has failed, or its session died."""

RendezvousKey = tuple[int, int, int]
"""(session, step, slot)."""


class Rendezvous:
    """The held tensors of one task. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[RendezvousKey, list[Any]] = {}  # value, fetches left, when it was put
        self.resumed = False
        """Whether the task goes on from its backup: what it held before is lost."""

    def put(self, key: RendezvousKey, value: Any, fetches: int) -> None:
        """Keeps ``value`` until it was taken ``fetches`` times."""
        now = time.monotonic()
        with self._lock:
            self._entries[key] = [value, fetches, now]
            oldest = next(iter(self._entries))
            if now - self._entries[oldest][2] > KEEP_SECS:
                del self._entries[oldest]

    def take(self, key: RendezvousKey) -> Any:
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
            entry[1] -= 1
            if entry[1] <= 0:
                del self._entries[key]
            return entry[0]

    def drop_session(self, session: int) -> None:
        """Forgets everything that is held for one session."""
        with self._lock:
            for key in [k for k in self._entries if k[0] == session]:
                del self._entries[key]

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)
