"""Preemption: SIGTERM ends a training loop in an orderly way, within a grace period; so does Ctrl-C, without one."""

from __future__ import annotations

import _thread
import contextlib
import enum
import gc
import math
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType

from absl import logging

from harness import exit_codes

_AGAIN_SECS = 0.01
"""A signal that has to wait is sent again after so long."""
LOCK_SECS = 1.0
"""A signal takes effect after so long at the latest, also within a lock that somebody else keeps for ever."""
IMPORT_SECS = 5.0
"""SIGTERM takes effect after so long at the latest, also while a module is imported."""
SWALLOWED_SHARE = 1 / 3
"""The share of the grace period after which a ``SystemExit`` that the program has caught is raised once more."""

_LOCKING = frozenset(
    (module, function)
    for module, functions in {
        "logging": ("acquire", "handle", "release", "_acquireLock", "_releaseLock"),
        "threading": ("__enter__", "__exit__", "acquire", "release"),
        "importlib._bootstrap": ("__init__", "__enter__", "__exit__", "acquire", "release", "_get_module_lock", "cb"),
        "_weakrefset": ("_remove",),
        "weakref": ("remove",),
    }.items()
    for function in functions
)
"""Functions of Python's library that lock and unlock in Python: an exception in them may leave the lock locked. The
last two are the callbacks of weak collections, in which Python discards an exception."""

_IMPORTING = ("importlib._bootstrap", "_find_and_load")


class _Event(enum.IntEnum):
    """The word of the main thread to the thread that attends: one of these, or a signal to send again."""

    ENDED = -1
    NOTICED = 0
    """SIGTERM has come: the grace period begins."""


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

    An import within the block is completed first, for 5 s at most: extension modules that are left half-way end the
    process by SIGABRT. Libraries in C may discard an exception too, and programs may catch ``SystemExit``. Where nobody
    holds it any more and the block goes on, it is raised once more after a third of the grace period: a program that
    cleans up by itself has that time for it.

    Args:
        grace_secs: seconds from the signal to the hard end of the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with exit_codes.interruptible():
        interrupt_between_locks()
        leave = _Leave(grace_secs)
        discarded, sys.unraisablehook = sys.unraisablehook, leave.discarded
        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            try:
                leave.end()  # before anybody else gets what it sends
            finally:
                signal.signal(signal.SIGTERM, before)
                sys.unraisablehook = discarded


def interrupt_between_locks() -> None:
    """Ctrl-C raises KeyboardInterrupt in this process as before, but not while the main thread locks or unlocks.

    Nor within a callback of the garbage collector, JAX's for one, or of a weak collection: Python discards what is
    raised there.

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
        self._held_up = _HeldUp(_locks_or_collects, LOCK_SECS)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._held_up(frame):
            _thread.start_new_thread(_send_again, (number,))  # one of threading takes locks, which may be those
        else:
            signal.default_int_handler(number, frame)


class _HeldUp:
    """Tells whether a signal has to wait where the main thread is, and that not for too long."""

    def __init__(self, waits: Callable[[FrameType | None], bool], most_secs: float) -> None:
        self._waits = waits
        self._most = round(most_secs / _AGAIN_SECS)
        self._times = 0

    def __call__(self, frame: FrameType | None) -> bool:
        self._times = self._times + 1 if self._waits(frame) and self._times < self._most else 0
        return self._times > 0


def _locks_or_collects(frame: FrameType | None) -> bool:
    """Whether a frame locks or unlocks, or a callback of the garbage collector runs in it."""
    return (frame is not None and _place(frame) in _LOCKING) or _collects(frame)


def _imports(frame: FrameType | None) -> int:
    """How many imports run in a frame, each by the module that the one before runs."""
    count = 0
    while frame is not None:
        count += _place(frame) == _IMPORTING
        frame = frame.f_back
    return count


def _place(frame: FrameType) -> tuple[object, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def _collects(frame: FrameType | None) -> bool:
    return any(_within(callback.__code__, frame) for callback in gc.callbacks if isinstance(callback, FunctionType))


def _send_again(number: int) -> None:
    time.sleep(_AGAIN_SECS)  # until the main thread has gone on
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


class _Leaving(SystemExit):
    """A ``SystemExit`` that can be looked after: Python's own takes no weak references."""


class _Leave:
    """The handler of SIGTERM in a preemptible block.

    A handler runs between any two bytecodes of the main thread, also within another lock's block. So it takes no lock
    and starts no thread: it puts into a queue of the kind that is made for that, which a thread of its own reads.

    The block is being left for as long as somebody holds the exception, as Python does through ``finally``, ``with``
    and ``except``. The handler has no name for it: its own frame, in the traceback, would hold it.
    """

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self._raised = False
        self._leaving: weakref.ref[_Leaving] | None = None
        self._until = math.inf  # the end of the grace period
        self._ignored = sys.unraisablehook
        self._locks = _HeldUp(_locks_or_collects, LOCK_SECS)
        around = _imports(sys._getframe())  # this program may be a module that somebody imports
        self._import = _HeldUp(lambda frame: _imports(frame) > around, IMPORT_SECS)
        self._events: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._attend, name="preemption", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """The signal has come: the grace period begins."""
        if self._until == math.inf:
            self._until = time.monotonic() + self._grace_secs
            self._events.put(_Event.NOTICED)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.notice()
        if self._raised:  # with a second signal the way out is being taken
            return
        if _within(_Leave.discarded.__code__, frame) or self._locks(frame) or self._import(frame):
            self._events.put(signal.SIGTERM)
            return
        self._raised = True
        raise self._leave()

    def _leave(self) -> _Leaving:
        error = _Leaving(exit_codes.code(exit_codes.PREEMPTED))
        self._leaving = weakref.ref(error)
        return error

    def _is_swallowed(self) -> bool:
        return self._raised and self._leaving is not None and self._leaving() is None

    def discarded(self, what: sys.UnraisableHookArgs) -> None:
        """Called by Python for an exception that cannot be caught; one that a signal has raised is raised once more."""
        if isinstance(what.exc_value, _Leaving):
            self._raised = False
            self._events.put(signal.SIGTERM)
        elif isinstance(what.exc_value, KeyboardInterrupt):
            self._events.put(signal.SIGINT)
        else:
            self._ignored(what)

    def end(self) -> None:
        """The block has ended in time."""
        self._events.put(_Event.ENDED)
        self._thread.join()

    def _attend(self) -> None:
        look_at = math.inf  # the next look whether somebody has swallowed the SystemExit
        while True:
            until = min(self._until, look_at)
            try:
                event = self._events.get(timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
            except queue.Empty:
                if until == self._until:
                    _cut_off(self._grace_secs)
                look_at = time.monotonic() + self._grace_secs * SWALLOWED_SHARE
                if self._is_swallowed():
                    logging.warning("SIGTERM once more: its SystemExit was caught or discarded, and the block goes on")
                    self._raised = False
                    _send_again(signal.SIGTERM)
                continue
            if event == _Event.ENDED:
                return
            if event == _Event.NOTICED:
                look_at = time.monotonic() + self._grace_secs * SWALLOWED_SHARE
                logging.warning("SIGTERM: ending within %g s", self._grace_secs)
            else:  # a signal: the code that it came into may go on for a moment
                _send_again(event)


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
        if isinstance(handler, _Leave):
            handler.notice()

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
