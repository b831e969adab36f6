"""Cluster resolvers: sources of the `ClusterSpec` of a process and of its own task.

A resolver answers three questions: the cluster (`cluster_spec()`), the task of this process (`task_type` and
`task_id`, None if unknown) and the server for a session (`master()`). The resolvers of engines are in
`runtime.cluster.slurm` and `runtime.cluster.jobset`.
"""

import json
import os
from abc import ABC, abstractmethod
from typing import Any

from runtime.cluster.spec import EVALUATOR, ClusterSpec, TaskId
from runtime.errors import InvalidArgumentError


class ClusterResolver(ABC):
    """The base of all resolvers.

    Attributes:
        task_type: job of this process; None if unknown.
        task_id: task index of this process; None if unknown.
        rpc_layer: prefix of the addresses of `master()`, such as "grpc"; None for no prefix.
    """

    def __init__(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> None:
        """Makes the resolver; see the class."""
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the present cluster."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the target for a session: the named task, else the default of the resolver.

        Raises:
            InvalidArgumentError: The cluster has no such task.
        """
        if task_type is None or task_id is None:
            return target(self._default_master(), rpc_layer or self.rpc_layer)
        return target(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def _default_master(self) -> str:
        """Returns the address for `master()` without a task; empty for this process."""
        return ""

    # Kinds of resolvers that read the environment override these; what was given to the resolver comes first.

    def _found_type(self) -> str | None:
        return None

    def _found_id(self) -> int | None:
        return None

    def _found_layer(self) -> str | None:
        return None

    @property
    def task_type(self) -> str | None:
        """Job of this process; None if unknown."""
        return self._task_type if self._task_type is not None else self._found_type()

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Task index of this process; None if unknown."""
        return self._task_id if self._task_id is not None else self._found_id()

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of the addresses of `master()`, such as "grpc"."""
        return self._rpc_layer if self._rpc_layer is not None else self._found_layer()

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def target(address: str, rpc_layer: str | None = None) -> str:
    """Makes "grpc://host:port" of an address; an empty address (this process) stays empty."""
    return f"{rpc_layer}://{address}" if address and rpc_layer else address


class SimpleClusterResolver(ClusterResolver):
    """The resolver of a cluster that is given.

    Args:
        cluster_spec: the cluster.
        master: the target for `master()` without a task.
        task_type: job of this process.
        task_id: task index of this process.
        rpc_layer: prefix of the addresses of `master()`, such as "grpc".

    Raises:
        TypeError: `cluster_spec` is not a `ClusterSpec`, or `master` is not a string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        """Makes the resolver; see the class."""
        super().__init__(task_type=task_type, task_id=task_id, rpc_layer=rpc_layer)
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec, not {type(cluster_spec).__name__}")
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, not {type(master).__name__}")
        self._cluster_spec = cluster_spec
        self._master = master

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that was given."""
        return self._cluster_spec

    def _default_master(self) -> str:
        return self._master


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in the environment variable TF_CONFIG, which is read at every call.

        {"cluster": {"ps": ["ps0:2222"], "worker": ["w0:2222", "w1:2222"]},
         "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}

    Also as the TFJob operator writes it: with ``environment`` and an evaluator, which is a task of the cluster or not,
    and, with ``enableDynamicWorker``, with ``sparseCluster``: a worker sees itself and all ps there, a ps only itself,
    an evaluator nobody.

    Without the variable the cluster is empty. Arguments override the variable.

    Args:
        task_type: job of this process.
        task_id: task index of this process.
        rpc_layer: prefix of the addresses of `master()`, such as "grpc".
    """

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster in the present TF_CONFIG.

        Raises:
            json.JSONDecodeError: TF_CONFIG is not JSON.
            InvalidArgumentError: TF_CONFIG is not an object.
            TypeError: "cluster" is not a cluster (see `ClusterSpec`).
        """
        config = _tf_config()
        if "sparseCluster" not in config:
            return ClusterSpec(config.get("cluster", {}))
        jobs = config["sparseCluster"]
        if not isinstance(jobs, dict):
            raise InvalidArgumentError(f'"sparseCluster" must be an object, got {jobs!r}')
        ps = jobs.get("ps")
        if _tf_config_task().get("type") == "ps" and isinstance(ps, list) and len(ps) == 1 and not jobs.get("worker"):
            # The ps is alone in the list, whatever its index.
            jobs = {"ps": {self.task_id or 0: ps[0]}}
        return ClusterSpec({job: tasks for job, tasks in jobs.items() if tasks})

    def checked(self) -> tuple[ClusterSpec, TaskId]:
        """Returns the cluster and the task of this process, for a program that must be a task.

        Raises:
            InvalidArgumentError: TF_CONFIG is missing or not JSON, has no task, or the task is not in the cluster. The
                error is one line that names the cause.
        """
        if not os.environ.get("TF_CONFIG"):
            raise InvalidArgumentError("TF_CONFIG is not set: is this a pod of a TFJob?")
        try:
            _tf_config()
            job, index = self.task_type, self.task_id
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(str(error)) from None
        try:
            cluster = self.cluster_spec()
        except (TypeError, InvalidArgumentError) as error:
            raise InvalidArgumentError(f"TF_CONFIG: {error}") from None
        if job is None or index is None:
            raise InvalidArgumentError('TF_CONFIG has no "task": {"type": ..., "index": ...}: which task is this?')
        return cluster, own_task(cluster, job, index, "TF_CONFIG")

    def _found_type(self) -> str | None:
        return _tf_config_task().get("type")

    def _found_id(self) -> int | None:
        """Returns the task index, which TF_CONFIG may write as a string."""
        index = _tf_config_task().get("index")
        try:
            return None if index is None else int(index)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"TF_CONFIG: task index must be an integer, got {index!r}") from None

    def _found_layer(self) -> str | None:
        return _tf_config().get("rpc_layer")

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the target for a session.

        The target is "session_master" of TF_CONFIG if present, empty for a cluster of at most one task, else the
        address of the named task, by default the task of this process.

        Raises:
            InvalidArgumentError: The cluster has no such task, or TF_CONFIG does not say the task of this process.
        """
        config = _tf_config()
        if "session_master" in config:
            return str(config["session_master"])
        cluster = self.cluster_spec()
        if len(cluster.tasks()) <= 1:
            return ""
        job = task_type if task_type is not None else self.task_type
        index = task_id if task_id is not None else self.task_id
        if job is None or index is None:
            missing = "No such job in cluster: None" if job is None else f"No task index for job {job!r}"
            raise InvalidArgumentError(f'{missing}; add "task": {{"type": ..., "index": ...}} to TF_CONFIG')
        return target(cluster.task_address(job, index), rpc_layer or self.rpc_layer)


def _tf_config() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        config = json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"TF_CONFIG is not JSON: {error.msg}", error.doc, error.pos) from None
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
        InvalidArgumentError: There is no such job or task; the error names the task and its ``source``.
    """
    if job == EVALUATOR and EVALUATOR not in cluster.jobs and index >= 0:
        return TaskId(job, index)
    if job not in cluster.jobs:
        known = ", ".join(cluster.jobs) or "none"
        raise InvalidArgumentError(f"{source}: unknown role {job!r}; the jobs of the cluster: {known}")
    if index not in (indices := cluster.task_indices(job)):
        there = ", ".join(map(str, indices)) or "none"
        raise InvalidArgumentError(f"{source}: task index {index} is out of range; the tasks of {job}: {there}")
    return TaskId(job, index)


def _tf_config_task() -> dict[str, Any]:
    task = _tf_config().get("task") or {}
    if not isinstance(task, dict):
        raise InvalidArgumentError(f'TF_CONFIG: "task" must be an object, got {task!r}')
    return task
