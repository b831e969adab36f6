"""Preemption: SIGTERM ends a training loop in an orderly way, within a grace period; so does Ctrl-C, without one."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType

from absl import logging

from harness import exit_codes

_AGAIN_SECS = 0.01
_MOST_TIMES_AGAIN = 100
"""A signal takes effect after a second at the latest, also within a lock that somebody else keeps for ever."""

_LOCKING = frozenset(
    (module, function)
    for module, functions in {
        "logging": ("acquire", "handle", "release", "_acquireLock", "_releaseLock"),
        "threading": ("__enter__", "__exit__", "acquire", "release"),
        "importlib._bootstrap": ("__init__", "__enter__", "__exit__", "acquire", "release", "_get_module_lock", "cb"),
    }.items()
    for function in functions
)
"""Functions of Python's library that lock and unlock in Python: an exception in them may leave the lock locked."""

_Event = float | signal.Signals | None
"""When the grace period ends, a signal to send again, or that the block has ended."""


@contextlib.contextmanager
def preemptible(grace_secs: float = 30.0) -> Iterator[None]:
    """A block that SIGTERM leaves by ``SystemExit``, as a cluster manager that takes the machine away wants it.

    The code is that of ``exit_codes.PREEMPTED``. Around ``managed_session`` this saves a last checkpoint on the chief
    and tells nobody that training is over: the task can be started again elsewhere. What is not done after the grace
    period is cut off. Outside the main thread, where Python allows no signal handlers, the block runs as it is.

    Ctrl-C does the same without a limit: its KeyboardInterrupt leaves the block as ``SystemExit`` with the code of
    ``exit_codes.INTERRUPTED``, so no traceback is printed.

    Python discards an exception that a signal's handler raises within a callback of the garbage collector, of a weak
    reference or within ``__del__``. Within the block such a signal, also Ctrl-C, is sent once more.

    Args:
        grace_secs: seconds from the signal to the hard end of the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt_between_locks()
    leave = _Leave(grace_secs)
    discarded, sys.unraisablehook = sys.unraisablehook, leave.discarded
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with exit_codes.interruptible():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = discarded
        leave.end()


def interrupt_between_locks() -> None:
    """Ctrl-C raises KeyboardInterrupt in this process as before, but not while the main thread locks or unlocks.

    Nor within a callback of the garbage collector, JAX's for one: Python discards what is raised there.

    Python runs a handler between any two bytecodes, so the exception may come when ``logging`` has taken the lock of
    its handler and has not yet entered the block that gives it back (before Python 3.13). Every other thread that logs
    then waits for ever, and so does a last save. Such a signal is sent once more, a hundredth of a second later.

    What a program has set as its own handler stays, and so does a Ctrl-C that is ignored.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _Interrupt())


class _Interrupt:
    """The handler of Ctrl-C."""

    def __init__(self) -> None:
        self._locks = _Locks()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._locks.within(frame):
            _thread.start_new_thread(_send_again, (number,))  # one of threading takes locks, which may be those
        else:
            signal.default_int_handler(number, frame)


class _Locks:
    """Tells whether a signal has to wait for a lock or for the garbage collector, and that not too often."""

    def __init__(self) -> None:
        self._times = 0

    def within(self, frame: FrameType | None) -> bool:
        """Whether the main thread, in ``frame``, must not be interrupted, and the signal can still wait."""
        locking = frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _LOCKING
        waits = (locking or _collects(frame)) and self._times < _MOST_TIMES_AGAIN
        self._times = self._times + 1 if waits else 0
        return self._times > 0


def _collects(frame: FrameType | None) -> bool:
    """Whether a callback of the garbage collector runs in a frame."""
    return any(_within(callback.__code__, frame) for callback in gc.callbacks if isinstance(callback, FunctionType))


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECS)  # until the main thread has gone on
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


class _Leave:
    """The handler of SIGTERM in a preemptible block.

    A handler runs between any two bytecodes of the main thread, also within another lock's block. So it takes no lock
    and starts no thread: it puts into a queue of the kind that is made for that, which a thread of its own reads.
    """

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self._exit = SystemExit(exit_codes.code(exit_codes.PREEMPTED))
        self._raised = False
        self._noticed = False
        self._ignored = sys.unraisablehook
        self._locks = _Locks()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._attend, name="preemption", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """The signal has come: the grace period begins."""
        if not self._noticed:
            self._noticed = True
            self._events.put(time.monotonic() + self._grace_secs)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.notice()
        if self._raised:  # with a second signal the way out is being taken
            return
        if _within(_Leave.discarded.__code__, frame) or self._locks.within(frame):
            self._events.put(signal.SIGTERM)
            return
        self._raised = True
        raise self._exit

    def discarded(self, what: sys.UnraisableHookArgs) -> None:
        """Called by Python for an exception that cannot be caught; one that a signal has raised is raised once more."""
        if what.exc_value is self._exit:
            self._raised = False
            self._events.put(signal.SIGTERM)
        elif isinstance(what.exc_value, KeyboardInterrupt):
            self._events.put(signal.SIGINT)
        else:
            self._ignored(what)

    def end(self) -> None:
        """The block has ended in time."""
        self._events.put(None)
        self._thread.join()

    def _attend(self) -> None:
        until: float | None = None
        while True:
            try:
                event = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                _cut_off(self._grace_secs)
            else:
                if event is None:
                    return
                if isinstance(event, signal.Signals):
                    _send_again(event)  # the callback that it came into may go on for a moment
                else:
                    until = event
                    logging.warning("SIGTERM: ending within %g s", self._grace_secs)


def _within(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


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
            logging.warning("%s: it takes effect when the save under way has ended", signal.Signals(number).name)
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
    os._exit(exit_codes.code(exit_codes.PREEMPTED))
