"""The reports of a run: log lines, figures, profiles, progress.

``harness.monitoring`` has the names for a training program, and its import defines the flags of
``program``.
"""

from absl import flags

from harness.monitoring import program
from harness.monitoring.program import (
    JsonFormatter,
    StepProfiler,
    TaskFormatter,
    configure_logging,
    watched,
    watched_at,
)

# The --help of a program that adopts this room lists these flags.
flags.adopt_module_key_flags(program)

__all__ = [
    "JsonFormatter",
    "StepProfiler",
    "TaskFormatter",
    "configure_logging",
    "watched",
    "watched_at",
]
