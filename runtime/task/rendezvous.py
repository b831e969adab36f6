"""Tensors that a task holds for others: produced by one stage, fetched straight by the task that needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime import concurrency
from runtime.errors import AbortedError, NotFoundError
from runtime.observe.trace import nbytes
from runtime.plan.plan import Hold
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import Ledger
from runtime.tensor_spec import AnyArray

KEEP_SECS = 600.0
"""Seconds that a tensor is kept that no task fetches, because its step failed or its session died."""

_ENTRY_BYTES = 256
"""What an entry takes beside the bytes of its tensor, so that a million empty ones are not nothing."""

RendezvousKey = tuple[int, int, int]
"""(session, step, slot)."""


@dataclass(slots=True)
class _Held:
    value: AnyArray
    fetches: int  # that are still to come
    by: frozenset[str]
    since: float
    nbytes: int


class Rendezvous:
    """The held tensors of one task. Thread safe.

    Args:
        ledger: where what is held for a session is counted.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = concurrency.Lock()
        self._entries: dict[RendezvousKey, _Held] = {}
        self.resumed = False
        """True if the task continues from its backup: tensors that it held before are lost."""

    @uninterrupted
    def put(self, key: RendezvousKey, value: AnyArray, hold: Hold) -> None:
        """Keeps ``value`` until it was taken as often as it is to be held for."""
        now, size = concurrency.monotonic(), nbytes([value]) + _ENTRY_BYTES
        with self._lock:
            if key in self._entries:
                self._forget(key)
            self._entries[key] = _Held(value, hold.times, hold.by, now, size)
            self._ledger.reserve(key[0], size, checked=False)
            oldest = next(iter(self._entries))
            if now - self._entries[oldest].since > KEEP_SECS:
                self._forget(oldest)

    def _forget(self, key: RendezvousKey) -> None:
        self._ledger.release(key[0], self._entries.pop(key).nbytes)

    @uninterrupted
    def take(self, key: RendezvousKey, check: Callable[[frozenset[str]], None] = lambda by: None) -> AnyArray:
        """Returns the value that was put under ``key``.

        Args:
            key: its key.
            check: is given the tasks that it is held for; what it raises leaves it where it is.

        Raises:
            NotFoundError: No value is there, or no longer.
            AbortedError: The value may have been there before the task was started again.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None and self.resumed:
                raise AbortedError(f"restarted since step {key[1]} began, what it held for it is gone")
            if entry is None:
                raise NotFoundError(f"no tensor is held for slot {key[2]} of step {key[1]}")
            check(entry.by)
            entry.fetches -= 1
            if entry.fetches <= 0:
                self._forget(key)
            return entry.value

    @uninterrupted
    def drop_session(self, session: int) -> None:
        """Forgets everything that is held for one session."""
        with self._lock:
            for key in [k for k in self._entries if k[0] == session]:
                self._forget(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)
