"""Progress: one line that is redrawn on a terminal, lines elsewhere."""

import io
import re

from harness.monitoring.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(stream: io.StringIO) -> str:
    shown = Progress(20, every=10, stream=stream)
    for step in (1, 5, 11, 20):
        shown.update(step, cost=1 / step)
    shown.close()
    return re.sub(r"[\d,]+ steps/s", "N steps/s", stream.getvalue())


def test_terminal_redraws_one_line() -> None:
    """A terminal shows no step so soon after the one before, but the last one, in place."""
    assert _shown(_Terminal()) == "\rstep 20/20 (100%)  cost 0.05  N steps/s\033[K\n"


def test_file_has_spaced_lines() -> None:
    """A file has a line after so many steps, and one for the last step."""
    lines = "step 11/20  cost 0.09091  N steps/s\nstep 20/20  cost 0.05  N steps/s\n"
    assert _shown(io.StringIO()) == lines
