"""The JobSet resolver: the cluster as the names that Kubernetes gives the pods of a JobSet."""

import os
import re

from runtime.cluster.resolvers import ClusterResolver, own_task
from runtime.cluster.spec import ClusterSpec, TaskId
from runtime.errors import InvalidArgumentError

JOBS_VARIABLE = "BELLWETHER_JOBS"
NAME_VARIABLE = "JOBSET_NAME"
JOB_VARIABLE = "REPLICATED_JOB_NAME"
JOB_INDEX_VARIABLE = "JOB_INDEX"
POD_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
SUBDOMAIN_VARIABLE = "JOBSET_SUBDOMAIN"
PORT_VARIABLE = "BELLWETHER_PORT"
DEFAULT_PORT = 2222
LABELS = {
    NAME_VARIABLE: "jobset.sigs.k8s.io/jobset-name",
    JOB_VARIABLE: "jobset.sigs.k8s.io/replicatedjob-name",
    JOB_INDEX_VARIABLE: "jobset.sigs.k8s.io/job-index",
}
"""The variables that a manifest takes from the labels of the pod (the downward API)."""


class JobSetClusterResolver(ClusterResolver):
    """The cluster that the environment of a pod of a JobSet describes, without the API server and RBAC.

    A replicated job is a job of the cluster, and its name is the job's. Pod ``p`` of child job
    ``j`` answers to ``<jobset>-<job>-<j>-<p>.<subdomain>``, and is task ``j * (pods of a child job)
    + p``. Kubernetes keeps the name of a pod that is made again at another address.

    The variables, of which the manifests of ``python -m harness.manifests`` set all:

    * JOBSET_NAME, REPLICATED_JOB_NAME, JOB_INDEX: from the pod's labels.
    * JOB_COMPLETION_INDEX: the pod's index in its child job; Kubernetes sets it. 0 without it.
    * BELLWETHER_JOBS: how many tasks each job has, ``ps=2,worker=8``; ``worker=2x4`` for 2 child
      jobs of 4 pods; ``worker=1x4+`` for one child job of 4 pods at first, whose ``parallelism``
      and ``completions`` may be raised.
    * JOBSET_SUBDOMAIN: of the network of the JobSet, by default its name. With a cluster domain
      if that is needed.
    * BELLWETHER_PORT: of every task, by default 2222.
    """

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that the variables describe now.

        Raises:
            InvalidArgumentError: A variable is missing or invalid; the error names the variable.
        """
        # The names follow the JobSet API: <jobset>-<replicated job>-<job index>-<pod
        # index>.<subdomain>.
        name = _read_variable(NAME_VARIABLE)
        subdomain = os.environ.get(SUBDOMAIN_VARIABLE) or name
        port = _read_number(PORT_VARIABLE, str(DEFAULT_PORT))
        return ClusterSpec(
            {
                job: {
                    j * pods + p: f"{name}-{job}-{j}-{p}.{subdomain}:{port}"
                    for j in range(replicas)
                    for p in [*range(pods), *_added_pods(job, pods, grows)]
                }
                for job, (replicas, pods, grows) in _job_sizes().items()
            }
        )

    def _task(self) -> tuple[str | None, int | None]:
        _, task = self.checked()
        return task.job, task.index

    def checked(self) -> tuple[ClusterSpec, TaskId]:
        """Returns the cluster, and the task of this process.

        Raises:
            InvalidArgumentError: A variable is missing or invalid, or the task of this pod is not
                in the cluster.
        """
        cluster, job = self.cluster_spec(), _read_variable(JOB_VARIABLE)
        index = _read_number(JOB_INDEX_VARIABLE)
        # An unknown job gets its error from `own_task`, which lists the known jobs.
        if job in cluster.jobs:
            replicas, pods, grows = _job_sizes()[job]
            pod = _read_number(POD_INDEX_VARIABLE, "0")
            # Without this check a pod of child job 1 could take the index of a pod of child job 2.
            if index >= replicas or (pod >= pods and not grows):
                where = f"{JOB_INDEX_VARIABLE}={index}, {POD_INDEX_VARIABLE}={pod}"
                raise InvalidArgumentError(
                    f"{where}: out of range, {JOBS_VARIABLE} gives {job} {replicas} child jobs "
                    f"with {pods} pods each"
                )
            index = index * pods + pod
        return cluster, own_task(cluster, job, index, f"{JOB_VARIABLE} and {JOB_INDEX_VARIABLE}")


def _added_pods(job: str, pods: int, grows: bool) -> list[int]:
    """Returns the index of this pod if its job has grown since the variables were written."""
    # A pod knows no pod index but its own, so only its own job can have an added task here.
    if job != os.environ.get(JOB_VARIABLE) or not grows:
        return []
    pod = _read_number(POD_INDEX_VARIABLE, "0")
    return [pod] if pod >= pods else []


def _job_sizes() -> dict[str, tuple[int, int, bool]]:
    """Returns the number of child jobs, of pods in each, and True if there may be more pods, by job."""
    text = _read_variable(JOBS_VARIABLE)
    sizes: dict[str, tuple[int, int, bool]] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)=(\d+)(?:x(\d+))?(\+)?\s*", part)
        if match is None:
            raise InvalidArgumentError(
                f"{JOBS_VARIABLE}: cannot read {part!r} in {text!r}; write ps=2,worker=8"
            )
        # A second entry of a job would replace the first, and tasks would disagree on the cluster.
        if match[1] in sizes:
            raise InvalidArgumentError(f"{JOBS_VARIABLE} has job {match[1]!r} twice: {text!r}")
        # With several child jobs, an added pod would shift the indices of all tasks behind it.
        if match[4] and (int(match[2]) != 1 or not match[3]):
            raise InvalidArgumentError(
                f"{JOBS_VARIABLE}: {part!r} can grow only with one child job: write worker=1x4+"
            )
        sizes[match[1]] = int(match[2]), int(match[3] or 1), bool(match[4])
    return sizes


def _read_variable(name: str) -> str:
    value = os.environ.get(name)
    # A manifest without the downward API leaves the variable empty or unset.
    if not value:
        source = (
            f"take it from the pod's label {LABELS[name]}"
            if name in LABELS
            else "write ps=2,worker=8"
        )
        raise InvalidArgumentError(f"{name} is not set, which a pod of a JobSet needs: {source}")
    return value


def _read_number(name: str, default: str | None = None) -> int:
    text = os.environ.get(name) or default
    if text is None:
        text = _read_variable(name)
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgumentError(f"{name} must be a number, got {text!r}")
    return int(text)
