"""Waits for what nobody tells of: files and figures of other processes, counters, threads of libraries."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from runtime.concurrency import list_threads

T = TypeVar("T")
TIMEOUT_SECS = 100.0
"""How long waits last by default: many times what the slowest of them needs on a machine that has other work too."""
_POLL_SECS = 0.01


def until(
    look: Callable[[], T], what: str = "", secs: float = TIMEOUT_SECS, *, every: float = _POLL_SECS
) -> T:
    """Waits until ``look`` returns a true value, and returns that value.

    Args:
        look: Function that is called again and again.
        what: Name of the condition, for the message.
        secs: Seconds after which the test fails.
        every: Seconds between two calls.
    """
    deadline = time.monotonic() + secs
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {secs:g} s{what and ': '}{what}"
        time.sleep(every)
    return found


def until_thread_ends(name: str) -> None:
    """Waits until no thread of a name runs in this process."""
    until(lambda: all(thread.name != name for thread in list_threads()), f"the end of {name}")


def count_waiters(condition: threading.Condition) -> int:
    """Returns the number of threads that wait for a condition."""
    return len(condition._waiters)  # type: ignore[attr-defined]
