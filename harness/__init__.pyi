# The public names of the package and the modules that define them: the one list. See __init__.py.

from harness import monitoring as monitoring
from harness.checkpoints.export import load_pytree as load_pytree
from harness.checkpoints.layout import latest_checkpoint as latest_checkpoint
from harness.checkpoints.names import partitioned as partitioned
from harness.checkpoints.reader import CheckpointReader as CheckpointReader
from harness.checkpoints.reader import list_variables as list_variables
from harness.checkpoints.reader import load_checkpoint as load_checkpoint
from harness.checkpoints.reader import load_variable as load_variable
from harness.checkpoints.save_job import SaveHandle as SaveHandle
from harness.checkpoints.saver import Saver as Saver
from harness.checkpoints.states import checkpointable as checkpointable
from harness.checkpoints.states import forget_checkpointable as forget_checkpointable
from harness.checkpoints.states import restore_states as restore_states
from harness.coordinator import Coordinator as Coordinator
from harness.coordinator import LooperThread as LooperThread
from harness.data.data_shards import DataShards as DataShards
from harness.monitoring import timeline as timeline
from harness.monitoring.cluster_scalars import StandardSeries as StandardSeries
from harness.monitoring.progress import Progress as Progress
from harness.optimizers.exponential_moving_average import (
    ExponentialMovingAverage as ExponentialMovingAverage,
)
from harness.optimizers.gradient_accumulation import accumulated as accumulated
from harness.optimizers.optimizer import AnyOptimizer as AnyOptimizer
from harness.optimizers.optimizer import Optimizer as Optimizer
from harness.optimizers.stale_synchronous import StaleSynchronous as StaleSynchronous
from harness.optimizers.sync_replicas import SyncReplicas as SyncReplicas
from harness.optimizers.tables import rowwise_adagrad as rowwise_adagrad
from harness.optimizers.training_summaries import training_summaries as training_summaries
from harness.optimizers.variable_tree import by_name as by_name
from harness.optimizers.wire_precision import on_wire as on_wire
from harness.tensorboard import summary as summary
from harness.tensorboard.writer import FileWriter as FileWriter
from harness.tensorboard.writer import FileWriterCache as FileWriterCache
from harness.training.evaluation.evaluator import Evaluator as Evaluator
from harness.training.run.hooks import CheckpointSaverHook as CheckpointSaverHook
from harness.training.run.hooks import CheckpointSaverListener as CheckpointSaverListener
from harness.training.run.hooks import EarlyStoppingHook as EarlyStoppingHook
from harness.training.run.hooks import LoggingTensorHook as LoggingTensorHook
from harness.training.run.hooks import NanLossDuringTrainingError as NanLossDuringTrainingError
from harness.training.run.hooks import NanTensorHook as NanTensorHook
from harness.training.run.hooks import SecondOrStepTimer as SecondOrStepTimer
from harness.training.run.hooks import SessionRunArgs as SessionRunArgs
from harness.training.run.hooks import SessionRunContext as SessionRunContext
from harness.training.run.hooks import SessionRunHook as SessionRunHook
from harness.training.run.hooks import SessionRunValues as SessionRunValues
from harness.training.run.hooks import StepCounterHook as StepCounterHook
from harness.training.run.hooks import StopAtStepHook as StopAtStepHook
from harness.training.run.hooks import SummarySaverHook as SummarySaverHook
from harness.training.run.join import Member as Member
from harness.training.run.join import find_identity as find_identity
from harness.training.run.join import join_cluster as join_cluster
from harness.training.run.monitored_session import MonitoredSession as MonitoredSession
from harness.training.run.monitored_session import (
    MonitoredTrainingSession as MonitoredTrainingSession,
)
from harness.training.run.supervisor import Supervisor as Supervisor
from harness.training.start.compilation_cache import keep_compilations as keep_compilations
from harness.training.start.global_step import create_global_step as create_global_step
from harness.training.start.global_step import get_global_step as get_global_step
from harness.training.start.global_step import (
    get_or_create_global_step as get_or_create_global_step,
)
from harness.training.start.managed_session import ManagedSession as ManagedSession
from harness.training.start.scaffold import ChiefSessionCreator as ChiefSessionCreator
from harness.training.start.scaffold import Scaffold as Scaffold
from harness.training.start.scaffold import SessionCreator as SessionCreator
from harness.training.start.scaffold import WorkerSessionCreator as WorkerSessionCreator
from harness.training.start.session_manager import SessionManager as SessionManager
from harness.training.stop.preemption import preemptible as preemptible

__version__: str
