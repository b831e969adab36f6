"""Who mirrors whom, and what a task that starts does about its mirror."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from absl import logging

from runtime.backup import image
from runtime.backup.primary import Answered, LaneKey, Send
from runtime.cluster.spec import ClusterSpec, TaskId
from runtime.errors import InvalidArgumentError, OpError
from runtime.observe.process_metrics import metrics
from runtime.task.worker import Worker


@dataclass(frozen=True)
class Reborn:
    """What a task takes over from its life before, beside what lies in its worker.

    Attributes:
        incarnation: what its peers know it by.
        lives: how often it has gone on from its mirror, this time included.
        answered: by lane, the last answer.
    """

    incarnation: int
    lives: int
    answered: Mapping[LaneKey, Answered]


def holder(spec: ClusterSpec, task: TaskId, backups: int, lag: int) -> str:
    """Name of the task that holds the mirror of ``task``: the next one of its job; empty without mirrors.

    Raises:
        InvalidArgumentError: there is no next task, or a number is out of range.
    """
    if backups not in (0, 1):
        raise InvalidArgumentError(f"ps_backups={backups}: a task has one mirror (1) or none (0)", task=str(task))
    if lag < 0:
        raise InvalidArgumentError(f"ps_backups_lag={lag}: it is a number of steps, 0 or more", task=str(task))
    if not backups:
        return ""
    indices = sorted(spec.task_indices(task.job))
    if len(indices) < 2:
        raise InvalidArgumentError(
            f"ps_backups=1 needs two tasks of job {task.job!r} at least: there is nobody to mirror this one",
            task=str(task),
        )
    return str(TaskId(task.job, indices[(indices.index(task.index) + 1) % len(indices)]))


def take_up(worker: Worker, holder: str, life: int, send: Send) -> Reborn | None:
    """Goes on from the mirror that the holder has of this task, if it has one; says what it does.

    Args:
        worker: empty still.
        holder: name of the task that holds the mirror.
        life: number of this process.
        send: sends a message to the holder.
    """
    began = time.monotonic()
    try:
        found = image.read(lambda header: send(header, ()), worker.task, life)
    except OpError as error:
        found = str(error)
    if isinstance(found, str):
        logging.info("%s starts empty, it has no mirror: %s: %s", worker.task, holder, found)
        worker.store.run.origin = f"{worker.task} has no mirror ({holder}: {found})"
        return None
    lives = int(found.about["lives"]) + 1
    answered = image.take_up(worker, found, lives)
    took = time.monotonic() - began
    lag = int(found.about["lag"])
    lost = f"at most {lag} updates after that are lost" if lag else "no update that was answered is lost"
    logging.warning(
        "%s goes on from its mirror at %s: %d variables after %d updates, read in %.2f s; %s",
        *(worker.task, holder, len(worker.store.variables()), found.version, took, lost),
    )
    metrics.add("mirror_recoveries_total")
    return Reborn(int(found.about["incarnation"]), lives, answered)
