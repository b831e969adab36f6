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
import enum
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, GracePeriod, failed
from harness.launch.tasks import attempt, launcher_ends_ps
from harness.training.last_save import not_saved, save_the_end, saved_step
from harness.training.managed_session import ManagedSession
from harness.training.preemption import interrupt_between_locks, shielded
from harness.training.run_end import note_end
from harness.training.session_manager import LOST_CONTACT, TrainingOver
from runtime.lowlevel import RunRecords, RunRecordView

_WAIT_SECS = 10.0
"""Seconds that a question at the end may take, and between two lines in the log of a wait."""
PROBE_SECS = 1.0
"""Seconds between two looks of the chief for a lost task that its own steps do not need at the moment."""
FAILURE_GRACE_SECS = 10.0
"""Seconds that a step may continue after a service has failed: the step may wait in vain then."""
_POLL_SECS = 1.0
"""Seconds between two looks at the steps that run after a stop, at most."""
_STOP_WAIT_SECS = 60.0
"""Seconds that a thread of a ps waits for an order to stop before a new question. An order is answered at once."""
_AT_EXIT_SECS = 5.0
"""Seconds that the end of the process waits for the thread that asks for orders."""
LEAST_SILENCE_SECS = 4.0
"""Least silence after which a task is given up, however short the grace period: signs of life may be late."""
GOES_TOO_SECS = 2.0
"""Seconds that a chief waits before it saves for a ps that stops: a chief that is to stop, too, saves at its end."""
LAST_SAVE_SECS = 10.0
"""Seconds between the chief's second save and the end of a ps that was asked to stop."""
ELASTIC = "elastic"
"""Collection of a graph that is not empty where workers come and go. A worker that leaves is not waited for then."""
ELASTIC_SILENCE_SECS = 10.0
"""Silence after which the end does not wait for a worker, where workers come and go: the worker may never return."""


class RunPhase(enum.Enum):
    """Place of a task on its way through a run. Each leads to the next; an interruption leads to ENDING."""

    TRAINING = enum.auto()
    """Steps run. After a stop they have the grace period to end."""
    WAITING = enum.auto()
    """The chief waits for the tasks that still train, and recovers the tasks that those need."""
    ENDING = enum.auto()
    """The last steps are saved and the end is reported. A task that stays silent cuts this short."""
    ENDED = enum.auto()
    """Nothing is left to save or to report."""


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
        self._answer_secs = min(_WAIT_SECS, max(2.0, stop_grace_secs))
        self.grace_period = GracePeriod(coord, stop_grace_secs)
        self.session: ManagedSession | None = None
        self.silence_secs = max(stop_grace_secs, LEAST_SILENCE_SECS)
        """Silence, in seconds, after which a task is not waited for at the end."""
        self._elastic = False
        self.late = False
        """True if the run had finished before this task came."""
        self.phase = RunPhase.TRAINING
        self.save: Callable[[], object] | None = None
        """Function that saves, now or soon. The chief calls it when a ps is about to leave; a face with a saver sets
        it."""
        self._records: RunRecords | None = None
        self._global_step: Any = None
        self._reached: int | None = None
        self._probed: Any = None
        self._without_value: frozenset[str] = frozenset()
        self._silenced = ""
        self._awaiting: threading.Thread | None = None
        self._closed = threading.Event()
        atexit.register(_report_at_exit, weakref.ref(self))

    def open(
        self,
        ready: Callable[[bool], rt.Session],
        bare: Callable[[], rt.Session],
        graph: rt.Graph,
        *,
        records: RunRecords | None,
        recover: bool,
        global_step: Any,
        on_recovery: Callable[[rt.Session], object] | None = None,
        probe: Any = None,
        give_up_secs: float = math.inf,
    ) -> ManagedSession:
        """Opens the session, and starts the helper threads.

        A task that comes after the end of the run gets a session too, with a stop requested already.

        Args:
            ready: Function that opens a session ready for training. Its argument is True in a recovery. The function
                raises TrainingOver when the run has finished.
            bare: Function that opens a session that need not be ready.
            graph: Graph of the session.
            records: Run records of the cluster; None when no other task takes part.
            recover: True for a session that recovers by itself.
            global_step: Variable that counts the steps, or None.
            on_recovery: Function that is called with each new session after a recovery.
            probe: Tensor with the names of variables without a value. The chief fetches it every ``PROBE_SECS`` and so
                finds a lost task while its training loop is busy elsewhere.
            give_up_secs: Seconds that ``ready`` waits at most, for the log.
        """
        interrupt_between_locks()
        self.grace_period.renew()
        self._elastic = bool(graph.get_collection(ELASTIC))
        self._records, self._global_step, self.late = records, global_step, False
        self._reached = None
        self.phase = RunPhase.TRAINING
        self._silenced = ""
        if before := attempt(os.environ):
            logging.info("this is start number %d of this task", before + 1)

        probes = recover and self.is_chief and records is not None and probe is not None
        self._probed = probe if probes else None

        def opener(recovering: bool) -> rt.Session:
            while True:
                try:
                    session = ready(recovering)
                except TrainingOver as error:
                    if recovering:
                        raise
                    logging.info("nothing left to do: %s", error)
                    self.late = True
                    session = bare()
                except rt.TaskLeftError:
                    raise
                except rt.OutOfRangeError as error:
                    # An ``init_fn`` has met the end of its data. In a training loop that error would be a clean end.
                    raise RuntimeError(f"The model could not be made ready: {error}") from error
                try:
                    if records is not None:
                        records.join(session.id)
                    if probes:
                        self._without_value = _names(session, probe, _WAIT_SECS)
                    return session
                except LOST_CONTACT as error:
                    # A task was lost just after the session was ready: another session, while there is time.
                    session.close()
                    if self.grace_period.exhausted():
                        raise
                    logging.info("lost contact again: %s", error)
                except BaseException:
                    # The caller does not receive the session, and so cannot close it.
                    session.close()
                    raise

        self.session = ManagedSession(
            opener,
            graph,
            self.grace_period,
            recover=recover,
            global_step=global_step,
            on_recovery=on_recovery,
            give_up_secs=give_up_secs,
        )
        self.session.is_chief = self.is_chief
        if self.late:
            self.coord.request_stop()
        # The threads of a session before this one end by their own event.
        self._closed.set()
        self._closed = threading.Event()
        if probes and not self.late:
            threading.Thread(target=self._probe, args=(self.session,), name="probe-tasks", daemon=True).start()
        threading.Thread(target=self._watch, args=(self.session, self._closed), name="watch-stop", daemon=True).start()
        if records is not None and not self.late:
            self._awaiting = threading.Thread(target=self._await_stop, args=(records,), name="await-stop", daemon=True)
            self._awaiting.start()
        return self.session

    def _watch(self, session: ManagedSession, closed: threading.Event) -> None:
        """Cancels, after a stop, a step that runs too long; closes the session when a task is silent too long.

        Without this a step would wait for ever for a gradient of a worker that has stopped, and a last save for a ps
        whose machine is gone.
        """
        self.coord.wait_for_stop()
        stopped_at = time.monotonic()
        if self._records is not None:
            self._records.close()
        limit = min(FAILURE_GRACE_SECS, self.grace_secs) if failed(self.coord) else self.grace_secs
        silence = Silence(session, self._records)
        while not closed.wait(max(0.05, min(_POLL_SECS, limit / 4))):
            # The stop may have been cleared: a thread of its own watches the next session.
            if self.phase is RunPhase.ENDED or not self.coord.should_stop():
                return
            took = min(session.step_secs(), time.monotonic() - stopped_at)
            if took > 0 and took >= limit and self.phase is RunPhase.TRAINING:
                logging.warning("a step still runs %.3g s after the stop: it is cancelled", took)
                session.raw.cancel_steps()
                session.end_steps()
            if self.phase is RunPhase.ENDING and (silent := silence.secs()) >= self.silence_secs:
                self._silenced = f"a task has given no sign of life for {silent:.0f} s while training was ending"
                logging.warning("%s: what waits for it is cancelled", self._silenced)
                session.close()
                return

    def _await_stop(self, records: RunRecords) -> None:
        """Requests a stop when another task, such as an evaluator, has ordered training to end.

        The order comes by the run records on the ps, and so does the notice of a ps that is about to leave.
        """
        while not self.coord.should_stop():
            try:
                reason, goes_in_secs = records.wait_stop(_STOP_WAIT_SECS)
            except (rt.CancelledError, rt.TaskLeftError):
                return
            except (rt.DeadlineExceededError, *LOST_CONTACT):
                # A lost task is no matter of this thread: the next step finds the loss and recovers.
                self.coord.wait_for_stop(PROBE_SECS)
                continue
            except rt.OpError as error:
                logging.warning("an order to end training would not be noticed: %s", error)
                return
            if reason:
                logging.info("training is to end: %s", reason)
                self.coord.request_stop()
            elif goes_in_secs is not None:
                self._save_before(time.monotonic() + goes_in_secs)

    def _save_before(self, goes_at: float) -> None:
        """Saves, as the chief, the variables of a ps that is about to leave: now, and once more shortly before.

        Args:
            goes_at: Time at which the ps leaves, on ``time.monotonic()``.
        """
        if self.save is not None and not self.coord.wait_for_stop(GOES_TOO_SECS):
            left = goes_at - time.monotonic()
            logging.warning("a ps has been told to go, and serves on for %.0f s at most: saving what it holds", left)
            # An error of this save stops training, as an error of a save that the timer begins.
            with self.coord.stop_on_exception():
                self.save()
                before = goes_at - LAST_SAVE_SECS - time.monotonic()
                if left > LAST_SAVE_SECS and not self.coord.wait_for_stop(max(0.0, before)):
                    self.save()
        # The ps reports its departure until it is gone, and is saved for once.
        self.coord.wait_for_stop(max(PROBE_SECS, goes_at - time.monotonic()))

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

    def _check_values(self, raw: rt.Session, secs: float) -> None:
        """Raises UnavailableError or AbortedError when any task, or the value of any variable, is lost."""
        lost = sorted(_names(raw, self._probed, secs) - self._without_value)
        if lost:
            # The task lives, but an update that failed has taken the values along: a new session restores them.
            error = rt.AbortedError(f"variables have lost their values: {', '.join(lost)}")
            error.session = raw.id
            raise error

    def _probe(self, session: ManagedSession) -> None:
        """Makes the chief restore lost variables even while its training loop is busy elsewhere."""
        while not self.coord.wait_for_stop(PROBE_SECS):
            raw = session.raw
            try:
                self._check_values(raw, _WAIT_SECS)
            except RuntimeError:
                # The session was closed, unless another thread has replaced it meanwhile.
                if raw is session.raw:
                    return
            except LOST_CONTACT as error:
                try:
                    session.recover(raw, error)
                except Exception as failure:  # training's own next step raises it too
                    logging.error("recovery failed: %s", failure)
                    return
            except rt.OpError as error:
                logging.info("probing the tasks: %s", error)

    def limit_silence(self) -> None:
        """Lets a ps that is silent for too long end the session from here on, with every wait in it."""
        if self.phase is not RunPhase.ENDED:
            self.phase = RunPhase.ENDING

    def leads(self) -> bool:
        """Returns True if this chief may write checkpoints: no other chief has taken its place."""
        return self._records is None or self._records.leads()

    def wait_for_others(self) -> None:
        """Waits, as the chief, until all tasks that take part are done.

        The other tasks may lose a ps meanwhile, which only a chief can restore. A living task is waited for without a
        limit. The wait ends early in three cases: the tasks that are left have been silent for the grace period, the
        ps tasks do not answer for the grace period, or a service fails.
        """
        records, session = self._records, self.session
        self._note_reached()
        if records is None or session is None or not self.is_chief or self.late or self.phase is RunPhase.ENDED:
            return
        # From here on a question to a dead task ends early: training needs no answer any more.
        records.answer_secs = self._answer_secs
        began = answered_at = time.monotonic()
        wait, logged_at, rested = 0.0, -math.inf, -1
        logged_gone: set[str] = set()
        self.phase = RunPhase.WAITING
        try:
            while not failed(self.coord):
                self.grace_period.deadline = answered_at + self.silence_secs
                try:
                    # Synchronous workers need not wait for the gradient of a chief that only waits. A recovered ps
                    # has forgotten this.
                    if wait and rested != session.recoveries:
                        records.rest(session.id)
                        rested = session.recoveries
                    silences = records.wait_done(wait)
                    answered_at = now = time.monotonic()
                except LOST_CONTACT as error:
                    logging.info("while waiting for the others: %s", error)
                    silences, now = {}, time.monotonic()
                    if now - answered_at >= self.silence_secs:
                        logging.warning("not waiting any longer for the others: the tasks cannot be asked for them")
                        return
                    self.grace_period.wait(0.2)
                    # This step recovers a lost task, which the other workers need too.
                    self._step(session)
                    continue
                # A worker that never came to any ps has the time of a silent worker, from now on.
                quiet = {who: min(secs, now - began) if secs == math.inf else secs for who, secs in silences.items()}
                left = [who for who, secs in quiet.items() if secs < self._worker_silence_secs]
                gone = quiet.keys() - set(left)
                for who in sorted(gone - logged_gone):
                    logging.warning("not waiting any longer for %s: no sign of life for %.0f s", who, quiet[who])
                logged_gone = gone
                if not left:
                    return
                step = self._step(session)
                if now - logged_at >= _WAIT_SECS:
                    logged_at = now
                    silent_ones = [f"{who} (silent for {quiet[who]:.0f} s)" if quiet[who] >= 3 else who for who in left]
                    # A wait that lasts is seen without INFO, too.
                    level = logging.INFO if now - began < _WAIT_SECS else logging.WARNING
                    logging.log(level, "waiting for %s to finish training (step %s)", ", ".join(silent_ones), step)
                soonest = min(self._worker_silence_secs - quiet[who] for who in left)
                wait = min(_WAIT_SECS, max(0.1, soonest))
        finally:
            self.grace_period.deadline, self.phase = None, RunPhase.TRAINING

    @property
    def _worker_silence_secs(self) -> float:
        """Silence, in seconds, after which a worker is not waited for at the end."""
        return min(self.silence_secs, ELASTIC_SILENCE_SECS) if self._elastic else self.silence_secs

    def _step(self, session: ManagedSession) -> int | None:
        """Returns the global step, None when it is not known; recovers any ps that is lost."""
        if session.closed:
            return self._reached
        try:
            # The thread that probes has ended with the stop, so this step looks at every ps in its place.
            if self._probed is not None:
                raw = session.raw
                try:
                    self._check_values(raw, self._answer_secs)
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

    def _note_reached(self) -> None:
        if self.session is not None and (step := self.session.reached()) is not None:
            self._reached = max(step, self._reached or 0)

    def finish(
        self,
        final: Callable[[rt.Session], object],
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
        if self.session is None or self.phase is RunPhase.ENDED:
            return
        held: contextlib.AbstractContextManager[list[int]] = shielded() if shield else contextlib.nullcontext([])
        with held as signals:
            self.phase = RunPhase.ENDING
            self._note_reached()
            if self._records is not None:
                self._records.answer_secs = self._answer_secs
            try:
                self._finish(self.session, final, over, checkpoint_dir, signals)
            except BaseException as error:
                self.phase = RunPhase.ENDED if shield or isinstance(error, Exception) else RunPhase.TRAINING
                raise
            self.phase = RunPhase.ENDED

    def _finish(
        self,
        session: ManagedSession,
        final: Callable[[rt.Session], object],
        over: bool,
        checkpoint_dir: str | None,
        signals: Sequence[int],
    ) -> None:
        saves = self.is_chief and checkpoint_dir is not None and self._global_step is not None
        if session.left is not None or session.raw.left_tasks:
            self._log_left(session)
            return
        if self._silenced and saves:
            raise rt.UnavailableError(f"{self._silenced}; {not_saved(self._reached, str(checkpoint_dir))}")
        if session.closed:
            if saves and not self.late:
                text = not_saved(self._reached, str(checkpoint_dir))
                logging.warning("the session was closed before the stop: %s", text)
        elif not self.late:
            if saves:
                try:
                    save_the_end(
                        session,
                        final,
                        self._global_step,
                        self._reached,
                        str(checkpoint_dir),
                        over=over,
                        signalled=lambda: bool(signals),
                    )
                except (rt.CancelledError, RuntimeError) as error:
                    if not self._silenced:
                        raise
                    text = f"{self._silenced}; {not_saved(self._reached, str(checkpoint_dir))}"
                    raise rt.UnavailableError(text) from error
            else:
                final(session)
        # A task with a signal is started again: the end of training is not reported.
        if over and not signals:
            if self._records is not None:
                self._report_done(self._records, session, str(checkpoint_dir) if saves else None)
            elif saves and not self.late:
                note_end(str(checkpoint_dir), saved_step(str(checkpoint_dir)))
        elif self._elastic and not self.is_chief and self._records is not None:
            self._say_goodbye(self._records, session)
        elif self.is_chief and not self.late:
            self._log_interrupted(str(checkpoint_dir) if saves else None)

    def _log_interrupted(self, checkpoint_dir: str | None) -> None:
        """Logs, for a user who has just pressed Ctrl-C, which step is saved. Losses were logged before."""
        if checkpoint_dir is None:
            logging.warning("interrupted: nothing is saved, as no checkpoints are written here")
        elif (step := saved_step(checkpoint_dir)) is not None:
            logging.warning("interrupted: step %d is saved in %s; the same command goes on there", step, checkpoint_dir)

    def _say_goodbye(self, records: RunRecords, session: ManagedSession) -> None:
        """Reports that training continues without this worker: no task waits for it or takes it for dead."""
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
        """Logs which steps this task has trained after the chief had given the task up."""
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
        self.phase = RunPhase.ENDED

    def at_exit(self) -> None:
        """Logs, when the process ends, that training was not brought to an end before."""
        if self._records is not None and self._awaiting is not None:
            # A thread that is in the middle of a call when the interpreter ends would abort the process.
            self._records.close()
            self._awaiting.join(_AT_EXIT_SECS)
        if self.session is None or self._records is None or self.late:
            return
        if self.phase is RunPhase.ENDED or self._closed.is_set():
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


def _names(session: rt.Session, probe: rt.Tensor, secs: float) -> frozenset[str]:
    return frozenset(name.decode() for name in session.run(probe, timeout_secs=secs))


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
            self._answered_at = time.monotonic()
        try:
            self._records.inspect()
            self._answered_at = time.monotonic()
        except LOST_CONTACT as error:
            logging.info("looking whether all tasks live: %s", error)
        return time.monotonic() - self._answered_at


def _key(variable: Any) -> tuple[str, str] | None:
    """Returns the (container, name) under which a variable is known on its task."""
    spec = getattr(variable, "spec", None)
    return (spec.container, spec.name) if isinstance(variable, rt.Variable) and spec is not None else None


def _report_at_exit(life: weakref.ref[Lifecycle]) -> None:
    known = life()
    if known is not None:
        known.at_exit()
