"""The rendezvous: tensors that a task holds for other tasks.

A stage puts a tensor here. The task whose stage needs the tensor fetches the tensor from here, and
not by way of the master.
"""

from collections.abc import Callable
from dataclasses import dataclass

from runtime import concurrency
from runtime.errors import AbortedError, NotFoundError
from runtime.observe.trace import nbytes
from runtime.plan.plan import HeldOutput
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import Ledger
from runtime.task import times
from runtime.tensor_spec import AnyArray

_ENTRY_BYTES = 256
"""Bytes of an entry beside those of the tensor. A million empty tensors take memory, too."""

RendezvousKey = tuple[int, int, int]
"""(session, step, slot)."""


@dataclass(slots=True)
class _HeldTensor:
    """A held tensor.

    Attributes:
        value: The tensor.
        fetches: Number of fetches that are still to come.
        by: Names of the tasks that may fetch the tensor; empty for any task.
        since: `monotonic()` of ``put``.
        nbytes: Bytes that the ledger has for the tensor.
    """

    value: AnyArray
    fetches: int
    by: frozenset[str]
    since: float
    nbytes: int


class Rendezvous:
    """The held tensors of one task. Thread safe.

    Args:
        ledger: Ledger that counts the bytes of the tensors for their sessions.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = concurrency.Lock()
        self._entries: dict[RendezvousKey, _HeldTensor] = {}
        self.resumed = False
        """True if the task continues from its backup.

        The tensors that the earlier process held are lost then.
        """

    @uninterrupted
    def put(self, key: RendezvousKey, value: AnyArray, hold: HeldOutput) -> None:
        """Keeps a value until the last fetch.

        Args:
            key: Key of the value. A value that has the key already is forgotten.
            value: The value.
            hold: Number of fetches, and the tasks that may fetch.
        """
        now, size = concurrency.monotonic(), nbytes([value]) + _ENTRY_BYTES
        with self._lock:
            # A step that was cut off runs again, and puts its tensors again.
            if key in self._entries:
                self._forget(key)
            self._entries[key] = _HeldTensor(value, hold.times, hold.by, now, size)
            self._ledger.reserve(key[0], size, checked=False)
            # One look at the oldest entry for each new entry keeps the number of forgotten ones
            # bounded.
            oldest = next(iter(self._entries))
            if now - self._entries[oldest].since > times.KEEP_SECS:
                self._forget(oldest)

    def _forget(self, key: RendezvousKey) -> None:
        self._ledger.release(key[0], self._entries.pop(key).nbytes)

    @uninterrupted
    def take(
        self, key: RendezvousKey, check: Callable[[frozenset[str]], None] = lambda by: None
    ) -> AnyArray:
        """Returns the value that was put under ``key``.

        Args:
            key: Key of the value.
            check: Receives the names of the tasks that may fetch. The value stays here if ``check``
                raises.

        Raises:
            NotFoundError: The key has no value, or no longer.
            AbortedError: The key may have had a value before the task was started again.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None and self.resumed:
                raise AbortedError(
                    f"restarted since step {key[1]} began, what it held for it is gone"
                )
            if entry is None:
                raise NotFoundError(f"no tensor is held for slot {key[2]} of step {key[1]}")
            check(entry.by)
            entry.fetches -= 1
            if entry.fetches <= 0:
                self._forget(key)
            return entry.value

    @uninterrupted
    def drop_session(self, session: int) -> None:
        """Forgets all tensors of one session."""
        with self._lock:
            for key in [k for k in self._entries if k[0] == session]:
                self._forget(key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)
