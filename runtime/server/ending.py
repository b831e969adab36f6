"""How one step of a client elsewhere is ended: what waits for it here, and its calls on other tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runtime.execution.cancel import Cancellation


class StepEnding(Cancellation):
    """Ends one step, and no other of its session.

    Waits of kernels on this task look at it as they do at any ``Cancellation``; calls on other tasks are ended by
    actions. The deadline is that of the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._actions: list[Callable[[], None]] = []
        self._actions_lock = threading.Lock()

    def set(self, reason: str = "nobody waits for the step any more") -> None:
        """Ends the step; what it still does raises CancelledError with the first reason given."""
        super().set(reason)
        with self._actions_lock:  # held: who has taken its action back knows that it does not run (any more)
            for action in self._actions:
                action()

    def add(self, action: Callable[[], None]) -> None:
        """Has ``action`` called when the step is ended, from another thread; at once if it was. It must be short."""
        with self._actions_lock:
            self._actions.append(action)
            if self.is_set():
                action()

    def remove(self, action: Callable[[], None]) -> None:
        """Takes back what ``add`` was given."""
        with self._actions_lock:
            self._actions.remove(action)
