"""Ending: the last checkpoint holds the step that training had come to, or an error tells what is missing.

A task that dies while training ends takes its variables along. The chief restores them, but the loop that would train
the lost steps again is over. So the end is an error then, and nobody is told that training is done: the chief that is
started again finds the restored model alive and trains what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from absl import logging

import runtime as rt
from harness.training.managed_session import ManagedSession
from harness.training.session_retry import LOST_CONTACT

_ADVICE = "start this task again to train them"


def save_the_end(
    session: ManagedSession,
    final: Callable[[rt.Session], object],
    global_step: Any,
    reached: int | None,
    checkpoint_dir: str,
    *,
    over: bool,
) -> None:
    """Has ``final`` write what is last, and makes sure that it is what was trained.

    Args:
        session: the training session; lost tasks are recovered for as long as its grace period lasts.
        final: writes the last checkpoint and summaries; begun anew when a task is lost meanwhile.
        global_step: the global step.
        reached: how far training had come; None when nobody knows.
        checkpoint_dir: where the newest checkpoint lies.
        over: training is done; False when it was interrupted and will be taken up again: losses are only logged.

    Raises:
        AbortedError: a task was lost, and with it steps that nobody has trained again; names it and them.
        UnavailableError, DeadlineExceededError: the same, and the lost task has not come back.
    """
    while True:
        raw = session.raw  # a recovery within final would put old values into a checkpoint of the end
        try:
            now = int(raw.run(global_step))
            final(raw)
            break
        except LOST_CONTACT as error:
            try:
                session.recover(raw, error)
            except (rt.DeadlineExceededError, *LOST_CONTACT) as gone:
                text = f"{gone.message}; {not_saved(reached, checkpoint_dir)}; {_ADVICE}"
                _log_end(type(gone)(text, task=gone.task), gone, over)
                return
        except (rt.CancelledError, RuntimeError):
            if not session.replaced(raw):  # by a recovery that was under way
                raise
    if reached is not None and now < reached:
        loss = session.last_loss
        who = "was lost" if loss is not None and loss.task else "a task was lost"
        text = (
            f"{who} while training was ending: back from step {reached} to step {now}, {reached - now} steps are lost; "
            f"{_ADVICE}"
        )
        _log_end(rt.AbortedError(text, task=loss.task if loss is not None else ""), loss, over)


def saved_step(checkpoint_dir: str) -> int | None:
    """The step of the newest checkpoint of a directory; None when there is none, or nobody can tell."""
    from harness.checkpoints.saver import latest_checkpoint

    try:
        name = os.path.basename(latest_checkpoint(checkpoint_dir) or "")
    except (rt.UnavailableError, rt.PermissionDeniedError) as error:
        logging.warning("which checkpoint is the newest is not known: %s", error)
        return None
    return int(name) if name.isdigit() else None


def not_saved(reached: int | None, checkpoint_dir: str) -> str:
    """What is lost when nothing is saved any more, in words.

    Args:
        reached: how far training had come; None when nobody knows.
        checkpoint_dir: where the newest checkpoint lies.
    """
    from harness.checkpoints.saver import latest_checkpoint

    try:
        found = latest_checkpoint(checkpoint_dir)
    except (rt.UnavailableError, rt.PermissionDeniedError) as error:  # this is for a message that must come out
        return f"what was done since the last checkpoint is not saved: which one is the newest is not known ({error})"
    kept = f"the newest checkpoint is {found}" if found else "there is no checkpoint"
    name = os.path.basename(found) if found else "0"
    if reached is None or not name.isdigit() or int(name) >= reached:
        return f"what was done since the last checkpoint is not saved: {kept}"
    return f"step {reached} is not saved, {kept}: steps {int(name) + 1} to {reached} are lost"


def _log_end(error: rt.OpError, cause: BaseException | None, over: bool) -> None:
    if over:
        raise error from cause
    logging.error("%s", error)
