"""The last save of a run: what training has come to is in it, or the end says what is lost.

Nothing comes after it that would make up for it. So it is begun anew where a task is lost meanwhile, and waits where
the disk is full: the tasks hold the model until it is saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

from absl import logging

import runtime as rt
from harness.training.managed_session import ManagedSession, Recoveries
from harness.training.session_manager import LOST_CONTACT

ROOM_SECS = 600.0
"""How long the last save of a run waits for room on its disk."""
_ROOM_TRY_SECS: Final = 10.0
"""How often it is begun anew meanwhile."""
_AWAY_TRY_SECS: Final = 1.0
"""How often, while its file system does not answer."""
_SIGNAL_SECS: Final = 0.5
_ADVICE: Final = "start this task again to train them"


def save_the_end(
    session: ManagedSession,
    final: Callable[[rt.Session], object],
    global_step: Any,
    reached: int | None,
    checkpoint_dir: str,
    *,
    over: bool,
    signalled: Callable[[], bool],
) -> None:
    """Has ``final`` write what is last, and makes sure that it holds the step that training had come to.

    A task that dies while training ends takes its variables along. The chief restores them, but the loop that would
    train the lost steps again is over. So the end is an error then, and nobody is told that training is done: the chief
    that is started again finds the restored model alive and trains what is missing.

    A full disk is waited for, if training is over, for ``ROOM_SECS``, and a file system that does not answer in any
    case. An error of a saver or a hook that is no loss of the session's tasks is raised as it is.

    Args:
        session: the training session; lost tasks are recovered for as long as its grace period lasts.
        final: writes the last checkpoint and summaries; begun anew when a task is lost meanwhile.
        global_step: the global step.
        reached: how far training had come; None when nobody knows.
        checkpoint_dir: where the newest checkpoint lies.
        over: training is done; False when it was interrupted and will be taken up again: losses are only logged.
        signalled: whether somebody has asked this process to end meanwhile: then nothing is waited for.

    Raises:
        DiskFullError: the disk is full, and has stayed so.
        AbortedError: a task was lost, and with it steps that nobody has trained again; names it and them.
        UnavailableError, DeadlineExceededError: the same, and the lost task has not come back.
    """
    room_until = None
    recoveries = Recoveries(session)
    while True:
        raw = session.raw  # a recovery within final would put old values into a checkpoint of the end
        try:
            now = int(raw.run(global_step))
            final(raw)
            break
        except (rt.lowlevel.DiskFullError, rt.lowlevel.DiskAwayError) as error:
            full = isinstance(error, rt.lowlevel.DiskFullError)
            if full and not over:
                raise
            if room_until is None:
                room_until = time.monotonic() + ROOM_SECS
                logging.error(
                    "the last checkpoint waits for %s, %g minutes at most: nothing is lost until then; Ctrl-C gives it "
                    "up (%s)",
                    *("room" if full else "its file system", ROOM_SECS / 60, error),
                )
            if not _until_next_try(room_until, _ROOM_TRY_SECS if full else _AWAY_TRY_SECS, signalled):
                text = f"{error.message}; {not_saved(reached, checkpoint_dir)}"
                raise type(error)(text, task=error.task) from error
        except Exception as error:
            if raw is session.raw and not raw.lost(error):
                raise  # of a saver or a hook of the user's own, or of the session's end
            try:
                if not recoveries.cure(raw, error):
                    raise
            except (rt.DeadlineExceededError, *LOST_CONTACT) as gone:
                text = f"{gone.message}; {not_saved(reached, checkpoint_dir)}; {_ADVICE}"
                _tell(type(gone)(text, task=gone.task), gone, over)
                return
    if reached is not None and now < reached:
        loss = session.last_loss
        who = "was lost" if loss is not None and loss.task else "a task was lost"
        text = (
            f"{who} while training was ending: back from step {reached} to step {now}, {reached - now} steps are lost; "
            f"{_ADVICE}"
        )
        _tell(rt.AbortedError(text, task=loss.task if loss is not None else ""), loss, over)


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


def _tell(error: rt.OpError, cause: BaseException | None, over: bool) -> None:
    if over:
        raise error from cause
    logging.error("%s", error)


def _until_next_try(until: float, pause_secs: float, signalled: Callable[[], bool]) -> bool:
    """Waits until a save may be begun anew; False where the time is over, or somebody wants the process to end.

    No event tells of room on a disk, and signals are only noted during a last save.
    """
    next_try = min(until, time.monotonic() + pause_secs)
    while not signalled() and time.monotonic() < next_try:
        time.sleep(_SIGNAL_SECS)
    return not signalled() and time.monotonic() < until
