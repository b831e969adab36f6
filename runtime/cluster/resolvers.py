"""Cluster resolvers: sources of the `ClusterSpec` of a process and of its own task.

A resolver answers three questions: the cluster (`cluster_spec()`), the task of this process
(`task_type` and `task_id`, None if unknown) and the server for a session (`master()`). The
resolvers of engines are in `runtime.cluster.slurm` and `runtime.cluster.jobset`.
"""

import json
import os
from abc import ABC, abstractmethod
from typing import Any

from runtime.cluster.spec import EVALUATOR, ClusterSpec, TaskId
from runtime.errors import InvalidArgumentError


class ClusterResolver(ABC):
    """The base of all resolvers."""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the present cluster."""

    @abstractmethod
    def _task(self) -> tuple[str | None, int | None]:
        """Returns the job and the index of this process; None for what is unknown."""

    @property
    def task_type(self) -> str | None:
        """Job of this process; None if unknown."""
        return self._task()[0]

    @property
    def task_id(self) -> int | None:
        """Task index of this process; None if unknown."""
        return self._task()[1]

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of the addresses of `master()`, such as "grpc"."""
        return "grpc"

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the target for a session: the named task, else this process.

        Raises:
            InvalidArgumentError: The cluster has no such task.
        """
        # The empty target is a session on this process alone, as in TF1.
        if task_type is None or task_id is None:
            return ""
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://" * bool(layer) + self.cluster_spec().task_address(task_type, task_id)


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in the environment variable TF_CONFIG, which is read at every call.

        {"cluster": {"ps": ["ps0:2222"], "worker": ["w0:2222", "w1:2222"]},
         "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}

    Also as the TFJob operator writes it: with ``environment`` and an evaluator, which is a task of
    the cluster or not, and, with ``enableDynamicWorker``, with ``sparseCluster``: a worker sees
    itself and all ps there, a ps only itself, an evaluator nobody.

    Without the variable the cluster is empty.
    """

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster in the present TF_CONFIG.

        Raises:
            json.JSONDecodeError: TF_CONFIG is not JSON.
            InvalidArgumentError: TF_CONFIG is not an object.
            TypeError: "cluster" is not a cluster (see `ClusterSpec`).
        """
        config = _tf_config()
        # TFJob writes this form with enableDynamicWorker, so that workers may be added.
        if "sparseCluster" not in config:
            return ClusterSpec(config.get("cluster", {}))
        jobs = config["sparseCluster"]
        if not isinstance(jobs, dict):
            raise InvalidArgumentError(f'"sparseCluster" must be an object, got {jobs!r}')
        ps = jobs.get("ps")
        if (
            self.task_type == "ps"
            and isinstance(ps, list)
            and len(ps) == 1
            and not jobs.get("worker")
        ):
            # The ps is alone in the list, whatever its index.
            jobs = {"ps": {self.task_id or 0: ps[0]}}
        # The lists have what this task may see. A job without tasks is none.
        return ClusterSpec({job: tasks for job, tasks in jobs.items() if tasks})

    def checked(self) -> tuple[ClusterSpec, TaskId]:
        """Returns the cluster and the task of this process, for a program that must be a task.

        Raises:
            InvalidArgumentError: TF_CONFIG is missing or not JSON, has no task, or the task is not
                in the cluster. The error is one line that names the cause.
        """
        if not os.environ.get("TF_CONFIG"):
            raise InvalidArgumentError("TF_CONFIG is not set: is this a pod of a TFJob?")
        try:
            _tf_config()
            job, index = self._task()
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(str(error)) from None
        # An invalid cluster raises TypeError elsewhere, but here the user wrote a variable and no
        # code.
        try:
            cluster = self.cluster_spec()
        except (TypeError, InvalidArgumentError) as error:
            raise InvalidArgumentError(f"TF_CONFIG: {error}") from None
        if job is None or index is None:
            raise InvalidArgumentError(
                'TF_CONFIG has no "task": {"type": ..., "index": ...}: which task is this?'
            )
        return cluster, own_task(cluster, job, index, "TF_CONFIG")

    def _task(self) -> tuple[str | None, int | None]:
        """Returns the task; TF_CONFIG may write the index as a string."""
        task = _tf_config().get("task") or {}
        if not isinstance(task, dict):
            raise InvalidArgumentError(f'TF_CONFIG: "task" must be an object, got {task!r}')
        index = task.get("index")
        try:
            return task.get("type"), None if index is None else int(index)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"TF_CONFIG: task index must be an integer, got {index!r}"
            ) from None

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of the addresses of `master()`; None without one in TF_CONFIG."""
        return _tf_config().get("rpc_layer")

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the target for a session.

        The target is "session_master" of TF_CONFIG if present, empty for a cluster of at most one
        task, else the address of the named task, by default the task of this process.

        Raises:
            InvalidArgumentError: The cluster has no such task, or TF_CONFIG does not say the task
                of this process.
        """
        config = _tf_config()
        # The user may name the target, for example a proxy, and the name outranks the cluster.
        if "session_master" in config:
            return str(config["session_master"])
        cluster = self.cluster_spec()
        # A lone task needs no server, so its session runs in its own process.
        if len(cluster.tasks()) <= 1:
            return ""
        own_type, own_id = self._task()
        job = own_type if task_type is None else task_type
        index = own_id if task_id is None else task_id
        if job is None or index is None:
            missing = (
                "No such job in cluster: None" if job is None else f"No task index for job {job!r}"
            )
            raise InvalidArgumentError(
                f'{missing}; add "task": {{"type": ..., "index": ...}} to TF_CONFIG'
            )
        return super().master(job, index, rpc_layer)


def _tf_config() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        config = json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        # The original message does not say which variable is meant.
        raise json.JSONDecodeError(
            f"TF_CONFIG is not JSON: {error.msg}", error.doc, error.pos
        ) from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"TF_CONFIG must be a JSON object, got {text!r}")
    return config


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; the parser alone would silently keep the last of two tasks with one index."""
    names = [name for name, _ in pairs]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidArgumentError(f"TF_CONFIG has {doubles[0]!r} twice")
    return dict(pairs)


def own_task(cluster: ClusterSpec, job: str, index: int, source: str) -> TaskId:
    """Returns the task of this process: a task of the cluster, or an evaluator, which may be outside the cluster.

    Raises:
        InvalidArgumentError: There is no such job or task; the error names the task and its
            ``source``.
    """
    # No task connects to an evaluator, so an evaluator needs no address in the cluster.
    if job == EVALUATOR and EVALUATOR not in cluster.jobs and index >= 0:
        return TaskId(job, index)
    if job not in cluster.jobs:
        known = ", ".join(cluster.jobs) or "none"
        raise InvalidArgumentError(
            f"{source}: unknown role {job!r}; the jobs of the cluster: {known}"
        )
    if index not in (indices := cluster.task_indices(job)):
        there = ", ".join(map(str, indices)) or "none"
        raise InvalidArgumentError(
            f"{source}: task index {index} is out of range; the tasks of {job}: {there}"
        )
    return TaskId(job, index)
