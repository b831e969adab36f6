"""The hook for checkpoints, and the base of the listeners. A monitored session calls the hook."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.training.run.hooks.base import EventsHook, SessionRunContext, SessionRunValues
from harness.training.run.hooks.timer import SecondOrStepTimer
from harness.training.run.services import SeriesCheckpoints, check_basename, costs_one_checkpoint
from harness.training.start import readiness
from harness.training.start.readiness import CheckpointSaver
from runtime import concurrency

if TYPE_CHECKING:
    from harness.training.start.scaffold import Scaffold


class CheckpointSaverListener:
    """Base of the listeners of a ``CheckpointSaverHook``; the methods do nothing."""

    def begin(self) -> None:
        """Begins the listener, in the hook's ``begin``."""

    def before_save(self, session: rt.Session, global_step_value: int) -> None:
        """Prepares for a checkpoint that is saved next."""

    def after_save(self, session: rt.Session, global_step_value: int) -> bool | None:
        """Receives the step of a checkpoint that is on disk; returns True to stop training."""
        return None

    def end(self, session: rt.Session, global_step_value: int) -> None:
        """Ends the listener, after the last checkpoint."""


class CheckpointSaverHook(EventsHook):
    """A hook that saves checkpoints: with every new session, at intervals, and at the end.

    Training continues during a save. A save that is due while another one runs is skipped, and
    counted in the saver. A hook with listeners waits for each save, because its listeners may read
    the checkpoint. A full disk costs that checkpoint, and is an error at the end; other failures
    are raised in the training loop.

    Args:
        checkpoint_dir: Directory of the checkpoints.
        save_secs: Seconds between checkpoints; exactly one of this and ``save_steps``.
        save_steps: Global steps between checkpoints.
        saver: Saver of the variables; at most one of this and ``scaffold``. Without both, the
            graph's first saver.
        checkpoint_basename: First part of the names.
        scaffold: Scaffold with the saver.
        listeners: Listeners to call, in this order.
        save_graph_def: True to write the graph for TensorBoard.

    Raises:
        ValueError: There are a saver and a scaffold, not exactly one interval, or the basename is a
            path.

    Examples:
        >>> import harness
        >>> hook = harness.CheckpointSaverHook("/tmp/run", save_secs=600)
        >>> hook.save_path
        '/tmp/run/model.ckpt'
    """

    def __init__(
        self,
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: CheckpointSaver | None = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Scaffold | None = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        save_graph_def: bool = True,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError("You cannot provide both saver and scaffold.")
        check_basename(checkpoint_basename)
        # The ps write there too, and may run in other working directories.
        self._dir = rt.lowlevel.storage.absolute(os.fspath(checkpoint_dir))
        super().__init__(self._dir)
        self.save_path = os.path.join(self._dir, checkpoint_basename)
        """First part of the checkpoints' paths."""
        self._saver = saver
        self._scaffold = scaffold
        self._listeners = list(listeners or ())
        self._save_graph_def = save_graph_def
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._checkpoints: SeriesCheckpoints | None = None
        self.leads: Callable[[], bool] = lambda: True
        """Function that returns True while this chief leads; set by a monitored session, called before each save."""
        self._soon = concurrency.Event()

    def begin(self) -> None:
        """Finds the global step, opens the writer and begins the listeners."""
        super().begin()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Saves the model with which the session begins."""
        if self._checkpoints is None:
            self._checkpoints = SeriesCheckpoints(
                self._get_saver(), self.save_path, self._step, self.writer, lambda: self.leads()
            )
            if self._save_graph_def and self.writer is not None:
                self.writer.add_graph(session.graph)
        # A new session may have other values: the first checkpoint says where it begins.
        step = int(session.run(self._step))
        self._save_step(session, step)
        self._timer.update_last_triggered_step(step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Saves when the interval has passed, or a save was requested."""
        step = int(run_values.results)
        if self._checkpoints is not None:
            self._checkpoints.inspect(run_context.session)
        moved = self._timer.should_trigger_for_step(step)
        # Set by the thread that hears of a ps that is told to go; this thread alone saves, between
        # two steps.
        if self._soon.is_set():
            self._soon.clear()
            moved = True
        # Variables may change while the global step stands still, as in a program that counts no
        # steps. To look costs a question to each ps, so the look waits for the interval.
        if moved or self._timer.secs_are_over():
            due = moved or self._has_changed(run_context.session)
            self._timer.update_last_triggered_step(step)
            if due and self._save_step(run_context.session, step):
                run_context.request_stop()

    def save_soon(self) -> None:
        """Requests a save after the next step, from any thread."""
        self._soon.set()

    def end(self, session: rt.Session) -> None:
        """Saves the last steps and ends the listeners."""
        step = int(session.run(self._step))
        assert self._checkpoints is not None
        if self._listeners and (
            step != self._timer.last_triggered_step() or self._has_changed(session)
        ):
            self._announce_and_save(session, step)
        # Also without listeners, and where the last save was skipped or had no room; it does
        # nothing if all is saved.
        self._checkpoints.save(session)
        for listener in self._listeners:
            listener.end(session, step)

    def leave(self, session: rt.Session) -> None:
        """Saves the present step. The call replaces ``end`` when a signal interrupts training."""
        if self._checkpoints is not None:
            self._checkpoints.save(session)

    def settle(self, secs: float) -> None:
        """Waits for a save that is under way. The call replaces ``end`` after an error.

        Args:
            secs: The longest wait, in seconds.
        """
        if self._checkpoints is not None:
            self._checkpoints.settle(secs)

    def _has_changed(self, session: rt.Session) -> bool:
        return self._checkpoints is not None and self._checkpoints.changed(session)

    def _save_step(self, session: rt.Session, step: int) -> bool:
        """Saves; returns True if a listener requests a stop."""
        assert self._checkpoints is not None
        with costs_one_checkpoint(session):
            # A listener may read the checkpoint, so it has to be whole when the listener is called.
            if self._listeners:
                return self._announce_and_save(session, step)
            self._checkpoints.begin(session)
        return False

    def _announce_and_save(self, session: rt.Session, step: int) -> bool:
        assert self._checkpoints is not None
        logging.info("saving a checkpoint at step %d into %s", step, self.save_path)
        for listener in self._listeners:
            listener.before_save(session, step)
        self._checkpoints.save(session)
        wishes = [listener.after_save(session, step) for listener in self._listeners]
        if any(wishes):
            logging.info("a checkpoint listener asked training to stop at step %d", step)
        return any(wishes)

    def _get_saver(self) -> CheckpointSaver:
        if self._saver is None and self._scaffold is not None:
            self._saver = self._scaffold.saver
        if self._saver is None:
            self._saver = readiness.default_part(rt.get_default_graph(), "saver")
        if self._saver is None:
            raise ValueError("CheckpointSaverHook: the graph has no variables to save")
        return self._saver
