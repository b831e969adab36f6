"""The training harness: Supervisor and friends, over the names of ``import runtime``.

Names are imported on first use, so that the launcher starts without JAX and Orbax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import monitoring
    from harness.checkpoints.initialize import init_from_checkpoint
    from harness.checkpoints.layout import (
        CheckpointState,
        checkpoint_exists,
        checkpoints_iterator,
        get_checkpoint_state,
        latest_checkpoint,
    )
    from harness.checkpoints.names import partitioned
    from harness.checkpoints.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
    from harness.checkpoints.saver import SaveHandle, Saver
    from harness.checkpoints.states import checkpointable, forget_checkpointable, restore_states
    from harness.coordinator import Coordinator, LooperThread
    from harness.monitoring import timeline
    from harness.monitoring.cluster_scalars import StandardSeries
    from harness.monitoring.progress import Progress
    from harness.optimizers.collective import CollectiveReplicas, join_group
    from harness.optimizers.gradient_accumulation import accumulated
    from harness.optimizers.optimizer import Optimizer
    from harness.optimizers.stale_synchronous import StaleSynchronous
    from harness.optimizers.sync_replicas import SyncReplicas
    from harness.optimizers.wire_precision import on_wire
    from harness.tensorboard import summary
    from harness.tensorboard.writer import FileWriter, FileWriterCache
    from harness.training.compilation_cache import keep_compilations
    from harness.training.global_step import create_global_step, get_global_step, get_or_create_global_step
    from harness.training.hooks import (
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
    from harness.training.managed_session import ManagedSession
    from harness.training.monitored_session import (
        MonitoredSession,
        MonitoredTrainingSession,
        SingularMonitoredSession,
    )
    from harness.training.preemption import preemptible
    from harness.training.queue_runner import (
        QueueRunner,
        add_queue_runner,
        start_queue_runners,
    )
    from harness.training.scaffold import (
        ChiefSessionCreator,
        Scaffold,
        SessionCreator,
        WorkerSessionCreator,
    )
    from harness.training.session_manager import SessionManager
    from harness.training.supervisor import Supervisor

_HOMES = {
    "CheckpointReader": "harness.checkpoints.reader",
    "CheckpointSaverHook": "harness.training.hooks",
    "CheckpointSaverListener": "harness.training.hooks",
    "CheckpointState": "harness.checkpoints.layout",
    "ChiefSessionCreator": "harness.training.scaffold",
    "CollectiveReplicas": "harness.optimizers.collective",
    "Coordinator": "harness.coordinator",
    "FeedFnHook": "harness.training.hooks",
    "FileWriter": "harness.tensorboard.writer",
    "FileWriterCache": "harness.tensorboard.writer",
    "FinalOpsHook": "harness.training.hooks",
    "GlobalStepWaiterHook": "harness.training.hooks",
    "LoggingTensorHook": "harness.training.hooks",
    "LooperThread": "harness.coordinator",
    "ManagedSession": "harness.training.managed_session",
    "MonitoredSession": "harness.training.monitored_session",
    "MonitoredTrainingSession": "harness.training.monitored_session",
    "NanLossDuringTrainingError": "harness.training.hooks",
    "NanTensorHook": "harness.training.hooks",
    "Optimizer": "harness.optimizers.optimizer",
    "ProfilerHook": "harness.training.hooks",
    "Progress": "harness.monitoring.progress",
    "QueueRunner": "harness.training.queue_runner",
    "SaveHandle": "harness.checkpoints.saver",
    "Saver": "harness.checkpoints.saver",
    "Scaffold": "harness.training.scaffold",
    "SecondOrStepTimer": "harness.training.hooks",
    "SessionCreator": "harness.training.scaffold",
    "SessionManager": "harness.training.session_manager",
    "SessionRunArgs": "harness.training.hooks",
    "SessionRunContext": "harness.training.hooks",
    "SessionRunHook": "harness.training.hooks",
    "SessionRunValues": "harness.training.hooks",
    "SingularMonitoredSession": "harness.training.monitored_session",
    "StaleSynchronous": "harness.optimizers.stale_synchronous",
    "StandardSeries": "harness.monitoring.cluster_scalars",
    "StepCounterHook": "harness.training.hooks",
    "StopAtStepHook": "harness.training.hooks",
    "SummarySaverHook": "harness.training.hooks",
    "Supervisor": "harness.training.supervisor",
    "SyncReplicas": "harness.optimizers.sync_replicas",
    "WorkerSessionCreator": "harness.training.scaffold",
    "accumulated": "harness.optimizers.gradient_accumulation",
    "add_queue_runner": "harness.training.queue_runner",
    "checkpoint_exists": "harness.checkpoints.layout",
    "checkpointable": "harness.checkpoints.states",
    "checkpoints_iterator": "harness.checkpoints.layout",
    "create_global_step": "harness.training.global_step",
    "forget_checkpointable": "harness.checkpoints.states",
    "get_checkpoint_state": "harness.checkpoints.layout",
    "get_global_step": "harness.training.global_step",
    "get_or_create_global_step": "harness.training.global_step",
    "init_from_checkpoint": "harness.checkpoints.initialize",
    "join_group": "harness.optimizers.collective",
    "keep_compilations": "harness.training.compilation_cache",
    "latest_checkpoint": "harness.checkpoints.layout",
    "list_variables": "harness.checkpoints.reader",
    "load_checkpoint": "harness.checkpoints.reader",
    "load_variable": "harness.checkpoints.reader",
    "monitoring": "harness.monitoring",
    "on_wire": "harness.optimizers.wire_precision",
    "partitioned": "harness.checkpoints.names",
    "preemptible": "harness.training.preemption",
    "restore_states": "harness.checkpoints.states",
    "start_queue_runners": "harness.training.queue_runner",
    "summary": "harness.tensorboard.summary",
    "timeline": "harness.monitoring.timeline",
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
    value = module if home.split(".")[-1] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
