"""What a run tells of itself while it trains: log lines, figures, profiles, progress.

``harness.monitoring`` gives what a training program uses; importing it defines the flags of ``program``.
"""

from harness.monitoring.program import (
    JsonFormatter,
    StepProfiler,
    TaskFormatter,
    configure_logging,
    metrics_port,
    watched,
)

__all__ = ["JsonFormatter", "StepProfiler", "TaskFormatter", "configure_logging", "metrics_port", "watched"]
