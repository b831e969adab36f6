"""SessionManager: opens a session and makes it ready - by initialising, restoring, keeping what lives, or waiting."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, Patience
from harness.training import opening, policy, readiness
from harness.training.global_step import get_global_step
from harness.training.policy import Action, Role
from harness.training.run_records import RunRecords

GIVE_UP_SECS = opening.GIVE_UP_SECS


class SessionManager:
    """Opens sessions for training.

    Args:
        local_init_op: run in every new session, by the chief and the others.
        ready_op: string tensor with the names of what is not ready, empty when all is; None: nothing is checked.
        ready_for_local_init_op: the same for what ``local_init_op`` needs; None: nothing is checked.
        graph: the graph; the default graph when not given.
        recovery_wait_secs: how often a ready operation of the user's own is looked at. Variables need no looking at:
            their tasks tell the moment they are ready.
        local_init_feed_dict: feeds of ``local_init_op``.
        patience: ends waits when training is to stop.

    Raises:
        ValueError: ``ready_for_local_init_op`` without ``local_init_op``.
    """

    def __init__(
        self,
        local_init_op: Any = None,
        ready_op: Any = None,
        ready_for_local_init_op: Any = None,
        graph: rt.Graph | None = None,
        recovery_wait_secs: float = 30,
        local_init_feed_dict: Mapping[Any, Any] | None = None,
        *,
        patience: Patience | None = None,
    ) -> None:
        if ready_for_local_init_op is not None and local_init_op is None:
            raise ValueError(
                "If you pass a ready_for_local_init_op, you must also pass a local_init_op: it is what it is for"
            )
        self._graph = graph or rt.get_default_graph()
        self._local_init_op = local_init_op
        self._ready_op = ready_op
        self._ready_for_local_init_op = ready_for_local_init_op
        self._recovery_wait_secs = recovery_wait_secs
        self._local_init_feed_dict = local_init_feed_dict
        self._patience = patience or Patience(Coordinator())
        self._patient_by_itself = patience is None
        self._records: dict[tuple[str, bool], RunRecords] = {}
        self._told = ""
        self._missing, self._awaited, self._await_secs = readiness.operations(self._graph)
        self._variables = len(self._graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES))

    @property
    def probe(self) -> rt.Tensor:
        """A tensor that touches every task that holds variables: fetching it finds out who is lost."""
        return self._missing

    def stop_with(self, patience: Patience) -> None:
        """Lets a Supervisor's patience end waits, unless one was given to the constructor.

        Args:
            patience: ends waits when training is to stop.
        """
        if self._patient_by_itself:
            self._patience = patience

    # -- the three ways ----------------------------------------------------------------------------------------

    def prepare_session(
        self,
        master: str,
        init_op: Any = None,
        saver: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = GIVE_UP_SECS,
        config: rt.SessionConfig | None = None,
        init_feed_dict: Mapping[Any, Any] | None = None,
        init_fn: Callable[[rt.Session], object] | None = None,
        *,
        recovering: bool = False,
    ) -> rt.Session:
        """Opens a session as the chief: keeps the model if it is alive, else restores it, else initialises it.

        Nobody trains while values are being given: the tasks are told first, and sessions that used older values are
        cut off (see ``docs/guarantees.md``). What is lost is logged.

        Args:
            master: session target.
            init_op: operation that gives all variables values.
            saver: what restores; without one nothing is restored.
            checkpoint_dir: directory of the checkpoints.
            checkpoint_filename_with_path: one checkpoint, instead of the newest of a directory.
            wait_for_checkpoint: wait for a checkpoint before initialising.
            max_wait_secs: how long to wait for tasks, and for a checkpoint.
            config: session options; without device filters, ``readiness.default_filters`` are used.
            init_feed_dict: feeds of ``init_op``.
            init_fn: called with the session after ``init_op``; not when the model was restored or kept.
            recovering: training has been going on in this process before; for the log.

        Raises:
            RuntimeError: nothing can make the model ready, or it is not ready after all.
            DeadlineExceededError: tasks did not answer in time; names them.
            ValueError: both kinds of checkpoint location were given.
        """
        if checkpoint_dir and checkpoint_filename_with_path:
            raise ValueError("Can not provide both checkpoint_dir and checkpoint_filename_with_path.")
        options = policy.Options(
            time.monotonic() + opening.limit_secs(config, max_wait_secs),
            init_op is not None or init_fn is not None or self._local_init_op is not None,
            wait_for_checkpoint,
            recovering,
        )

        records = self.records(master, config, Role.CHIEF)
        logdir = _place(checkpoint_dir)

        def attempt(session: rt.Session, reopen: opening.Reopen) -> rt.Session | None:
            report = self._report(session, records, _newest(saver, checkpoint_dir, checkpoint_filename_with_path))
            decision = self._decide(Role.CHIEF, report, options)
            if decision.action is Action.WAIT:
                self._patience.wait(min(self._recovery_wait_secs, max(0.0, options.give_up_at - time.monotonic())))
                return None
            if decision.action is Action.GIVE_UP:
                raise RuntimeError(
                    "Model is not initialized and no init_op or init_fn or local_init_op was given: " + decision.reason
                )
            if records is not None:
                records.claim()
            if decision.action is Action.KEEP:
                if warning := policy.other_run(report, logdir, self._live_step(session, report)):
                    logging.warning("%s", warning)
            else:
                live = self._live_step(session, report)
                if records is not None and records.load():
                    session = reopen()  # this one is cut off too
                if decision.action is Action.RESTORE:
                    path = _restore(saver, session, checkpoint_dir, str(report.checkpoint))
                    self._tell_lost(session, live, path)
                else:
                    _initialize(session, init_op, init_feed_dict, init_fn)
            self._make_ready(session, init_op, init_fn, report)
            if records is not None:
                records.open(logdir)
            return session

        return self._until(attempt, master, config, options, Role.CHIEF)

    def recover_session(
        self,
        master: str,
        saver: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = GIVE_UP_SECS,
        config: rt.SessionConfig | None = None,
    ) -> tuple[rt.Session, bool]:
        """Opens a session and restores it if there is something to restore; never initialises global variables.

        Returns:
            The session, and whether the model is ready: it was alive, or was restored.
        """
        try:
            return (
                self.prepare_session(
                    master,
                    None,
                    saver,
                    checkpoint_dir,
                    checkpoint_filename_with_path,
                    wait_for_checkpoint,
                    max_wait_secs,
                    config,
                ),
                True,
            )
        except RuntimeError as error:
            logging.info("could not recover a session: %s", error)
        session = rt.Session(
            master, self._graph, readiness.filtered(config, self._graph, opening.limit_secs(config, max_wait_secs))
        )
        self._try_local_init(session)
        return session, False

    def wait_for_session(
        self, master: str, config: rt.SessionConfig | None = None, max_wait_secs: float | None = math.inf
    ) -> rt.Session:
        """Opens a session as one of the others: waits until the chief has made the model ready.

        Args:
            master: session target.
            config: session options; without device filters, ``readiness.default_filters`` are used.
            max_wait_secs: how long to wait; None is without a limit.

        Raises:
            TrainingOver: the chief has finished training.
            DeadlineExceededError: the model was not ready in time; says what was missing.
        """
        max_wait_secs = opening.limit_secs(config, max_wait_secs)
        options = policy.Options(time.monotonic() + max_wait_secs)

        records = self.records(master, config, Role.OTHER)

        def attempt(session: rt.Session, reopen: opening.Reopen) -> rt.Session | None:
            report = None
            while True:
                left = options.give_up_at - time.monotonic()
                report = self._report(session, records, None, report, left)
                if not report.missing and "loading" not in report.phases.values():
                    report = replace(report, not_ready=self._local_init(session))
                decision = self._decide(Role.OTHER, report, options)
                if decision.action is Action.JOIN:
                    return session
                if decision.action is Action.END:
                    raise opening.TrainingOver(decision.reason)
                if decision.action is Action.GIVE_UP or self._patience.exhausted():
                    raise rt.DeadlineExceededError(
                        f"Session was not ready after waiting {max_wait_secs:.0f} secs: {decision.reason}"
                    )
                if report.not_ready:
                    self._patience.wait(max(0.0, min(self._recovery_wait_secs, left)))

        return self._until(attempt, master, config, options, Role.OTHER)

    # -- their parts -------------------------------------------------------------------------------------------

    def records(self, master: str, config: rt.SessionConfig | None, role: Role) -> RunRecords | None:
        """The run records behind a target; None for a session that shares nothing."""
        if not master:
            return None
        key = (master, role is Role.CHIEF)
        if key not in self._records:
            self._records[key] = RunRecords(
                master, readiness.filtered(config, self._graph, opening.ATTEMPT_SECS), is_chief=role is Role.CHIEF
            )
        return self._records[key]

    def _until(
        self,
        attempt: opening.Attempt,
        master: str,
        config: rt.SessionConfig | None,
        options: policy.Options,
        role: Role,
    ) -> rt.Session:
        def open_one(secs: float) -> rt.Session:
            return rt.Session(master, self._graph, readiness.filtered(config, self._graph, secs))

        def tell(error: Exception) -> None:
            self._tell(f"{role.value}: waiting: {error}")

        return opening.until_accepted(attempt, open_one, self._patience, options.give_up_at, tell)

    def _report(
        self,
        session: rt.Session,
        records: RunRecords | None,
        checkpoint: str | None,
        last: policy.Report | None = None,
        wait_secs: float = 0.0,
    ) -> policy.Report:
        """What the cluster reports; with ``last``, after waiting a while for what was missing in that."""
        wait_secs = max(0.0, min(wait_secs, opening.ATTEMPT_SECS))
        if last is not None and not last.missing and "loading" in last.phases.values() and records is not None:
            records.wait_loaded(wait_secs)
        try:
            if last is not None and last.missing:
                session.run(self._awaited, {self._await_secs: wait_secs}, timeout_secs=wait_secs + opening.ATTEMPT_SECS)
            names = session.run(self._missing, timeout_secs=opening.ATTEMPT_SECS)
        except rt.DeadlineExceededError as error:
            raise rt.UnavailableError(error.message, task=error.task) from None
        looked = {} if records is None else records.look()
        return policy.Report(
            variables=self._variables,
            missing=_names(names),
            phases={task: record.phase for task, record in looked.items()},
            addresses={task: record.address for task, record in looked.items() if record.address},
            chief=next((record.chief for record in looked.values() if record.chief), ""),
            origins=[record.origin for record in looked.values() if record.origin],
            checkpoint=checkpoint,
            logdirs=[record.logdir for record in looked.values() if record.logdir],
        )

    def _decide(self, role: Role, report: policy.Report, options: policy.Options) -> policy.Decision:
        decision = policy.decide(time.monotonic(), role, report, options)
        self._tell(f"{role.value}: {decision.action.value}: {decision.reason}", again=decision.action is Action.WAIT)
        return decision

    def _tell(self, text: str, again: bool = False) -> None:
        if text != self._told or again:
            logging.info("%s", text)
            self._told = text

    def _make_ready(self, session: rt.Session, init_op: Any, init_fn: Any, report: policy.Report) -> None:
        missing = self._try_local_init(session)
        if missing:
            raise RuntimeError(
                f"Init operations did not make model ready for local_init. {_what_ran(init_op, init_fn)}, {missing}"
            )
        not_ready = readiness.reason(session, self._ready_op)
        if not_ready:
            raise RuntimeError(
                f"Init operations did not make model ready. {_what_ran(init_op, init_fn)}, "
                f"local_init_op: {getattr(self._local_init_op, 'name', None)}, error: {not_ready}"
            )

    def _try_local_init(self, session: rt.Session) -> str:
        """Runs the local init operation if it may; gives what is missing for it."""
        missing = readiness.reason(session, self._ready_for_local_init_op)
        if not missing and self._local_init_op is not None:
            session.run(self._local_init_op, self._local_init_feed_dict)
        return missing

    def _local_init(self, session: rt.Session) -> str:
        return self._try_local_init(session) or readiness.reason(session, self._ready_op)

    def _live_step(self, session: rt.Session, report: policy.Report) -> int | None:
        """The global step as it stands on its task, None when it is lost or there is none."""
        step = get_global_step(self._graph)
        if "loading" in report.phases.values():  # a chief has died on its way: it may be the restored one already
            return None
        if step is None or step.op.name in report.missing:
            return None
        try:
            return int(session.run(step))
        except rt.FailedPreconditionError:
            return None

    def _tell_lost(self, session: rt.Session, live: int | None, path: str) -> None:
        step = get_global_step(self._graph)
        if step is None:
            return
        now = int(session.run(step))
        if live is None:
            logging.info("restored %s: training goes on from step %d", path, now)
        else:
            logging.warning("restored %s: back from step %d to step %d, %d steps are lost", path, live, now, live - now)


def _initialize(session: rt.Session, init_op: Any, feed_dict: Mapping[Any, Any] | None, init_fn: Any) -> None:
    if init_op is not None:
        session.run(init_op, feed_dict)
    if init_fn is not None:
        init_fn(session)


def _restore(saver: Any, session: rt.Session, directory: str | None, path: str) -> str:
    """Restores a checkpoint; of a directory the newest one that is not damaged. Returns its path."""
    if directory and hasattr(saver, "restore_latest"):
        return str(saver.restore_latest(session, directory))
    saver.restore(session, path)
    return path


def _newest(saver: Any, directory: str | None, path: str | None) -> str | None:
    """The checkpoint to restore; None when there is none, or nothing to restore it with."""
    if saver is None or not (directory or path):
        return None
    if path:
        return path
    from harness.checkpoints.saver import latest_checkpoint

    found: str | None = latest_checkpoint(str(directory))
    return found


def _place(directory: str | None) -> str:
    """A directory in the form that tells whether it is another one; empty for none."""
    if not directory or "://" in directory:
        return directory or ""
    return os.path.realpath(directory)


def _names(array: Any) -> list[str]:
    return [name.decode() if isinstance(name, bytes) else str(name) for name in np.ravel(array)]


def _what_ran(init_op: Any, init_fn: Any) -> str:
    return f"Init op: {getattr(init_op, 'name', init_op)}, init fn: {init_fn}"
