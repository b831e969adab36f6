"""Lifecycle: one task's way through a training run, from its session to an end that leaves no task behind.

Supervisor and MonitoredTrainingSession are two faces of ``Lifecycle``. A run passes through four steps:

1. ``open`` makes the session that recovers by itself, and enters this task in the run records.
2. ``wait_for_others``: the chief waits for the tasks that still train.
3. ``finish`` has the caller write the last checkpoint, and then reports the end of training to every task.
4. ``close`` ends the session and the helper threads.

No work is limited here: another worker may train, and a last save or evaluation may run, for as long as needed. The
grace period limits the silence of a task. A living task gives a sign of life every second.

docs/guarantees.md has the table of the ways in which a run can end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, GracePeriod, failed
from harness.launch.tasks import attempt, launcher_ends_ps
from harness.training.start.managed_session import ManagedSession
from harness.training.start.session_manager import LOST_CONTACT
from harness.training.start.session_source import ANSWER_SECS, RunSessions, SessionSource
from harness.training.stop.last_save import not_saved, save_the_end, saved_step
from harness.training.stop.policy import (
    EndFacts,
    EndReport,
    LastSave,
    RunEvent,
    RunPhase,
    WaitLimits,
    WaitNews,
    WaitState,
    after_answer,
    after_loss,
    choose_report,
    choose_save,
    next_phase,
)
from harness.training.stop.preemption import interrupt_between_locks, shielded
from harness.training.stop.run_end import note_end
from harness.training.stop.stop_orders import StopOrders
from runtime import concurrency
from runtime.lowlevel import RunRecords, RunRecordView

PROBE_SECS = 1.0
"""Seconds between two looks of the chief for a lost task that its own steps do not need at the moment."""
FAILURE_GRACE_SECS = 10.0
"""Seconds that a step may continue after a service has failed: the step may wait in vain then."""
_RETRY_SECS = 0.2
"""Seconds between two questions to ps tasks that do not answer while the chief waits for workers."""
_POLL_SECS = 1.0
"""Seconds between two looks at the steps that run after a stop, at most."""
LEAST_SILENCE_SECS = 4.0
"""Least silence after which a task is given up, however short the grace period: signs of life may be late."""
_WITHOUT_SESSION = (RunPhase.OPENING, RunPhase.OVER)
"""Phases in which there is nothing to wait for, to save or to report."""
ELASTIC = "elastic"
"""Collection of a graph that is not empty where workers come and go. A worker that leaves is not waited for then."""
ELASTIC_SILENCE_SECS = 10.0
"""Silence after which the end does not wait for a worker, where workers come and go: the worker may never return."""


class Lifecycle:
    """The life of one task in a run.

    A session has three helper threads. ``watch-stop`` cancels a step that outlives a stop, ``await-stop`` waits for the
    order of another task to stop, and ``probe-tasks`` finds lost tasks on the chief.

    Args:
        coord: Coordinator that stops the task.
        is_chief: True on the chief, which waits for the other tasks at the end and then ends the run.
        stop_grace_secs: Seconds that a task may be silent at the end, and that a step may take after a stop.
    """

    def __init__(self, coord: Coordinator, is_chief: bool, stop_grace_secs: float) -> None:
        self.coord = coord
        self.is_chief = is_chief
        self.grace_secs = stop_grace_secs
        self._answer_secs = min(ANSWER_SECS, max(2.0, stop_grace_secs))
        self.grace_period = GracePeriod(coord, stop_grace_secs)
        self.session: ManagedSession | None = None
        self.silence_secs = max(stop_grace_secs, LEAST_SILENCE_SECS)
        """Silence, in seconds, after which a task is not waited for at the end."""
        self._elastic = False
        self.phase = RunPhase.OPENING
        """Place of the task on its way through the run."""
        self.story: list[tuple[float, RunEvent, RunPhase]] = []
        """Changes of the phase since the last ``open``: ``time.monotonic()``, the event, and the phase after it."""
        self.save: Callable[[], object] | None = None
        """Function that saves, now or soon. The chief calls it when a ps is about to leave; a face with a saver sets
        it."""
        self._sessions: RunSessions | None = None
        self._records: RunRecords | None = None
        self._global_step: Any = None
        self._reached: int | None = None
        self._silenced = ""
        self._orders: StopOrders | None = None
        self._closed = concurrency.Event()
        atexit.register(_report_at_exit, weakref.ref(self))

    @property
    def late(self) -> bool:
        """True if the run had finished before this task came."""
        return self._sessions is not None and self._sessions.late

    def _note(self, event: RunEvent) -> None:
        """Moves to the phase after an event, and keeps a change for a reader of the story."""
        before, self.phase = self.phase, next_phase(self.phase, event)
        if before is self.phase:
            return
        self.story.append((concurrency.monotonic(), event, self.phase))
        logging.debug("%s: %s", self.phase.name.lower(), event.value)

    def open(
        self,
        source: SessionSource,
        graph: rt.Graph,
        *,
        recover: bool,
        global_step: Any,
        on_recovery: Callable[[rt.Session], object] | None = None,
    ) -> ManagedSession:
        """Opens the session, and starts the helper threads.

        A task that comes after the end of the run gets a session too, with a stop requested already.

        Args:
            source: Source of the sessions.
            graph: Graph of the session.
            recover: True for a session that recovers by itself.
            global_step: Variable that counts the steps, or None.
            on_recovery: Function that is called with each new session after a recovery.
        """
        interrupt_between_locks()
        self.grace_period.renew()
        self.story.clear()
        self._note(RunEvent.OPENS)
        self._elastic = bool(graph.get_collection(ELASTIC))
        self._records, self._global_step = source.records, global_step
        self._reached = None
        self._silenced = ""
        if before := attempt(os.environ):
            logging.info("this is start number %d of this task", before + 1)
        self._sessions = RunSessions(source, self.grace_period, probes=recover and self.is_chief)
        self.session = ManagedSession(
            self._sessions, graph, self.grace_period, recover=recover, global_step=global_step, on_recovery=on_recovery
        )
        self.session.is_chief = self.is_chief
        self._note(RunEvent.OPENED)
        if self.late:
            self.coord.request_stop()
        self._start_threads(self.session, self._sessions)
        return self.session

    def _start_threads(self, session: ManagedSession, sessions: RunSessions) -> None:
        # The threads of a session before this one end by their own event.
        self._closed.set()
        self._closed = concurrency.Event()
        if sessions.probes and not self.late:
            concurrency.Thread(target=self._probe, args=(session, sessions), name="probe-tasks", daemon=True).start()
        concurrency.Thread(target=self._watch, args=(session, self._closed), name="watch-stop", daemon=True).start()
        if self._records is not None and not self.late:
            self._orders = StopOrders(self._records, self.coord, lambda: self.save)
            self._orders.start()

    def _watch(self, session: ManagedSession, closed: concurrency.Event) -> None:
        """Cancels, after a stop, a step that runs too long; closes the session when a task is silent too long.

        Without this a step would wait for ever for a gradient of a worker that has stopped, and a last save for a ps
        whose machine is gone.
        """
        self.coord.wait_for_stop()
        stopped_at = concurrency.monotonic()
        if self._records is not None:
            self._records.close()
        limit = min(FAILURE_GRACE_SECS, self.grace_secs) if failed(self.coord) else self.grace_secs
        silence = Silence(session, self._records)
        while not closed.wait(max(0.05, min(_POLL_SECS, limit / 4))):
            # The stop may have been cleared: a thread of its own watches the next session.
            if self.phase is RunPhase.OVER or not self.coord.should_stop():
                return
            took = min(session.step_secs(), concurrency.monotonic() - stopped_at)
            if took > 0 and took >= limit and self.phase is RunPhase.TRAINING:
                logging.warning("a step still runs %.3g s after the stop: it is cancelled", took)
                session.raw.cancel_steps()
                session.end_steps()
            if self.phase is RunPhase.ENDING and (silent := silence.secs()) >= self.silence_secs:
                self._silenced = f"a task has given no sign of life for {silent:.0f} s while training was ending"
                logging.warning("%s: what waits for it is cancelled", self._silenced)
                session.close()
                return

    def stop_everybody(self, reason: str = "") -> None:
        """Orders all tasks that take part to stop, by the run records.

        Without a session of a cluster there is no other task, and nothing is done.

        Args:
            reason: Reason in words, for the logs of the other tasks.

        Raises:
            OpError: The order did not reach a ps.
        """
        if self._records is not None and self.session is not None and not self.session.closed:
            self._records.stop(reason)

    def _probe(self, session: ManagedSession, sessions: RunSessions) -> None:
        """Makes the chief restore lost variables even while its training loop is busy elsewhere."""
        while not self.coord.wait_for_stop(PROBE_SECS):
            raw = session.raw
            try:
                sessions.check_values(raw, ANSWER_SECS)
            except RuntimeError:
                # The session was closed, unless another thread has replaced it meanwhile.
                if raw is session.raw:
                    return
            except LOST_CONTACT as error:
                try:
                    session.recover(raw, error)
                except Exception as failure:
                    # The next training step raises this error too, in the thread of the user.
                    logging.error("recovery failed: %s", failure)
                    return
            except rt.OpError as error:
                logging.info("probing the tasks: %s", error)

    def limit_silence(self) -> None:
        """Starts the end: from here on the silence of a ps closes the session, and so cancels every wait.

        Services may still be at work, and a save of theirs may wait for that ps.
        """
        self._note(RunEvent.ENDS)

    def leads(self) -> bool:
        """Returns True while this chief leads the run, and so may write checkpoints."""
        return self._records is None or self._records.leads()

    def wait_for_others(self) -> None:
        """Waits, as the chief, until all tasks that take part are done.

        The other tasks may lose a ps meanwhile, which only a chief can restore. A living task is waited for without a
        limit. The wait ends early in three cases: the tasks that are left have been silent for the grace period, the
        ps tasks do not answer for the grace period, or a service fails.
        """
        records, session = self._records, self.session
        self._note_reached()
        if records is None or session is None or not self.is_chief or self.late or self.phase in _WITHOUT_SESSION:
            return
        # From here on a question to a dead task ends early: training needs no answer any more.
        records.answer_secs = self._answer_secs
        limits = WaitLimits(self.silence_secs, self._worker_silence_secs)
        now = concurrency.monotonic()
        state, rested = WaitState(now, now), -1
        self._note(RunEvent.WAITS)
        try:
            while not state.over and not failed(self.coord):
                self.grace_period.deadline = state.answered_at + self.silence_secs
                try:
                    # Synchronous workers need not wait for the gradient of a chief that only waits. A recovered ps has
                    # forgotten this.
                    if state.wait_secs and rested != session.recoveries:
                        records.rest(session.id)
                        rested = session.recoveries
                    silences = records.wait_done(state.wait_secs)
                except LOST_CONTACT as error:
                    logging.info("while waiting for the others: %s", error)
                    state = after_loss(state, concurrency.monotonic(), limits)
                    if state.over:
                        logging.warning("not waiting any longer for the others: the tasks cannot be asked for them")
                    else:
                        # This step recovers a lost task, which the other workers need too.
                        self.grace_period.wait(_RETRY_SECS)
                        self._step(session)
                    continue
                state, news = after_answer(state, silences, concurrency.monotonic(), limits)
                self._tell_of_wait(news, None if state.over else self._step(session))
        finally:
            self.grace_period.deadline = None
            self._note(RunEvent.WAITED)

    def _tell_of_wait(self, news: WaitNews, step: int | None) -> None:
        for task, secs in news.given_up.items():
            logging.warning("not waiting any longer for %s: no sign of life for %.0f s", task, secs)
        if news.awaited:
            # A wait that lasts is seen without INFO, too.
            level = logging.WARNING if news.lasts else logging.INFO
            logging.log(level, "waiting for %s to finish training (step %s)", news.awaited, step)

    @property
    def _worker_silence_secs(self) -> float:
        """Silence, in seconds, after which a worker is not waited for at the end."""
        return min(self.silence_secs, ELASTIC_SILENCE_SECS) if self._elastic else self.silence_secs

    def _step(self, session: ManagedSession) -> int | None:
        """Returns the global step, None when it is not known; recovers any ps that is lost."""
        try:
            if session.closed:
                self._restore_closed()
                return self._reached
            # The thread that probes has ended with the stop, so this step looks at every ps in its place.
            if self._sessions is not None and self._sessions.probes:
                raw = session.raw
                try:
                    self._sessions.check_values(raw, self._answer_secs)
                except LOST_CONTACT as error:
                    session.recover(raw, error)
                except (rt.CancelledError, RuntimeError):
                    if not session.replaced(raw):
                        raise
            if self._global_step is None:
                return None
            step = int(session.run(self._global_step, timeout_secs=self._answer_secs))
            self._reached = max(step, self._reached or 0)
            return step
        except (rt.DeadlineExceededError, *LOST_CONTACT) as error:
            logging.info("while waiting for the others: %s", error)
            return None

    def _restore_closed(self) -> None:
        """Restores, for the other tasks, a ps that was lost after the program has closed the chief's session.

        No session is left that would recover, and the other tasks wait for this chief, which waits for them.
        """
        assert self._records is not None and self._sessions is not None
        # Only a chief that recovers by itself probes.
        if not self._sessions.probes:
            return
        records = self._records.inspect()
        if all(record.phase in ("ready", "finished") for record in records.values()):
            return
        logging.warning("a ps has lost its values after this task has closed its session: restoring for the others")
        try:
            self._sessions.restore()
        except (rt.DeadlineExceededError, *LOST_CONTACT):
            raise
        except (rt.OpError, RuntimeError) as error:
            # The end of the run is reported all the same: another chief may lead, or the checkpoint may be damaged.
            logging.warning("the values could not be restored for the others: %s", error)

    def _note_reached(self) -> None:
        if self.session is not None and (step := self.session.seen.reached) is not None:
            self._reached = max(step, self._reached or 0)

    def finish(
        self,
        final: Callable[[rt.SessionLike], object],
        *,
        over: bool,
        checkpoint_dir: str | None = None,
        shield: bool = True,
    ) -> None:
        """Ends this task's part: saves, then reports the end to the other tasks. Does nothing the second time.

        Args:
            final: Function that writes the last checkpoint and summaries. Called again when a task was lost meanwhile.
            over: True when training is done; False when training was interrupted and will continue later.
            checkpoint_dir: Directory of the chief's checkpoints; None when there are none.
            shield: True to hold SIGTERM and Ctrl-C back until the end of this call (``preemption.shielded``). With
                False ``finish`` may be called again after an interruption.

        Raises:
            AbortedError, UnavailableError: A task was lost, and steps with it (``save_the_end``), or was silent for too
                long to be saved. The end of training is not reported then.
        """
        if self.session is None or self.phase in _WITHOUT_SESSION:
            return
        held: contextlib.AbstractContextManager[list[int]] = shielded() if shield else contextlib.nullcontext([])
        with held as signals:
            self._note(RunEvent.ENDS)
            self._note_reached()
            if self._records is not None:
                self._records.answer_secs = self._answer_secs
            try:
                self._finish(self.session, final, over, checkpoint_dir, signals)
            except BaseException as error:
                self._note(RunEvent.DONE if shield or isinstance(error, Exception) else RunEvent.INTERRUPTED)
                raise
            self._note(RunEvent.DONE)

    def _finish(
        self,
        session: ManagedSession,
        final: Callable[[rt.SessionLike], object],
        over: bool,
        checkpoint_dir: str | None,
        signals: Sequence[int],
    ) -> None:
        facts = EndFacts(
            is_chief=self.is_chief,
            saves=self.is_chief and checkpoint_dir is not None and self._global_step is not None,
            late=self.late,
            left=session.left is not None or bool(session.raw.left_tasks),
            closed=session.closed,
            silenced=bool(self._silenced),
            over=over,
            signalled=False,
            shared=self._records is not None,
            elastic=self._elastic,
        )
        directory = str(checkpoint_dir) if facts.saves else None
        match choose_save(facts):
            case LastSave.LEFT:
                self._log_left(session)
                return
            case LastSave.SILENCED:
                raise self._silence_error(directory)
            case LastSave.CLOSED:
                text = not_saved(self._reached, str(directory))
                logging.warning("the session was closed before the stop: %s", text)
            case LastSave.SAVE:
                self._save_last(session, final, str(directory), over, signals)
            case LastSave.FINAL:
                final(session)
        self._report(choose_report(replace(facts, signalled=bool(signals))), session, directory)

    def _save_last(
        self,
        session: ManagedSession,
        final: Callable[[rt.SessionLike], object],
        directory: str,
        over: bool,
        signals: Sequence[int],
    ) -> None:
        """Saves, as the chief; raises UnavailableError where the silence of a task has ended that."""
        try:
            save_the_end(
                session,
                final,
                self._global_step,
                self._reached,
                directory,
                over=over,
                signalled=lambda: bool(signals),
            )
        except (rt.CancelledError, RuntimeError) as error:
            if not self._silenced:
                raise
            raise self._silence_error(directory) from error

    def _silence_error(self, directory: str | None) -> rt.UnavailableError:
        return rt.UnavailableError(f"{self._silenced}; {not_saved(self._reached, str(directory))}")

    def _report(self, report: EndReport, session: ManagedSession, directory: str | None) -> None:
        match report:
            case EndReport.DONE if self._records is not None:
                self._report_done(self._records, session, directory)
            case EndReport.MARK:
                note_end(str(directory), saved_step(str(directory)))
            case EndReport.GOODBYE if self._records is not None:
                self._say_goodbye(self._records, session)
            case EndReport.INTERRUPTED:
                self._log_interrupted(directory)

    def _log_interrupted(self, checkpoint_dir: str | None) -> None:
        """Logs the saved step, for a user who has just pressed Ctrl-C. Losses were logged before."""
        if checkpoint_dir is None:
            logging.warning("interrupted: nothing is saved, as no checkpoints are written here")
        elif (step := saved_step(checkpoint_dir)) is not None:
            logging.warning("interrupted: step %d is saved in %s; the same command goes on there", step, checkpoint_dir)

    def _say_goodbye(self, records: RunRecords, session: ManagedSession) -> None:
        """Reports the departure of this worker: training continues, and no task waits for a sign of life."""
        try:
            records.done(leave=False, session=session.id, goodbye=True)
            logging.info("left the training run, which goes on without this task")
        except (rt.TaskLeftError, *LOST_CONTACT) as error:
            logging.warning("could not tell the others that this task leaves: %s", error)

    def _report_done(self, records: RunRecords, session: ManagedSession, checkpoint_dir: str | None) -> None:
        try:
            if self.is_chief and not self.late:
                step = None if checkpoint_dir is None else saved_step(checkpoint_dir)
                end = self._worker_silence_secs, _key(self._global_step), step, self._elastic
                try:
                    records.finish(*end)
                except rt.AbortedError:
                    # A ps was started again after the last save, and knows of no chief: this chief claims the lead.
                    if not records.leads():
                        raise
                    records.claim()
                    records.finish(*end)
                if checkpoint_dir is not None:
                    note_end(checkpoint_dir, step)
            answers = records.done(leave=not launcher_ends_ps(os.environ), session=session.id)
            if not self.is_chief:
                self._log_too_late(answers.values(), session)
        except (rt.PermissionDeniedError, rt.TaskLeftError, *LOST_CONTACT) as error:
            if session.raw.left_tasks:
                self._log_left(session)
                return
            logging.warning("could not tell the others that this task is done: %s", error)

    def _log_left(self, session: ManagedSession) -> None:
        why = session.left or f"{', '.join(session.raw.left_tasks)} has left: training is over"
        logging.warning("%s; what was done here since the last checkpoint is not saved", why)

    def _log_too_late(self, records: Iterable[RunRecordView], session: ManagedSession) -> None:
        """Logs the steps that this task has trained after the chief had given the task up."""
        saved = max((record.saved_step for record in records if record.saved_step is not None), default=None)
        if saved is None:
            return
        now = self._reached
        try:
            # The session underneath runs this, without a recovery: the ps may leave, now that this task is done.
            now = int(session.raw.run(self._global_step, timeout_secs=self._answer_secs))
        except (rt.OpError, RuntimeError) as error:
            logging.info("how far training has come is not known: %s", error)
        if now is not None and now > saved:
            logging.warning(
                "the chief has ended training without this task: its last checkpoint is of step %d, steps %d to %d are "
                "not saved",
                *(saved, saved + 1, now),
            )

    def abandon(self) -> None:
        """Ends the run after an error: nothing is saved, and the end of training is not reported."""
        self._note(RunEvent.DONE)

    def at_exit(self) -> None:
        """Logs, when the process ends, that training was not brought to an end before."""
        if self._orders is not None:
            self._orders.end()
        if self.session is None or self._records is None or self.late:
            return
        if self.phase in _WITHOUT_SESSION or self._closed.is_set():
            return
        self._note_reached()
        reached = "" if self._reached is None else f" (step {self._reached} was the last seen here)"
        logging.warning(
            "this process ends without having come through Supervisor.stop() or the end of its session's block: nobody "
            "is told that it is done%s",
            f", and what was trained since the last checkpoint is not saved{reached}" if self.is_chief else "",
        )

    def close(self) -> None:
        """Closes the session; never waits for a dead task."""
        self._closed.set()
        self.grace_period.end()
        if self._records is not None:
            self._records.close()
        if self.session is not None:
            self.session.close()


class Silence:
    """The silence of the tasks that a session needs.

    Args:
        session: Session whose master knows the silence, if the master is in this process.
        records: Run records that are asked otherwise.
    """

    def __init__(self, session: ManagedSession, records: RunRecords | None) -> None:
        self._session = session
        self._records = records
        self._answered_at: float | None = None

    def secs(self) -> float:
        """Returns the seconds since the last sign of life of the most silent task; 0 when all tasks live."""
        known = self._session.raw.silent_secs
        if known is not None or self._records is None:
            return known or 0.0
        if self._answered_at is None:
            self._answered_at = concurrency.monotonic()
        try:
            self._records.inspect()
            self._answered_at = concurrency.monotonic()
        except LOST_CONTACT as error:
            logging.info("looking whether all tasks live: %s", error)
        return concurrency.monotonic() - self._answered_at


def _key(variable: Any) -> tuple[str, str] | None:
    """Returns the container and the name of a variable on its task; None for anything else."""
    spec = getattr(variable, "spec", None)
    return (spec.container, spec.name) if isinstance(variable, rt.Variable) and spec is not None else None


def _report_at_exit(life: weakref.ref[Lifecycle]) -> None:
    known = life()
    if known is not None:
        known.at_exit()
