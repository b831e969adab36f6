"""MonitoredSession: a session with hooks around every step, on the same machinery as the Supervisor's.

``MonitoredTrainingSession`` makes one with the usual hooks for the chief and the other workers.
"""

import enum
import inspect
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from absl import logging

import runtime as rt
from harness import timeouts
from harness.coordinator import Coordinator
from harness.training import times
from harness.training.run import services
from harness.training.run.hook_calls import HookCalls
from harness.training.run.hooks.base import (
    SessionRunHook,
)
from harness.training.run.hooks.checkpoint import CheckpointSaverHook
from harness.training.run.hooks.observe import StepCounterHook, SummarySaverHook
from harness.training.start.global_step import get_global_step
from harness.training.start.managed_session import ManagedSession
from harness.training.start.policy import TaskRole
from harness.training.start.readiness import Feeds
from harness.training.start.scaffold import (
    ChiefSessionCreator,
    OpensSessions,
    OwnSessionCreator,
    Scaffold,
    TrainingSessionCreator,
    WorkerSessionCreator,
)
from harness.training.start.session_start import LOST_CONTACT, TrainingOver
from harness.training.stop.lifecycle import Lifecycle

_T = TypeVar("_T")
_CLEAN_END = (rt.OutOfRangeError, rt.TaskLeftError, TrainingOver, StopIteration)


class DefaultInterval(enum.Enum):
    """The value of an interval not given."""

    USE_DEFAULT = enum.auto()


USE_DEFAULT = DefaultInterval.USE_DEFAULT
"""The mark of an interval that is not given; the other interval of a pair turns this one off."""
_SUMMARY_STEPS = 100


class StepContext:
    """The argument of the function of ``run_step_fn``.

    Args:
        managed: The session that recovers.
        run_with_hooks: Function that runs a step with hooks.
    """

    def __init__(self, managed: ManagedSession, run_with_hooks: Callable[..., Any]) -> None:
        self._managed = managed
        self._run_with_hooks = run_with_hooks

    @property
    def session(self) -> rt.Session:
        """The present session underneath, without hooks."""
        return self._managed.raw

    def run_with_hooks(self, *args: object, **kwargs: object) -> Any:
        """Runs a step with hooks, as ``MonitoredSession.run`` does."""
        return self._run_with_hooks(*args, **kwargs)

    def request_stop(self) -> None:
        """Stops training. Raises StopIteration, which leaves the function."""
        raise StopIteration("step_fn has requested the iterations to stop.")


class MonitoredSession:
    """A session that initialises or restores, calls hooks, recovers lost tasks and ends training well.

        creator = ChiefSessionCreator(master=server.target)
        with MonitoredSession(creator, [StopAtStepHook(last_step=1000)]) as sess:
            while not sess.should_stop():
                sess.run(train_op)

    The end of the input (OutOfRangeError, StopIteration) ends the block without an error. Where the
    block ends without an error, the hooks' ``end`` is called. Where a task is lost
    (``Session.lost``) there is a new session, and the step is run again unless it was applied: an
    error of a hook after the step never repeats the step.

    Args:
        session_creator: Maker of sessions; the chief's, without checkpoints, by default.
        hooks: Hooks to call, in this order.
        stop_grace_period_secs: Seconds that threads, steps and other tasks have to end after a
            stop.
    """

    _recovers = True

    def __init__(
        self,
        session_creator: OpensSessions | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        stop_grace_period_secs: float = timeouts.STOP_GRACE_SECS,
    ) -> None:
        self.graph = rt.get_default_graph()
        """The graph."""
        # A graph that was open is open again after the session, as in TF1.
        self._graph_was_final = self.graph.finalized
        self._grace_secs = min(stop_grace_period_secs, timeouts.LONGEST_SECS)
        self.coord = Coordinator(clean_stop_exception_types=[])
        """The coordinator of the threads."""
        # A session creator of the user's own is wrapped, so that the rest knows one kind.
        given = session_creator or ChiefSessionCreator()
        creator = given if isinstance(given, TrainingSessionCreator) else OwnSessionCreator(given)
        chief = creator.role is TaskRole.CHIEF
        self.hooks = _hooks_of(hooks or (), chief)
        """The hooks, in the order of their calls."""
        self._calls = HookCalls(self.hooks, self.coord)
        self._checkpoint_dir = creator.checkpoint_dir if chief else None
        self._life = Lifecycle(self.coord, chief, self._grace_secs)
        # Before the session, as hooks may add to the graph, and the creator makes it final.
        self._calls.begin()
        self._session: ManagedSession | None = self._open_session(creator)
        # A late task may not run a step: the block is to end at once.
        self._saw_stop = self._life.late
        try:
            self._calls.equip(self._life, self.raw, self._checkpoint_dir)
            if not self._life.late:
                runners = self.graph.get_collection(rt.GraphKeys.QUEUE_RUNNERS)
                services.start_queue_runners(runners, self._session, self.coord)
                self._run_after_first_create(self._session)
        except BaseException:
            # The caller gets no session, so the caller cannot close it.
            self._close_session()
            raise

    def _open_session(self, creator: TrainingSessionCreator) -> ManagedSession:
        # The chief restores the series that its own hook saves; another hook may save elsewhere.
        series = self._calls.series_in(self._checkpoint_dir)
        creator.equip(self._life.grace_period, series, recovers=self._recovers)
        return self._life.open(
            creator,
            self.graph,
            recover=self._recovers,
            global_step=get_global_step(self.graph),
            saves=bool(self._calls.savers),
            on_recovery=self._calls.begin_session,
        )

    def _close_session(self) -> None:
        """Ends the threads and the session, without the work of the end of training."""
        # Read before the close, as the hooks below need the session that they have registered in.
        raw = self.raw
        self.coord.request_stop()
        self._life.close()
        self._session = None
        self._calls.rest(raw)
        if not self._graph_was_final:
            self.graph.unsafe_unfinalize()

    def _run_after_first_create(self, session: ManagedSession) -> None:
        raw = session.raw
        try:
            self._calls.begin_session(raw)
        except LOST_CONTACT as error:
            # The recovery calls the hooks with the new session.
            session.recover(raw, error)

    # -- steps -------------------------------------------------------------------------------------

    def run(
        self,
        fetches: object,
        feed_dict: Feeds | None = None,
        options: rt.RunOptions | None = None,
        run_metadata: rt.RunMetadata | None = None,
    ) -> Any:
        """Runs one step with the additions of the hooks.

        Args:
            fetches: As in ``Session.run``.
            feed_dict: As in ``Session.run``; it is not changed.
            options: ``runtime.RunOptions``.
            run_metadata: ``runtime.RunMetadata`` to fill.

        Raises:
            RuntimeError: A stop was requested before, the session is closed, or one tensor is fed
                twice.
            BaseException: An error of a thread, such as one that fills a queue.
        """
        return self._run_step(
            lambda raw: self._calls.run_step(
                self.managed, raw, fetches, feed_dict, options, run_metadata
            )
        )

    def run_step_fn(self, step_fn: Callable[..., _T]) -> _T | None:
        """Runs a function that does a step in its own way.

        Args:
            step_fn: Function of ``step_context``. Its ``session`` runs steps without hooks, its
                ``run_with_hooks`` runs steps with hooks. The function is called again after the
                loss of a task.

        Returns:
            The value of the function; None after ``step_context.request_stop()``.

        Raises:
            ValueError: The function has other parameters.
        """
        # TF1 checks the name of the parameter, too.
        names = [n for n in inspect.signature(step_fn).parameters if n != "self"]
        if names != ["step_context"]:
            raise ValueError(f"`step_fn` must take one argument, step_context, not {names}")

        def once(raw: rt.Session) -> _T | None:
            context = StepContext(
                self.managed, lambda *a, **k: self._calls.run_step(self.managed, self.raw, *a, **k)
            )
            try:
                return step_fn(context)
            except StopIteration:
                self.coord.request_stop()
                return None

        return self._run_step(once)

    @property
    def managed(self) -> ManagedSession:
        """The session that recovers, without hooks. Raises RuntimeError after ``close``."""
        if self._session is None:
            raise RuntimeError("Session is already closed.")
        return self._session

    @property
    def raw(self) -> rt.Session:
        """The present session underneath, as ``ManagedSession.raw``."""
        return self.managed.raw

    def _run_step(self, once: Callable[[rt.Session], _T]) -> _T:
        """Runs a step of the user's, which is an error after a stop that the user's loop could see.

        An order to stop may come between the loop's look and its step: that step is run.
        """
        session = self.managed
        if self._saw_stop:
            self.coord.raise_requested_exception()
            raise RuntimeError("Run called even after should_stop requested.")
        try:
            return session.run_again(once)
        finally:
            self._saw_stop = self.coord.should_stop()

    def should_stop(self) -> bool:
        """Returns True if training is to stop, or has ended."""
        self._saw_stop = self._session is None or self.coord.should_stop()
        return self._saw_stop

    def request_stop(self) -> None:
        """Asks training to stop."""
        self.coord.request_stop()
        self._saw_stop = True

    # -- the end -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Gives the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Ends training; the end of the input is no error."""
        clean = kind is None or kind in _CLEAN_END
        self._end_training(
            clean=clean, interrupted=kind is not None and not issubclass(kind, Exception)
        )
        return clean

    def close(self) -> None:
        """Ends training well, and closes the session.

        Raises:
            RuntimeError: The session is closed.
            BaseException: An error of a thread.
        """
        if self._session is None:
            raise RuntimeError("Session is already closed.")
        self._end_training(clean=True, interrupted=False)

    def _end_training(self, *, clean: bool, interrupted: bool) -> None:
        if self._session is None:
            return
        try:
            if clean and not self.coord.failed:
                try:
                    self._life.wait_for_others()
                    self._life.finish(
                        self._calls.end,
                        over=True,
                        checkpoint_dir=self._checkpoint_dir,
                        shield=False,
                    )
                except (KeyboardInterrupt, SystemExit):
                    # The signal came during the end: save, but leave the run open for the next
                    # start.
                    self._life.finish(
                        self._calls.leave, over=False, checkpoint_dir=self._checkpoint_dir
                    )
                    raise
            elif interrupted and not self.coord.failed:
                # Training is not over: the next start continues with what is saved here.
                self._life.finish(
                    self._calls.leave, over=False, checkpoint_dir=self._checkpoint_dir
                )
            # After an error nothing is saved, but a save that is under way must not be torn.
            else:
                self._calls.settle(self._grace_secs)
            self.coord.request_stop()
            self.coord.join(stop_grace_period_secs=self._grace_secs, ignore_live_threads=True)
        except BaseException:
            # Otherwise the block has an error of its own, which Python raises and which came first.
            if clean:
                raise
        finally:
            self._close_session()


def _hooks_of(hooks: Sequence[SessionRunHook], chief: bool) -> list[SessionRunHook]:
    """Returns the hooks of a task. TF1 programs give all tasks the same hooks, but only the chief saves."""
    kept = [hook for hook in hooks if chief or not isinstance(hook, CheckpointSaverHook)]
    if len(kept) < len(hooks):
        logging.info(
            "the chief saves: this task, which is not the chief, leaves its CheckpointSaverHook out"
        )
    return kept


@rt.lowlevel.explains_arguments
def MonitoredTrainingSession(  # noqa: N802 - TF1's name of a function
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Scaffold | None = None,
    hooks: Sequence[SessionRunHook] | None = None,
    chief_only_hooks: Sequence[SessionRunHook] | None = None,
    save_checkpoint_secs: float | None | DefaultInterval = USE_DEFAULT,
    save_summaries_steps: int | None | DefaultInterval = USE_DEFAULT,
    save_summaries_secs: float | None | DefaultInterval = USE_DEFAULT,
    config: rt.SessionConfig | None = None,
    stop_grace_period_secs: float = timeouts.STOP_GRACE_SECS,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float = times.GIVE_UP_SECS,
    save_checkpoint_steps: int | None | DefaultInterval = USE_DEFAULT,
    summary_dir: str | None = None,
    save_graph_def: bool = True,
) -> MonitoredSession:
    """Makes a monitored session for training, with the usual hooks of the chief and the other workers.

    Args:
        master: Target of the session.
        is_chief: True on the task that initialises, saves and summarises. The others wait for it
            and get ``hooks`` only.
        checkpoint_dir: Directory of the checkpoints; None for none.
        scaffold: Scaffold of the graph.
        hooks: Hooks of every task.
        chief_only_hooks: Hooks of the chief, called before all others.
        save_checkpoint_secs: Seconds between checkpoints, 600 when neither this nor
            ``save_checkpoint_steps`` is given.
        save_summaries_steps: Global steps between summaries, 100 when neither this nor
            ``save_summaries_secs`` is.
        save_summaries_secs: Seconds between summaries.
        config: Options of the session; without device filters no task waits for tasks that it does
            not need.
        stop_grace_period_secs: Seconds that threads, steps and other tasks have to end after a
            stop.
        log_step_count_steps: Global steps between step rates; None for none.
        max_wait_secs: The longest wait for the model, in seconds.
        save_checkpoint_steps: Global steps between checkpoints.
        summary_dir: Directory of the events; ``checkpoint_dir`` by default.
        save_graph_def: True to write the graph into the events.

    Raises:
        ValueError: Both intervals of the checkpoints were given.
        RuntimeError: The hooks need a global step and there is none.

    Examples:
        >>> import harness
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     train = harness.get_or_create_global_step().assign_add(1)
        ...     with harness.MonitoredTrainingSession(hooks=[harness.StopAtStepHook(last_step=3)]) as session:
        ...         while not session.should_stop():
        ...             step = int(session.run(train))
        >>> step
        3
    """
    summaries = _interval_pair(save_summaries_secs, save_summaries_steps, (None, _SUMMARY_STEPS))
    saves = _interval_pair(save_checkpoint_secs, save_checkpoint_steps, (times.SAVE_SECS, None))
    scaffold = scaffold or Scaffold()
    if not is_chief:
        creator = WorkerSessionCreator(scaffold, master, config, max_wait_secs)
        return MonitoredSession(creator, hooks, stop_grace_period_secs)
    # TF1 refuses two intervals, too.
    if all(saves):
        raise ValueError(
            "Can not provide both every_secs and every_steps for checkpoints: leave one of the two "
            "out"
        )
    checkpoint_dir = (
        rt.lowlevel.storage.absolute(os.fspath(checkpoint_dir)) if checkpoint_dir else ""
    )
    summary_dir = summary_dir or checkpoint_dir
    # In TF1's order: the counter, the summaries, the checkpoints.
    own: list[SessionRunHook] = []
    if summary_dir and log_step_count_steps:
        own.append(StepCounterHook(log_step_count_steps, None, summary_dir))
    if summary_dir and any(summaries):
        secs, steps = summaries
        own.append(SummarySaverHook(steps, secs, summary_dir, scaffold=scaffold))
    if checkpoint_dir and any(saves):
        own.append(
            CheckpointSaverHook(
                checkpoint_dir, *saves, scaffold=scaffold, save_graph_def=save_graph_def
            )
        )
    chief = ChiefSessionCreator(
        scaffold, master, config, checkpoint_dir, max_wait_secs=max_wait_secs
    )
    return MonitoredSession(
        chief, [*(chief_only_hooks or ()), *own, *(hooks or ())], stop_grace_period_secs
    )


def _interval_pair(
    secs: float | None | DefaultInterval,
    steps: int | None | DefaultInterval,
    default: tuple[float | None, int | None],
) -> tuple[float | None, int | None]:
    """Returns the seconds and the steps between two times; 0 counts as None. Both None is never."""
    if secs is USE_DEFAULT and steps is USE_DEFAULT:
        return default
    return (None if secs is USE_DEFAULT else secs) or None, (
        None if steps is USE_DEFAULT else steps
    ) or None
