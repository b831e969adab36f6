"""Preemption: SIGTERM ends a training loop in an orderly way, within a grace period."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from absl import logging

EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def preemptible(grace_secs: float = 30.0) -> Iterator[None]:
    """A block that SIGTERM leaves by ``SystemExit``, as a cluster manager that takes the machine away wants it.

    Around ``managed_session`` this saves a last checkpoint on the chief and tells nobody that training is over: the
    task can be started again elsewhere. What is not done after the grace period is cut off. Outside the main thread,
    where Python allows no signal handlers, the block runs as it is.

    Args:
        grace_secs: seconds from the signal to the hard end of the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watchdogs: list[threading.Timer] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if watchdogs:  # a second signal: the way out is being taken
            return
        logging.warning("SIGTERM: ending within %g s", grace_secs)
        watchdog = threading.Timer(grace_secs, _cut_off, [grace_secs])
        watchdog.daemon = True
        watchdog.start()
        watchdogs.append(watchdog)
        raise SystemExit(EXIT_CODE)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for watchdog in watchdogs:
            watchdog.cancel()


def _cut_off(grace_secs: float) -> None:
    logging.error("not done %g s after SIGTERM: ending now, what was not saved is lost", grace_secs)
    logging.flush()
    os._exit(EXIT_CODE)
