"""HookCalls: the hooks of a monitored session, called together at the begin, around each step and at the end."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, underlying
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
from harness.training.start.managed_session import ManagedSession, StepRecoveries
from harness.training.start.readiness import Feeds
from harness.training.stop.lifecycle import Lifecycle
from harness.training.stop.preemption import shielded


class HookCalls:
    """The hooks of one monitored session, called in their order.

    Args:
        hooks: The hooks.
        coord: Coordinator of the session's threads.
    """

    def __init__(self, hooks: Sequence[SessionRunHook], coord: Coordinator) -> None:
        self._hooks = hooks
        self._coord = coord
        self.savers = [hook for hook in hooks if isinstance(hook, CheckpointSaverHook)]
        """The hooks that save checkpoints."""
        # The session in which each hook has ended well, by the hook's place.
        self._ended: dict[int, rt.SessionLike] = {}

    def begin(self) -> None:
        """Begins each hook. Hooks may add to the graph."""
        for hook in self._hooks:
            hook.begin()

    def series_in(self, directory: str | None) -> str:
        """Returns the name of the series of checkpoints that a hook saves in a directory; empty for none."""
        saved = [os.path.split(hook.save_path) for hook in self.savers]
        return next((name for place, name in saved if place == directory), "")

    def equip(self, life: Lifecycle, raw: rt.Session, checkpoint_dir: str | None) -> None:
        """Sets the attributes of hooks that depend on the run.

        Args:
            life: The way of the task through the run.
            raw: The session.
            checkpoint_dir: Directory of the chief's checkpoints; None for none.
        """
        for hook in self._hooks:
            # A chief that was replaced neither saves nor ends the run of the next chief.
            if isinstance(hook, FollowsLeader):
                hook.leads = life.leads
            if isinstance(hook, CheckpointSaverHook):
                life.save = hook.save_soon
            if isinstance(hook, StopsEverybody):
                hook.stop_everybody = life.stop_everybody
            if isinstance(hook, EarlyStoppingHook):
                hook.register_state(raw, checkpoint_dir)

    def begin_session(self, session: rt.Session) -> None:
        """Calls ``after_create_session`` of each hook."""
        for hook in self._hooks:
            hook.after_create_session(session, self._coord)

    def run_step(
        self,
        managed: ManagedSession,
        raw: rt.Session,
        fetches: object,
        feed_dict: Feeds | None = None,
        options: rt.RunOptions | None = None,
        run_metadata: rt.RunMetadata | None = None,
    ) -> Any:
        """Runs one step with the additions of the hooks.

        Args:
            managed: The session that recovers.
            raw: The present session underneath.
            fetches: As in ``Session.run``, and so are the arguments after it.
            feed_dict: Feeds of the caller.
            options: Options of the caller.
            run_metadata: Metadata to fill.
        """
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
        merged = {"caller": fetches, "hooks": requested}
        results = raw.run(merged, feeds or None, options, run_metadata)
        managed.seen.note(merged, results)
        given = results["hooks"]
        assert given.keys() == requested.keys(), "each hook gets its own values"
        values = [
            SessionRunValues(given.get(n), options, run_metadata) for n in range(len(self._hooks))
        ]
        self._after_run(managed, context, values)
        return results["caller"]

    def _after_run(
        self,
        managed: ManagedSession,
        context: SessionRunContext,
        values: Sequence[SessionRunValues],
    ) -> None:
        """Calls the hooks after a step. The step is applied: a recovery does not run it again."""
        recoveries = StepRecoveries(managed)
        for hook, given in zip(self._hooks, values, strict=True):
            try:
                hook.after_run(context, given)
            except Exception as error:
                if not recoveries.cure(context.session, error):
                    raise
                # The hooks behind get the new session, and the values of the step that was applied.
                context.session = managed.raw
        if context.stop_requested:
            self._coord.request_stop()

    def leave(self, session: rt.SessionLike) -> None:
        """Saves, in place of ``end``, when a signal interrupts training."""
        for hook in self.savers:
            hook.leave(underlying(session))

    def settle(self, secs: float) -> None:
        """Waits for saves that are under way, ``secs`` seconds for each at most."""
        for hook in self.savers:
            hook.settle(secs)

    def end(self, session: rt.SessionLike) -> None:
        """Calls ``end`` of each hook that has not ended well in this session.

        A hook that fails does not keep the hooks behind it from theirs. The call comes again while
        the hook that saves waits for room, and in a new session after the loss of a task.
        """
        failure: Exception | None = None
        for place, hook in enumerate(self._hooks):
            if self._ended.get(place) is session:
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
                self._ended[place] = session
            except Exception as error:
                # The caller recovers the session, and all hooks begin their end again in the new
                # one.
                if underlying(session).lost(error):
                    raise
                logging.error("the end of %s failed: %r", type(hook).__name__, error)
                failure = failure or error
        if failure is not None:
            raise failure

    def rest(self, raw: rt.Session) -> None:
        """Releases the session and the files of events.

        Args:
            raw: The session, in which hooks have registered their states.
        """
        for hook in self._hooks:
            if isinstance(hook, EarlyStoppingHook):
                hook.forget_state(raw)
            if isinstance(hook, EventsHook):
                hook.rest()


def merged_options(
    first: rt.RunOptions | None, second: rt.RunOptions | None
) -> rt.RunOptions | None:
    """Merges two ``RunOptions``: the higher trace level, the longer time limit.

    Args:
        first: Options, or None.
        second: Options, or None.

    Examples:
        >>> import runtime as rt
        >>> from harness.training.run.hook_calls import merged_options
        >>> merged_options(rt.RunOptions(timeout_in_ms=5), rt.RunOptions(timeout_in_ms=9)).timeout_in_ms
        9
    """
    if first is None or second is None:
        return second if first is None else first
    return rt.RunOptions(
        trace_level=max(first.trace_level, second.trace_level),
        timeout_in_ms=max(first.timeout_in_ms, second.timeout_in_ms),
    )
