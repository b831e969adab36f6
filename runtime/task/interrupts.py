"""Ctrl-C is held back during a block whose effects must happen together."""

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


def _forked() -> None:
    global _main_thread
    _main_thread = _get_ident()


os.register_at_fork(after_in_child=_forked)


def uninterrupted(inner: AbstractContextManager[None]) -> AbstractContextManager[None]:
    """``inner``, and Ctrl-C is held back as long as it lasts; what came meanwhile is acted upon at its end.

    Python runs a signal's handler between any two bytecodes of the main thread, so a KeyboardInterrupt may come right
    after a call has had its effect and before its result is kept. In other threads there is nothing to hold back.
    """
    return inner if _get_ident() != _main_thread else _HeldBack(inner)


class _HeldBack:
    __slots__ = ("_inner", "_handler", "_came")

    def __init__(self, inner: AbstractContextManager[None]) -> None:
        self._inner = inner
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler):
            _signal.signal(_signal.SIGINT, self._note)
            self._handler = handler
        try:
            self._inner.__enter__()
        except BaseException:
            self._release()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._inner.__exit__(kind, error, at)
        finally:
            self._release()

    def _release(self) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)
