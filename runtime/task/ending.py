"""The end of one step of a client in another process.

The session of the client makes a `StepEnding` for each step. The end of the step ends the waits on
this task and the calls to other tasks.
"""

from collections.abc import Iterable

from runtime import concurrency
from runtime.errors import CancelledError
from runtime.state.cancellation import Cancellation
from runtime.wire.channel import Lane


class StepEnding(Cancellation):
    """The end of one step, and of no other step of the session.

    Kernels on this task wait with this `Cancellation`. Calls to other tasks end with their lanes.
    The deadline is that of the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lanes: list[Lane] = []
        self._waits: list[Cancellation] = []
        self._covered = concurrency.Lock()

    def set(
        self,
        reason: str = "nobody waits for the step any more",
        error: type[CancelledError] = CancelledError,
    ) -> None:
        """Ends the step.

        The calls and waits of the step raise ``error`` with the first reason.
        """
        super().set(reason, error)
        # The lock is held, because a lane that is not covered any more may belong to another step.
        with self._covered:
            for lane in self._lanes:
                lane.cancel()
            waits = list(self._waits)
        for wait in waits:
            wait.set(reason, error)

    def cover(self, lanes: Iterable[Lane]) -> None:
        """Adds lanes, whose calls end with the step until ``uncover``.

        Raises:
            CancelledError: The step has ended before.
        """
        with self._covered:
            self._lanes.extend(lanes)
        # The step may have ended just before the lanes were added, and would not cancel them.
        if self.is_set():
            self.check("the step")

    def uncover(self, lanes: Iterable[Lane]) -> None:
        """Undoes ``cover``, before the lanes are returned to their pool.

        Lanes that were never covered may be among them.
        """
        gone = list(lanes)
        with self._covered:
            self._lanes = [lane for lane in self._lanes if all(lane is not other for other in gone)]

    def covers(self, lane: Lane) -> bool:
        """Returns True if the end of the step ends the calls of a lane."""
        with self._covered:
            return any(lane is other for other in self._lanes)

    def include(self, wait: Cancellation) -> None:
        """Adds a wait, which ends with the step or for a reason of its own."""
        with self._covered:
            self._waits.append(wait)
        # As in ``cover``: an end just before would not reach the wait.
        if self.is_set():
            wait.set("nobody waits for the step any more")
