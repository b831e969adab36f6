"""Ctrl-C and SIGTERM are held back during a block whose effects must happen together."""

from __future__ import annotations

# What `signal` wraps: that looks each argument up in enums, which costs ten times as much as the call.
import _signal  # type: ignore[import-not-found]
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident
_SIGNALS = (_signal.SIGINT, _signal.SIGTERM)


def _forked() -> None:
    global _main_thread
    _main_thread = _get_ident()


os.register_at_fork(after_in_child=_forked)


def uninterrupted(inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
    """``inner``, and signals are held back as long as it lasts; what came meanwhile is acted upon at its end.

    Python runs a signal's handler between any two bytecodes of the main thread, so what Ctrl-C raises, or SIGTERM where
    the program has a handler that raises (``harness.preemptible``), may come right after a call has had its effect and
    before its result is kept. In other threads there is nothing to hold back.
    """
    return inner if _get_ident() != _main_thread else _HeldBack(inner)


class _HeldBack:
    __slots__ = ("_inner", "_handlers", "_came")

    def __init__(self, inner: AbstractContextManager[None]) -> None:
        self._inner = inner
        self._handlers: list[tuple[int, Callable[[int, FrameType | None], object]]] = []
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    _signal.signal(number, self._note)
            self._inner.__enter__()
        except BaseException:
            self._release()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came[number] = frame

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._inner.__exit__(kind, error, at)
        finally:
            self._release()

    def _release(self) -> None:
        for number, handler in self._handlers:
            _signal.signal(number, handler)
        for number, handler in self._handlers:
            if number in self._came:
                handler(number, self._came[number])
