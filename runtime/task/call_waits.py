"""The waits of the calls of a task, which end with their sessions and their connections.

A worker registers a call here while the call runs a kernel that may wait.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from runtime import concurrency
from runtime.errors import CancelledError, HungUpError
from runtime.state.cancellation import HUNG_UP, Cancellation
from runtime.wire.connection import caller_is_gone

# A call of a session that has ended may still arrive for some time.
_ENDED_SESSIONS = 4096


class CallWaits:
    """The calls of a task that may wait, by session. Thread safe.

    Args:
        task: Name of the task, for errors.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = concurrency.Lock()
        # By session, the lane of each call (0 in this process) and the end of the call's waits.
        self._waits: dict[int, set[tuple[int, Cancellation]]] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of calls that may wait now."""
        with self._lock:
            return sum(map(len, self._waits.values()))

    def has_ended(self, session: int) -> bool:
        """Returns True if a session was closed."""
        return session in self._ended

    def end_session(self, session: int) -> None:
        """Refuses the later calls of a session that was closed."""
        with self._lock:
            self._ended[session] = None
            if len(self._ended) > _ENDED_SESSIONS:
                self._ended.popitem(last=False)

    @contextmanager
    def hold(self, session: int, lane: int, cancelled: Cancellation) -> Iterator[None]:
        """Lets the end of the session and the break of the lane end a call's waits, within the block.

        Args:
            session: Session of the call.
            lane: Lane of the call; 0 in this process.
            cancelled: End of the call's waits.

        Raises:
            CancelledError: The session was closed.
        """
        entry = (lane, cancelled)
        with self._lock:
            if session in self._ended:
                raise CancelledError("the session was closed", task=self._task)
            self._waits.setdefault(session, set()).add(entry)
        try:
            # The lane may have broken before the entry was there.
            if lane and caller_is_gone():
                cancelled.set(HUNG_UP, HungUpError)
            yield
        finally:
            with self._lock:
                waits = self._waits[session]
                waits.remove(entry)
                # Sessions come and go for as long as the task lives.
                if not waits:
                    del self._waits[session]

    def cancel(self, session: int, reason: str) -> None:
        """Ends the waits of a session's calls with CancelledError."""
        # The waits end without the lock: their calls take the lock as they leave ``hold``.
        with self._lock:
            waits = list(self._waits.get(session, ()))
        for _, cancelled in waits:
            cancelled.set(reason)

    def hang_up(self, session: int, lane: int) -> None:
        """Ends the waits of a lane's call with HungUpError."""
        with self._lock:
            waits = [cancelled for of, cancelled in self._waits.get(session, ()) if of == lane]
        for cancelled in waits:
            cancelled.set(HUNG_UP, HungUpError)
