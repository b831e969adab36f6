"""Preemption: SIGTERM ends a training loop in an orderly way, within a grace period."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
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
    leave = _Leave(grace_secs)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        leave.end()


class _Leave:
    """The handler of SIGTERM in a preemptible block."""

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self._watchdog: threading.Timer | None = None
        self._raised = False

    def notice(self) -> None:
        """The signal has come: the grace period begins."""
        if self._watchdog is None:
            logging.warning("SIGTERM: ending within %g s", self._grace_secs)
            self._watchdog = threading.Timer(self._grace_secs, _cut_off, [self._grace_secs])
            self._watchdog.daemon = True
            self._watchdog.start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.notice()
        if not self._raised:  # with a second signal the way out is being taken
            self._raised = True
            raise SystemExit(EXIT_CODE)

    def end(self) -> None:
        """The block has ended in time."""
        if self._watchdog is not None:
            self._watchdog.cancel()


@contextlib.contextmanager
def shielded() -> Iterator[list[int]]:
    """A block, such as a last save, after which SIGTERM and Ctrl-C come out that arrive within it; gives their numbers.

    A second Ctrl-C comes out at once; the grace period of ``preemptible`` begins with the signal, not after the block.
    An error that ends the block is logged when a signal comes out in its place. Handlers that are not Python's are left
    alone, and outside the main thread nothing is done: no signal comes there.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        handler = before[number]
        if number in held and number == signal.SIGINT:
            handler(number, frame)
            return
        if number not in held:
            held.append(number)
            logging.warning("%s: as soon as what is being saved is whole", signal.Signals(number).name)
        notice = getattr(handler, "notice", None)
        if notice is not None:
            notice()

    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before: dict[int, Callable[[int, FrameType | None], object]] = {n: h for n, h in found.items() if callable(h)}
    failure: Exception | None = None
    try:
        for number in before:
            signal.signal(number, hold)
        yield held
    except Exception as error:
        failure = error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held and failure is not None:
        logging.error("%s", failure)
    for number in held:
        before[number](number, None)
    if failure is not None:
        raise failure


def _cut_off(grace_secs: float) -> None:
    logging.error("not done %g s after SIGTERM: ending now, what was not saved is lost", grace_secs)
    logging.flush()
    os._exit(EXIT_CODE)
