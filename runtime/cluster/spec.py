"""The value of a cluster: `ClusterSpec` maps jobs to numbered tasks and tasks to addresses.

A `ClusterSpec` is immutable, and its constructor checks no addresses: a graph can be built for a
cluster that does not exist yet. `validate` checks the addresses, and a server calls `validate`
before the start.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from runtime.errors import InvalidArgumentError
from runtime.proto import cluster_pb2

EVALUATOR = "evaluator"
"""The job whose tasks follow a run from outside: no task waits for an evaluator, and evaluators serve no task."""
CHIEF_JOBS = ("chief", "master")
"""Jobs whose task 0 is the chief. Without such a job worker 0 is the chief."""
_MAX_DIFFERENCES = 5
"""Differences that `difference` spells out; the rest is counted, so that the error stays readable."""


@dataclass(frozen=True, order=True)
class TaskId:
    """A task of a cluster, which as text is a device name, such as "/job:ps/task:0"."""

    job: str
    index: int

    def __str__(self) -> str:
        """Returns the task as a device name, the form in errors."""
        return f"/job:{self.job}/task:{self.index}"


JobsLike = Mapping[str, Sequence[str] | Mapping[int, str] | Mapping[str, str]]
"""The plain form of a `ClusterSpec`: job name to a list of addresses, or to {index: address}."""


class ClusterSpec:
    """The jobs and tasks of a cluster, with the address of each task.

        ClusterSpec({"ps": ["ps0:2222"], "worker": ["w0:2222", "w1:2222"]})
        ClusterSpec({"ps": ["ps0:2222"], "worker": {1: "w1:2222"}})    # only some of the tasks

    Args:
        cluster: a mapping from job name to a list or tuple of addresses, or to a mapping from task
            index to address; or a `ClusterSpec`; or a `ClusterDef` message.

    Raises:
        TypeError: `cluster`, a job or an address is of another type.
        InvalidArgumentError: a task index is negative, or a job or index is given twice.
    """

    def __init__(self, cluster: "JobsLike | ClusterSpec | Message") -> None:
        """Makes the description; see the class."""
        self._jobs: dict[str, dict[int, str]] = {}
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
        elif isinstance(cluster, Mapping):
            self._jobs = {_job_name(job): _job_tasks(job, tasks) for job, tasks in cluster.items()}
        # A message's fields are no attributes of its class, so a runtime-checkable Protocol does
        # not know them.
        elif isinstance(cluster, Message) and "job" in cluster.DESCRIPTOR.fields_by_name:
            jobs: Any = cluster
            for job_def in jobs.job:
                if job_def.name in self._jobs:
                    raise InvalidArgumentError(f"job {job_def.name!r} is given twice")
                self._jobs[job_def.name] = _job_tasks(job_def.name, job_def.tasks)
        else:
            raise TypeError(
                "cluster must be a dictionary mapping one or more job names to lists of addresses "
                "or dictionaries "
                f"of index to address, or a ClusterSpec or ClusterDef; got {type(cluster).__name__}"
            )
        assert all(list(tasks) == sorted(tasks) for tasks in self._jobs.values())

    @property
    def jobs(self) -> list[str]:
        """The job names, in the order they were given."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the jobs as plain values: a list for the indices 0, 1, 2..., else a dict from index to address."""
        return {
            # A list says the same as a dict only if no index is missing.
            job: list(tasks.values()) if tasks and max(tasks) == len(tasks) - 1 else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> cluster_pb2.ClusterDef:
        """Returns the jobs as a message, sorted by name."""
        return cluster_pb2.ClusterDef(
            job=[cluster_pb2.JobDef(name=job, tasks=self._jobs[job]) for job in sorted(self._jobs)]
        )

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job, without gaps between indices."""
        return len(self._tasks_of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, ascending."""
        return list(self._tasks_of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        >>> ClusterSpec({"ps": ["ps0:2222"]}).task_address("ps", 0)
        'ps0:2222'

        Raises:
            InvalidArgumentError: There is no such job or task.
        """
        tasks = self._tasks_of(job_name)
        if task_index not in tasks:
            there = ", ".join(map(str, tasks)) or "none"
            raise InvalidArgumentError(
                f"No task with index {task_index} in job {job_name!r}; its tasks: {there}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job by index, with None for missing tasks."""
        tasks = self._tasks_of(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def tasks(self) -> dict[TaskId, str]:
        """Returns the address of every task, sorted by job and index."""
        return {
            TaskId(job, index): address
            for job in sorted(self._jobs)
            for index, address in self._jobs[job].items()
        }

    def default_task(self) -> TaskId:
        """Returns the task for variables without a device.

        The task must be the same on every host, so the order in which jobs were written does not
        count: the first task of "ps", or without "ps" the first task of the job whose name sorts
        first.

        Raises:
            InvalidArgumentError: The cluster has no tasks.
        """
        for job in sorted(self._jobs, key=lambda name: (name != "ps", name)):
            if self._jobs[job]:
                return TaskId(job, min(self._jobs[job]))
        raise InvalidArgumentError("the cluster has no tasks")

    def chief(self) -> TaskId | None:
        """Returns the task that leads a run: task 0 of job "chief" (or "master"), else worker 0, else None."""
        # Older programs call the job of the chief "master".
        for job in (*CHIEF_JOBS, "worker"):
            if 0 in self._jobs.get(job, {}):
                return TaskId(job, 0)
        return None

    def validate(self) -> None:
        """Checks that every address is "host:port" and that no two tasks share one (port 0, "any", may repeat).

        Raises:
            InvalidArgumentError: An address is invalid or used twice; the error names the task and
                the address.
        """
        seen: dict[tuple[str, int], TaskId] = {}
        for task, address in self.tasks().items():
            try:
                host, port = split_address(address)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(
                    f"task {task.index} of job {task.job}: {error.message}"
                ) from None
            # Host names have no case, so w0:2222 and W0:2222 are one address.
            first = seen.setdefault((host.lower(), port), task)
            if port and first != task:
                raise InvalidArgumentError(
                    f"task {task.index} of job {task.job} and task {first.index} of job "
                    f"{first.job} "
                    f"have the same address {address!r}: every task needs its own host:port"
                )

    def fingerprint(self) -> str:
        """Returns a short digest (16 hex digits), the same in every process for equal specs."""
        # JSON of sorted lists has one text for equal specs, in every process and version of Python.
        canonical = json.dumps(
            [[job, sorted(self._jobs[job].items())] for job in sorted(self._jobs)]
        )
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def _tasks_of(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            there = ", ".join(self._jobs) or "none"
            raise InvalidArgumentError(f"No such job in cluster: {job_name!r}; its jobs: {there}")
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        """Returns True if there are jobs."""
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        """Returns True for equal jobs, tasks and addresses in any spelling.

        A plain dict is equal in the form {job: {index: address}}.
        """
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return self._jobs == other if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        """Returns the same hash for equal specs."""
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        """Returns `ClusterSpec({...})`, sorted by job."""
        jobs = self.as_dict()
        return f"ClusterSpec({ {job: jobs[job] for job in sorted(jobs)}!r})"


def difference(here: ClusterSpec, there: ClusterSpec) -> str:
    """Says in words how two cluster definitions differ; the empty string when they do not.

    >>> difference(ClusterSpec({"ps": ["a:1"]}), ClusterSpec({"ps": ["b:1"]}))
    "task 0 of job ps: 'a:1' here, 'b:1' there"
    """
    found = []
    for job in sorted({*here.jobs, *there.jobs}):
        if job not in here._jobs or job not in there._jobs:
            found.append(f"job {job}: only {'here' if job in here._jobs else 'there'}")
            continue
        left, right = here._jobs[job], there._jobs[job]
        for index in sorted({*left, *right}):
            if left.get(index) != right.get(index):
                found.append(
                    f"task {index} of job {job}: {_show(left.get(index))} here, "
                    f"{_show(right.get(index))} there"
                )
    assert bool(found) == (here != there), "a difference has no words"
    more = [f"and {len(found) - _MAX_DIFFERENCES} more"] if len(found) > _MAX_DIFFERENCES else []
    return "; ".join(found[:_MAX_DIFFERENCES] + more)


def agree(here: ClusterSpec, there: ClusterSpec) -> bool:
    """Returns True if tasks with these definitions can work together, although one may know more workers.

    The ps tasks, and every task in both definitions, must be the same. A worker list may be longer
    on tasks that were started later, so that workers can be added while training runs. A ps whose
    definition has no other task (the ``sparseCluster`` of TFJob) works with every task that knows
    the ps at that address.

    Args:
        here: the definition of this task.
        there: the definition of the other task.

    >>> agree(ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]}), ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]}))
    True
    """
    # A ps that knows only itself learns the other ps from its workers, so only its own address
    # counts.
    for one, other in ((here, there), (there, here)):
        if len(one._jobs.get("ps", {})) == len(one.tasks()) == 1:
            return one._jobs["ps"].items() <= other._jobs.get("ps", {}).items()
    # Variables are placed by the list of ps, so two lists would put one variable on two tasks.
    if here._jobs.get("ps", {}) != there._jobs.get("ps", {}) or {*here.jobs} != {*there.jobs}:
        return False
    return all(
        theirs == address
        for job in here.jobs
        for index, address in here._jobs[job].items()
        if (theirs := there._jobs[job].get(index)) is not None
    )


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[IPv6]:port" into the host (without brackets) and the port (0 to 65535).

    Raises:
        InvalidArgumentError: there is no host, no port, or something else in the address.
    """
    host, colon, port = address.rpartition(":")
    # Users paste targets such as grpc://ps0:2222, whose host would be "grpc://ps0".
    if "/" in address:
        raise InvalidArgumentError(
            f"address {address!r} must be plain 'host:port', without a scheme or path"
        )
    if not colon or not host or (host.startswith("[") and not host.endswith("]")):
        raise InvalidArgumentError(
            f"address {address!r} has no port or no host: write 'host:port', such as 'ps0:2222'"
        )
    # "::1:2222" may be an address with a port or a longer address without one.
    if ":" in host and not host.startswith("["):
        raise InvalidArgumentError(
            f"address {address!r} is ambiguous: write an IPv6 address as '[::1]:2222'"
        )
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InvalidArgumentError(
            f"address {address!r} has a bad port {port!r}: it must be a number from 0 to 65535"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns "host:port", with brackets around an IPv6 address; ``split_address`` is the way back.

    >>> join_address("::1", 2222)
    '[::1]:2222'
    """
    assert not host.startswith("["), "a host has no brackets of its own"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _show(address: str | None) -> str:
    return "no such task" if address is None else repr(address)


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"Job name {job!r} must be a string")
    return job


def _job_tasks(job: str, tasks: object) -> dict[int, str]:
    """Returns the tasks of a job by ascending index."""
    if isinstance(tasks, Mapping):
        pairs = [(_task_index(job, index), address) for index, address in tasks.items()]
    # A text is a sequence too, and {"ps": "ps0:2222"} would be a task for each letter.
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        pairs = list(enumerate(tasks))
    else:
        raise TypeError(
            f"The tasks of job {job!r} must be a list or a dictionary, not {type(tasks).__name__}"
        )
    for index, address in pairs:
        if not isinstance(address, str):
            raise TypeError(
                f"Task address {address!r} of task {index} of job {job!r} must be a string"
            )
    result = dict(sorted(pairs))
    if len(result) != len(pairs):
        raise InvalidArgumentError(
            f"job {job!r} has a task index twice: {sorted(index for index, _ in pairs)}"
        )
    return result


def _task_index(job: str, index: object) -> int:
    """Returns the index of a task; text is accepted, because keys of JSON are text."""
    try:
        # `int` turns True into 1 and 1.5 into 1, and either is a mistake here.
        if isinstance(index, bool | float) or not isinstance(index, int | str):
            raise ValueError
        number = int(index)
    except ValueError:
        raise TypeError(f"Task index {index!r} of job {job!r} must be an integer") from None
    if number < 0:
        raise InvalidArgumentError(f"Task index {number} of job {job!r} must not be negative")
    return number
