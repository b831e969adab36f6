"""The grace period: how long a wait goes on after somebody has asked everything to stop."""

from __future__ import annotations

import threading
import time

from harness.coordinator import Coordinator

STOP_GRACE_SECS = 120.0
"""How long threads, steps under way and other workers have to end after a stop, by default."""


class GracePeriod:
    """Bounds waits for tasks that may be dead: they end a while after a stop, and at once after a failure.

    Args:
        coord: tells of stops and failures.
        grace_secs: how long waits may go on after a stop without a failure.
    """

    def __init__(self, coord: Coordinator, grace_secs: float = STOP_GRACE_SECS) -> None:
        self.coord = coord
        self.grace_secs = grace_secs
        self._stopped_at: float | None = None
        self._over = threading.Event()
        self.deadline: float | None = None
        """``time.monotonic()`` when the grace period ends even without a stop."""

    def exhausted(self) -> bool:
        """Whether it is time to give up."""
        if self._over.is_set() or (self.deadline is not None and time.monotonic() >= self.deadline):
            return True
        if not self.coord.should_stop():
            self._stopped_at = None
            return False
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        return failed(self.coord) or time.monotonic() - self._stopped_at >= self.grace_secs

    def at_most(self, secs: float) -> float:
        """``secs``, or the time that is left when that is less."""
        self.exhausted()  # notes when the stop came
        ends = [] if self.deadline is None else [self.deadline]
        if self._stopped_at is not None:
            ends.append(self._stopped_at + self.grace_secs)
        return min([secs, *(max(0.1, end - time.monotonic()) for end in ends)])

    def wait(self, secs: float) -> None:
        """Waits, less long when the grace period ends meanwhile or a stop is requested."""
        if self.coord.should_stop():
            self._over.wait(min(secs, 1.0))
        else:
            self.coord.wait_for_stop(secs)

    def renew(self) -> None:
        """Begins anew, for another session."""
        self._over.clear()
        self._stopped_at = self.deadline = None

    def start_again(self) -> None:
        """Contact was lost just now: the whole grace period is there again, however long ago the stop was."""
        self._stopped_at = None

    def end(self) -> None:
        """Ends all waits now."""
        self._over.set()


def failed(coord: Coordinator) -> bool:
    """Whether a coordinator was stopped by an exception."""
    try:
        coord.raise_requested_exception()
    except BaseException:  # noqa: B036 - it is looked at, not handled: join() raises it again
        return True
    return False
