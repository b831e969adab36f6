"""The wait of the chief for the tasks that still train.

``Lifecycle`` calls ``wait_for_others`` before the last save.

The other tasks may lose a ps meanwhile, and only a chief restores values. So the chief asks in a
loop, and each round recovers what is lost. ``policy`` decides for how long the chief waits, and for
which tasks.
"""

from absl import logging

import runtime as rt
from harness.training import times
from harness.training.start.session_start import LOST_CONTACT
from harness.training.stop.policy import WaitLimits, WaitNews, WaitState, after_answer, after_loss
from harness.training.stop.task_run import TaskRun
from runtime import concurrency
from runtime.lowlevel import RunRecords


def wait_for_others(run: TaskRun, records: RunRecords) -> None:
    """Waits until all tasks that take part are done.

    A living task is waited for without a limit. The wait ends early in three cases: the tasks that
    are left have been silent for the grace period, the ps tasks do not answer for the grace period,
    or a service fails.

    Args:
        run: Part of the chief in the run.
        records: Run records of the cluster.
    """
    assert run.is_chief and not run.late, (
        "only the chief of a run that goes on waits for other tasks"
    )
    session, grace_period = run.session, run.sessions.grace_period
    # From here on a question to a dead task ends early: training needs no answer any more.
    records.answer_secs = run.answer_secs
    limits = WaitLimits(run.silence_secs, run.worker_silence_secs)
    now = concurrency.monotonic()
    # No session has this number of recoveries, so the first round informs the ps tasks.
    state, rested = WaitState(now, now), -1
    try:
        while not state.over and not session.coord.failed:
            # A recovery within this wait ends when the wait does.
            grace_period.deadline = state.answered_at + run.silence_secs
            try:
                # Synchronous workers need not wait for the gradient of a chief that only waits. A
                # recovered ps has forgotten this.
                if state.wait_secs and rested != session.recoveries:
                    records.rest(session.id)
                    rested = session.recoveries
                silences = records.wait_done(state.wait_secs)
            except LOST_CONTACT as error:
                logging.info("while waiting for the others: %s", error)
                state = after_loss(state, concurrency.monotonic(), limits)
                if state.over:
                    logging.warning(
                        "not waiting any longer for the others: the tasks cannot be asked for them"
                    )
                else:
                    # This step recovers a lost task, which the other workers need too.
                    grace_period.wait(times.RETRY_SECS)
                    _run_step(run, records)
                continue
            state, news = after_answer(state, silences, concurrency.monotonic(), limits)
            _log_news(news, None if state.over else _run_step(run, records))
    finally:
        grace_period.deadline = None


def _log_news(news: WaitNews, step: int | None) -> None:
    for task, secs in news.given_up.items():
        logging.warning("not waiting any longer for %s: no sign of life for %.0f s", task, secs)
    if news.awaited:
        # A wait that lasts is seen without INFO, too.
        level = logging.WARNING if news.lasts else logging.INFO
        logging.log(level, "waiting for %s to finish training (step %s)", news.awaited, step)


def _run_step(run: TaskRun, records: RunRecords) -> int | None:
    """Returns the global step, None when the step is not known; recovers any ps that is lost."""
    session = run.session
    try:
        if session.closed:
            _restore_closed(run, records)
            return run.reached
        # The thread that probes has ended with the stop, so this step looks at every ps in its
        # place. A loss is only found by asking every ps: the global step may lie on one that lives.
        if run.sessions.probes:
            raw = session.raw
            try:
                run.sessions.check_values(raw, run.answer_secs)
            except LOST_CONTACT as error:
                session.recover(raw, error)
            except (rt.CancelledError, RuntimeError):
                if not session.replaced(raw):
                    raise
        if session.seen.variable is None:
            return None
        step = int(session.run(session.seen.variable, timeout_secs=run.answer_secs))
        run.note_reached(step)
        return step
    except (rt.DeadlineExceededError, *LOST_CONTACT) as error:
        logging.info("while waiting for the others: %s", error)
        return None


def _restore_closed(run: TaskRun, records: RunRecords) -> None:
    """Restores a lost ps for the other tasks, after the program has closed the chief's session.

    No session is left to recover the ps. The other tasks wait for the chief, and the chief waits
    for the other tasks.
    """
    # Only a chief that recovers by itself probes.
    if not run.sessions.probes:
        return
    if all(record.phase in ("ready", "finished") for record in records.inspect().values()):
        return
    logging.warning(
        "a ps has lost its values after this task has closed its session: restoring for the others"
    )
    try:
        run.sessions.restore()
    except (rt.DeadlineExceededError, *LOST_CONTACT):
        raise
    except (rt.OpError, RuntimeError) as error:
        # The end of the run is reported all the same: another chief may lead, or the checkpoint may
        # be damaged.
        logging.warning("the values could not be restored for the others: %s", error)
