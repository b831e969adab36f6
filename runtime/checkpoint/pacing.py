"""Work that must not slow down training: it runs in threads that step aside for all others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

NICENESS = 10
"""How far such a thread steps aside: with this one it gets a tenth of a core that others want too."""
CORES_TO_SHARE = 8
"""With fewer cores such work is also paced: with a quarter of them it works for a quarter of the time."""
REST_SECS = 0.5
"""The longest rest: work that takes longer waits for the disk, not for a core."""

T = TypeVar("T")


class Pace:
    """Makes work rest between its pieces while training needs the cores, where these are few.

    A low priority is not enough there: what the work has the kernel do (write back pages) has no priority of its own,
    and a step that wakes up finds its core taken.

    Args:
        progress: a number that grows while somebody trains.
        wait: waits for so many seconds, or until the work is not wanted any more.
        cores: of this machine; None asks the operating system.
    """

    def __init__(self, progress: Callable[[], int], wait: Callable[[float], object], cores: int | None = None) -> None:
        self._progress = progress
        self._wait = wait
        self._factor = max(0.0, CORES_TO_SHARE / (cores or os.cpu_count() or 1) - 1)
        self._seen = progress()

    def others_work(self) -> bool:
        """Whether the work should rest now: somebody has trained since this was asked before."""
        before, self._seen = self._seen, self._progress()
        return self._factor > 0 and self._seen != before

    def rest(self, worked_secs: float) -> None:
        """Rests after a piece of work that took so many seconds."""
        self._wait(min(worked_secs * self._factor, REST_SECS))


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Runs ``work`` in a thread of its own; the future has what it returns or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def in_background(work: Callable[[], T], name: str) -> T:
    """Runs ``work`` in a thread of low priority and waits for it.

    A thread's priority can be lowered but not raised again, so the caller's own stays as it is.

    Args:
        work: what to do; what it raises is raised here.
        name: of the thread.
    """

    def run() -> T:
        step_aside()
        return work()

    return in_thread(run, name).result()


def step_aside(others: str = "") -> None:
    """Lowers the priority of the calling thread, or of the threads of this process that have a name, for good.

    Only where a thread has a priority of its own, which is Linux.

    Args:
        others: the name that the operating system has for the threads; empty means the calling thread.
    """
    if sys.platform != "linux":
        return
    if not others:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().strip() == others:
                    os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
