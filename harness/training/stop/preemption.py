"""Preemption: SIGTERM ends a training block within a grace period, and Ctrl-C ends it without one.

``join_cluster`` and ``preemptible`` install the handlers, and a lifecycle shields its last save
from them. The wish is an exception that leaves the block, wherever the main thread is. Two simpler
ways do not do that:

* An exception at the border of a step only. A step may wait for minutes for a task that the same
  preemption has taken, and code that reads data or evaluates runs no step. Both would keep the
  chief from its last save.
* An exception between any two bytecodes, as Python's own handlers raise it. Locks stay locked,
  half-made imports end the process by SIGABRT, and callbacks of the garbage collector and of weak
  references discard the exception.

So the handler raises at once, except in these places: there the signal is sent again, after a
hundredth of a second. A program that drops the exception receives it again at the next third of the
grace period. At the end of that period the process is ended by force. The handler still fails where
code in C never returns to the interpreter: then only the end of the grace period helps.
"""

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
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType

from absl import logging

from harness import exit_codes
from harness.training import times
from runtime import concurrency

SWALLOWED_SHARE = 1 / 3
"""The share of the grace period after which a ``SystemExit`` that the program has caught is raised once more."""

_LOCKING = frozenset(
    (module, function)
    for module, functions in {
        "logging": ("acquire", "handle", "release", "_acquireLock", "_releaseLock"),
        "threading": ("__enter__", "__exit__", "acquire", "release"),
        "importlib._bootstrap": (
            "__init__",
            "__enter__",
            "__exit__",
            "acquire",
            "release",
            "_get_module_lock",
            "cb",
        ),
        "_weakrefset": ("_remove",),
        "weakref": ("remove",),
    }.items()
    for function in functions
)
"""Functions of Python's library in which an exception may leave a lock locked.

The last two are the callbacks of weak collections, in which Python discards an exception.
"""

_IMPORTING = ("importlib._bootstrap", "_find_and_load")


class _Event(enum.IntEnum):
    """A word of the main thread to the thread that attends; any other number is a signal to send again."""

    ENDED = -1
    NOTICED = 0
    """SIGTERM has come: the grace period begins."""


@contextlib.contextmanager
def preemptible(grace_secs: float = 30.0) -> Iterator[None]:
    """Runs a block that SIGTERM leaves by ``SystemExit``, with the code of ``exit_codes.PREEMPTED``.

    Around ``managed_session`` the chief saves a last checkpoint, and no task is told that training
    is over. So the task can be started again elsewhere. The process is ended with the grace period.
    Outside the main thread Python allows no signal handlers, and the block runs as it is.

    Ctrl-C does the same without a limit. Its KeyboardInterrupt leaves the block as ``SystemExit``
    with the code of ``exit_codes.INTERRUPTED``, so Python prints no traceback.

    An import within the block is completed first, for 5 s at most. A program may catch
    ``SystemExit`` to clean up. Where the block goes on and nobody holds the exception any more, it
    is raised once more at the next third of the grace period, counted from the signal.

    Args:
        grace_secs: Seconds from the signal to the hard end of the process.

    Examples:
        >>> import harness
        >>> with harness.preemptible(grace_secs=30):
        ...     pass  # train here
    """
    if concurrency.current_thread() is not concurrency.main_thread():
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
                # Before the old handler is back: a signal that is sent again belongs to this block.
                leave.end()
            finally:
                signal.signal(signal.SIGTERM, before)
                sys.unraisablehook = discarded


def interrupt_between_locks() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt, but not while the main thread locks or unlocks.

    Nor within a callback of the garbage collector, as JAX has one, or of a weak collection: Python
    discards an exception there.

    Python runs a handler between any two bytecodes. So the exception may come when ``logging`` has
    taken the lock of its handler and has not yet entered the block that releases the lock (before
    Python 3.13). Every other thread that logs then waits for ever, and so does a last save. Such a
    signal is sent again, a hundredth of a second later.

    A handler of the program's own stays, and so does a Ctrl-C that is ignored.
    """
    if (
        concurrency.current_thread() is concurrency.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _Interrupt())


class _Interrupt:
    """The handler of Ctrl-C."""

    def __init__(self) -> None:
        self._held_up = _HeldUp(_locks_or_collects, times.LOCK_SECS)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Sent again by another thread: the main thread has to go on, or it never leaves the lock.
        if self._held_up(frame):
            # A thread of ``threading`` takes locks while it starts, and the main thread may hold
            # just those.
            _thread.start_new_thread(_send_again, (number,))
        else:
            signal.default_int_handler(number, frame)


class _HeldUp:
    """The decision if a signal has to wait where the main thread is, for a limited time."""

    def __init__(self, waits: Callable[[FrameType | None], bool], most_secs: float) -> None:
        self._waits = waits
        self._most = round(most_secs / times.SIGNAL_AGAIN_SECS)
        self._times = 0

    def __call__(self, frame: FrameType | None) -> bool:
        # A place that the main thread never leaves must not keep a signal for ever.
        self._times = self._times + 1 if self._waits(frame) and self._times < self._most else 0
        return self._times > 0


def _locks_or_collects(frame: FrameType | None) -> bool:
    """Returns True if a frame locks or unlocks, or runs in a callback of the garbage collector."""
    return (frame is not None and _place(frame) in _LOCKING) or _collects(frame)


def _imports(frame: FrameType | None) -> int:
    """Returns the number of imports under way in a frame, each in the module of the one before."""
    count = 0
    while frame is not None:
        count += _place(frame) == _IMPORTING
        frame = frame.f_back
    return count


def _place(frame: FrameType) -> tuple[object, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def _collects(frame: FrameType | None) -> bool:
    return any(
        _within(callback.__code__, frame)
        for callback in gc.callbacks
        if isinstance(callback, FunctionType)
    )


def _send_again(number: int) -> None:
    # No event tells that the main thread has left the lock.
    concurrency.sleep(times.SIGNAL_AGAIN_SECS)
    main = concurrency.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


class _Leaving(SystemExit):
    """A ``SystemExit`` with weak references, which Python's own lacks."""


class _Leave:
    """The handler of SIGTERM in a preemptible block.

    A handler runs between any two bytecodes of the main thread, also within the block of a lock. So
    it takes no lock and starts no thread. It puts an event into a ``SimpleQueue``, which is made
    for handlers, and a thread reads the queue.

    The program is leaving the block for as long as a frame holds the exception, as Python's do in
    ``finally``, ``with`` and ``except``. The handler has no name for the exception: its own frame,
    in the traceback, would hold it.
    """

    def __init__(self, grace_secs: float) -> None:
        self._grace_secs = grace_secs
        self._raised = False
        self._leaving: weakref.ref[_Leaving] | None = None
        self._until = math.inf  # the end of the grace period
        self._ignored = sys.unraisablehook
        self._locks = _HeldUp(_locks_or_collects, times.LOCK_SECS)
        # The program itself may be a module that another one imports: only imports within the block
        # count.
        around = _imports(sys._getframe())
        self._import = _HeldUp(lambda frame: _imports(frame) > around, times.IMPORT_SECS)
        self._events: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads = concurrency.ThreadGroup("the grace period of a preemptible program")
        self._threads.start(self._attend, name="preemption")

    def notice(self) -> None:
        """Begins the grace period, at the first signal."""
        if self._until == math.inf:
            self._until = concurrency.monotonic() + self._grace_secs
            self._events.put(_Event.NOTICED)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.notice()
        # A second signal must not interrupt the way out, and with it the last save.
        if self._raised:
            return
        # An exception here would be discarded, leave a lock locked, or leave a module half
        # imported.
        if _within(_Leave.discarded.__code__, frame) or self._locks(frame) or self._import(frame):
            self._events.put(signal.SIGTERM)
            return
        self._raised = True
        raise self._leave()

    def _leave(self) -> _Leaving:
        error = _Leaving(exit_codes.code(exit_codes.PREEMPTED))
        # Not in ``__call__``: a name in the handler's frame, which the traceback keeps, would hold
        # the exception.
        self._leaving = weakref.ref(error)
        return error

    def discarded(self, what: sys.UnraisableHookArgs) -> None:
        """Sends a signal again whose exception Python could not raise; called as ``sys.unraisablehook``."""
        if isinstance(what.exc_value, _Leaving):
            self._raised = False
            self._events.put(signal.SIGTERM)
        elif isinstance(what.exc_value, KeyboardInterrupt):
            self._events.put(signal.SIGINT)
        else:
            self._ignored(what)

    def end(self) -> None:
        """Ends the thread that attends: the block has ended in time."""
        self._events.put(_Event.ENDED)
        self._threads.close()

    def _attend(self) -> None:
        # The next look if the program has swallowed the SystemExit; there is none before the
        # signal.
        look_at = math.inf
        while True:
            until = min(self._until, look_at)
            try:
                event = self._events.get(
                    timeout=None if until == math.inf else max(0.0, until - concurrency.monotonic())
                )
            except queue.Empty:
                if until == self._until:
                    _cut_off(self._grace_secs)
                look_at = concurrency.monotonic() + self._grace_secs * SWALLOWED_SHARE
                # The program has caught or dropped the exception: no frame holds it any more.
                if self._raised and self._leaving is not None and self._leaving() is None:
                    logging.warning(
                        "SIGTERM once more: its SystemExit was caught or discarded, and the block "
                        "goes on"
                    )
                    self._raised = False
                    _send_again(signal.SIGTERM)
                continue
            if event == _Event.ENDED:
                return
            if event == _Event.NOTICED:
                look_at = concurrency.monotonic() + self._grace_secs * SWALLOWED_SHARE
                logging.warning("SIGTERM: ending within %g s", self._grace_secs)
            else:
                # The code that the signal came into gets a moment to leave its lock or import.
                _send_again(event)


def _within(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def shielded() -> Iterator[list[int]]:
    """Runs a block, such as a last save, that SIGTERM and Ctrl-C do not interrupt.

    The signals take effect after the block, and the list of their numbers is the value of the
    block. A second Ctrl-C takes effect at once. The grace period of ``preemptible`` begins with the
    signal, not after the block. An error that ends the block is logged when a signal takes effect
    in its place. Handlers that are not Python's stay. Outside the main thread nothing is done: no
    signal comes there.
    """
    held: list[int] = []
    if concurrency.current_thread() is not concurrency.main_thread():
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        handler = before[number]
        if number in held and number == signal.SIGINT:
            handler(number, frame)
            return
        if number not in held:
            held.append(number)
            logging.warning(
                "%s: it takes effect when the save under way has ended", signal.Signals(number).name
            )
        if isinstance(handler, _Leave):
            handler.notice()

    # A handler that is not Python's is None here, and SIG_IGN is no function: both stay.
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before: dict[int, Callable[[int, FrameType | None], object]] = {
        n: h for n, h in found.items() if callable(h)
    }
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
    assert before.keys() >= set(held), "a held signal has a handler"
    # After the handlers are back: one of these may raise, and the rest must find the handlers as
    # they were.
    for number in held:
        before[number](number, None)
    if failure is not None:
        raise failure


def _cut_off(grace_secs: float) -> None:
    logging.error("not done %g s after SIGTERM: ending now, what was not saved is lost", grace_secs)
    logging.flush()
    os._exit(exit_codes.code(exit_codes.PREEMPTED))
