"""The last save of a run: it holds the last step, or the end of the run says which steps are lost.

No later save can make up for a failed one. So the last save begins again when a task is lost
meanwhile, and waits when the disk is full. The ps tasks hold the model until the save has ended.
"""

from collections.abc import Callable

from absl import logging

import runtime as rt
from harness.training import times
from harness.training.start.managed_session import ManagedSession, StepRecoveries
from harness.training.start.session_start import LOST_CONTACT
from runtime import concurrency

_ADVICE = "start this task again to train them"


def save_the_end(
    session: ManagedSession,
    final: Callable[[rt.SessionLike], object],
    reached: int | None,
    checkpoint_dir: str,
    *,
    over: bool,
    signalled: Callable[[], bool],
) -> None:
    """Calls ``final``, again where necessary, and checks that the last trained step was saved.

    A task that dies while training ends takes its variables along. The chief restores the
    variables, but the loop that would train the lost steps again has ended. So the end is an error,
    and is not reported to the other tasks. A chief that is started again keeps the restored model
    and trains the lost steps.

    The save waits up to ``ROOM_SECS`` for room on a full disk, if training is over, and for a file
    system that does not answer in any case. An error of a saver or a hook that is no loss of the
    session's tasks is raised.

    Args:
        session: Training session. Lost tasks are recovered during its grace period.
        final: Function that writes the last checkpoint and summaries. Called again when a task was
            lost meanwhile.
        reached: Highest global step before the end; None when not known.
        checkpoint_dir: Directory of the checkpoints.
        over: True when training is done. False when training was interrupted: losses are only
            logged.
        signalled: Function that returns True after a signal. Then no wait begins.

    Raises:
        DiskFullError: The disk is full, and has stayed so.
        AbortedError: A task was lost, and steps with it. The message names the task and the steps.
        UnavailableError, DeadlineExceededError: The same, and the lost task has not come back.
    """
    assert session.seen.variable is not None, "without a global step no step can be lost"
    room_until = None
    recoveries = StepRecoveries(session)
    while True:
        # All of the save runs in one session underneath: a recovery in the middle would save old
        # values as the last.
        raw = session.raw
        try:
            now = int(raw.run(session.seen.variable))
            final(raw)
            break
        except (rt.lowlevel.DiskFullError, rt.lowlevel.DiskAwayError) as error:
            full = isinstance(error, rt.lowlevel.DiskFullError)
            # An interrupted run goes on later from the checkpoint before, and its host may end it
            # within seconds.
            if full and not over:
                raise
            if room_until is None:
                room_until = concurrency.monotonic() + times.ROOM_SECS
                logging.error(
                    "the last checkpoint waits for %s, %g minutes at most: nothing is lost until "
                    "then; Ctrl-C gives it up (%s)",
                    "room" if full else "its file system",
                    times.ROOM_SECS / 60,
                    error,
                )
            if not _until_next_try(
                room_until, times.ROOM_TRY_SECS if full else times.AWAY_TRY_SECS, signalled
            ):
                text = f"{error.message}; {not_saved(reached, checkpoint_dir)}"
                raise type(error)(text, task=error.task) from error
        except Exception as error:
            # The error is one of a saver or a hook, or of a session that was closed: no recovery
            # helps.
            if raw is session.raw and not raw.lost(error):
                raise
            try:
                if not recoveries.cure(raw, error):
                    raise
            except (rt.DeadlineExceededError, *LOST_CONTACT) as gone:
                text = f"{gone.message}; {not_saved(reached, checkpoint_dir)}; {_ADVICE}"
                _tell(type(gone)(text, task=gone.task), gone, over)
                return
    # The save itself went well. But it holds an older step, if a task came back from a checkpoint
    # meanwhile.
    if reached is not None and now < reached:
        loss = session.last_loss
        who = "was lost" if loss is not None and loss.task else "a task was lost"
        text = (
            f"{who} while training was ending: back from step {reached} to step {now}, "
            f"{reached - now} steps are lost; {_ADVICE}"
        )
        _tell(rt.AbortedError(text, task=loss.task if loss is not None else ""), loss, over)


def saved_step(checkpoint_dir: str) -> int | None:
    """Returns the step of the newest checkpoint of a directory; None when there is none or it is not known."""
    from harness.checkpoints.layout import latest_checkpoint, step_of

    try:
        return step_of(latest_checkpoint(checkpoint_dir) or "")
    except (rt.UnavailableError, rt.PermissionDeniedError) as error:
        logging.warning("which checkpoint is the newest is not known: %s", error)
        return None


def not_saved(reached: int | None, checkpoint_dir: str) -> str:
    """Returns the words for the steps that are lost when no further save comes.

    Args:
        reached: Highest global step; None when not known.
        checkpoint_dir: Directory of the checkpoints.
    """
    from harness.checkpoints.layout import latest_checkpoint, step_of

    try:
        found = latest_checkpoint(checkpoint_dir)
    except (rt.UnavailableError, rt.PermissionDeniedError) as error:
        # The words are part of another error's message, which must come out.
        return f"what was done since the last checkpoint is not saved: which one is the newest is not known ({error})"
    kept = f"the newest checkpoint is {found}" if found else "there is no checkpoint"
    step = step_of(found) if found else 0
    if reached is None or step is None or step >= reached:
        return f"what was done since the last checkpoint is not saved: {kept}"
    return f"step {reached} is not saved, {kept}: steps {step + 1} to {reached} are lost"


def _tell(error: rt.OpError, cause: BaseException | None, over: bool) -> None:
    if over:
        raise error from cause
    logging.error("%s", error)


def _until_next_try(until: float, pause_secs: float, signalled: Callable[[], bool]) -> bool:
    """Waits until the next try of a save; returns False after a signal, or when the time is up.

    The wait looks again and again: no event reports room on a disk, and a last save only notes
    signals.
    """
    next_try = min(until, concurrency.monotonic() + pause_secs)
    while not signalled() and concurrency.monotonic() < next_try:
        concurrency.sleep(times.SIGNAL_LOOK_SECS)
    return not signalled() and concurrency.monotonic() < until
