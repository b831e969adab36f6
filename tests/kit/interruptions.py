"""A signal at each of the places of a call where Python looks whether one has come."""

from __future__ import annotations

import dis
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

LOOKS = ("CALL", "JUMP_BACKWARD", "BEFORE_WITH", "LOAD_SPECIAL")
"""How the names of those instructions begin after which Python looks for signals.

It does so at the beginning of a
function that is written in Python, and not after its return."""


class Interruption:
    """A signal that comes at one place of a call: its handler is called there, as Python does it.

    Args:
        number: of the signal.
        at: the number of the place; -1 for none.
        within: files and folders whose functions have places.

    Attributes:
        places: how many have been come by.
        came: where the signal came.
    """

    def __init__(self, number: int, at: int, within: Sequence[str]) -> None:
        self._number = number
        self._at = at
        self._within = tuple(within)
        self._codes: dict[CodeType, dict[int, str]] = {}
        self._looks: set[FrameType] = set()
        """Those whose last instruction was one after which Python looks."""
        self.places = 0
        self.came = ""

    def __call__(self, call: Callable[[], object]) -> None:
        """Makes the call. Raises the error of the handler."""
        sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it before tracing begins
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(None)
            self._looks.clear()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call" and frame.f_back is not None:
            self._looks.discard(frame.f_back)
        if not frame.f_code.co_filename.startswith(self._within):
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._looks.add(frame)
        elif event == "opcode":
            if frame in self._looks:
                self.places += 1
                if self.places == self._at + 1:
                    self.came = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
                    handler = signal.getsignal(self._number)
                    assert callable(handler)
                    handler(self._number, frame)
            if self._name(frame).startswith(LOOKS):
                self._looks.add(frame)
            else:
                self._looks.discard(frame)
        elif event == "return":
            self._looks.discard(frame)
        return self._trace

    def _name(self, frame: FrameType) -> str:
        """Returns the name of the instruction that a frame runs now."""
        names = self._codes.get(frame.f_code)
        if names is None:
            names = self._codes[frame.f_code] = {
                i.offset: i.opname for i in dis.get_instructions(frame.f_code)
            }
        return names[frame.f_lasti]


def interruptions(number: int, call: Callable[[], object], *within: str) -> Iterator[Interruption]:
    """One for each place of a call, which is made once before, without a signal.

    Args:
        number: of the signal.
        call: the call.
        within: files and folders whose functions have places.
    """
    counting = Interruption(number, -1, within)
    counting(call)
    # A test collects after each signal, and need not walk through what earlier tests have made.
    gc.collect()
    gc.freeze()
    assert counting.places > 10
    return (Interruption(number, at, within) for at in range(counting.places))
