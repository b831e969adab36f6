"""SessionStart: one start, or one recovery, of a training session, from the first attempt to a ready model.

``SessionManager`` makes one for each session that it opens. An attempt opens a session, asks the
cluster, decides (``policy.py``) and acts. A loss of contact on the way leads to another attempt,
after a pause.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from absl import logging

import runtime as rt
from harness import timeouts
from harness.checkpoints.layout import latest_checkpoint
from harness.checkpoints.saver import Saver
from harness.coordinator import GracePeriod
from harness.training import times
from harness.training.start import log_directory, policy, readiness
from harness.training.start.global_step import get_global_step
from harness.training.start.inspection import ModelInspector, silence_is_loss
from harness.training.start.policy import StartAction, TaskRole
from harness.training.start.readiness import CheckpointSaver, Element, Feeds, ReadyOperations
from runtime import concurrency
from runtime.lowlevel import RunRecords

_LINES = 5
"""Lines with the same reason after which ``LOG_RARELY_SECS`` lie between two."""
LOST_CONTACT = (rt.UnavailableError, rt.AbortedError)
"""Errors that a new session can cure: a task is gone, or was started again, or its variables were restored."""


class TrainingOver(rt.OutOfRangeError):
    """The chief has finished training: a clean end for the other tasks.

    The type differs from OutOfRangeError because a user's ``init_fn`` may raise OutOfRangeError at
    the end of data.
    """


@dataclass(frozen=True)
class SessionRequest:
    """A session that is to be opened and made ready.

    Attributes:
        role: Role of this task.
        master: Session target.
        config: Session options of the user's.
        options: Options of the decision.
        records: Run records behind the target; None for a session that shares nothing.
        init_op: Operation that gives the variables values. This and all attributes below are the
            chief's.
        init_feed_dict: Feeds of ``init_op``.
        init_fn: Function that is called with the session after ``init_op``.
        saver: Saver that restores; None restores nothing.
        checkpoint_dir: Directory of the checkpoints.
        checkpoint: Path of one checkpoint, instead of the newest of a directory.
        series: Name of the series of checkpoints that the run saves; empty where not known.
    """

    role: TaskRole
    master: str
    config: rt.SessionConfig | None
    options: policy.StartOptions
    records: RunRecords | None
    init_op: Element | None = None
    init_feed_dict: Feeds | None = None
    init_fn: Callable[[rt.Session], object] | None = None
    saver: CheckpointSaver | None = None
    checkpoint_dir: str | None = None
    checkpoint: str | None = None
    series: str = ""

    @property
    def logdir(self) -> str:
        """The directory in a form that two runs can compare; empty for none."""
        # A URL has no links to resolve, and a name is the same on every host.
        if not self.checkpoint_dir or "://" in self.checkpoint_dir:
            return self.checkpoint_dir or ""
        return os.path.realpath(self.checkpoint_dir)

    def newest_checkpoint(self) -> str | None:
        """Returns the path of the checkpoint to restore; None without a checkpoint or a saver."""
        if self.saver is None or not (self.checkpoint_dir or self.checkpoint):
            return None
        return self.checkpoint or latest_checkpoint(str(self.checkpoint_dir))

    def restore(self, session: rt.Session) -> str:
        """Restores the newest undamaged checkpoint; returns the path of the checkpoint."""
        assert self.saver is not None, "a checkpoint is only found for a saver"
        # Looked for again: the record of the directory may name this run's series since.
        path = str(self.newest_checkpoint())
        # A saver of the user's own chooses among no checkpoints.
        if isinstance(self.saver, Saver):
            return str(self.saver.restore_latest(session, self.checkpoint_dir or path))
        self.saver.restore(session, path)
        return path


class _HoldingSession(rt.Session):
    """A session with the chief's lock of the log directory; the close of the session releases the lock."""

    hold: log_directory.DirectoryLock

    def close(self) -> None:
        """Closes the session, then releases the lock."""
        super().close()
        self.hold.release()


class SessionStart:
    """One start, or one recovery, of the session of a task.

    Args:
        request: The session that is wanted.
        model: The questions about the model, whose graph the session runs.
        operations: The operations that say when the model is ready.
        grace_period: Grace period whose end ends waits.
    """

    def __init__(
        self,
        request: SessionRequest,
        model: ModelInspector,
        operations: ReadyOperations,
        grace_period: GracePeriod,
    ) -> None:
        self._request = request
        self._model = model
        self._operations = operations
        self._grace_period = grace_period
        self._began = concurrency.monotonic()
        self._pause_secs = times.FIRST_BACKOFF_SECS
        self._rival_since = math.inf
        # The last reason in the log and its time: a wait of an hour is not an hour of equal lines.
        self._logged, self._logged_at, self._lines = "", 0.0, 0

    def run(self) -> rt.Session:
        """Tries until a session is ready, and returns the session."""
        while True:
            try:
                return self._open_ready()
            # Whatever was under way begins again with a new session: each part of it may be done
            # twice.
            except LOST_CONTACT as error:
                self._note_loss(error)
            self._grace_period.wait(self._pause_secs)
            self._pause_secs = min(2 * self._pause_secs, times.LAST_BACKOFF_SECS)

    def _open_ready(self) -> rt.Session:
        """Opens a session, then asks, decides and acts until the session is ready."""
        request, session = self._request, self._open_session()
        report: policy.ClusterReport | None = None
        try:
            while True:
                report = self._ask_cluster(session, report)
                decision = self._decide_action(report)
                # A task that is not the chief has nothing left to do: its model is ready.
                if decision.action is StartAction.JOIN:
                    return session
                self._raise_if_hopeless(decision)
                if decision.action is StartAction.WAIT:
                    self._wait_to_ask(report)
                    self._pause_secs = times.FIRST_BACKOFF_SECS
                    continue
                assert request.role is TaskRole.CHIEF, "the chief alone gives values"
                # From here on this chief changes values: no other chief may live, and no other job
                # may write there.
                if self._wait_for_rival(report):
                    continue
                # After a wait the other job has left a new checkpoint, so the cluster is asked
                # again.
                if self._wait_for_directory(session, report):
                    continue
                if request.records is not None:
                    session.authority.lead_with(request.records.claim())
                live = self._model.live_step(session, report)
                # A new generation of values cuts off all other sessions, before any value changes.
                if decision.action is not StartAction.KEEP and request.records is not None:
                    session.adopt_generations(request.records.load())
                self._carry_out(session, report, decision.action, live)
                return session
        except BaseException:
            # The caller does not receive the session, and so cannot close it.
            session.close()
            raise

    @property
    def _left_secs(self) -> float:
        return max(0.0, self._request.options.give_up_at - concurrency.monotonic())

    def _open_session(self) -> _HoldingSession:
        request = self._request
        # One attempt is short, so that the loop sees a stop and can say what it waits for.
        left = max(0.1, self._left_secs)
        secs = self._grace_period.at_most(min(left, times.ATTEMPT_SECS))
        config = readiness.filtered(request.config, self._model.graph, secs)
        with silence_is_loss():
            session = _HoldingSession(request.master, self._model.graph, config)
        # The lock lives as long as the session: another job may write there once this chief has
        # closed it.
        session.hold = log_directory.DirectoryLock()
        # A ps whose program lacks ``server.join()`` would train beside the workers, as one of them.
        if session.task.startswith("/job:ps/") and request.records is not None:
            session.close()
            raise rt.InvalidArgumentError(
                "this task is a parameter server, and is about to train: have it call "
                "server.join() instead, before the graph is made",
                task=session.task,
            )
        return session

    def _note_loss(self, error: rt.OpError) -> None:
        """Logs the reason of a wait; raises instead when the time is up, or training is to stop."""
        now = concurrency.monotonic()
        if now >= self._request.options.give_up_at:
            text = f"Session was not ready after waiting {now - self._began:.0f} secs: {error}"
            raise rt.DeadlineExceededError(text) from error
        if self._grace_period.exhausted():
            raise error
        self._log_reason(f"{self._request.role.value}: waiting: {error}")

    def _wait_for_directory(
        self,
        session: _HoldingSession,
        report: policy.ClusterReport,
    ) -> bool:
        """Takes the lock of the log directory; returns True if another job had to end first."""
        waited = False
        # The other job may end at any moment. Its chief leaves the lock with its process, and no
        # event says so.
        while reason := session.hold.take(
            self._request.logdir, report.addresses.values(), self._request.series
        ):
            self._note_loss(rt.UnavailableError(reason))
            self._grace_period.wait(times.LOCK_TRY_SECS)
            waited = True
        return waited

    def _wait_for_rival(self, report: policy.ClusterReport) -> bool:
        """Waits a moment and returns True while another run's chief seems to live; raises after ``RIVAL_SECS``.

        A chief seems to live for a second or two after death, so a single look is not enough.
        """
        now, reason = concurrency.monotonic(), policy.rival(report, self._request.logdir)
        if not reason:
            self._rival_since = math.inf
            return False
        self._rival_since = min(self._rival_since, now)
        if now - self._rival_since >= times.RIVAL_SECS:
            raise rt.InvalidArgumentError(reason)
        self._grace_period.wait(times.LOCK_TRY_SECS)
        return True

    def _ask_cluster(
        self, session: rt.Session, last: policy.ClusterReport | None
    ) -> policy.ClusterReport:
        """Returns the report of the cluster.

        A worker first waits for the values missing in the report before.
        """
        request = self._request
        # The chief does not wait for values here: it is the task that gives them.
        if request.role is TaskRole.CHIEF:
            return self._model.report(session, request.records, request.newest_checkpoint())
        if last is not None:
            longest = times.OWN_SECS if self._model.own(session) else times.ATTEMPT_SECS
            self._model.wait(session, request.records, last, min(self._left_secs, longest))
        report = self._model.report(session, request.records, None)
        own = self._model.own(session)
        # Variables on the own task stay out: no chief gives them values.
        report = replace(report, missing=[name for name in report.missing if name not in own])
        if not report.missing and "loading" not in report.phases.values():
            report = replace(report, not_ready=self._operations.missing(session))
        return report

    def _decide_action(self, report: policy.ClusterReport) -> policy.StartDecision:
        role, options = self._request.role, self._request.options
        decision = policy.decide(concurrency.monotonic(), role, report, options)
        self._log_reason(
            f"{role.value}: {decision.action.value}: {decision.reason}",
            # To initialise in a recovery loses all that was trained.
            aloud=decision.action is StartAction.INITIALIZE and options.recovering,
            again=decision.action is StartAction.WAIT,
        )
        return decision

    def _raise_if_hopeless(self, decision: policy.StartDecision) -> None:
        if decision.action is StartAction.END:
            raise TrainingOver(decision.reason)
        # The chief gives up at once, as no task can help it. Another task gives up when its time is
        # over.
        gives_up = decision.action is StartAction.GIVE_UP
        if self._request.role is TaskRole.CHIEF:
            if gives_up:
                raise RuntimeError(
                    "Model is not initialized and no init_op or init_fn or local_init_op was "
                    "given: " + decision.reason
                )
        elif gives_up or self._grace_period.exhausted():
            limit = self._request.options.give_up_at - self._began
            raise rt.DeadlineExceededError(
                f"Session was not ready after waiting {limit:.0f} secs: {decision.reason}"
            )

    def _wait_to_ask(self, report: policy.ClusterReport) -> None:
        """Waits before the cluster is asked again, where asking does not wait by itself."""
        # Where variables are missing the next question waits on the tasks themselves, without a
        # pause here.
        if self._request.role is TaskRole.CHIEF or report.not_ready:
            self._grace_period.wait(min(self._operations.recovery_wait_secs, self._left_secs))

    def _carry_out(
        self,
        session: rt.Session,
        report: policy.ClusterReport,
        action: StartAction,
        live: int | None,
    ) -> None:
        """Carries out the chief's decision, then opens the model to all tasks."""
        request, path = self._request, ""
        done = f"Init op: {getattr(request.init_op, 'name', request.init_op)}, init fn: {request.init_fn}"
        if action is StartAction.KEEP:
            # The live model wins over the directory: to restore would throw away steps of a run
            # that trains.
            if warning := policy.other_run(report, request.logdir, live):
                logging.warning("%s", warning)
            elif (
                report.checkpoint
                and not request.options.recovering
                and isinstance(request.saver, Saver)
            ):
                request.saver.take_states(request.checkpoint_dir or report.checkpoint)
        elif action is StartAction.RESTORE:
            path = request.restore(session)
            done = f"Restored: {path}"
        else:
            assert action is StartAction.INITIALIZE
            if request.init_op is not None:
                session.run(request.init_op, request.init_feed_dict)
            if request.init_fn is not None:
                request.init_fn(session)
        # The local variables come last, as their initial values may read the global ones.
        self._operations.make_ready(session, done)
        if path:
            self._log_lost(session, live, path)
        self._warn_of_unsaved(session)
        if request.records is not None:
            request.records.open(request.logdir)

    def _log_reason(self, text: str, aloud: bool = False, again: bool = False) -> None:
        now = concurrency.monotonic()
        pause = 0.0 if again else timeouts.LOG_EVERY_SECS
        if self._lines >= _LINES:
            pause = times.LOG_RARELY_SECS
        if aloud:
            logging.warning("%s", text)
        elif text != self._logged:
            self._lines = 0
            logging.info("%s", text)
        elif now - self._logged_at >= pause:
            # A wait that lasts is seen without INFO, too.
            logging.warning("%s (for %.0f s now)", text, now - self._began)
        else:
            return
        self._lines += 1
        self._logged, self._logged_at = text, now

    def _warn_of_unsaved(self, session: rt.Session) -> None:
        """Warns, when training begins, of variables that no later start can restore."""
        request = self._request
        if (
            not isinstance(request.saver, Saver)
            or not request.checkpoint_dir
            or request.options.recovering
        ):
            return
        lost = {v.op.name for v in request.saver.not_saved(self._model.graph)} - self._model.own(
            session
        )
        if lost:
            logging.warning(
                "%d global variables are in no checkpoint: %s; a chief that is started again "
                "cannot go on. Make the Saver after minimize(), and of all variables",
                len(lost),
                ", ".join(sorted(lost)),
            )

    def _log_lost(self, session: rt.Session, live: int | None, path: str) -> None:
        step = get_global_step(self._model.graph)
        # Without a global step no number of lost steps is known.
        if step is None:
            return
        now = int(session.run(step))
        if live is None:
            logging.info("restored %s: training goes on from step %d", path, now)
        else:
            logging.warning(
                "restored %s: back from step %d to step %d, %d steps are lost",
                path,
                live,
                now,
                live - now,
            )
