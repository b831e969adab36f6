"""The ledger of a task: the bytes that the task keeps for each session.

The store, the rendezvous, the queues, the accumulators and the registry share the ledger. An eighth
of each limit is for stages alone, so that a full queue does not refuse the stage that would empty
the queue.
"""

from runtime import concurrency
from runtime.limits import Limits

NOBODY = 0
"""The owner of variables, and of the remains of ended sessions: elements of queues, stages for the next session."""
VALUES_SHARE = 7 / 8
"""The part of each limit that values may fill; the rest is for stages."""


class Ledger:
    """The bytes kept on a task, by session. Thread safe.

    Args:
        limits: The limits ``client_bytes`` and ``task_bytes``.
        task: The task's name, for errors.

    Examples:
        >>> ledger = Ledger(Limits(client_bytes=800), "/job:ps/task:0")
        >>> ledger.reserve(7, 700)
        >>> ledger.of(7)
        700
        >>> ledger.reserve(7, 1)
        Traceback (most recent call last):
        ...
        runtime.errors.ResourceExhaustedError: ...
    """

    def __init__(self, limits: Limits | None = None, task: str = "") -> None:
        self._limits = limits or Limits()
        self._task = task
        self._lock = concurrency.Lock()
        self._bytes: dict[int, int] = {}
        self._total = 0
        self.own: set[int] = set()
        """The sessions of this process, which are counted and not checked."""

    @property
    def total(self) -> int:
        """The bytes that are kept for all sessions."""
        return self._total

    def of(self, session: int) -> int:
        """Returns the bytes that are kept for a session."""
        return self._bytes.get(session, 0)

    def check(self, session: int, more: int = 0, *, stages: bool = False) -> None:
        """Checks that a session may keep further bytes.

        Args:
            session: The session.
            more: The bytes.
            stages: True for stages, which may fill the limits; values leave an eighth to stages.

        Raises:
            ResourceExhaustedError: More than a limit would be kept, for the session or for all.
        """
        if session in self.own:
            return
        # Stages are what empties a full queue, so values leave room for them.
        share, limits = 1.0 if stages else VALUES_SHARE, self._limits
        of_session, of_all = self.of(session) + more, self._total + more
        # Variables belong to all sessions, so no session's limit holds for them.
        if session != NOBODY and of_session > share * limits.client_bytes:
            raise limits.exceeded(
                "client_bytes", f"{of_session} bytes are kept here for this session", self._task
            )
        if of_all > share * limits.task_bytes:
            raise limits.exceeded(
                "task_bytes", f"{of_all} bytes are kept here for all sessions", self._task
            )

    def reserve(
        self, session: int, count: int, *, checked: bool = True, stages: bool = False
    ) -> None:
        """Counts bytes for a session from now on.

        Args:
            session: The session.
            count: The bytes.
            checked: False counts the bytes without a look at the limits.
            stages: As of ``check``.

        Raises:
            ResourceExhaustedError: As ``check``; nothing is counted.
        """
        with self._lock:
            # The check and the count share the lock, so that two callers do not both take the last
            # bytes.
            if checked:
                self.check(session, count, stages=stages)
            self._total += count
            self._bytes[session] = self._bytes.get(session, 0) + count

    def release(self, session: int, count: int) -> None:
        """Releases bytes of a session, also after the end of the session."""
        with self._lock:
            self._total -= count
            # After the end of a session its bytes are counted for nobody.
            owner = session if self._bytes.get(session, 0) >= count else NOBODY
            left = self._bytes.get(owner, 0) - count
            if left:
                self._bytes[owner] = left
            else:
                self._bytes.pop(owner, None)

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._lock:
            assert self._total == sum(self._bytes.values()), (
                "bytes were released that were never reserved"
            )
            assert min(self._bytes.values(), default=0) >= 0

    def end(self, session: int) -> None:
        """Moves the bytes of a session that ends to ``NOBODY``."""
        with self._lock:
            self.own.discard(session)
            left = self._bytes.pop(session, 0)
            if left:
                self._bytes[NOBODY] = self._bytes.get(NOBODY, 0) + left
