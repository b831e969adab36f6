"""Progress of a training loop: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import NoReturn, TextIO

from tqdm import tqdm

from runtime import concurrency


class Progress:
    """The display of global step, figures and steps per second.

    Args:
        total: the global step at which training ends.
        every: global steps between two lines (where there is no terminal to draw a bar on).
        stream: where to write; standard output by default.
    """

    def __init__(self, total: int, every: int = 100, stream: TextIO | None = None) -> None:
        self._total = total
        self._every = every
        self._stream = stream or sys.stdout
        self._bar: tqdm[NoReturn] | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total, unit="step", file=self._stream, dynamic_ncols=True, mininterval=0.2
            )
        self._last: tuple[int, float] | None = None

    def update(self, step: int, **shown: float) -> None:
        """Shows the global step ``step``, with the figures ``shown`` beside."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()}, refresh=False)
            return
        now = concurrency.monotonic()
        # A rate needs two steps, and the first one begins the span.
        if self._last is None:
            self._last = (step, now)
        before, at = self._last
        if step == before or (step - before < self._every and step < self._total):
            return
        rate = (step - before) / max(now - at, 1e-9)
        figures = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        print(
            f"step {step}/{self._total}  {figures}  {rate:,.0f} steps/s",
            file=self._stream,
            flush=True,
        )
        self._last = (step, now)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
