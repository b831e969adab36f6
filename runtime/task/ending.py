"""The end of one step of a client in another process: of its waits on this task and its calls on others."""

from __future__ import annotations

from collections.abc import Iterable

from runtime import concurrency
from runtime.errors import CancelledError
from runtime.state.cancellation import Cancellation
from runtime.wire.channel import Lane


class StepEnding(Cancellation):
    """The end of one step, and of no other of its session.

    Waits of kernels on this task look at it as they do at any ``Cancellation``; the calls on other tasks are ended by
    their lanes. The deadline is that of the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lanes: list[Lane] = []
        self._waits: list[Cancellation] = []
        self._covered = concurrency.Lock()

    def set(
        self, reason: str = "nobody waits for the step any more", error: type[CancelledError] = CancelledError
    ) -> None:
        """Ends the step: its calls and waits raise ``error`` with the first reason."""
        super().set(reason, error)
        with self._covered:  # held: a lane that is not covered any more may be another step's
            for lane in self._lanes:
                lane.cancel()
            waits = list(self._waits)
        for wait in waits:
            wait.set(reason, error)

    def cover(self, lanes: Iterable[Lane]) -> None:
        """Has the end of the step end the calls of these lanes, until ``uncover``.

        Raises:
            CancelledError: it was ended before.
        """
        with self._covered:
            self._lanes.extend(lanes)
        if self.is_set():
            self.check("the step")

    def uncover(self, lanes: Iterable[Lane]) -> None:
        """Undoes ``cover``, before lanes are given back. Lanes that were never covered may be among them."""
        gone = list(lanes)
        with self._covered:
            self._lanes = [lane for lane in self._lanes if all(lane is not other for other in gone)]

    def include(self, wait: Cancellation) -> None:
        """Has the end of the step end a wait that something else may end too."""
        with self._covered:
            self._waits.append(wait)
        if self.is_set():
            wait.set("nobody waits for the step any more")
