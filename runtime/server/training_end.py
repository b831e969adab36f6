"""The end of a task: the wait for the end of training, and the tasks that need this task until then."""

import contextlib
import itertools
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Mapping

from absl import logging

from runtime import concurrency
from runtime.errors import InvalidArgumentError
from runtime.server import times
from runtime.state.store import Store
from runtime.timeouts import LOG_EVERY_SECS

DRAIN_VARIABLE = "BELLWETHER_DRAIN_SECS"
"""Environment variable: most seconds for which a task serves after SIGTERM while training tasks are connected."""


class TrainingEnd:
    """The wait of one task for the end of training.

    Args:
        task: Name of the task.
        store: Variables and run record of the task.
        over: Event set when the wait should end: the server has stopped, or no task needs this task
            any more.

    Attributes:
        stopped: Event set when the server has stopped.
    """

    def __init__(self, task: str, store: Store, over: concurrency.Event) -> None:
        self.stopped = concurrency.Event()
        self._task = task
        self._store = store
        self._over = over

    def note_stop(self) -> None:
        """Notes that the server has stopped, and ends all waits."""
        self.stopped.set()
        self._over.set()

    def wait(self, late_secs: float) -> bool:
        """Waits for the end of training, or until the server has stopped.

        Args:
            late_secs: Seconds after the chief's end for which the task waits for workers that never
                came.

        Returns:
            True at the end of training, False if the server has stopped before.
        """
        run = self._store.run
        # A short wait belongs to every normal end. Only a longer wait deserves a warning.
        log_at, log = 0.0, logging.info
        while not self._over.wait(times.END_LOOK_SECS) and not run.may_leave(late_secs):
            awaited = run.awaited()
            if awaited and concurrency.monotonic() >= log_at:
                log_at = concurrency.monotonic() + LOG_EVERY_SECS
                who = "training is over" if not run.unfinished() else "some are done with training"
                log("%s: %s; waiting for %s", self._task, who, ", ".join(map(str, awaited)))
                log = logging.warning
        # The event `_over` alone does not tell a stop from the end of training.
        if self.stopped.is_set():
            if run.unfinished():
                logging.warning(
                    "%s stops before training has ended: %s",
                    self._task,
                    "started again, it goes on from the newest checkpoint"
                    if run.logdir
                    else "there are no checkpoints to go on from",
                )
            return False
        # The run record gave these tasks up, after the silence that the chief has set.
        for who_is_gone in run.awaited():
            logging.warning("%s: not waiting any longer for %s", self._task, who_is_gone)
        self._log_unsaved()
        logging.info("%s: training is over, nobody needs this task any more", self._task)
        return True

    def drain(self, secs: float) -> None:
        """Waits until no training task is connected.

        Args:
            secs: Most seconds to wait.
        """
        run = self._store.run
        deadline = concurrency.monotonic() + secs
        living = run.connected()
        if living and secs:
            logging.warning(
                "%s: SIGTERM: serving on for %g s at most, for %s",
                self._task,
                secs,
                ", ".join(living),
            )
            # The chief learns the time and saves before. Steps after the last checkpoint end with
            # this task.
            run.go_at(deadline)
        # A connected worker may be saving, and its last checkpoint needs this task.
        while (left := deadline - concurrency.monotonic()) > 0 and run.connected():
            if self._over.wait(min(times.DRAIN_LOOK_SECS, left)):
                break

    def outlast_sessions(self) -> None:
        """Waits, at the end of the program, until no training task is connected.

        A program of a ps may end by itself, for example when a queue has a token of each worker.
        The chief has yet to save then. A process that takes part itself waits for no other: the
        others might wait for this process.
        """
        run, log_at = self._store.run, 0.0
        # A program that has failed is gone at once. Only an uncaught error leaves its type here.
        # Daemon processes end at Python's exit, which the wait would hold up for ever.
        if hasattr(sys, "last_type") or any(
            child.daemon for child in multiprocessing.active_children()
        ):
            return
        while (living := run.connected()) and not any(map(run.environment.own, living.values())):
            if self._over.wait(times.DRAIN_LOOK_SECS):
                return
            if concurrency.monotonic() >= log_at:
                log_at = concurrency.monotonic() + LOG_EVERY_SECS
                logging.info(
                    "%s: the program is over; serving on for the sessions of %s",
                    self._task,
                    ", ".join(living),
                )

    def _log_unsaved(self) -> None:
        """Warns of steps after the chief's last checkpoint."""
        # A worker that the chief no longer waited for may have trained on.
        saved = self._store.run.saved
        if saved is None or self._store.uninitialized([saved[0]]):
            return
        now = int(self._store.snapshot([saved[0]])[saved[0]])
        if now > saved[1]:
            logging.warning(
                "%s: the last checkpoint is of step %d, and training has come to step %d: steps %d "
                "to %d are not saved",
                *(self._task, saved[1], now, saved[1] + 1, now),
            )


def read_drain_secs(environ: Mapping[str, str]) -> float:
    """Returns the seconds in ``BELLWETHER_DRAIN_SECS``, else 0.

    Raises:
        InvalidArgumentError: The variable is no number.
    """
    text = environ.get(DRAIN_VARIABLE) or "0"
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f"{DRAIN_VARIABLE}={text!r} is no number of seconds") from None


@contextlib.contextmanager
def started_by_sigterm(thread: concurrency.Thread) -> Iterator[None]:
    """Starts a thread at the first SIGTERM within the block, if the block runs in the main thread.

    Args:
        thread: Thread that was not started yet.
    """
    # Only the main thread may set the handler of a signal.
    if concurrency.current_thread() is not concurrency.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    # The signal may come twice: from an engine that signals all processes, and from a launcher.
    calls = itertools.count()
    # A signal handler interrupts the main thread at any instruction, maybe with a lock held. So the
    # handler only starts the thread.
    signal.signal(signal.SIGTERM, lambda *_: None if next(calls) else thread.start())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
