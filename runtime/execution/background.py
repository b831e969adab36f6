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

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> T:
    """Runs ``work`` in a thread of low priority and waits for it.

    A thread's priority can be lowered but not raised again, so the caller's own stays as it is.

    Args:
        work: what to do; what it raises is raised here.
        name: of the thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        step_aside()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future.result()


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
