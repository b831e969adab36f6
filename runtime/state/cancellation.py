"""Cancellation: the end of the waits of a call, as a session ends, a caller hangs up or a deadline passes."""

from collections.abc import Callable, MutableMapping
from typing import Any

from runtime import concurrency
from runtime.errors import CancelledError, DeadlineExceededError, HungUpError

HUNG_UP = "the caller hung up"
"""The reason of a wait whose caller is dead, has given up or was cut off; a caller that was cut off calls again."""


class Cancellation(concurrency.Event):
    """The end of one call: an Event that also wakes the conditions of waits.

    Args:
        deadline: ``time.monotonic()`` at which waits end with DeadlineExceededError; None for no
            limit.
        hung_up: returns True if the caller has hung up. A kernel checks before the kernel hands
            over an element.
        memory: effects of an earlier run of the call, which was cut off, for the next run.

    Examples:
        >>> cancelled = Cancellation(deadline=concurrency.monotonic() + 60)
        >>> cancelled.set("the caller hung up")
        >>> cancelled.over
        True
    """

    def __init__(
        self,
        deadline: float | None = None,
        hung_up: Callable[[], bool] | None = None,
        memory: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.deadline = deadline
        self.memory = {} if memory is None else memory
        self._hung_up = hung_up
        self._lock = concurrency.Lock()
        self._reason = ""
        self._error = CancelledError
        self._conditions: list[concurrency.Condition] = []

    def set(
        self, reason: str = "the session was closed", error: type[CancelledError] = CancelledError
    ) -> None:
        """Ends the call: present and future waits raise ``error`` with the first reason."""
        with self._lock:
            if self._reason:
                return
            self._reason, self._error = reason, error
            super().set()
            waiting = list(self._conditions)
        # The own lock is free here, as a call takes it while it holds its condition.
        for condition in waiting:
            with condition:
                condition.notify_all()

    @property
    def over(self) -> bool:
        """True if ``check`` would raise now."""
        return bool(self._reason) or (
            self.deadline is not None and concurrency.monotonic() >= self.deadline
        )

    def check(self, what: str) -> None:
        """Raises if the call must end; ``what`` names the wait in the error.

        Raises:
            CancelledError: The call was cancelled.
            DeadlineExceededError: The deadline of the call has passed.
        """
        if self._reason:
            raise self._error(f"{what}: {self._reason}")
        if self.deadline is not None and concurrency.monotonic() >= self.deadline:
            raise DeadlineExceededError(f"{what}: the deadline has passed")

    def wait_for(
        self,
        condition: concurrency.Condition,
        ready: Callable[[], bool],
        what: str,
        until: float | None = None,
        *,
        acts: bool = False,
    ) -> bool:
        """Waits, holding ``condition``, until ``ready()``.

        Args:
            condition: held by the caller; notified when ``ready`` may have changed.
            ready: the condition of the wait.
            what: name of the wait, for errors.
            until: ``time.monotonic()`` at which the wait ends without an error.
            acts: True if the call has an effect after the wait. A call without a wait then raises
                too if the caller has gone.

        Returns:
            True if ``ready()`` was true; False only after ``until``.

        Raises:
            CancelledError, DeadlineExceededError: as ``check``; without ``acts`` only when
                ``ready()`` is false.
        """
        if ready():
            if acts:
                self._check_wanted(what)
            return True
        # The condition is listed before the first look at the reason, so that a later ``set`` finds
        # the condition.
        with self._lock:
            self._conditions.append(condition)
        try:
            while not ready():
                self.check(what)
                now = concurrency.monotonic()
                if until is not None and now >= until:
                    return False
                # The earlier of the two ends the wait.
                limits = [t for t in (until, self.deadline) if t is not None]
                condition.wait(max(0.0, min(limits) - now) if limits else None)
            if acts:
                self._check_wanted(what)
            return True
        finally:
            with self._lock:
                self._conditions.remove(condition)

    def _check_wanted(self, what: str) -> None:
        if self._reason:
            raise self._error(f"{what}: {self._reason}")
        # An element for a dead caller would be lost, so the connection is looked at just before.
        if self._hung_up is not None and self._hung_up():
            raise HungUpError(f"{what}: {HUNG_UP}")
