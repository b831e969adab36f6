"""Ctrl-C between two steps of what must happen together: it is held back for that long."""

from __future__ import annotations

# What `signal` wraps: that looks each argument up in enums, which costs ten times as much as the call.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class HeldBack:
    """Holds Ctrl-C back as long as the ``with`` lasts; what came meanwhile is acted upon at its end.

    Python runs a signal's handler between any two bytecodes of the main thread, so a KeyboardInterrupt may come right
    after a call has had its effect and before its result is kept. In other threads there is nothing to hold back.
    """

    __slots__ = ("_handler", "_came")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler):
            _signal.signal(_signal.SIGINT, self._note)
            self._handler = handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)
