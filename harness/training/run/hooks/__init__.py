"""Hooks: code around the life of a monitored session, and around every step."""

from harness.training.run.hooks.base import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from harness.training.run.hooks.checkpoint import CheckpointSaverHook, CheckpointSaverListener
from harness.training.run.hooks.control import (
    EarlyStoppingHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    StopAtStepHook,
)
from harness.training.run.hooks.observe import (
    LoggingTensorHook,
    StepCounterHook,
    SummarySaverHook,
)
from harness.training.run.hooks.timer import SecondOrStepTimer

__all__ = [
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "EarlyStoppingHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
]
