"""Figures of this process that no hot path owns: checkpoints, recoveries, the last error. Servers report them.

Names end in ``_total`` when they only grow; a reader takes differences of those.
"""

from __future__ import annotations

import logging as std_logging
import threading
import time

from absl import logging

from runtime.errors import one_line


class Metrics:
    """Named numbers. Thread safe; for events that happen now and then, not for steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._error = ("", 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Adds to a number that only grows; its name ends in ``_total``."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + amount

    def set(self, name: str, value: float) -> None:
        """Sets a number that goes up and down."""
        with self._lock:
            self._values[name] = float(value)

    def read(self) -> dict[str, float]:
        """A copy of all numbers."""
        with self._lock:
            return dict(self._values)

    def note_error(self, text: str) -> None:
        """Remembers the last error."""
        with self._lock:
            self._error = (text, time.time())

    @property
    def last_error(self) -> tuple[str, float]:
        """The last error and when it was (seconds since the epoch); an empty text and 0 when there was none."""
        return self._error


class _ErrorNoter(std_logging.Handler):
    def __init__(self, metrics: Metrics) -> None:
        super().__init__(std_logging.ERROR)
        self._metrics = metrics

    def emit(self, record: std_logging.LogRecord) -> None:
        self._metrics.note_error(one_line(record.getMessage()))


metrics = Metrics()
"""Of this process: ``runtime.metrics.add("checkpoint_seconds_total", 1.5)``."""

logging.get_absl_logger().addHandler(_ErrorNoter(metrics))
