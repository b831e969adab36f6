"""Finalizers that run on a thread of their own, some time after the last reference to an object is gone.

The garbage collector runs a finalizer in any thread, under any lock. So a finalizer here only puts
its action into a queue. ``queue.SimpleQueue`` is made for this use: a thread inside the queue may
enter the queue again.
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


def when_dropped(
    thing: _T, action: Callable[[], None]
) -> weakref.finalize[[Callable[[], None]], _T]:
    """Calls ``action`` some time after ``thing`` is gone, but not at the end of the process.

    Args:
        thing: any object that can be referred to weakly.
        action: a function without a reference to ``thing``. May take a little time. Its errors are
            logged.

    Returns:
        The finalizer, whose ``detach`` takes the order back.
    """
    _start_thread()
    finalizer = weakref.finalize(thing, _actions.put, action)
    finalizer.atexit = False
    return finalizer


def later(action: Callable[[], None]) -> None:
    """Calls ``action`` soon, and else like ``when_dropped``."""
    _start_thread()
    _actions.put(action)


def _start_thread() -> None:
    global _thread
    with _lock:
        # The child of a fork has no threads.
        if _thread is None or not _thread.is_alive():
            _thread = concurrency.ThreadGroup("finalizers").start(_run_actions, name="dropped")


def _run_actions() -> None:
    while True:
        action = _actions.get()
        try:
            action()
        except Exception:
            logging.exception("The finalizer of a dropped object failed")
        del action
