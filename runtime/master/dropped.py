"""Finalizers that run on a thread of their own, some time after the last reference to an object is gone.

A finalizer runs wherever the garbage collector happens to: in any thread, under any lock. So it only puts the action
into a queue, which is made for that (``queue.SimpleQueue`` may be entered again by the thread that is in it).
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from runtime import concurrency

_T = TypeVar("_T")

_actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_lock = concurrency.Lock()
_thread: concurrency.Thread | None = None


def when_dropped(thing: _T, action: Callable[[], None]) -> weakref.finalize[[Callable[[], None]], _T]:
    """Has ``action`` called some time after ``thing`` is gone; not at the end of the process.

    Args:
        thing: any object that can be referred to weakly.
        action: does not refer to it. May take a little time; what it raises is logged.

    Returns:
        What ``detach`` takes the order back with.
    """
    _start()
    finalizer = weakref.finalize(thing, _actions.put, action)
    finalizer.atexit = False
    return finalizer


def later(action: Callable[[], None]) -> None:
    """Has ``action`` called some time from now; otherwise as ``when_dropped``."""
    _start()
    _actions.put(action)


def _start() -> None:
    global _thread
    with _lock:
        # The child of a fork has no threads.
        if _thread is None or not _thread.is_alive():
            _thread = concurrency.ThreadGroup("finalizers").start(_work, name="dropped")


def _work() -> None:
    while True:
        action = _actions.get()
        try:
            action()
        except Exception:
            logging.exception("The finalizer of a dropped object failed")
        del action
