"""The ledger of a task: the bytes that the task keeps for each session.

The rendezvous and the queues share a ledger; the registry has another, so that elements refuse no stage that would
take them. What is taken or dropped is released.
"""

from __future__ import annotations

import threading

from runtime.limits import Limits

NOBODY = 0
"""The owner of the remains of ended sessions: elements of queues, stages for the next session."""


class Ledger:
    """The bytes kept on a task, by session. Thread safe.

    Args:
        limits: The limits ``client_bytes`` and ``task_bytes``.
        task: The task's name, for errors.
    """

    def __init__(self, limits: Limits | None = None, task: str = "") -> None:
        self._limits = limits or Limits()
        self._task = task
        self._lock = threading.Lock()
        self._bytes: dict[int, int] = {}
        self._total = 0
        self.own: set[int] = set()
        """The sessions of this process, which are counted and not checked."""

    def of(self, session: int) -> int:
        """Returns the bytes that are kept for a session."""
        return self._bytes.get(session, 0)

    def check(self, session: int, more: int = 0) -> None:
        """Checks that so many bytes more may be kept for a session.

        Raises:
            ResourceExhaustedError: More than a limit would be kept, for the session or for all.
        """
        if session in self.own:
            return
        its, limits = self.of(session) + more, self._limits
        if session != NOBODY and its > limits.client_bytes:
            raise limits.exceeded("client_bytes", f"{its} bytes are kept here for this session", self._task)
        if (total := self._total + more) > limits.task_bytes:
            raise limits.exceeded("task_bytes", f"{total} bytes are kept here for all sessions", self._task)

    def reserve(self, session: int, count: int, *, checked: bool = True) -> None:
        """Counts bytes that are kept for a session from now on.

        Args:
            session: The session.
            count: The bytes.
            checked: False counts them whatever the limits are.

        Raises:
            ResourceExhaustedError: As ``check``; nothing is counted.
        """
        with self._lock:
            if checked:
                self.check(session, count)
            self._total += count
            self._bytes[session] = self._bytes.get(session, 0) + count

    def release(self, session: int, count: int) -> None:
        """Counts bytes of a session that are kept no longer, also of a session that has ended."""
        with self._lock:
            self._total -= count
            owner = session if self._bytes.get(session, 0) >= count else NOBODY
            left = self._bytes.get(owner, 0) - count
            if left:
                self._bytes[owner] = left
            else:
                self._bytes.pop(owner, None)

    def end(self, session: int) -> None:
        """Counts the bytes of a session that ends for ``NOBODY``."""
        with self._lock:
            self.own.discard(session)
            left = self._bytes.pop(session, 0)
            if left:
                self._bytes[NOBODY] = self._bytes.get(NOBODY, 0) + left
