"""Takeover: the holder of each task's backup, and the start of a process from a backup."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from absl import logging

from runtime import concurrency
from runtime.backup import image
from runtime.backup.primary import AnsweredUpdate, LaneKey, Primary, Send
from runtime.cluster.spec import ClusterSpec, TaskId
from runtime.errors import (
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from runtime.observe.process_metrics import metrics
from runtime.task.worker import Worker


@dataclass(frozen=True)
class ResumedTask:
    """The state that a process takes over from the last process, beside the state of the worker.

    Attributes:
        incarnation: number by which peers know the task.
        takeovers: number of continuations from the backup, with the present continuation.
        answered: the last answer on each lane.
    """

    incarnation: int
    takeovers: int
    answered: Mapping[LaneKey, AnsweredUpdate]


def holder(spec: ClusterSpec, task: TaskId, backups: int, lag: int) -> str:
    """Returns the name of the task that holds the backup of ``task``: the next task of the job.

    The name is empty without backups.

    Raises:
        InvalidArgumentError: There is no next task, or a number is out of range.

    Examples:
        >>> spec = ClusterSpec({"ps": ["a:1", "b:1", "c:1"]})
        >>> holder(spec, TaskId("ps", 2), backups=1, lag=100)
        '/job:ps/task:0'
    """
    if backups not in (0, 1):
        raise InvalidArgumentError(
            f"ps_backups={backups}: a task has one backup (1) or none (0)", task=str(task)
        )
    if lag < 0:
        raise InvalidArgumentError(
            f"ps_backups_lag={lag}: it is a number of steps, 0 or more", task=str(task)
        )
    if not backups:
        return ""
    # Indices may have gaps, where tasks were removed.
    indices = sorted(spec.task_indices(task.job))
    if len(indices) < 2:
        raise InvalidArgumentError(
            f"ps_backups=1 needs two tasks of job {task.job!r} at least: there is nobody to hold "
            "this one's backup",
            task=str(task),
        )
    return str(TaskId(task.job, indices[(indices.index(task.index) + 1) % len(indices)]))


def begin_backup(
    worker: Worker, holder: str, lag: int, incarnation: int, send: Send
) -> ResumedTask:
    """Continues from the backup of this task, if there is one, and begins the next backup.

    Args:
        worker: the worker of this process, still empty.
        holder: name of the task that holds the backup.
        lag: most answered updates that the backup may lack.
        incarnation: number of this process, for a task without a backup.
        send: sends a message to the holder and returns the answer.
    """
    process_id = concurrency.random_id(62)
    resumed = take_up(worker, holder, process_id, send) or ResumedTask(incarnation, 0, {})
    primary = Primary(
        worker.task,
        holder,
        lag,
        process_id,
        {"incarnation": resumed.incarnation, "takeovers": resumed.takeovers, "lag": lag},
        functools.partial(image.capture, worker),
        send,
        functools.partial(worker.leave, replaced=True),
    )
    # Clients repeat their calls to the same incarnation. The answers keep a repeated update from
    # being applied twice.
    primary.inherit(resumed.answered)
    worker.begin_backup(primary)
    primary.start()
    return resumed


def take_up(worker: Worker, holder: str, process_id: int, send: Send) -> ResumedTask | None:
    """Continues from the backup of this task, if the holder has a usable image, and logs the outcome.

    Args:
        worker: the worker of this process, still empty.
        holder: name of the task that holds the backup.
        process_id: random number of this process.
        send: sends a message to the holder and returns the answer.
    """
    began = concurrency.monotonic()
    try:
        found = image.read(lambda header: send(header, ()), worker.task, process_id)
    except (UnauthenticatedError, PermissionDeniedError):
        # A process that started empty would be refused, too.
        raise
    except OpError as error:
        found = str(error)
    if isinstance(found, str):
        logging.info("%s starts empty, it has no backup: %s: %s", worker.task, holder, found)
        worker.store.run.origin = f"{worker.task} has no backup ({holder}: {found})"
        return None
    assert not worker.store.variables(), "a backup fills an empty worker"
    answered = image.take_up(worker, found)
    took = concurrency.monotonic() - began
    lag = int(found.about["lag"])
    lost = (
        f"at most {lag} updates after that are lost"
        if lag
        else "no update that was answered is lost"
    )
    logging.warning(
        "%s goes on from its backup at %s: %d variables after %d updates, read in %.2f s; %s",
        *(worker.task, holder, len(worker.store.variables()), found.version, took, lost),
    )
    metrics.add("backup_recoveries_total")
    about = found.about
    return ResumedTask(int(about["incarnation"]), int(about["takeovers"]) + 1, answered)
