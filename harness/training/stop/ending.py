"""The end of one task's part in a run: the last save, then the report to the other tasks.

``Lifecycle.finish`` calls ``end_part``, where signals wait until the call returns. docs/endings.md
has the table of the ways in which a run can end.
"""

import os
from collections.abc import Callable, Iterable, Sequence

from absl import logging

import runtime as rt
from harness.launch.tasks import launcher_ends_ps
from harness.training.start.managed_session import ManagedSession
from harness.training.start.session_start import LOST_CONTACT
from harness.training.stop.last_save import not_saved, save_the_end, saved_step
from harness.training.stop.run_end import note_end
from harness.training.stop.task_run import TaskRun
from runtime.lowlevel import RunRecords, RunRecordView


def end_part(
    run: TaskRun,
    final: Callable[[rt.SessionLike], object],
    *,
    over: bool,
    checkpoint_dir: str | None,
    signals: Sequence[int],
) -> None:
    """Saves the last steps, then reports the end to the other tasks.

    Args:
        run: Part of the task in the run.
        final: Function that writes the last checkpoint and summaries. Called again when a task was
            lost meanwhile.
        over: True when training is done; False when training was interrupted and will continue
            later.
        checkpoint_dir: Directory of the chief's checkpoints; None when there are none.
        signals: Signals that have come since the end began. A task with a signal is started again,
            and so is not reported as done.

    Raises:
        AbortedError, UnavailableError: A task was lost, and steps with it; or a task was silent for
            too long to be saved. The end of training is not reported then.
    """
    session = run.session
    # Without a global step a checkpoint of the last step cannot be told from an earlier one.
    directory = checkpoint_dir if run.is_chief and session.seen.variable is not None else None
    # The departure of a ps comes first: nothing can be saved then, and the session may be closed
    # for that reason.
    if session.left is not None or session.raw.left_tasks:
        _log_left(session)
        return
    if run.silenced and directory is not None:
        raise _silence_error(run, directory)
    # A program may close its session before the end. Nothing can be saved then, but the run still
    # has to end.
    if session.closed:
        if directory is not None and not run.late:
            logging.warning(
                "the session was closed before the stop: %s", not_saved(run.reached, directory)
            )
    elif not run.late and directory is not None:
        _save_last(run, final, directory, over, signals)
    elif not run.late:
        final(session)
    # The report comes last: the ps tasks may leave as soon as the chief says that training is over.
    if over and not signals:
        if run.records is not None:
            _report_done(run, run.records, directory)
        elif directory is not None and not run.late:
            note_end(directory, saved_step(directory))
    elif run.is_elastic and not run.is_chief and run.records is not None:
        _say_goodbye(run.records, session)
    elif run.is_chief and not run.late:
        _log_interrupted(directory)


def _save_last(
    run: TaskRun,
    final: Callable[[rt.SessionLike], object],
    directory: str,
    over: bool,
    signals: Sequence[int],
) -> None:
    """Saves, as the chief.

    Raises UnavailableError where the silence of a task has ended the save.
    """
    try:
        save_the_end(
            run.session, final, run.reached, directory, over=over, signalled=lambda: bool(signals)
        )
    except (rt.CancelledError, RuntimeError) as error:
        if not run.silenced:
            raise
        raise _silence_error(run, directory) from error


def _silence_error(run: TaskRun, directory: str) -> rt.UnavailableError:
    return rt.UnavailableError(f"{run.silenced}; {not_saved(run.reached, directory)}")


def _log_interrupted(directory: str | None) -> None:
    """Logs the saved step, for a user who has just pressed Ctrl-C. Losses were logged before."""
    if directory is None:
        logging.warning("interrupted: nothing is saved, as no checkpoints are written here")
    elif (step := saved_step(directory)) is not None:
        logging.warning(
            "interrupted: step %d is saved in %s; the same command goes on there", step, directory
        )


def _say_goodbye(records: RunRecords, session: ManagedSession) -> None:
    """Reports the departure of this worker: training continues, and no task waits for a sign of life."""
    try:
        records.done(leave=False, session=session.id, goodbye=True)
        logging.info("left the training run, which goes on without this task")
    except (rt.TaskLeftError, *LOST_CONTACT) as error:
        logging.warning("could not tell the others that this task leaves: %s", error)


def _report_done(run: TaskRun, records: RunRecords, directory: str | None) -> None:
    """Reports the task as done.

    The chief first reports the end of training, with the saved step.
    """
    session = run.session
    try:
        if run.is_chief and not run.late:
            step = None if directory is None else saved_step(directory)
            _finish_run(run, records, step)
            if directory is not None:
                note_end(directory, step)
        # A launcher ends the ps tasks itself. Elsewhere they leave when every task has said that it
        # is done.
        answers = records.done(leave=not launcher_ends_ps(os.environ), session=session.id)
        # A chief has just saved, and knows its own step.
        if not run.is_chief:
            _log_too_late(run, answers.values())
    # The steps are saved, so a report that fails is no error of this task.
    except (rt.PermissionDeniedError, rt.TaskLeftError, *LOST_CONTACT) as error:
        if session.raw.left_tasks:
            _log_left(session)
            return
        logging.warning("could not tell the others that this task is done: %s", error)


def _finish_run(run: TaskRun, records: RunRecords, step: int | None) -> None:
    assert run.is_chief, "the chief ends the run"
    end = run.worker_silence_secs, _counter_key(run.session), step, run.is_elastic
    try:
        records.finish(*end)
    except rt.AbortedError:
        # A ps was started again after the last save, and knows of no chief: this chief claims the
        # lead.
        if not records.leads():
            raise
        records.claim()
        records.finish(*end)


def _counter_key(session: ManagedSession) -> tuple[str, str] | None:
    """Returns the container and the name of the global step on its task; None for a step that is no variable."""
    step = session.seen.variable
    return (step.spec.container, step.spec.name) if isinstance(step, rt.Variable) else None


def _log_left(session: ManagedSession) -> None:
    why = session.left or f"{', '.join(session.raw.left_tasks)} has left: training is over"
    logging.warning("%s; what was done here since the last checkpoint is not saved", why)


def _log_too_late(run: TaskRun, records: Iterable[RunRecordView]) -> None:
    """Logs the steps trained here after the chief had given the task up."""
    saved = max(
        (record.saved_step for record in records if record.saved_step is not None), default=None
    )
    if saved is None:
        return
    now = run.reached
    try:
        # The session underneath runs this, without a recovery: the ps may leave, now that this task
        # is done.
        now = int(run.session.raw.run(run.session.seen.variable, timeout_secs=run.answer_secs))
    except (rt.OpError, RuntimeError) as error:
        logging.info("how far training has come is not known: %s", error)
    if now is not None and now > saved:
        logging.warning(
            "the chief has ended training without this task: its last checkpoint is of step %d, "
            "steps %d to %d are not saved",
            saved,
            saved + 1,
            now,
        )
