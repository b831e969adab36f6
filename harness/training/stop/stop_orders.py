"""The orders of other tasks: a thread of each task waits for the order to stop, and for the notice of a ps that leaves.

Both come by the run records on the ps. ``Lifecycle`` starts the thread with its session.
"""

from collections.abc import Callable

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.training import times
from harness.training.start.session_start import LOST_CONTACT
from runtime import concurrency
from runtime.lowlevel import RunRecords


class StopOrders(concurrency.Thread):
    """A daemon thread for the orders of other tasks.

    Args:
        records: Run records with the orders.
        coord: Coordinator of the task.
        save: Function that returns the function that saves, as the chief; None where nothing is
            saved.
    """

    def __init__(
        self,
        records: RunRecords,
        coord: Coordinator,
        save: Callable[[], Callable[[], object] | None],
    ) -> None:
        super().__init__(name="await-stop", daemon=True)
        self._records = records
        self._coord = coord
        self._save = save

    def run(self) -> None:
        """Waits for orders until a stop, such as the order of an evaluator to end training."""
        while not self._coord.should_stop():
            try:
                reason, goes_in_secs = self._records.wait_stop(times.STOP_WAIT_SECS)
            except (rt.CancelledError, rt.TaskLeftError):
                return
            except (rt.DeadlineExceededError, *LOST_CONTACT):
                # A lost task is no matter of this thread: the next step finds the loss and
                # recovers.
                self._coord.wait_for_stop(times.STOP_PAUSE_SECS)
                continue
            except rt.OpError as error:
                logging.warning("an order to end training would not be noticed: %s", error)
                return
            if reason:
                logging.info("training is to end: %s", reason)
                self._coord.request_stop()
            elif goes_in_secs is not None:
                self._save_before(concurrency.monotonic() + goes_in_secs)

    def end(self) -> None:
        """Ends the wait for orders as the process ends.

        A thread in the middle of a call when the interpreter ends would abort the process.
        """
        self._records.close()
        self.join(times.AT_EXIT_SECS)

    def _save_before(self, goes_at: float) -> None:
        """Saves, as the chief, the variables of a ps that is about to leave: now, and once more shortly before.

        Args:
            goes_at: Time at which the ps leaves, on ``time.monotonic()``.
        """
        save = self._save()
        if save is not None and not self._coord.wait_for_stop(times.GOES_TOO_SECS):
            left = goes_at - concurrency.monotonic()
            logging.warning(
                "a ps has been told to go, and serves on for %.0f s at most: saving what it holds",
                left,
            )
            # An error of this save stops training, as an error of a save that the timer begins.
            with self._coord.stop_on_exception():
                save()
                before = goes_at - times.LAST_SAVE_SECS - concurrency.monotonic()
                if left > times.LAST_SAVE_SECS and not self._coord.wait_for_stop(max(0.0, before)):
                    save()
        # The ps reports its departure until it is gone, and is saved for once.
        self._coord.wait_for_stop(max(times.STOP_PAUSE_SECS, goes_at - concurrency.monotonic()))
