"""MonitoredSession: a session with hooks around every step, on the same machinery as the Supervisor's.

``MonitoredTrainingSession`` makes one with the usual hooks for the chief and the other workers.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from absl import logging

import runtime as rt
from harness.coordinator import LONGEST_SECS, STOP_GRACE_SECS, Coordinator, failed, underlying
from harness.training.run import services
from harness.training.run.hooks.base import (
    EventsHook,
    FollowsLeader,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopsEverybody,
)
from harness.training.run.hooks.checkpoint import CheckpointSaverHook
from harness.training.run.hooks.control import EarlyStoppingHook
from harness.training.run.hooks.observe import StepCounterHook, SummarySaverHook
from harness.training.start.global_step import get_global_step
from harness.training.start.managed_session import ManagedSession, StepRecoveries
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
from harness.training.start.session_manager import GIVE_UP_SECS
from harness.training.start.session_start import LOST_CONTACT, TrainingOver
from harness.training.stop.lifecycle import Lifecycle
from harness.training.stop.preemption import shielded

_T = TypeVar("_T")
_CLEAN_END = (rt.OutOfRangeError, rt.TaskLeftError, TrainingOver, StopIteration)


class DefaultInterval(enum.Enum):
    """The value of an interval not given."""

    USE_DEFAULT = enum.auto()


USE_DEFAULT: Final = DefaultInterval.USE_DEFAULT
"""The mark of an interval that is not given; the other interval of a pair turns this one off."""
_SAVE_SECS = 600.0
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
        stop_grace_period_secs: float = STOP_GRACE_SECS,
    ) -> None:
        self._graph = rt.get_default_graph()
        # A graph that was open is open again after the session, as in TF1.
        self._graph_was_final = self._graph.finalized
        # TF1 programs give all tasks the same hooks, so the saving ones are left out below on other
        # tasks.
        self._hooks = list(hooks or ())
        self._grace_secs = min(stop_grace_period_secs, LONGEST_SECS)
        self._coord = Coordinator(clean_stop_exception_types=[])
        # A session creator of the user's own is wrapped, so that the rest knows one kind.
        given = session_creator or ChiefSessionCreator()
        creator = given if isinstance(given, TrainingSessionCreator) else OwnSessionCreator(given)
        chief = creator.role is TaskRole.CHIEF
        if not chief and _savers_among(self._hooks):
            logging.info(
                "the chief saves: this task, which is not the chief, leaves its "
                "CheckpointSaverHook out"
            )
            self._hooks = [
                hook for hook in self._hooks if not isinstance(hook, CheckpointSaverHook)
            ]
        self._checkpoint_dir = creator.checkpoint_dir if chief else None
        self._life = Lifecycle(self._coord, chief, self._grace_secs)
        # Before the session, as hooks may add to the graph, and the creator makes it final.
        for hook in self._hooks:
            hook.begin()
        self._session: ManagedSession | None = self._open_session(creator)
        # A late task may not run a step: the block is to end at once.
        self._saw_stop = self._life.late
        try:
            self._equip_hooks()
            if not self._life.late:
                runners = self._graph.get_collection(rt.GraphKeys.QUEUE_RUNNERS)
                services.start_queue_runners(runners, self._session, self._coord)
                self._run_after_first_create(self._session)
        except BaseException:
            # The caller gets no session, so the caller cannot close it.
            self._close_session()
            raise

    def _open_session(self, creator: TrainingSessionCreator) -> ManagedSession:
        saved = [os.path.split(hook.save_path) for hook in _savers_among(self._hooks)]
        # The chief restores the series that its own hook saves; another hook may save elsewhere.
        series = next((name for directory, name in saved if directory == self._checkpoint_dir), "")
        creator.equip(self._life.grace_period, series, recovers=self._recovers)
        return self._life.open(
            creator,
            self._graph,
            recover=self._recovers,
            global_step=get_global_step(self._graph),
            on_recovery=self._run_after_create,
        )

    def _equip_hooks(self) -> None:
        """Sets the attributes of hooks that depend on the run."""
        for hook in self._hooks:
            # A chief that was replaced neither saves nor ends the run of the next chief.
            if isinstance(hook, FollowsLeader):
                hook.leads = self._life.leads
            if isinstance(hook, CheckpointSaverHook):
                self._life.save = hook.save_soon
            if isinstance(hook, StopsEverybody):
                hook.stop_everybody = self._life.stop_everybody
            if isinstance(hook, EarlyStoppingHook):
                hook.register_state(self.raw, self._checkpoint_dir)

    def _close_session(self) -> None:
        """Ends the threads and the session, without the work of the end of training."""
        # Read before the close, as the hooks below need the session that they have registered in.
        raw = self.raw
        self._coord.request_stop()
        self._life.close()
        self._session = None
        for hook in self._hooks:
            if isinstance(hook, EarlyStoppingHook):
                hook.forget_state(raw)
            if isinstance(hook, EventsHook):
                hook.rest()
        if not self._graph_was_final:
            self._graph.unsafe_unfinalize()

    def _run_after_create(self, session: rt.Session) -> None:
        for hook in self._hooks:
            hook.after_create_session(session, self._coord)

    def _run_after_first_create(self, session: ManagedSession) -> None:
        raw = session.raw
        try:
            self._run_after_create(raw)
        except LOST_CONTACT as error:
            # The recovery calls the hooks with the new session.
            session.recover(raw, error)

    @property
    def graph(self) -> rt.Graph:
        """The graph."""
        return self._graph

    @property
    def coord(self) -> Coordinator:
        """The coordinator of the threads."""
        return self._coord

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
            lambda raw: self._run_hooked(raw, fetches, feed_dict, options, run_metadata)
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
                self.managed, lambda *a, **k: self._run_hooked(self.managed.raw, *a, **k)
            )
            try:
                return step_fn(context)
            except StopIteration:
                self._coord.request_stop()
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
            self._coord.raise_requested_exception()
            raise RuntimeError("Run called even after should_stop requested.")
        try:
            return session.run_again(once)
        finally:
            self._saw_stop = self._coord.should_stop()

    def _run_hooked(
        self,
        raw: rt.Session,
        fetches: object,
        feed_dict: Feeds | None = None,
        options: rt.RunOptions | None = None,
        run_metadata: rt.RunMetadata | None = None,
    ) -> Any:
        context = SessionRunContext(SessionRunArgs(fetches, feed_dict, options), raw)
        requested: dict[int, object] = {}
        feeds = dict(feed_dict or {})
        for number, hook in enumerate(self._hooks):
            args = hook.before_run(context)
            if args is None:
                continue
            if args.fetches is not None:
                requested[number] = args.fetches
            for key, value in (args.feed_dict or {}).items():
                if key in feeds:
                    raise RuntimeError(
                        f"Same tensor is fed by two hooks, or by a hook and the caller: {key!r}"
                    )
                feeds[key] = value
            # A hook that traces must not lose the time limit of the caller.
            options = merged_options(options, args.options)
        # A hook that asks for a trace reads it from here; the caller need not have asked.
        if options is not None and options.trace_level and run_metadata is None:
            run_metadata = rt.RunMetadata()
        # One step for the caller and all hooks: their values are of the same moment, and cost one
        # round trip.
        merged = {"caller": fetches, "hooks": requested} if requested else {"caller": fetches}
        results = raw.run(merged, feeds or None, options, run_metadata)
        self.managed.seen.note(merged, results)
        given = results.get("hooks", {})
        self._after_run(
            context,
            [
                SessionRunValues(given.get(n), options, run_metadata)
                for n in range(len(self._hooks))
            ],
        )
        return results["caller"]

    def _after_run(self, context: SessionRunContext, values: Sequence[SessionRunValues]) -> None:
        """Calls the hooks after a step. The step is applied: a recovery does not run it again."""
        recoveries = StepRecoveries(self.managed)
        for hook, given in zip(self._hooks, values, strict=True):
            try:
                hook.after_run(context, given)
            except Exception as error:
                if not recoveries.cure(context.session, error):
                    raise
                # The hooks behind get the new session, and the values of the step that was applied.
                context.session = self.raw
        if context.stop_requested:
            self._coord.request_stop()

    def should_stop(self) -> bool:
        """Returns True if training is to stop, or has ended."""
        self._saw_stop = self._session is None or self._coord.should_stop()
        return self._saw_stop

    def request_stop(self) -> None:
        """Asks training to stop."""
        self._coord.request_stop()
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
            if clean and not failed(self._coord):
                try:
                    self._life.wait_for_others()
                    ends = functools.partial(self._end_hooks, {})
                    self._life.finish(
                        ends, over=True, checkpoint_dir=self._checkpoint_dir, shield=False
                    )
                except (KeyboardInterrupt, SystemExit):
                    # The signal came during the end: save, but leave the run open for the next
                    # start.
                    self._life.finish(
                        self._leave_hooks, over=False, checkpoint_dir=self._checkpoint_dir
                    )
                    raise
            elif interrupted and not failed(self._coord):
                # Training is not over: the next start continues with what is saved here.
                self._life.finish(
                    self._leave_hooks, over=False, checkpoint_dir=self._checkpoint_dir
                )
            # After an error nothing is saved, but a save that is under way must not be torn.
            else:
                self._settle_hooks()
            self._coord.request_stop()
            self._coord.join(stop_grace_period_secs=self._grace_secs, ignore_live_threads=True)
        except BaseException:
            # Otherwise the block has an error of its own, which Python raises and which came first.
            if clean:
                raise
        finally:
            self._close_session()

    def _leave_hooks(self, session: rt.SessionLike) -> None:
        for hook in _savers_among(self._hooks):
            hook.leave(underlying(session))

    def _settle_hooks(self) -> None:
        for hook in _savers_among(self._hooks):
            hook.settle(self._grace_secs)

    def _end_hooks(self, ended: dict[int, rt.SessionLike], session: rt.SessionLike) -> None:
        """Calls each hook's ``end``.

        A hook that fails does not keep the hooks behind it from theirs.

        Args:
            ended: The session in which each hook has ended well, by the hook's place. Such a hook
                is not called again while the hook that saves waits for room. It is called again in
                a new session, after the loss of a task.
            session: The session.
        """
        failure: Exception | None = None
        for place, hook in enumerate(self._hooks):
            if ended.get(place) is session:
                continue
            try:
                # Only saves are shielded: an ``end`` of the user's own must not keep Ctrl-C
                # waiting.
                with (
                    shielded()
                    if isinstance(hook, CheckpointSaverHook)
                    else contextlib.nullcontext()
                ):
                    hook.end(underlying(session))
                ended[place] = session
            except Exception as error:
                # The caller recovers the session, and all hooks begin their end again in the new
                # one.
                if underlying(session).lost(error):
                    raise
                logging.error("the end of %s failed: %r", type(hook).__name__, error)
                failure = failure or error
        if failure is not None:
            raise failure


def _savers_among(hooks: Sequence[SessionRunHook]) -> list[CheckpointSaverHook]:
    return [hook for hook in hooks if isinstance(hook, CheckpointSaverHook)]


def merged_options(
    first: rt.RunOptions | None, second: rt.RunOptions | None
) -> rt.RunOptions | None:
    """Merges two ``RunOptions``: the higher trace level, the longer time limit.

    Args:
        first: Options, or None.
        second: Options, or None.

    Examples:
        >>> import runtime as rt
        >>> from harness.training.run.monitored_session import merged_options
        >>> merged_options(rt.RunOptions(timeout_in_ms=5), rt.RunOptions(timeout_in_ms=9)).timeout_in_ms
        9
    """
    if first is None or second is None:
        return second if first is None else first
    return rt.RunOptions(
        trace_level=max(first.trace_level, second.trace_level),
        timeout_in_ms=max(first.timeout_in_ms, second.timeout_in_ms),
    )


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
    stop_grace_period_secs: float = STOP_GRACE_SECS,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float = GIVE_UP_SECS,
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
    saves = _interval_pair(save_checkpoint_secs, save_checkpoint_steps, (_SAVE_SECS, None))
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
