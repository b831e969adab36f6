"""Progress of a training loop: one line that is redrawn on a terminal, lines elsewhere."""

import sys
from typing import TextIO

from harness.monitoring import times
from runtime import concurrency


class Progress:
    """The display of global step, figures and steps per second.

    Args:
        total: the global step at which training ends.
        every: global steps between two lines (where there is no terminal to redraw a line on).
        stream: where to write; standard output by default.
    """

    def __init__(self, total: int, every: int = 100, stream: TextIO | None = None) -> None:
        self._total = total
        self._every = every
        self._stream = stream or sys.stdout
        self._redraws = self._stream.isatty()
        self._last: tuple[int, float] | None = None

    def update(self, step: int, **shown: float) -> None:
        """Shows the global step ``step``, with the figures ``shown`` beside."""
        now = concurrency.monotonic()
        # A rate needs two steps, and the first one begins the span.
        if self._last is None:
            self._last = (step, now)
        before, at = self._last
        early = now - at < times.REDRAW_SECS if self._redraws else step - before < self._every
        if step == before or (early and step < self._total):
            return
        rate = (step - before) / max(now - at, 1e-9)
        part = f" ({step / self._total:.0%})" if self._redraws else ""
        figures = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        line = f"step {step}/{self._total}{part}  {figures}  {rate:,.0f} steps/s"
        # The line before may have been longer.
        form = "\r{}\033[K" if self._redraws else "{}\n"
        print(form.format(line), end="", file=self._stream, flush=True)
        self._last = (step, now)

    def close(self) -> None:
        """Ends the line on a terminal."""
        if self._redraws and self._last is not None:
            print(file=self._stream)
