"""``tf.train``: servers, supervisors, savers, hooks and optimizers; from the harness and the runtime on first use."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import runtime as rt
from harness import exit_codes
from harness.tf1.graph.config import apply as _apply
from harness.tf1.graph.framework import write_graph
from harness.tf1.inputs import batching as _batching  # noqa: F401 - adds names to the table
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import Later, add_names
from harness.tf1.train import decays as _decays  # noqa: F401
from harness.tf1.train import optimizers as _optimizers  # noqa: F401
from harness.training.start.global_step import global_step


class Server(rt.Server):
    """``rt.Server``, with TensorFlow's ``protocol``, which must be "grpc"."""

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        **options: Any,
    ) -> None:
        if protocol not in (None, "grpc"):
            raise rt.NotFoundError(
                f"No server factory registered for protocol {protocol!r}: there is 'grpc'"
            )
        cluster = server_or_cluster_def
        if isinstance(cluster, rt.lowlevel.ServerDef):
            job_name = job_name or cluster.job_name or None
            task_index = cluster.task_index if task_index is None else task_index
            cluster = cluster.cluster
        super().__init__(cluster, job_name, task_index, _apply(config), start, **options)

    def join(self, late_secs: float = 600.0, drain_secs: float | None = None) -> NoReturn:
        """Serves until the process is no longer needed, and ends the program then, or the thread that called it.

        As in TensorFlow the program never comes back from it: a ps goes on into the worker's code
        otherwise. It is over when training is, when SIGTERM arrives, and when ``stop`` is called;
        see ``rt.Server.join``, which returns.

        Args:
            late_secs: how long workers that have never come are waited for after the chief has
                finished.
            drain_secs: how long it serves on after SIGTERM while tasks that train live.

        Raises:
            SystemExit: always, with the code 0, or that of "preempted" where SIGTERM has come
                before training was over.
        """
        sys.exit(exit_codes.of_join(super().join(late_secs, drain_secs)))

    @property
    def server_def(self) -> rt.lowlevel.ServerDef:
        """The cluster and this task's place in it, as a proto."""
        cluster, task = self.cluster.as_cluster_def(), self.task
        return rt.lowlevel.ServerDef(
            cluster=cluster, job_name=task.job, task_index=task.index, protocol="grpc"
        )

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Starts a cluster of one task on a free port of this machine."""
        return Server({"local": ["localhost:0"]}, "local", 0, config=config, start=start)


_HARNESS = """
    CheckpointSaverHook CheckpointSaverListener ChiefSessionCreator Coordinator LoggingTensorHook LooperThread
    MonitoredSession MonitoredTrainingSession NanLossDuringTrainingError NanTensorHook Scaffold SecondOrStepTimer
    SessionCreator SessionRunArgs SessionRunContext SessionRunHook SessionRunValues StepCounterHook StopAtStepHook
    SummarySaverHook Supervisor WorkerSessionCreator create_global_step get_global_step get_or_create_global_step
    latest_checkpoint load_variable
    """
_EXAMPLES = "BytesList Example Feature FeatureList FeatureLists Features FloatList Int64List SequenceExample"

_TRAINING = "FeedFnHook FinalOpsHook GlobalStepWaiterHook ProfilerHook SessionManager SingularMonitoredSession"
_RUNNERS = "QueueRunner add_queue_runner start_queue_runners"

_LATER = {
    **{name: f"harness.{name}" for name in _HARNESS.split()},
    **{name: f"harness.tf1.train.training.{name}" for name in _TRAINING.split()},
    **{name: f"harness.tf1.inputs.queue_runner.{name}" for name in _RUNNERS.split()},
    **{name: f"harness.tf1.inputs.example_pb2.{name}" for name in _EXAMPLES.split()},
    "ClusterSpec": "runtime.ClusterSpec",
    "NewCheckpointReader": "harness.tf1.train.saver.CheckpointReader",
    "Saver": "harness.tf1.train.saver.Saver",
    "SaverDef": "harness.tf1.train.saver.SaverDef",
    "SummaryWriter": "harness.tf1.train.saver.FileWriter",
    "SummaryWriterCache": "harness.FileWriterCache",
    "checkpoints_iterator": "harness.tf1.train.checkpoints.checkpoints_iterator",
    "init_from_checkpoint": "harness.tf1.train.checkpoints.init_from_checkpoint",
    "import_meta_graph": "harness.tf1.train.saver.import_meta_graph",
    "checkpoint_exists": "harness.tf1.train.saver.checkpoint_exists",
    "get_checkpoint_state": "harness.tf1.train.saver.get_checkpoint_state",
    "list_variables": "harness.tf1.train.saver.list_variables",
    "load_checkpoint": "harness.tf1.train.saver.CheckpointReader",
    "match_filenames_once": "harness.tf1.inputs.readers.match_filenames_once",
}
"""TensorFlow's name -> where it is found when it is first used."""

_HERE = {
    "ClusterDef": rt.lowlevel.ClusterDef,
    "JobDef": rt.lowlevel.JobDef,
    "Server": Server,
    "ServerDef": rt.lowlevel.ServerDef,
    "global_step": global_step,
    "replica_device_setter": rt.replica_device_setter,
    "write_graph": write_graph,
}
add_names("tf.train", {name: Later(path) for name, path in _LATER.items()} | _HERE)

__getattr__, __dir__ = namespace("tf.train")
