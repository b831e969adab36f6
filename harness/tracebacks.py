"""The traceback of an error: frames of the program, without those of libraries."""

import contextlib
import functools
import os
import pathlib
import sys
import sysconfig
import traceback
from types import TracebackType

VARIABLE = "BELLWETHER_TRACEBACK"
"""``full`` in this environment variable has Python print what it always prints."""

_ROOT = pathlib.Path(__file__).parents[1]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("harness", "runtime"))
"""Beginnings of the paths of this library."""
_LEFT_OUT = f"(frames of libraries are left out: {VARIABLE}=full shows them)"


def shorten_uncaught() -> None:
    """Makes Python print the short traceback of an uncaught error that has come through this library.

    A program with another ``sys.excepthook`` continues to print tracebacks with the program's own
    hook.
    """
    # A debugger or a notebook has set a hook of its own, which knows better how to print.
    show = sys.excepthook
    if show is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        frames = traceback.extract_tb(trace)
        came = isinstance(value, Exception) and any(f.filename.startswith(_OURS) for f in frames)
        if came and os.environ.get(VARIABLE) != "full":
            print(short(value), file=sys.stderr, flush=True)
        else:
            show(kind, value, trace)

    sys.excepthook = hook


def short(error: BaseException) -> str:
    """Returns the traceback of an error, without the frames of libraries.

    The traceback of a cause or context stays where the program had a part in it. The last line says
    that frames are left out. A program that is installed as a library has all frames.
    """
    told = traceback.TracebackException.from_exception(error)
    whole = list(told.stack)
    _leave_out_libraries(told)
    told.stack.extend([] if told.stack else whole)
    return "".join(told.format()) + _LEFT_OUT


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Returns the beginnings of the paths of code that is not the program's."""
    # The look for the path takes milliseconds, which only a failing program needs.
    return (*_OURS, sysconfig.get_path("purelib"), contextlib.__file__, "<frozen")


def _leave_out_libraries(told: traceback.TracebackException) -> None:
    for index in reversed(range(len(told.stack))):
        if told.stack[index].filename.startswith(_libraries()):
            del told.stack[index]
    for each in (told.__cause__, told.__context__):
        if each is not None:
            _leave_out_libraries(each)
    # A cause without a frame of the program is detail of the library; the message of the error says
    # it.
    if told.__cause__ is not None and not told.__cause__.stack:
        told.__cause__, told.__suppress_context__ = None, True
    if told.__context__ is not None and not told.__context__.stack:
        told.__context__ = None
