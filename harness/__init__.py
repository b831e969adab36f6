"""The training harness: Supervisor and friends, over the names of ``import runtime``.

Names are imported on first use, so that the launcher starts without JAX and Orbax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import monitoring, summary, timeline
    from harness.accumulate import accumulated
    from harness.checkpoints.initialize import init_from_checkpoint
    from harness.checkpoints.layout import (
        CheckpointState,
        checkpoint_exists,
        checkpoints_iterator,
        get_checkpoint_state,
        latest_checkpoint,
    )
    from harness.checkpoints.partitions import partitioned
    from harness.checkpoints.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
    from harness.checkpoints.states import checkpointable, forget_checkpointable, restore_states
    from harness.collective import CollectiveReplicas, join_group
    from harness.compilations import keep_compilations
    from harness.coordinator import Coordinator
    from harness.global_step import create_global_step, get_global_step, get_or_create_global_step
    from harness.hooks import (
        CheckpointSaverHook,
        CheckpointSaverListener,
        FeedFnHook,
        FinalOpsHook,
        GlobalStepWaiterHook,
        LoggingTensorHook,
        NanLossDuringTrainingError,
        NanTensorHook,
        ProfilerHook,
        SecondOrStepTimer,
        SessionRunArgs,
        SessionRunContext,
        SessionRunHook,
        SessionRunValues,
        StepCounterHook,
        StopAtStepHook,
        SummarySaverHook,
    )
    from harness.looper import LooperThread
    from harness.managed_session import ManagedSession
    from harness.monitored_session import (
        MonitoredSession,
        SingularMonitoredSession,
    )
    from harness.monitored_training_session import (
        MonitoredTrainingSession,
    )
    from harness.narrow import on_wire
    from harness.optimizer import Optimizer
    from harness.preemption import preemptible
    from harness.progress import Progress
    from harness.queue_runner import (
        QueueRunner,
        add_queue_runner,
        start_queue_runners,
    )
    from harness.saver import SaveHandle, Saver
    from harness.scaffold import (
        Scaffold,
    )
    from harness.series import StandardSeries
    from harness.session_creator import (
        ChiefSessionCreator,
        SessionCreator,
        WorkerSessionCreator,
    )
    from harness.session_manager import SessionManager
    from harness.stale_synchronous import StaleSynchronous
    from harness.supervisor import Supervisor
    from harness.sync_replicas import SyncReplicas
    from harness.writer import FileWriter, FileWriterCache

_HOMES = {
    "CheckpointReader": "harness.checkpoints.reader",
    "CheckpointSaverHook": "harness.hooks",
    "CheckpointSaverListener": "harness.hooks",
    "CheckpointState": "harness.checkpoints.layout",
    "ChiefSessionCreator": "harness.session_creator",
    "CollectiveReplicas": "harness.collective",
    "Coordinator": "harness.coordinator",
    "FeedFnHook": "harness.hooks",
    "FileWriter": "harness.writer",
    "FileWriterCache": "harness.writer",
    "FinalOpsHook": "harness.hooks",
    "GlobalStepWaiterHook": "harness.hooks",
    "LoggingTensorHook": "harness.hooks",
    "LooperThread": "harness.looper",
    "ManagedSession": "harness.managed_session",
    "MonitoredSession": "harness.monitored_session",
    "MonitoredTrainingSession": "harness.monitored_training_session",
    "NanLossDuringTrainingError": "harness.hooks",
    "NanTensorHook": "harness.hooks",
    "Optimizer": "harness.optimizer",
    "ProfilerHook": "harness.hooks",
    "Progress": "harness.progress",
    "QueueRunner": "harness.queue_runner",
    "SaveHandle": "harness.saver",
    "Saver": "harness.saver",
    "Scaffold": "harness.scaffold",
    "SecondOrStepTimer": "harness.hooks",
    "SessionCreator": "harness.session_creator",
    "SessionManager": "harness.session_manager",
    "SessionRunArgs": "harness.hooks",
    "SessionRunContext": "harness.hooks",
    "SessionRunHook": "harness.hooks",
    "SessionRunValues": "harness.hooks",
    "SingularMonitoredSession": "harness.monitored_session",
    "StaleSynchronous": "harness.stale_synchronous",
    "StandardSeries": "harness.series",
    "StepCounterHook": "harness.hooks",
    "StopAtStepHook": "harness.hooks",
    "SummarySaverHook": "harness.hooks",
    "Supervisor": "harness.supervisor",
    "SyncReplicas": "harness.sync_replicas",
    "WorkerSessionCreator": "harness.session_creator",
    "accumulated": "harness.accumulate",
    "add_queue_runner": "harness.queue_runner",
    "checkpoint_exists": "harness.checkpoints.layout",
    "checkpointable": "harness.checkpoints.states",
    "checkpoints_iterator": "harness.checkpoints.layout",
    "create_global_step": "harness.global_step",
    "forget_checkpointable": "harness.checkpoints.states",
    "get_checkpoint_state": "harness.checkpoints.layout",
    "get_global_step": "harness.global_step",
    "get_or_create_global_step": "harness.global_step",
    "init_from_checkpoint": "harness.checkpoints.initialize",
    "join_group": "harness.collective",
    "keep_compilations": "harness.compilations",
    "latest_checkpoint": "harness.checkpoints.layout",
    "list_variables": "harness.checkpoints.reader",
    "load_checkpoint": "harness.checkpoints.reader",
    "load_variable": "harness.checkpoints.reader",
    "monitoring": "harness.monitoring",
    "on_wire": "harness.narrow",
    "partitioned": "harness.checkpoints.partitions",
    "preemptible": "harness.preemption",
    "restore_states": "harness.checkpoints.states",
    "start_queue_runners": "harness.queue_runner",
    "summary": "harness.summary",
    "timeline": "harness.timeline",
}
"""Public name -> the module that defines it, or that it is."""

__all__ = [
    "CheckpointReader",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "CheckpointState",
    "ChiefSessionCreator",
    "CollectiveReplicas",
    "Coordinator",
    "FeedFnHook",
    "FileWriter",
    "FileWriterCache",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "LooperThread",
    "ManagedSession",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "Optimizer",
    "ProfilerHook",
    "Progress",
    "QueueRunner",
    "SaveHandle",
    "Saver",
    "Scaffold",
    "SecondOrStepTimer",
    "SessionCreator",
    "SessionManager",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "SingularMonitoredSession",
    "StaleSynchronous",
    "StandardSeries",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "Supervisor",
    "SyncReplicas",
    "WorkerSessionCreator",
    "accumulated",
    "add_queue_runner",
    "checkpoint_exists",
    "checkpointable",
    "checkpoints_iterator",
    "create_global_step",
    "forget_checkpointable",
    "get_checkpoint_state",
    "get_global_step",
    "get_or_create_global_step",
    "init_from_checkpoint",
    "join_group",
    "keep_compilations",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
    "monitoring",
    "on_wire",
    "partitioned",
    "preemptible",
    "restore_states",
    "start_queue_runners",
    "summary",
    "timeline",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"harness.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
