"""``tf.train``'s hooks, sessions and session manager that only programs of TensorFlow name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

import runtime as rt
from harness import timeouts
from harness.coordinator import Coordinator
from harness.monitoring import timeline
from harness.training import times
from harness.training.run.hooks import (
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from harness.training.run.hooks.base import EventsHook, GlobalStepHook
from harness.training.run.monitored_session import MonitoredSession
from harness.training.start import readiness, session_manager
from harness.training.start.scaffold import ChiefSessionCreator, Scaffold


class GlobalStepWaiterHook(GlobalStepHook):
    """A hook that keeps a worker waiting until the others have reached a global step.

    A slow start helps asynchronous training.

    Args:
        wait_until_step: Global step at which this worker begins.
        poll_secs: Seconds between looks at the global step.
    """

    def __init__(self, wait_until_step: int, poll_secs: float = 0.5) -> None:
        self._wait_until = wait_until_step
        self._poll_secs = poll_secs
        self._done = wait_until_step <= 0
        self._coord: Coordinator | None = None

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Remembers the coordinator, whose stop ends the wait."""
        self._coord = coord

    def before_run(self, run_context: SessionRunContext) -> None:
        """Waits before the first step; a stop ends the wait."""
        while not self._done:
            step = int(run_context.session.run(self._step))
            if step >= self._wait_until:
                break
            text = "waiting for global step %d, it is %d now"
            logging.log_every_n_seconds(
                logging.WARNING, text, timeouts.LOG_EVERY_SECS, self._wait_until, step
            )
            if self._coord is not None and self._coord.wait_for_stop(self._poll_secs):
                break
        self._done = True


class FeedFnHook(SessionRunHook):
    """A hook that feeds every step with the values of a function.

    Args:
        feed_fn: Returns the feeds of one step.
    """

    def __init__(self, feed_fn: Callable[[], Mapping[Any, Any]]) -> None:
        self.feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns the feeds of the function."""
        return SessionRunArgs(feed_dict=self.feed_fn())


class FinalOpsHook(SessionRunHook):
    """A hook that runs operations at the end of training.

    Args:
        final_ops: Structure of fetches, as in ``Session.run``.
        final_ops_feed_dict: Feeds of that run.
    """

    def __init__(
        self, final_ops: Any, final_ops_feed_dict: Mapping[Any, Any] | None = None
    ) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """The values of the final operations; None before the end."""
        return self._values

    def end(self, session: rt.Session) -> None:
        """Runs the final operations.

        Raises OutOfRangeError where these have met the end of the input.
        """
        if self._final_ops is None:
            return
        try:
            self._values = session.run(self._final_ops, self._feed_dict)
        except (rt.OutOfRangeError, StopIteration) as error:
            logging.warning(
                "the final operations met the end of the input: give them an input of their own "
                "(%s)",
                error,
            )
            raise


class ProfilerHook(EventsHook):
    """A hook that traces a step at intervals.

    A trace is ``timeline-<step>.json`` for Chrome or Perfetto, and run metadata for TensorBoard.

    Args:
        save_steps: Steps between traces; exactly one of this and ``save_secs``.
        save_secs: Seconds between traces.
        output_dir: Directory of the files.
    """

    def __init__(
        self, save_steps: int | None = None, save_secs: float | None = None, output_dir: str = ""
    ) -> None:
        super().__init__(output_dir)
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._next: int | None = None
        self._requested = False

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Leaves out the first step of a session, which compiles."""
        self._next = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns options that trace the step, when a trace is due."""
        self._requested = self._next is not None and self._timer.should_trigger_for_step(self._next)
        options = rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE) if self._requested else None
        return SessionRunArgs(self._step, options=options)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the trace that was taken."""
        step = int(run_values.results)
        # The interval begins with the first step, although that one compiles and is not traced.
        if self._next is None:
            self._timer.update_last_triggered_step(step)
        elif self._requested and run_values.run_metadata is not None:
            self._timer.update_last_triggered_step(step)
            directory = self._output_dir or "."
            path = os.path.join(directory, f"timeline-{step}.json")
            logging.info("Saving timeline for %d into '%s'.", step, path)
            try:
                os.makedirs(directory, exist_ok=True)
                timeline.write(path, run_values.run_metadata)
            except OSError as error:
                # A full disk, say: no training depends on a trace.
                logging.error("the timeline is not written: %s", error)
            if self.writer is not None:
                self.writer.add_run_metadata(run_values.run_metadata, f"step_{step}", step)
        self._next = step + 1


class SingularMonitoredSession(MonitoredSession):
    """A monitored session of a single chief that raises the loss of a task as an error.

    Args:
        hooks: Hooks to call, in this order.
        scaffold: Scaffold of the graph.
        master: Target of the session.
        config: Options of the session.
        checkpoint_dir: Directory of the checkpoints to restore from.
        stop_grace_period_secs: Seconds that threads have to end after a stop.
        checkpoint_filename_with_path: Path of the one checkpoint to restore from.
    """

    _recovers = False

    def __init__(
        self,
        hooks: Sequence[SessionRunHook] | None = None,
        scaffold: Scaffold | None = None,
        master: str = "",
        config: rt.SessionConfig | None = None,
        checkpoint_dir: str | None = None,
        stop_grace_period_secs: float = timeouts.STOP_GRACE_SECS,
        checkpoint_filename_with_path: str | None = None,
    ) -> None:
        creator = ChiefSessionCreator(
            scaffold, master, config, checkpoint_dir, checkpoint_filename_with_path
        )
        super().__init__(creator, hooks, stop_grace_period_secs)

    def raw_session(self) -> rt.Session:
        """Returns the session underneath. Raises RuntimeError when it is closed."""
        return self.raw


class SessionManager(session_manager.SessionManager):
    """``harness.SessionManager`` with TensorFlow's third way to open a session."""

    def recover_session(
        self,
        master: str,
        saver: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = times.GIVE_UP_SECS,
        config: rt.SessionConfig | None = None,
    ) -> tuple[rt.Session, bool]:
        """Opens a session and restores the newest checkpoint, if any; never initialises global variables.

        The arguments are those of ``prepare_session``.

        Returns:
            The session, and True if the model is ready: alive before, or restored.
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
            master,
            self._graph,
            readiness.filtered(config, self._graph, readiness.limit_secs(config, max_wait_secs)),
        )
        self.operations.init_local(session)
        return session, False
