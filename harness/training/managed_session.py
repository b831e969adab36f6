"""ManagedSession: a session that makes itself a new one when a task that it needs is lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, GracePeriod
from harness.training.session_manager import LOST_CONTACT
from harness.training.session_source import RunSessions

TRIES = 3
"""New sessions in a row for one step that find nothing different, or too little memory: a fourth is no use."""
_PAUSE_SECS = 0.5
"""Before the second of them: what a task is short of may pass."""
_T = TypeVar("_T")


class ManagedSession(rt.Session):
    """A session whose ``run`` survives the loss of tasks.

    When the tasks of the session underneath raise UnavailableError or AbortedError (``Session.lost``), a new session is
    opened (the chief restores what is lost, the others wait for that), and the step is run again in it: the caller sees
    a step that took longer. The same error of a Python call in the step is that call's own. Any number of threads may
    use the session; one of them recovers, the others wait for that. A step that fails again in ``TRIES`` new sessions
    in which nothing is different, or for which there is too little memory as often, raises its error.

    It is a session to whoever is given one, and has none of a session's own state: what it does not do itself, it asks
    of the present session underneath, ``raw``.

    Args:
        sessions: Opens the first session, and a new one in each recovery.
        graph: the graph that is run.
        grace_period: when it is exhausted, nothing is recovered any more.
        recover: False lets the errors out, as the classic session does.
        global_step: for telling what was lost.
        on_recovery: called with each new session after a recovery, before any step is run in it.
    """

    def __init__(
        self,
        sessions: RunSessions,
        graph: rt.Graph,
        grace_period: GracePeriod,
        *,
        recover: bool = True,
        global_step: Any = None,
        on_recovery: Callable[[rt.Session], object] | None = None,
    ) -> None:
        self.graph = graph
        self._sessions = sessions
        self._grace_period = grace_period
        self._coord = grace_period.coord
        self._recovers = recover
        self._global_step = global_step
        self._on_recovery = on_recovery
        give_up_secs = sessions.give_up_secs
        self._limit = f" (gives up after {give_up_secs:g} s)" if give_up_secs < math.inf else ""
        self._recovery = threading.RLock()
        self._failed: BaseException | None = None
        self._gives_step: dict[rt.Operation | None, bool] = {}
        self._seen: int | None = None
        self._lost: tuple[int, int] | None = None
        self._closed = False
        self._steps: dict[int, float] = {}  # by thread: since when it has been running one
        self.on_exit: Callable[[BaseException | None], object] | None = None
        """Called when a ``with`` block of the session ends, before it is closed, with the error that ends it."""
        self.left: rt.TaskLeftError | None = None
        """Why nothing more can be trained: a task has left, as training is over."""
        self.is_chief: bool | None = None
        """True on the chief of the run; None of a session that is part of no run."""
        self.last_loss: rt.OpError | None = None
        """What the last recovery was for; names the task."""
        self.recoveries = 0
        """How often a new session has been opened."""
        self.raw = sessions.open(False)
        """The present session underneath."""
        self.config = self.raw.config
        self.target = self.raw.target

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None, *arguments: Any, **options: Any) -> Any:
        """Runs one step; arguments, result and errors are those of ``Session.run``.

        Raises:
            BaseException: what has stopped the coordinator, such as the failure of a service thread.
            UnavailableError, AbortedError: a task was lost, and the session does not recover, or is to stop.
            ResourceExhaustedError: it needs more memory than a task has.
            DeadlineExceededError: it was not possible to recover in time; names who is missing.
            OutOfRangeError: the chief has finished training meanwhile. TaskLeftError: a task has left since.
        """
        result = self.run_again(lambda raw: raw.run(fetches, feed_dict, *arguments, **options))
        self.note(fetches, result)
        return result

    def run_again(self, step: Callable[[rt.Session], _T]) -> _T:
        """Calls a function with the session underneath, and again with each new one that a loss makes necessary.

        Args:
            step: Runs a step in the session that it is given.

        Returns:
            The value of the function.

        Raises:
            BaseException: What has stopped the coordinator, or what the function raises that is no loss of the session.
        """
        recoveries = Recoveries(self)
        self._steps[threading.get_ident()] = time.monotonic()
        try:
            while True:
                if self._coord.should_stop():
                    self._coord.raise_requested_exception()  # a service has failed: not only in the log
                raw = self.raw
                try:
                    return step(raw)
                except Exception as error:
                    if recoveries.cure(raw, error):
                        continue
                    if isinstance(error, rt.TaskLeftError) and raw.raised(error):
                        self.left = error
                    self._coord.raise_requested_exception()  # what a thread's failure has led to: a closed queue
                    raise
        finally:
            self._steps.pop(threading.get_ident(), None)

    def end_steps(self) -> None:
        """Notes that the steps under way have been cancelled."""
        self._steps.clear()

    def step_secs(self) -> float:
        """For how long the oldest of the steps under way has been running, seconds; 0 when there is none."""
        began = min(list(self._steps.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def replaced(self, raw: rt.Session) -> bool:
        """Whether another thread has put a new session in the place of one, and closed that, while a step waited in it.

        Args:
            raw: the session of the step; a recovery that is under way is waited for.
        """
        with self._recovery:
            return raw is not self.raw

    def note(self, fetches: Any, result: Any) -> None:
        """Remembers the global step that a step has fetched, for telling what was lost.

        Args:
            fetches: What was fetched; looked into as far as it is lists, tuples and dictionaries.
            result: The values, in the same structure.
        """
        if isinstance(fetches, dict):
            for key, fetch in fetches.items():
                self.note(fetch, result[key])
        elif isinstance(fetches, (list, tuple)):
            for fetch, value in zip(fetches, result, strict=True):
                self.note(fetch, value)
        elif isinstance(result, np.number) and self._is_step(getattr(fetches, "op", None)):
            self._seen = max(int(result), self._seen or 0)

    def _is_step(self, op: rt.Operation | None) -> bool:
        """Returns True if an operation gives the value of the global step: it reads it, or what it has become."""
        known = self._gives_step.get(op)
        if known is None:
            name = getattr(getattr(self._global_step, "op", None), "name", "")
            written = [variable.name for variable in getattr(getattr(op, "body", None), "variables", ())]
            reads = op is not None and op.name in (name, f"{name}/read")
            known = self._gives_step[op] = bool(name) and (reads or written == [name])
        return known

    def recover(self, broken: rt.Session, error: BaseException) -> None:
        """Replaces a broken session, unless another thread has done so already.

        Args:
            broken: the session that raised.
            error: what it raised; raised again when there is to be no recovery, or the session has not lost a task.
        """
        if not self._recovers:
            raise error
        with self._recovery:
            if self.raw is not broken:
                return
            if not broken.lost(error):
                raise error
            if self._failed is not None:
                raise self._failed
            if not self._closed and (gone := broken.left_tasks):
                self.left = rt.TaskLeftError("it has left: training is over", task=", ".join(gone))
                raise self.left from error
            self._grace_period.start_again()
            if self._closed or self._grace_period.exhausted():
                raise error
            started = time.monotonic()
            logging.warning("recovering: %s%s", error, self._limit)
            if isinstance(error, rt.OpError):
                self.last_loss = error
            try:
                fresh = self._sessions.open(True)
            except BaseException as failure:
                self._failed = failure
                if isinstance(failure, rt.TaskLeftError):
                    self.left = failure
                raise
            self.recoveries += 1
            fresh.take_plans(broken)
            if self._on_recovery is not None:
                try:
                    self._on_recovery(fresh)
                except BaseException as again:
                    if not fresh.lost(again):
                        fresh.close()
                        raise
                    logging.warning("lost contact again: %s", again)  # the next run finds out, and recovers again
            self._log_recovery(broken, fresh, time.monotonic() - started)
            self.raw = fresh
            broken.close()

    def _log_recovery(self, broken: rt.Session, fresh: rt.Session, took_secs: float) -> None:
        known, now = self.last_step(), None
        if self._global_step is not None:
            try:
                now = int(fresh.run(self._global_step))
            except LOST_CONTACT as again:
                logging.warning("lost contact again: %s", again)
        if now is not None:
            self._seen = now  # what is lost is told once
            if self._lost is not None and known is not None and known <= self._lost[1]:
                self._lost = (self._lost[0], now)  # lost again before anything was made good
            elif known is not None and known > now:
                self._lost = (known, now)
        rt.lowlevel.metrics.add("recoveries_total")
        rt.lowlevel.metrics.add("recovery_seconds_total", took_secs)
        text = f"recovered within {took_secs:.2f} s"
        if now is None:
            logging.warning("%s", text)
        elif known is None or (known <= now and self._value_id(broken) == self._value_id(fresh)):
            logging.warning("%s at step %d: no step that this task has seen is lost", text, now)
        elif known <= now:  # gone back, and the others have trained on since
            logging.warning(
                "%s at step %d: the chief has replaced the values meanwhile, and its log says how many steps are lost "
                "(step %d was the last seen here)",
                *(text, now, known),
            )
        else:
            rt.lowlevel.metrics.add("steps_lost_total", known - now)
            logging.warning(
                "%s at step %d: %d steps are lost (step %d was the last seen here)", text, now, known - now, known
            )

    def _value_id(self, session: rt.Session) -> str:
        """Which life of the global step's task a session uses; replacing values replaces those of every task."""
        return session.value_ids[session.placement([self._global_step])[self._global_step].task_name]

    def last_step(self) -> int | None:
        """Returns the latest global step that a run has fetched, None when none has; after a recovery the one then."""
        return self._seen

    def reached(self) -> int | None:
        """How far training had come: ``last_step``, or what was lost and of which nothing has been made good since."""
        last = self.last_step()
        return self._lost[0] if self._lost is not None and last is not None and last <= self._lost[1] else last

    @property
    def coord(self) -> Coordinator:
        """What stops training in this task."""
        return self._coord

    # -- its end -----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self) -> None:
        """Ends the session, and a step that is under way with CancelledError. Never waits for a dead task."""
        self._closed = True
        self.raw.close()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Ends what belongs to the block (``on_exit``), takes back the defaults and closes the session."""
        try:
            if self.on_exit is not None:
                self.on_exit(value)
        finally:
            super().__exit__(kind, value, traceback)


class _OfRaw:
    """An attribute that is the one of the present session underneath."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, session: ManagedSession | None, owner: object) -> Any:
        return self if session is None else getattr(session.raw, self._name)


for _name in (
    *("value_ids", "task", "id", "silent_secs", "left_tasks", "authority", "checkpoint_coordinator", "placement"),
    *("adopt_generations", "list_devices", "cancel_steps", "raised", "lost", "take_plans"),
):
    setattr(ManagedSession, _name, _OfRaw(_name))


class Recoveries:
    """The recoveries of one thing that is to be done, such as a step.

    Args:
        session: The session in which it is done.
    """

    def __init__(self, session: ManagedSession) -> None:
        self._session = session
        self._in_vain = 0

    def cure(self, raw: rt.Session, error: BaseException) -> bool:
        """Returns True if an error ended only a session underneath, in whose place there is another one now.

        Args:
            raw: The session underneath that was used.
            error: What ended its use.

        Raises:
            ResourceExhaustedError: There was too little memory, ``TRIES`` times.
            UnavailableError, AbortedError: The session has not lost a task, or it has, in vain, for the so manyth time.
        """
        session = self._session
        if not isinstance(error, LOST_CONTACT):
            # A hook may raise the same classes while another thread replaces the session: that error is the hook's.
            cancelled = isinstance(error, rt.CancelledError | RuntimeError) and raw.raised(error)
            return cancelled and session.replaced(raw)
        if self._in_vain >= TRIES:
            again = f"{error.message} (also after {TRIES} recoveries"
            if error.out_of_memory:
                text = f"{again}: give it less to do, or more memory)"
                raise rt.ResourceExhaustedError(text, task=error.task) from error
            raise type(error)(f"{again}, which found nothing different)", task=error.task)
        if self._in_vain > 1:
            session.coord.wait_for_stop(_PAUSE_SECS)
        session.recover(raw, error)
        same = raw.value_ids == session.raw.value_ids
        self._in_vain = self._in_vain + 1 if same or error.out_of_memory else 0
        return True


def is_chief(session: rt.Session, default: bool) -> bool:
    """Returns True if the task of a session is the chief of its run, as who opened the session has said.

    Args:
        session: The session.
        default: The answer for a session that is part of no run.
    """
    found = getattr(session, "is_chief", None)
    return default if found is None else bool(found)
