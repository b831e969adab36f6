"""A timer in seconds or in steps."""

from __future__ import annotations

import time
from collections.abc import Callable


class SecondOrStepTimer:
    """Tells when it is time to do something again.

    Args:
        every_secs: seconds between two times; exactly one of this and ``every_steps``.
        every_steps: steps between two times.
        clock: seconds on a clock that only goes forward.

    Raises:
        ValueError: both or neither.
    """

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError("exactly one of every_secs and every_steps should be provided")
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self._last: tuple[int, float] | None = None

    def reset(self) -> None:
        """Forgets the last time: the next question is answered with yes."""
        self._last = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether it is time at ``step``; never twice for one step."""
        if self._last is None:
            return True
        last_step, _ = self._last
        if step == last_step:
            return False
        return self.secs_are_over() if self._every_steps is None else step >= last_step + self._every_steps

    def secs_are_over(self) -> bool:
        """Whether so many seconds have gone by, whatever the step is; never with a timer in steps."""
        return (
            self._every_secs is not None
            and self._last is not None
            and self._clock() >= self._last[1] + self._every_secs
        )

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Notes that it was done at ``step``; returns seconds and steps since the time before, None at the first."""
        now, before = self._clock(), self._last
        self._last = (step, now)
        return (None, None) if before is None else (now - before[1], step - before[0])

    def last_triggered_step(self) -> int | None:
        """The step of the last time."""
        return None if self._last is None else self._last[0]
