"""Background work beside training: threads of low priority, and rests between pieces of work."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from runtime import concurrency
from runtime.checkpoint import times

NICENESS = 10
"""Nice value of background threads, with which a thread gets a tenth of a contested core."""
CORES_TO_SHARE = 8
"""Number of cores below which work also rests: with a quarter of them, work takes a quarter of the time."""

T = TypeVar("T")


class Pace:
    """The rests of background work on a machine with few cores.

    A low priority is not enough there. The kernel writes pages back at its own priority, and a
    training step that wakes up finds the core taken.

    Args:
        progress: returns a number that grows while a worker trains.
        wait: waits for a time in seconds, or until the work is cancelled.
        cores: cores of this machine; None asks the operating system.
    """

    def __init__(
        self, progress: Callable[[], int], wait: Callable[[float], object], cores: int | None = None
    ) -> None:
        self._progress = progress
        self._wait = wait
        self._factor = max(0.0, CORES_TO_SHARE / (cores or os.cpu_count() or 1) - 1)
        self._seen = progress()

    def others_work(self) -> bool:
        """Returns True if a worker has trained since the last call, so that the work should rest."""
        before, self._seen = self._seen, self._progress()
        return self._factor > 0 and self._seen != before

    def rest(self, worked_secs: float) -> None:
        """Rests after a piece of work that took ``worked_secs`` seconds."""
        # On few cores the work takes a fixed share of the time.
        self._wait(min(worked_secs * self._factor, times.REST_SECS))


def in_background(work: Callable[[], T], name: str) -> T:
    """Runs ``work`` in a thread of low priority and waits for it.

    A thread's priority can be lowered but not raised again, so the caller's own stays as it is.

    Args:
        work: function to run; its result is returned and its error raised.
        name: name of the thread.

    Examples:
        >>> in_background(lambda: 6 * 7, "example")
        42
    """

    def run() -> T:
        step_aside()
        return work()

    return concurrency.in_thread(run, name).result()


def step_aside(others: str = "") -> None:
    """Lowers the priority of the calling thread, or of named threads of this process, for good.

    Does nothing but on Linux, where each thread has a priority of its own.

    Args:
        others: name of the threads in the operating system; empty for the calling thread.
    """
    if sys.platform != "linux":
        return
    if not others:
        os.setpriority(os.PRIO_PROCESS, concurrency.native_thread_id(), NICENESS)
        return
    for thread in os.listdir("/proc/self/task"):
        # A thread that ends meanwhile raises one of these errors.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().strip() == others:
                    os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
