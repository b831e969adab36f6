"""SessionManager: opens a session and makes the model ready, by keeping, restoring, initialising or waiting.

Every start and every recovery is one loop (``SessionManager._until_ready``): open a session, ask
the cluster, decide (``policy.py``), act. A loss of contact on the way leads to another session,
after a pause.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from absl import logging

import runtime as rt
from harness.checkpoints.layout import latest_checkpoint
from harness.checkpoints.saver import Saver
from harness.coordinator import Coordinator, GracePeriod
from harness.launch.tasks import attempt
from harness.training.start import log_directory, policy, readiness
from harness.training.start.global_step import get_global_step
from harness.training.start.inspection import ATTEMPT_SECS, ModelInspector, silence_is_loss
from harness.training.start.policy import StartAction, TaskRole
from harness.training.start.readiness import CheckpointSaver, Element, Feeds
from runtime import concurrency
from runtime.lowlevel import RunRecords

_LOG_EVERY_SECS = 10.0
"""Seconds between two lines with the same reason for a wait."""
_LOCK_SECS = 0.5
"""Seconds between two tries to take the lock of a log directory."""
OWN_SECS = 1.0
"""Seconds of one blocking wait where variables lie on the session's own task: no chief initialises those, so the wait
always takes its full length."""
RIVAL_SECS = 5.0
"""Seconds that the chief of another run is watched: a chief that has just died gives no sign of life meanwhile."""
FIRST_BACKOFF_SECS = 0.05
"""Seconds of the first pause between two attempts; each pause doubles the one before."""
LAST_BACKOFF_SECS = 1.0
"""Seconds of the longest pause between two attempts."""
GIVE_UP_SECS = 7200.0
"""Seconds that a session is waited for by default, at the start and in each recovery."""
LOST_CONTACT = (rt.UnavailableError, rt.AbortedError)
"""Errors that a new session can cure: a task is gone, or was started again, or its variables were restored."""


class TrainingOver(rt.OutOfRangeError):
    """The chief has finished training: a clean end for the other tasks.

    The type differs from OutOfRangeError because a user's ``init_fn`` may raise OutOfRangeError at
    the end of data.
    """


@dataclass(frozen=True)
class _SessionRequest:
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

    @property
    def logdir(self) -> str:
        """The directory in a form that two runs can compare; empty for none."""
        # A URL has no links to resolve, and a name is the same on every host.
        if not self.checkpoint_dir or "://" in self.checkpoint_dir:
            return self.checkpoint_dir or ""
        return os.path.realpath(self.checkpoint_dir)


class _HoldingSession(rt.Session):
    """A session with the chief's lock of the log directory; the close of the session releases the lock."""

    hold: log_directory.DirectoryLock

    def close(self) -> None:
        """Closes the session, then releases the lock."""
        super().close()
        self.hold.release()


class SessionManager:
    """Opens sessions for training.

    Args:
        local_init_op: Operation that runs in every new session, of the chief and of the other
            tasks.
        ready_op: String tensor with the names of what is not ready, empty when all is. None checks
            nothing.
        ready_for_local_init_op: The same for what ``local_init_op`` needs. None checks nothing.
        graph: Graph of the sessions. Default: the default graph.
        recovery_wait_secs: Seconds between two looks at a ready operation of the user's own.
            Variables need no looks: their tasks report them ready at once.
        local_init_feed_dict: Feeds of ``local_init_op``.
        grace_period: Grace period whose end ends waits.

    Raises:
        ValueError: ``ready_for_local_init_op`` was given without ``local_init_op``.

    Examples:
        >>> import harness
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     v = rt.Variable(1.0, name="v")
        ...     with harness.SessionManager().prepare_session("", init_op=v.initializer) as session:
        ...         float(session.run(v))
        1.0
    """

    def __init__(
        self,
        local_init_op: Element | None = None,
        ready_op: Element | None = None,
        ready_for_local_init_op: Element | None = None,
        graph: rt.Graph | None = None,
        recovery_wait_secs: float = 30,
        local_init_feed_dict: Feeds | None = None,
        *,
        grace_period: GracePeriod | None = None,
    ) -> None:
        if ready_for_local_init_op is not None and local_init_op is None:
            raise ValueError(
                "If you pass a ready_for_local_init_op, you must also pass a local_init_op: it is "
                "what it is for"
            )
        self._graph = graph or rt.get_default_graph()
        self._local_init_op = local_init_op
        self._ready_op = ready_op
        self._ready_for_local_init_op = ready_for_local_init_op
        self._recovery_wait_secs = recovery_wait_secs
        self._local_init_feed_dict = local_init_feed_dict
        # A manager that a program makes by itself has no coordinator: its waits end by their limits
        # alone.
        self._grace_period = grace_period or GracePeriod(Coordinator())
        self._has_own_grace_period = grace_period is None
        # Kept by target, as the leadership of a chief must outlive the session that has claimed it.
        self._records: dict[tuple[str, bool], RunRecords] = {}
        self._rival_since = math.inf
        # The last reason in the log and its time: a wait of an hour is not an hour of equal lines.
        self._logged, self._logged_at = "", 0.0
        self._model = ModelInspector(self._graph)
        self.series = ""
        """Name of the series of checkpoints that the run saves (``checkpoint_basename``); empty where not known."""

    @property
    def probe(self) -> rt.Tensor:
        """A tensor that touches every task with variables: to fetch the tensor finds a lost task."""
        return self._model.missing

    def stop_with(self, grace_period: GracePeriod) -> None:
        """Sets the grace period, unless the constructor was given one.

        Args:
            grace_period: Grace period whose end ends waits.
        """
        if self._has_own_grace_period:
            self._grace_period = grace_period

    # -- the three ways ----------------------------------------------------------------------------

    def prepare_session(
        self,
        master: str,
        init_op: Element | None = None,
        saver: CheckpointSaver | None = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = GIVE_UP_SECS,
        config: rt.SessionConfig | None = None,
        init_feed_dict: Feeds | None = None,
        init_fn: Callable[[rt.Session], object] | None = None,
        *,
        recovering: bool = False,
    ) -> rt.Session:
        """Opens a session as the chief: keeps a live model, else restores, else initialises.

        No task trains while variables get values. The ps tasks are informed first, and cut off
        sessions that used older values (docs/guarantees.md). Lost steps are logged.

        Args:
            master: Session target.
            init_op: Operation that gives all variables values.
            saver: Saver that restores; None restores nothing.
            checkpoint_dir: Directory of the checkpoints.
            checkpoint_filename_with_path: Path of one checkpoint, instead of the newest of a
                directory.
            wait_for_checkpoint: True to wait for a checkpoint before the model is initialised.
            max_wait_secs: Seconds to wait for tasks, and for a checkpoint.
            config: Session options. Without device filters ``readiness.default_filters`` are used.
            init_feed_dict: Feeds of ``init_op``.
            init_fn: Function that is called with the session after ``init_op``; not for a restored
                or live model.
            recovering: True if this process has trained in the run before; for the log.

        Raises:
            RuntimeError: Nothing can make the model ready, or the model is not ready after all.
            TrainingOver: The run has finished, and a launcher has started this task again since.
            DeadlineExceededError: Tasks did not answer in time. The message names them.
            ValueError: Both kinds of checkpoint location were given.
        """
        # TF1 has the same check, with these words.
        if checkpoint_dir and checkpoint_filename_with_path:
            raise ValueError(
                "Can not provide both checkpoint_dir and checkpoint_filename_with_path."
            )
        options = policy.StartOptions(
            concurrency.monotonic() + readiness.limit_secs(config, max_wait_secs),
            init_op is not None or init_fn is not None or self._local_init_op is not None,
            wait_for_checkpoint,
            recovering,
            # A launcher counts the starts of a task. A task that is started by hand counts as a new
            # run.
            attempt(os.environ) > 0,
        )
        return self._until_ready(
            _SessionRequest(
                TaskRole.CHIEF,
                master,
                config,
                options,
                self.records(master, config, TaskRole.CHIEF),
                init_op,
                init_feed_dict,
                init_fn,
                saver,
                checkpoint_dir,
                checkpoint_filename_with_path,
            )
        )

    def wait_for_session(
        self,
        master: str,
        config: rt.SessionConfig | None = None,
        max_wait_secs: float | None = math.inf,
    ) -> rt.Session:
        """Opens a session as a task that is not the chief: waits until the chief has made the model ready.

        Args:
            master: Session target.
            config: Session options. Without device filters ``readiness.default_filters`` are used.
            max_wait_secs: Seconds to wait; None is without a limit.

        Raises:
            TrainingOver: The chief has finished training.
            DeadlineExceededError: The model was not ready in time. The message names what was
                missing.
        """
        options = policy.StartOptions(
            concurrency.monotonic() + readiness.limit_secs(config, max_wait_secs)
        )
        records = self.records(master, config, TaskRole.OTHER)
        return self._until_ready(_SessionRequest(TaskRole.OTHER, master, config, options, records))

    # -- their parts -------------------------------------------------------------------------------

    def records(
        self, master: str, config: rt.SessionConfig | None, role: TaskRole
    ) -> RunRecords | None:
        """Returns the run records behind a target; None for a session that shares nothing.

        Args:
            master: Session target.
            config: Session options of the user's.
            role: Role of this task.
        """
        if not master:
            return None
        # A process may play both parts, as tests do, and only a chief's records may lead.
        key = (master, role is TaskRole.CHIEF)
        if key not in self._records:
            self._records[key] = RunRecords(
                master,
                readiness.filtered(config, self._graph, ATTEMPT_SECS),
                is_chief=role is TaskRole.CHIEF,
            )
        return self._records[key]

    def _until_ready(self, request: _SessionRequest) -> rt.Session:
        """Opens sessions, asks, decides and acts until a session is ready: the loop of every start and recovery."""
        started = concurrency.monotonic()
        backoff = FIRST_BACKOFF_SECS
        session: _HoldingSession | None = None
        report: policy.ClusterReport | None = None
        try:
            while True:
                try:
                    if session is None:
                        session, report = self._open_session(request), None
                    report = self._ask_cluster(request, session, report)
                    decision = self._decide_action(request.role, report, request.options)
                    # A task that is not the chief has nothing left to do: its model is ready.
                    if decision.action is StartAction.JOIN:
                        return session
                    self._raise_if_hopeless(request, decision, started)
                    if decision.action is StartAction.WAIT:
                        self._wait_to_ask(request, report)
                        backoff = FIRST_BACKOFF_SECS
                        continue
                    # From here on this chief changes values: no other chief may live, and no other
                    # job may write there.
                    if self._wait_for_rival(request, report):
                        continue
                    # After a wait the other job has left a new checkpoint, so the cluster is asked
                    # again.
                    if self._wait_for_directory(request, session, report, started):
                        continue
                    if request.records is not None:
                        session.authority.lead_with(request.records.claim())
                    live = self._model.live_step(session, report)
                    # A new generation of values cuts off all other sessions, before any value
                    # changes.
                    if decision.action is not StartAction.KEEP and request.records is not None:
                        session.adopt_generations(request.records.load())
                    self._carry_out(request, session, report, decision.action, live)
                    return session
                # Whatever was under way begins again with a new session: each part of it may be
                # done twice.
                except LOST_CONTACT as error:
                    if session is not None:
                        session.close()
                        session = None
                    self._note_loss(request, error, started)
                    self._grace_period.wait(backoff)
                    backoff = min(2 * backoff, LAST_BACKOFF_SECS)
        except BaseException:
            # The caller does not receive the session, and so cannot close it.
            if session is not None:
                session.close()
            raise

    def _open_session(self, request: _SessionRequest) -> _HoldingSession:
        # One attempt is short, so that the loop sees a stop and can say what it waits for.
        left = max(0.1, request.options.give_up_at - concurrency.monotonic())
        secs = self._grace_period.at_most(min(left, ATTEMPT_SECS))
        config = readiness.filtered(request.config, self._graph, secs)
        with silence_is_loss():
            session = _HoldingSession(request.master, self._graph, config)
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

    def _note_loss(self, request: _SessionRequest, error: rt.OpError, started: float) -> None:
        """Logs the reason of a wait; raises instead when the time is up, or training is to stop."""
        now = concurrency.monotonic()
        if now >= request.options.give_up_at:
            text = f"Session was not ready after waiting {now - started:.0f} secs: {error}"
            raise rt.DeadlineExceededError(text) from error
        if self._grace_period.exhausted():
            raise error
        self._log_reason(f"{request.role.value}: waiting: {error}")

    def _wait_for_directory(
        self,
        request: _SessionRequest,
        session: _HoldingSession,
        report: policy.ClusterReport,
        started: float,
    ) -> bool:
        """Takes the lock of the log directory; returns True if another job had to end first."""
        waited = False
        # The other job may end at any moment. Its chief leaves the lock with its process, and no
        # event says so.
        while reason := session.hold.take(request.logdir, report.addresses.values(), self.series):
            self._note_loss(request, rt.UnavailableError(reason), started)
            self._grace_period.wait(_LOCK_SECS)
            waited = True
        return waited

    def _wait_for_rival(self, request: _SessionRequest, report: policy.ClusterReport) -> bool:
        """Waits a moment and returns True while another run's chief seems to live; raises after ``RIVAL_SECS``.

        A chief seems to live for a second or two after death, so a single look is not enough.
        """
        now, reason = concurrency.monotonic(), policy.rival(report, request.logdir)
        if not reason:
            self._rival_since = math.inf
            return False
        self._rival_since = min(self._rival_since, now)
        if now - self._rival_since >= RIVAL_SECS:
            raise rt.InvalidArgumentError(reason)
        self._grace_period.wait(_LOCK_SECS)
        return True

    def _ask_cluster(
        self, request: _SessionRequest, session: rt.Session, last: policy.ClusterReport | None
    ) -> policy.ClusterReport:
        """Returns the report of the cluster.

        A worker first waits for the values missing in the report before.
        """
        # The chief does not wait for values here: it is the task that gives them.
        if request.role is TaskRole.CHIEF:
            checkpoint = _newest_checkpoint(
                request.saver, request.checkpoint_dir, request.checkpoint
            )
            return self._model.report(session, request.records, checkpoint)
        if last is not None:
            longest = OWN_SECS if self._model.own(session) else ATTEMPT_SECS
            wait_secs = max(0.0, min(request.options.give_up_at - concurrency.monotonic(), longest))
            self._model.wait(session, request.records, last, wait_secs)
        report = self._model.report(session, request.records, None)
        own = self._model.own(session)
        # Variables on the own task stay out: no chief gives them values.
        report = replace(report, missing=[name for name in report.missing if name not in own])
        if not report.missing and "loading" not in report.phases.values():
            report = replace(report, not_ready=self._local_init(session))
        return report

    def _decide_action(
        self, role: TaskRole, report: policy.ClusterReport, options: policy.StartOptions
    ) -> policy.StartDecision:
        decision = policy.decide(concurrency.monotonic(), role, report, options)
        self._log_reason(
            f"{role.value}: {decision.action.value}: {decision.reason}",
            # To initialise in a recovery loses all that was trained.
            aloud=decision.action is StartAction.INITIALIZE and options.recovering,
            again=decision.action is StartAction.WAIT,
        )
        return decision

    def _raise_if_hopeless(
        self, request: _SessionRequest, decision: policy.StartDecision, started: float
    ) -> None:
        if decision.action is StartAction.END:
            raise TrainingOver(decision.reason)
        # The chief gives up at once, as no task can help it. Another task gives up when its time is
        # over.
        gives_up = decision.action is StartAction.GIVE_UP
        if request.role is TaskRole.CHIEF:
            if gives_up:
                raise RuntimeError(
                    "Model is not initialized and no init_op or init_fn or local_init_op was "
                    "given: " + decision.reason
                )
        elif gives_up or self._grace_period.exhausted():
            limit = request.options.give_up_at - started
            raise rt.DeadlineExceededError(
                f"Session was not ready after waiting {limit:.0f} secs: {decision.reason}"
            )

    def _wait_to_ask(self, request: _SessionRequest, report: policy.ClusterReport) -> None:
        """Waits before the cluster is asked again, where asking does not wait by itself."""
        # Where variables are missing the next question waits on the tasks themselves, without a
        # pause here.
        if request.role is TaskRole.CHIEF or report.not_ready:
            left = max(0.0, request.options.give_up_at - concurrency.monotonic())
            self._grace_period.wait(min(self._recovery_wait_secs, left))

    def _carry_out(
        self,
        request: _SessionRequest,
        session: rt.Session,
        report: policy.ClusterReport,
        action: StartAction,
        live: int | None,
    ) -> None:
        """Carries out the chief's decision, then opens the model to all tasks."""
        path = ""
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
            assert request.saver is not None, "a checkpoint is only found for a saver"
            # The newest checkpoint is looked for again: the record of the directory may name this
            # run's series since.
            newest = _newest_checkpoint(request.saver, request.checkpoint_dir, request.checkpoint)
            path = _restore_checkpoint(request.saver, session, request.checkpoint_dir, str(newest))
            done = f"Restored: {path}"
        else:
            if request.init_op is not None:
                session.run(request.init_op, request.init_feed_dict)
            if request.init_fn is not None:
                request.init_fn(session)
        # The local variables come last, as their initial values may read the global ones.
        self._make_ready(session, done)
        if path:
            self._log_lost(session, live, path)
        self._warn_of_unsaved(request, session)
        if request.records is not None:
            request.records.open(request.logdir)

    def _log_reason(self, text: str, aloud: bool = False, again: bool = False) -> None:
        now = concurrency.monotonic()
        if aloud:
            logging.warning("%s", text)
        elif text != self._logged:
            logging.info("%s", text)
        elif again or now - self._logged_at >= _LOG_EVERY_SECS:
            # A wait that lasts is seen without INFO, too.
            logging.warning("%s", text)
        else:
            return
        self._logged, self._logged_at = text, now

    def _warn_of_unsaved(self, request: _SessionRequest, session: rt.Session) -> None:
        """Warns, when training begins, of variables that no later start can restore."""
        saver = request.saver
        if not isinstance(saver, Saver) or not request.checkpoint_dir or request.options.recovering:
            return
        lost = {v.op.name for v in saver.not_saved(self._graph)} - self._model.own(session)
        if lost:
            logging.warning(
                "%d global variables are in no checkpoint: %s; a chief that is started again "
                "cannot go on. Make the Saver after minimize(), and of all variables",
                len(lost),
                ", ".join(sorted(lost)),
            )

    def _make_ready(self, session: rt.Session, done: str) -> None:
        missing = self._try_local_init(session)
        if missing:
            raise RuntimeError(
                f"Init operations did not make model ready for local_init. {done}, {missing}"
            )
        not_ready = readiness.reason(session, self._ready_op)
        if not_ready:
            raise RuntimeError(
                f"Init operations did not make model ready. {done}, "
                f"local_init_op: {getattr(self._local_init_op, 'name', None)}, error: {not_ready}"
            )

    def _try_local_init(self, session: rt.Session) -> str:
        """Runs the local init operation when the global variables are ready; returns the missing names, or nothing."""
        missing = readiness.reason(session, self._ready_for_local_init_op)
        if not missing and self._local_init_op is not None:
            session.run(self._local_init_op, self._local_init_feed_dict)
        return missing

    def _local_init(self, session: rt.Session) -> str:
        return self._try_local_init(session) or readiness.reason(session, self._ready_op)

    def _log_lost(self, session: rt.Session, live: int | None, path: str) -> None:
        step = get_global_step(self._graph)
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


def _restore_checkpoint(
    saver: CheckpointSaver, session: rt.Session, directory: str | None, path: str
) -> str:
    """Restores a checkpoint, or the newest undamaged one of a directory; returns the path of the checkpoint."""
    # A saver of the user's own chooses among no checkpoints.
    if isinstance(saver, Saver):
        return str(saver.restore_latest(session, directory or path))
    saver.restore(session, path)
    return path


def _newest_checkpoint(
    saver: CheckpointSaver | None, directory: str | None, path: str | None
) -> str | None:
    """Returns the path of the checkpoint to restore; None without a checkpoint or a saver."""
    if saver is None or not (directory or path):
        return None
    return path or latest_checkpoint(str(directory))
