"""Signals held back: Ctrl-C and SIGTERM wait for the end of a call with effects that belong together."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import os
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

# What `signal` wraps: that looks each argument up in enums, which costs ten times as much as the
# call.
from runtime import concurrency

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Handler = Callable[[int, FrameType | None], object]

_main_thread = concurrency.main_thread().ident
_get_ident = concurrency.thread_id
_SIGNALS = (_signal.SIGINT, _signal.SIGTERM)
_held_back: _HeldBack | None = None
"""The signals of the call in which the main thread is."""


def _adopt_fork() -> None:
    """Makes the forking thread the main thread; calls of other threads do not end in the child."""
    global _main_thread, _held_back
    if _held_back is not None and _get_ident() != _main_thread:
        # The handlers of the parent stand in the child as they were at the fork.
        _held_back.restore_handlers()
        _held_back = None
    _main_thread = _get_ident()


os.register_at_fork(after_in_child=_adopt_fork)


def uninterrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Holds signals back during calls of a function, and runs the handlers at the end of the call.

    Python runs a signal's handler between any two bytecodes of the main thread. A handler that
    raises (``KeyboardInterrupt``, ``harness.preemptible``) may raise right after a lock was taken,
    or between an effect and the note of the effect. Other threads run no handlers. A held signal
    ends no wait, so each wait within a call needs a limit. The limit at the write gate is
    ``Limits.pause_secs``.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # The outermost call holds signals back for all calls within. Other threads run no handlers.
        if _held_back is not None or _get_ident() != _main_thread:
            return function(*args, **kwargs)
        with _HeldBack():
            return function(*args, **kwargs)

    return call


class _HeldBack:
    __slots__ = ("_handlers", "_came", "_over")

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._came: dict[int, FrameType | None] = {}
        self._over = False

    def __enter__(self) -> None:
        global _held_back
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                # A signal that is ignored, or ends the process, has no handler to hold back.
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note_signal)
        except BaseException:
            # The handler of a signal that was not held back yet has raised.
            self._give_back()
            raise
        _held_back = self

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            # Two other signals have kept `_give_back` from setting the handler of this signal.
            _signal.signal(number, self._handlers[number])
            self._handlers[number](number, frame)
        else:
            self._came[number] = frame

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        global _held_back
        _held_back = None
        self._give_back()

    def restore_handlers(self) -> None:
        """Sets the program's own handlers again."""
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)

    def _give_back(self) -> None:
        self._over = True
        try:
            self.restore_handlers()
        except BaseException:
            # The handler of the first signal, which was set a moment ago, has raised.
            self.restore_handlers()
            raise
        finally:
            self._call_handlers()

    def _call_handlers(self) -> None:
        """Calls the handler of each signal that came, also after a handler has raised."""
        if self._came:
            # The recursion calls the next handler also if this handler raises.
            number, frame = self._came.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self._call_handlers()
