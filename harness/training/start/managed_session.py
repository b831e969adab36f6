"""ManagedSession: the session of a training loop, which survives the loss of tasks.

``Lifecycle`` makes a ``ManagedSession`` for Supervisor and MonitoredSession. ``Session.lost`` tells
a lost task from an error of the step's own Python: it knows where an error comes from, and the type
of an error does not say so.
"""

import contextlib
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.exit_codes import show_line
from harness.training import times
from harness.training.start.global_step import GlobalStep
from harness.training.start.readiness import Feeds
from harness.training.start.session_source import RunSessions
from harness.training.start.session_start import LOST_CONTACT
from runtime import concurrency

TRIES = 3
"""New sessions in a row for one step that find nothing different, or too little memory, before the error is raised."""
_T = TypeVar("_T")


class StepRate:
    """The rate of global steps between two calls of ``count``."""

    _last: tuple[int, float] | None = None

    def count(self, step: int, now: float) -> float | None:
        """Returns the rate since the last call, steps per second.

        Returns None at the first call, before the first step, and after a loss of steps.

        Args:
            step: The global step.
            now: Seconds of a clock that never goes back.
        """
        last, self._last = self._last, (step, now)
        if last is None or now <= last[1] or not last[0] <= step > 0:
            return None
        return (step - last[0]) / (now - last[1])


class SeenSteps:
    """The global steps seen by a task, for the lines about its progress and the log of lost steps.

    Args:
        variable: Variable that counts the steps; None for none.
        log_secs: Seconds between two lines; 0 for none.
    """

    def __init__(self, variable: GlobalStep | None, log_secs: float) -> None:
        self.variable = variable
        """The variable that counts the steps."""
        self.last: int | None = None
        """Latest step that a step of training has fetched; None before. A recovery sets it back."""
        self.reached: int | None = None
        """Highest step so far. A lost step counts until a step beyond the restored one is seen."""
        self._log_secs = log_secs or math.inf
        self._due = 0.0
        self._rate = StepRate()
        self._scalars: dict[str, np.number] = {}
        self._has_nan = False
        self._gives_step: dict[rt.Operation | None, bool] = {}

    def note(self, fetches: object, result: Any) -> None:
        """Notes the global step among the values that a step has fetched.

        Args:
            fetches: Fetches of the step. Lists, tuples and dictionaries are searched.
            result: Values, in the same structure.
        """
        if isinstance(fetches, dict):
            for key, fetch in fetches.items():
                self.note(fetch, result[key])
        elif isinstance(fetches, (list, tuple)):
            for fetch, value in zip(fetches, result, strict=True):
                self.note(fetch, value)
        # Scalars are numpy numbers, as a session returns them. A list of them is no global step.
        elif isinstance(result, np.number):
            if self._is_step(getattr(fetches, "op", None)):
                step = int(result)
                if self.last is None or step > self.last:
                    self.last = self.reached = step
                    if concurrency.monotonic() >= self._due:
                        values = dict(self._scalars).items()
                        shown = [f", {at.partition(':')[0]} {value:.4g}" for at, value in values]
                        self._log_rate("", "".join(shown))
                return
            name = str(getattr(fetches, "name", fetches))
            self._scalars[name] = result
            # NaN alone differs from itself.
            if result != result and not self._has_nan:
                self._has_nan = True
                logging.warning(
                    "%s is NaN%s: if this is the loss, training has diverged; "
                    "lower the learning rate, clip the gradients or look for NaN in the data",
                    name,
                    "" if self.last is None else f" after step {self.last}",
                )

    def log_end(self, directory: str | None) -> None:
        """Logs that training is over, with the last step, the rate, and the directory of the checkpoints."""
        if self._log_secs < math.inf:
            saved = f"; its checkpoints are in {directory}" if directory else ""
            self._log_rate("training is over: ", saved)

    def _log_rate(self, before: str, after: str) -> None:
        now = concurrency.monotonic()
        self._due = now + self._log_secs
        rate = self._rate.count(self.last or 0, now)
        if rate is not None:
            show_line(f"{before}step {self.last}, {rate:,.1f} steps/s{after}")

    def _is_step(self, op: rt.Operation | None) -> bool:
        """Returns True if an operation reads the global step, or updates the step alone and returns the result."""
        known = self._gives_step.get(op)
        if known is None:
            name = "" if self.variable is None else self.variable.op.name
            # An update of the step alone returns the new step, so a loop that fetches only that
            # update counts, too.
            written = [
                variable.name for variable in getattr(getattr(op, "body", None), "variables", ())
            ]
            reads = op is not None and op.name in (name, f"{name}/read")
            known = self._gives_step[op] = bool(name) and (reads or written == [name])
        return known

    def log_recovery(self, broken: rt.Session, fresh: rt.Session, took_secs: float) -> None:
        """Logs the steps lost with a recovery, each lost step once.

        Args:
            broken: Session with a lost task.
            fresh: New session in place of the broken session.
            took_secs: Seconds that the recovery took.
        """
        # The step of the log is read without a recovery: a loss here is met again by the next step.
        known, now = self.last, None
        if self.variable is not None:
            try:
                now = int(fresh.run(self.variable))
            except LOST_CONTACT as again:
                logging.warning("lost contact again: %s", again)
        # A lost step is reported once.
        if now is not None:
            self.last, self.reached = now, max(now, self.reached or 0)
        rt.lowlevel.metrics.add("recoveries_total")
        rt.lowlevel.metrics.add("recovery_seconds_total", took_secs)
        text = f"recovered within {took_secs:.2f} s"
        if now is None:
            logging.warning("%s", text)
        elif known is None or (known <= now and self._value_ids(broken) == self._value_ids(fresh)):
            logging.warning("%s at step %d: no step that this task has seen is lost", text, now)
        elif known <= now:
            # The step went back, and other workers have trained since: this task cannot count the
            # lost steps.
            logging.warning(
                "%s at step %d: the chief has replaced the values meanwhile, and its log says how "
                "many steps are lost (step %d was the last seen here)",
                text,
                now,
                known,
            )
        else:
            rt.lowlevel.metrics.add("steps_lost_total", known - now)
            logging.warning(
                "%s at step %d: %d steps are lost (step %d was the last seen here)",
                text,
                now,
                known - now,
                known,
            )

    def _value_ids(self, session: rt.Session) -> list[str]:
        """Returns the id of the values on the global step's task.

        A restore gives the values of every task new ids.
        """
        placed = session.placement([] if self.variable is None else [self.variable])
        return [session.value_ids[place.task_name] for place in placed.values()]


class ManagedSession:
    """A session whose ``run`` survives the loss of tasks.

    When the tasks of the session underneath raise UnavailableError or AbortedError, a recovery
    opens a new session and runs the step again there. The caller sees a step that took longer. The
    chief restores lost variables; other tasks wait for the chief. The same error of a Python call
    in the step is raised.

    Any number of threads may use the session; one thread recovers while the other threads wait. A
    step raises its error after ``TRIES`` new sessions in which nothing was different, or memory was
    short.

    A ``ManagedSession`` wraps a session, and is none: ``runtime.SessionLike`` is the type of both.
    Every other public attribute is the one of the present session underneath, ``raw``.

    Args:
        sessions: Sessions of the run: the first one, and a new one in each recovery.
        graph: Graph that is run.
        recover: False raises the error of a lost task, as TF1's session does.
        global_step: Variable that counts the steps, for the log of lost steps; None for none.
        on_recovery: Function that is called with each new session after a recovery, before any step
            runs there.
        is_chief: True on the chief of the run; None of a session that is part of no run.
    """

    def __init__(
        self,
        sessions: RunSessions,
        graph: rt.Graph,
        *,
        recover: bool = True,
        global_step: GlobalStep | None = None,
        on_recovery: Callable[[rt.Session], object] | None = None,
        is_chief: bool | None = None,
    ) -> None:
        self.graph = graph
        """Graph that is run."""
        self._sessions = sessions
        self._recovers = recover
        self._on_recovery = on_recovery
        self._recovery = concurrency.RLock()
        self._failed: BaseException | None = None
        # By thread that runs a step: the begin of the step on time.monotonic().
        self._steps: dict[int, float] = {}
        self._entered: contextlib.ExitStack | None = None
        self.on_exit: Callable[[BaseException | None], object] | None = None
        """Function that is called at the end of a ``with`` block, before the close, with the error of the block."""
        self.left: rt.TaskLeftError | None = None
        """Error that ends all training here: a task has left, as training is over. None before."""
        self.is_chief = is_chief
        """True on the chief of the run; None of a session that is part of no run."""
        self.last_loss: rt.OpError | None = None
        """Error that the last recovery was for; names the task."""
        self.recoveries = 0
        """Number of recoveries, each with a new session."""
        self.closed = False
        """True after ``close``."""
        self.raw = sessions.open(False)
        """The present session underneath."""
        self.seen = SeenSteps(global_step, self.raw.config.log_secs)
        """Global steps that this task has seen."""

    def __getattr__(self, name: str) -> Any:
        # Private state of the session underneath stays private, and a half-made session has no
        # ``raw`` to ask.
        gone = rt.lowlevel.explain_name(f"ManagedSession.{name}")
        if gone or name.startswith("_") or "raw" not in vars(self):
            usual = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(gone or usual)
        return getattr(self.raw, name)

    def run(
        self, fetches: object, feed_dict: Feeds | None = None, *arguments: Any, **options: Any
    ) -> Any:
        """Runs one step; arguments, result and errors are those of ``Session.run``.

        Args:
            fetches: As in ``Session.run``.
            feed_dict: As in ``Session.run``.
            *arguments: Further arguments of ``Session.run``.
            **options: Further arguments of ``Session.run``, by name.

        Raises:
            BaseException: The error that has stopped the coordinator, such as the failure of a
                service thread.
            UnavailableError, AbortedError: A task was lost, and the session does not recover, or is
                to stop.
            ResourceExhaustedError: The step needs more memory than a task has.
            DeadlineExceededError: A recovery did not succeed in time. The message names the missing
                task.
            OutOfRangeError: The chief has finished training meanwhile.
            TaskLeftError: A task has left since, as training is over.
        """
        result = self.run_again(lambda raw: raw.run(fetches, feed_dict, *arguments, **options))
        self.seen.note(fetches, result)
        return result

    def run_again(self, step: Callable[[rt.Session], _T]) -> _T:
        """Calls a function with the session underneath, and again with each new one that a loss makes necessary.

        Args:
            step: Function of a session that runs a step.

        Returns:
            The value of the function.

        Raises:
            BaseException: The error that has stopped the coordinator, or an error of the function
                that is no loss of the session.
        """
        # Counted for each step: a step that was run again and went well has no bearing on the next.
        recoveries = StepRecoveries(self)
        self._steps[concurrency.thread_id()] = concurrency.monotonic()
        try:
            while True:
                # The failure of a service reaches the training loop here, not only the log.
                if self.coord.should_stop():
                    self.coord.raise_requested_exception()
                # Kept for the question below: another thread may replace the session while this one
                # fails.
                raw = self.raw
                try:
                    return step(raw)
                except Exception as error:
                    if recoveries.cure(raw, error):
                        continue
                    if isinstance(error, rt.TaskLeftError) and raw.raised(error):
                        self.left = error
                    # The error of a thread comes first: a closed queue, say, is only its
                    # consequence.
                    self.coord.raise_requested_exception()
                    raise
        finally:
            self._steps.pop(concurrency.thread_id(), None)

    def end_steps(self) -> None:
        """Forgets the steps under way, after a cancellation."""
        self._steps.clear()

    def step_secs(self) -> float:
        """Returns the age of the oldest step under way, in seconds; 0 when there is none."""
        began = min(list(self._steps.values()), default=None)
        return 0.0 if began is None else concurrency.monotonic() - began

    def replaced(self, raw: rt.Session) -> bool:
        """Returns True if another thread has replaced and closed a session.

        Waits for a recovery under way.

        Args:
            raw: Session underneath in which a step has run.
        """
        with self._recovery:
            return raw is not self.raw

    def recover(self, broken: rt.Session, error: BaseException) -> None:
        """Replaces a broken session, unless another thread has done so already.

        Args:
            broken: Session underneath that raised.
            error: Error of that session. Raised again when there is to be no recovery, or no task
                is lost.

        Raises:
            TaskLeftError: A task has left, as training is over.
            BaseException: The error, or the error that has ended the recovery.
        """
        if not self._recovers:
            raise error
        with self._recovery:
            # Another thread was first. Its session is good until a step says otherwise.
            if self.raw is not broken:
                return
            if not broken.lost(error):
                raise error
            # One failed recovery is the end for all threads: each would wait as long for the same
            # error.
            if self._failed is not None:
                raise self._failed
            if not self.closed and (gone := broken.left_tasks):
                self.left = rt.TaskLeftError("it has left: training is over", task=", ".join(gone))
                raise self.left from error
            self._sessions.grace_period.start_again()
            if self.closed or self._sessions.grace_period.exhausted():
                raise error
            started = concurrency.monotonic()
            limit = self._sessions.give_up_secs
            logging.warning(
                "recovering: %s%s",
                error,
                f" (gives up after {limit:g} s)" if limit < math.inf else "",
            )
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
            # Planning and export would be most of the time to the next step.
            fresh.take_plans(broken)
            if self._on_recovery is not None:
                try:
                    self._on_recovery(fresh)
                except BaseException as again:
                    if not fresh.lost(again):
                        fresh.close()
                        raise
                    # The next run meets the loss again, and recovers.
                    logging.warning("lost contact again: %s", again)
            self.seen.log_recovery(broken, fresh, concurrency.monotonic() - started)
            # Replaced before the close: a step that the close ends must find the new session.
            self.raw = fresh
            broken.close()

    @property
    def coord(self) -> Coordinator:
        """The coordinator that stops training in this task."""
        return self._sessions.grace_period.coord

    # Both work on any session: steps of theirs go through ``run``, and so are recovered.
    make_callable = rt.Session.make_callable
    as_default = rt.Session.as_default

    # -- its end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the session; a step under way ends with CancelledError.

        Never waits for a dead task.
        """
        self.closed = True
        self.raw.close()

    def __enter__(self) -> Self:
        """Makes the session and the graph the defaults of the thread."""
        if self._entered is not None:
            raise RuntimeError(
                "Session context managers are not re-entrant: use Session.as_default() for nesting"
            )
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(self.graph.as_default())
        self._entered.enter_context(self.as_default())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Calls ``on_exit``, takes back the defaults and closes the session."""
        try:
            if self.on_exit is not None:
                self.on_exit(value)
        finally:
            entered, self._entered = self._entered, None
            assert entered is not None
            # The defaults are taken back also when the close is interrupted.
            with entered:
                self.close()


class StepRecoveries:
    """The recoveries of one action in a session, such as a step.

    Args:
        session: Session of the action.
    """

    def __init__(self, session: ManagedSession) -> None:
        self._session = session
        self._in_vain = 0

    def cure(self, raw: rt.Session, error: BaseException) -> bool:
        """Returns True if an error has ended only a session underneath, and a new session has taken its place.

        Args:
            raw: Session underneath that was used.
            error: Error that ended the use.

        Raises:
            ResourceExhaustedError: Memory was short in ``TRIES`` sessions.
            UnavailableError, AbortedError: The session has not lost a task, or ``TRIES`` recoveries
                were in vain.
        """
        session = self._session
        if not isinstance(error, LOST_CONTACT):
            # A hook may raise the same classes while another thread replaces the session: that
            # error is the hook's.
            cancelled = isinstance(error, rt.CancelledError | RuntimeError) and raw.raised(error)
            return cancelled and session.replaced(raw)
        if self._in_vain >= TRIES:
            again = f"{error.message} (also after {TRIES} recoveries"
            if error.out_of_memory:
                text = f"{again}: give it less to do, or more memory)"
                raise rt.ResourceExhaustedError(text, task=error.task) from error
            raise type(error)(f"{again}, which found nothing different)", task=error.task)
        # The first two are immediate. A third in a row says that the shortage needs time.
        if self._in_vain > 1:
            session.coord.wait_for_stop(times.SESSION_PAUSE_SECS)
        session.recover(raw, error)
        # New values mean that a task was really lost. With the same values the error has another
        # cause.
        same = raw.value_ids == session.raw.value_ids
        self._in_vain = self._in_vain + 1 if same or error.out_of_memory else 0
        return True


def is_chief(session: rt.SessionLike, default: bool) -> bool:
    """Returns True if the task of a session is the chief of its run.

    Args:
        session: Session of the task.
        default: Answer for a session that is part of no run.
    """
    found = getattr(session, "is_chief", None)
    return default if found is None else bool(found)
