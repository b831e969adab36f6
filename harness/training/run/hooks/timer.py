"""A timer in seconds or in steps: hooks ask it in each step."""

from collections.abc import Callable

from runtime import concurrency


class SecondOrStepTimer:
    """A timer in seconds or in steps.

    Args:
        every_secs: Seconds between two times; exactly one of this and ``every_steps``.
        every_steps: Steps between two times.
        clock: Returns seconds of a clock that never goes back.

    Raises:
        ValueError: Both intervals are given, or neither.

    Examples:
        >>> import harness
        >>> timer = harness.SecondOrStepTimer(every_steps=10)
        >>> timer.update_last_triggered_step(5)
        (None, None)
        >>> timer.should_trigger_for_step(14), timer.should_trigger_for_step(15)
        (False, True)
    """

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        clock: Callable[[], float] = concurrency.monotonic,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError("exactly one of every_secs and every_steps should be provided")
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self._last: tuple[int, float] | None = None

    def reset(self) -> None:
        """Forgets the last time, so that the next step is due."""
        self._last = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns True if ``step`` is due; never twice for one step."""
        if self._last is None:
            return True
        last_step, _ = self._last
        # A step that is run again after a recovery is not due twice.
        if step == last_step:
            return False
        return (
            self.secs_are_over()
            if self._every_steps is None
            else step >= last_step + self._every_steps
        )

    def secs_are_over(self) -> bool:
        """Returns True if the seconds have passed, also where the step stands still."""
        return (
            self._every_secs is not None
            and self._last is not None
            and self._clock() >= self._last[1] + self._every_secs
        )

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Notes that ``step`` was the last time.

        Returns:
            Seconds and steps since the time before; None and None at the first.
        """
        # Read once, so that no time between two readings is lost.
        now, before = self._clock(), self._last
        assert before is None or now >= before[1], "the clock has gone back"
        self._last = (step, now)
        return (None, None) if before is None else (now - before[1], step - before[0])

    def last_triggered_step(self) -> int | None:
        """Returns the step of the last time, or None."""
        return None if self._last is None else self._last[0]
