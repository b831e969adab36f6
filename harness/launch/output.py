"""The output of tasks as prefixed lines, in one stream for a human or for `grep`."""

import collections
import io
import os
import re
import select
from collections.abc import Sequence
from typing import BinaryIO, TextIO

MAX_LINE_BYTES = 1 << 16
"""A longer line is shown in pieces, so that a task that never ends its line costs no memory."""
TAIL_LINES = 20
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
# Everything below space and DEL, save tab and the escape that starts a colour: a terminal must
# survive binary output.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")


class LineBuffer:
    r"""The bytes of one task, cut into clean lines.

    Of a line that was redrawn with carriage returns (a progress bar) only the last state counts;
    bytes that are not UTF-8 and control characters are shown as escapes (`\xff`).
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[str]:
        """Adds `data`. Returns the lines that are complete now, without their ends."""
        self._pending += data
        *whole, rest = self._pending.split(b"\n")
        lines = [piece for line in whole for piece in _cut_pieces(line)]
        # A line without an end is shown in pieces before the line fills the memory.
        *early, last = _cut_pieces(rest) if len(rest) > MAX_LINE_BYTES else [rest]
        assert len(last) <= MAX_LINE_BYTES, "the rest of a line grows without end"
        self._pending = bytearray(last)
        return self._remember_lines([_clean_line(line) for line in lines + early])

    def flush(self) -> list[str]:
        """Returns the rest, a line without an end, if there is one."""
        rest, self._pending = self._pending, bytearray()
        return self._remember_lines([_clean_line(rest)] if rest else [])

    def _remember_lines(self, lines: list[str]) -> list[str]:
        self.tail.extend(lines)
        return lines


def _cut_pieces(line: bytearray) -> list[bytearray]:
    # An empty line is one piece, too.
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, max(len(line), 1), MAX_LINE_BYTES)]


def _clean_line(line: bytearray) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class LinePrinter:
    """The writer of lines `name | line`, with aligned and perhaps coloured names.

    No training depends on these lines. Lines that a full disk does not take are lost.

    Attributes:
        failure: The reason why the last lines could not be written; empty when they were.
        last: The name of the task whose lines were written last; empty before the first.
    """

    def __init__(self, stream: BinaryIO | io.RawIOBase, names: Sequence[str], colour: bool) -> None:
        """Prepares prefixes for all `names` that will come. Their order gives the colours."""
        # A buffered stream would write again what has failed.
        self._stream = getattr(stream, "raw", stream)
        self._prefixes = {name: _make_prefix(name, names, colour) for name in names}
        self.failure = self.last = ""

    def shares_output_with(self, other: "LinePrinter") -> bool:
        """Returns True if both printers write to one terminal, or into one file."""
        return os.path.samestat(os.fstat(self._stream.fileno()), os.fstat(other._stream.fileno()))

    def write(self, name: str, lines: Sequence[str]) -> None:
        """Writes `lines` of the task `name`.

        Raises:
            BrokenPipeError: The reader of the stream has gone.
        """
        if not lines:
            return
        # A failure may have cut a line, which is ended first.
        text = "\n" * bool(self.failure) + "".join(
            f"{self._prefixes[name]}{line}\n" for line in lines
        )
        left = memoryview(text.encode())
        try:
            while left:
                written = self._stream.write(left)
                # Another process has made the stream non-blocking, and the stream is full.
                if written is None:
                    select.select([], [self._stream], [])
                    continue
                left = left[written:]
        except BrokenPipeError:
            raise
        except OSError as error:
            self.failure = str(error)
        else:
            self.failure, self.last = "", name


def _make_prefix(name: str, names: Sequence[str], colour: bool) -> str:
    text = f"{name:<{max(map(len, names))}} |"
    return (
        f"\x1b[{_COLOURS[list(names).index(name) % len(_COLOURS)]}m{text}\x1b[0m "
        if colour
        else f"{text} "
    )


def wants_colour(stream: TextIO) -> bool:
    """Returns True if a stream is a terminal, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")
