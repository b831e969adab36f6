"""Lifecycle: one task's way through a training run, from its session to an end that leaves nobody behind.

Supervisor and MonitoredTrainingSession are two faces of this. It opens the session that recovers by itself, tells the
run records that this task takes part, and at the end waits, as the chief, for those who still train, lets the caller
write what is final, and tells everybody that training is over.

Nothing here limits work: another worker may train, and a last save or evaluation may run, for as long as it takes. What
is limited, by the grace period, is the silence of a task: no sign of life, which a living one gives every second.
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
PROBE_SECS = 1.0
"""How often the chief looks whether a task is lost that its own steps do not need just now."""
FAILURE_GRACE_SECS = 10.0
"""How long a step may go on after a service has failed: what it waits for may never come then."""
_POLL_SECS = 1.0
_STOP_WAIT_SECS = 60.0
"""How long one of a ps's threads waits for an order to stop before it is asked again; the order comes at once."""
_AT_EXIT_SECS = 5.0
LEAST_SILENCE_SECS = 4.0
"""A task that has been silent for less is not given up, however short the grace period: signs of life may be late."""
GOES_TOO_SECS = 2.0
"""How long a chief waits before it saves for a ps that has been told to go: one that is told, too, saves at its end."""
LAST_SAVE_SECS = 10.0
"""How long before a ps goes that has been told to, the chief begins to save once more."""
ELASTIC = "elastic"
"""The collection of a graph that holds something when its workers come and go: one that leaves is not waited for."""
ELASTIC_SILENCE_SECS = 10.0
"""Where workers come and go, one that has been silent for so long at the end is not waited for: it need not come."""


class RunPhase(enum.Enum):
    """The place of a task on its way through a run: each leads to the next, and an interruption to the end."""

    TRAINING = enum.auto()
    """Steps run, or have the grace period to end after a stop."""
    WAITING = enum.auto()
    """The chief waits for the tasks that still train, and recovers what they need."""
    ENDING = enum.auto()
    """The last steps are saved and the end is reported; a task that stays silent ends that."""
    ENDED = enum.auto()
    """Nothing is left to save or to report."""


class Lifecycle:
    """The life of one task in a run.

    Args:
        coord: stops it.
        is_chief: the chief waits for the others at the end, and ends the run.
        stop_grace_secs: how long a task may be silent at the end, and a step under way after a stop may take.
    """

    def __init__(self, coord: Coordinator, is_chief: bool, stop_grace_secs: float) -> None:
        self.coord = coord
        self.is_chief = is_chief
        self.grace_secs = stop_grace_secs
        self._answer_secs = min(_WAIT_SECS, max(2.0, stop_grace_secs))
        self.grace_period = GracePeriod(coord, stop_grace_secs)
        self.session: ManagedSession | None = None
        self.silence_secs = max(stop_grace_secs, LEAST_SILENCE_SECS)
        """A task without a sign of life for so long is not waited for at the end."""
        self._elastic = False
        self.late = False
        """Whether the run had finished before this task came."""
        self.phase = RunPhase.TRAINING
        self.save: Callable[[], object] | None = None
        """Saves, or has it done soon; called in the chief when a ps has been told to go. Who has a saver sets it."""
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
        """Opens the session.

        A task that comes after the end of the run gets a session too, with a stop requested already.

        Args:
            ready: opens a session that is ready for training; told whether it recovers one. TrainingOver means
                that the run has finished.
            bare: opens a session that need not be ready.
            graph: the graph.
            records: the run records; None when nobody else takes part.
            recover: whether the session recovers by itself.
            global_step: the global step, or None.
            on_recovery: called with each new session after a recovery.
            probe: names of variables without a value, fetched now and then by the chief, so that it finds out which and
                who is lost while it does something else.
            give_up_secs: how long ``ready`` waits at most, for the log.
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
                except rt.OutOfRangeError as error:  # of a function of the user's own: no end of a training to come
                    raise RuntimeError(f"The model could not be made ready: {error}") from error
                try:
                    if records is not None:
                        records.join(session.id)
                    if probes:
                        self._without_value = _names(session, probe, _WAIT_SECS)
                    return session
                except LOST_CONTACT as error:  # a task was lost just after it was ready
                    session.close()
                    if self.grace_period.exhausted():
                        raise
                    logging.info("lost contact again: %s", error)
                except BaseException:  # nobody gets this session, so nobody will close it
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
        self._closed.set()  # of a session before this one
        self._closed = threading.Event()
        if probes and not self.late:
            threading.Thread(target=self._probe, args=(self.session,), name="probe-tasks", daemon=True).start()
        threading.Thread(target=self._watch, args=(self.session, self._closed), name="watch-stop", daemon=True).start()
        if records is not None and not self.late:
            self._awaiting = threading.Thread(target=self._await_stop, args=(records,), name="await-stop", daemon=True)
            self._awaiting.start()
        return self.session

    def _watch(self, session: ManagedSession, closed: threading.Event) -> None:
        """After a stop: a step must not wait for ever for what will not come, nor the end for a task that is silent."""
        self.coord.wait_for_stop()
        stopped_at = time.monotonic()
        if self._records is not None:
            self._records.close()
        limit = min(FAILURE_GRACE_SECS, self.grace_secs) if failed(self.coord) else self.grace_secs
        silence = Silence(session, self._records)
        while not closed.wait(max(0.05, min(_POLL_SECS, limit / 4))):
            if self.phase is RunPhase.ENDED or not self.coord.should_stop():  # or another session is watched
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
        """Requests a stop when somebody, an evaluator say, has ordered training to end by way of the run records."""
        while not self.coord.should_stop():
            try:
                reason, goes_in_secs = records.wait_stop(_STOP_WAIT_SECS)
            except (rt.CancelledError, rt.TaskLeftError):
                return
            except (rt.DeadlineExceededError, *LOST_CONTACT):
                self.coord.wait_for_stop(PROBE_SECS)  # who trains is told of it by a step
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
        """As the chief, saves what goes with a ps at a time: now, and once more shortly before."""
        if self.save is not None and not self.coord.wait_for_stop(GOES_TOO_SECS):
            left = goes_at - time.monotonic()
            logging.warning("a ps has been told to go, and serves on for %.0f s at most: saving what it holds", left)
            with self.coord.stop_on_exception():  # as a save that the timer begins
                self.save()
                before = goes_at - LAST_SAVE_SECS - time.monotonic()
                if left > LAST_SAVE_SECS and not self.coord.wait_for_stop(max(0.0, before)):
                    self.save()
        self.coord.wait_for_stop(max(PROBE_SECS, goes_at - time.monotonic()))  # until it is gone

    def stop_everybody(self, reason: str = "") -> None:
        """Orders all who take part to stop, by the run records; stops nobody where there is no session of a cluster.

        Args:
            reason: why, in words, for the others' logs.

        Raises:
            OpError: a ps could not be told.
        """
        if self._records is not None and self.session is not None and not self.session.closed:
            self._records.stop(reason)

    def _check_values(self, raw: rt.Session, secs: float) -> None:
        """Raises UnavailableError or AbortedError when a task, or what a variable had, is lost: on any of the tasks."""
        lost = sorted(_names(raw, self._probed, secs) - self._without_value)
        if lost:  # an update that failed has taken them along
            error = rt.AbortedError(f"variables have lost their values: {', '.join(lost)}")
            error.session = raw.id
            raise error

    def _probe(self, session: ManagedSession) -> None:
        """Makes the chief restore what is lost even while its training loop is busy elsewhere."""
        while not self.coord.wait_for_stop(PROBE_SECS):
            raw = session.raw
            try:
                self._check_values(raw, _WAIT_SECS)
            except RuntimeError:
                if raw is session.raw:
                    return  # it is closed: this is the end
            except LOST_CONTACT as error:
                try:
                    session.recover(raw, error)
                except Exception as failure:  # training's own next step raises it too
                    logging.error("recovery failed: %s", failure)
                    return
            except rt.OpError as error:
                logging.info("probing the tasks: %s", error)

    def limit_silence(self) -> None:
        """From here on a ps that is silent for too long ends what waits for it, with the session."""
        if self.phase is not RunPhase.ENDED:
            self.phase = RunPhase.ENDING

    def leads(self) -> bool:
        """Whether this chief may write checkpoints: no other one has taken its place."""
        return self._records is None or self._records.leads()

    def wait_for_others(self) -> None:
        """As the chief, waits until all who take part are done; they may need what only a chief can restore.

        Whoever lives is waited for, however long it takes. The wait ends early for those who give no sign of life for
        the grace period, when the tasks with the variables do not answer for so long, and when a service fails.
        """
        records, session = self._records, self.session
        self._note_reached()
        if records is None or session is None or not self.is_chief or self.late or self.phase is RunPhase.ENDED:
            return
        records.answer_secs = self._answer_secs  # from here on a dead task is not waited for any longer
        began = answered_at = time.monotonic()
        wait, logged_at, rested = 0.0, -math.inf, -1
        logged_gone: set[str] = set()
        self.phase = RunPhase.WAITING
        try:
            while not failed(self.coord):
                self.grace_period.deadline = answered_at + self.silence_secs
                try:
                    if wait and rested != session.recoveries:  # nobody need keep step with a chief that only waits
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
                    self._step(session)  # recovers what is lost on the way: the others need it too
                    continue
                # One that never came to any of the tasks has the time of a silent one, from now on.
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
                    level = logging.INFO if now - began < _WAIT_SECS else logging.WARNING  # what lasts is seen by all
                    logging.log(level, "waiting for %s to finish training (step %s)", ", ".join(silent_ones), step)
                soonest = min(self._worker_silence_secs - quiet[who] for who in left)
                wait = min(_WAIT_SECS, max(0.1, soonest))
        finally:
            self.grace_period.deadline, self.phase = None, RunPhase.TRAINING

    @property
    def _worker_silence_secs(self) -> float:
        """A worker without a sign of life for so long is not waited for at the end."""
        return min(self.silence_secs, ELASTIC_SILENCE_SECS) if self._elastic else self.silence_secs

    def _step(self, session: ManagedSession) -> int | None:
        """The global step now; a lost ps, whichever it is, is recovered on the way, as the others need it too."""
        if session.closed:
            return self._reached
        try:
            if self._probed is not None:  # the thread that probes has ended with the stop
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
        """Ends this task's part: does what is final, then tells the others. Does nothing the second time.

        Args:
            final: writes the last checkpoint and summaries; called again when a task was lost meanwhile.
            over: training is done; False when it was interrupted and will be taken up again.
            checkpoint_dir: where the chief's checkpoints lie; None when it writes none.
            shield: SIGTERM and Ctrl-C come out after this instead of within it (``preemption.shielded``). Without
                that ``finish`` may be called again after an interruption.

        Raises:
            AbortedError, UnavailableError: a task was lost meanwhile, and steps with it (``save_the_end``), or was
                silent for too long for them to be saved. The others are not told that training is over.
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
        if over and not signals:  # one that is interrupted is started again
            if self._records is not None:
                self._report_done(self._records, session, str(checkpoint_dir) if saves else None)
            elif saves and not self.late:
                note_end(str(checkpoint_dir), saved_step(str(checkpoint_dir)))
        elif self._elastic and not self.is_chief and self._records is not None:
            self._say_goodbye(self._records, session)
        elif self.is_chief and not self.late:
            self._log_interrupted(str(checkpoint_dir) if saves else None)

    def _log_interrupted(self, checkpoint_dir: str | None) -> None:
        """What somebody wants to know who has just pressed Ctrl-C; what is lost, if anything, has been told before."""
        if checkpoint_dir is None:
            logging.warning("interrupted: nothing is saved, as no checkpoints are written here")
        elif (step := saved_step(checkpoint_dir)) is not None:
            logging.warning("interrupted: step %d is saved in %s; the same command goes on there", step, checkpoint_dir)

    def _say_goodbye(self, records: RunRecords, session: ManagedSession) -> None:
        """Training goes on without this worker: nobody is to wait for it, nor to hold it for dead."""
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
                except rt.AbortedError:  # a task was started again after the last save, and knows of no chief
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
        """Tells what this task has trained after the chief had given it up."""
        saved = max((record.saved_step for record in records if record.saved_step is not None), default=None)
        if saved is None:
            return
        now = self._reached
        try:  # not by a step that recovers: the tasks may leave, now that this one is done
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
        """Training has ended with an error: nothing is saved, and nobody told that it is over."""
        self.phase = RunPhase.ENDED

    def at_exit(self) -> None:
        """The process ends. Tells it if training was not brought to an end before."""
        if self._records is not None and self._awaiting is not None:
            # A thread that is in the middle of a call when the interpreter goes aborts the process.
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
    """For how long a task that a session needs has given no sign of life.

    Args:
        session: its own master knows, if it is in this process.
        records: are asked else.
    """

    def __init__(self, session: ManagedSession, records: RunRecords | None) -> None:
        self._session = session
        self._records = records
        self._answered_at: float | None = None

    def secs(self) -> float:
        """Seconds; 0 when all give some."""
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
    """The (container, name) under which a variable is known on its task."""
    spec = getattr(variable, "spec", None)
    return (spec.container, spec.name) if isinstance(variable, rt.Variable) and spec is not None else None


def _report_at_exit(life: weakref.ref[Lifecycle]) -> None:
    known = life()
    if known is not None:
        known.at_exit()
