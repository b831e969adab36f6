"""The hook that saves checkpoints, and those who listen to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.training.hooks.base import EventsHook, SessionRunContext, SessionRunValues
from harness.training.hooks.timer import SecondOrStepTimer
from harness.training.services import Checkpoints, check_basename, costs_one_checkpoint

if TYPE_CHECKING:
    from harness.training.readiness import CheckpointSaver
    from harness.training.scaffold import Scaffold


class CheckpointSaverListener:
    """Base of those who are told of checkpoints: each method does nothing here."""

    def begin(self) -> None:
        """Called with the hook's ``begin``."""

    def before_save(self, session: rt.Session, global_step_value: int) -> None:
        """Called before a checkpoint is saved."""

    def after_save(self, session: rt.Session, global_step_value: int) -> bool | None:
        """Called after a checkpoint was saved; True stops training."""
        return None

    def end(self, session: rt.Session, global_step_value: int) -> None:
        """Called at the end, after the last checkpoint."""


class CheckpointSaverHook(EventsHook):
    """Saves a checkpoint with every new session, then every so many global steps or seconds, and at the end.

    Saves run while training goes on; one that is due while the last one still runs is skipped and counted in the
    saver. Only a hook with listeners waits for each, because it tells them of what is on disk. A full disk costs that
    checkpoint, and is an error at the end; other failures are raised in the training loop.

    Args:
        checkpoint_dir: directory of the checkpoints.
        save_secs: seconds between checkpoints; exactly one of this and ``save_steps``.
        save_steps: global steps between checkpoints.
        saver: what saves; at most one of this and ``scaffold``. Without both, the graph's first saver.
        checkpoint_basename: first part of the names.
        scaffold: gives the saver.
        listeners: told of the checkpoints.
        save_graph_def: whether the graph is written as ``graph.pbtxt`` and for TensorBoard.

    Raises:
        ValueError: both a saver and a scaffold, not exactly one interval, or a basename that is none.
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
        self._dir = rt.lowlevel.storage.absolute(os.fspath(checkpoint_dir))  # tasks may run in other directories
        super().__init__(self._dir)
        self.save_path = os.path.join(self._dir, checkpoint_basename)
        """First part of the checkpoints' paths."""
        self._saver = saver
        self._scaffold = scaffold
        self._listeners = list(listeners or ())
        self._save_graph_def = save_graph_def
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._checkpoints: Checkpoints | None = None
        self.leads: Callable[[], bool] = lambda: True
        """Asked before each save whether this chief still leads; a monitored session sets it."""
        self._soon = threading.Event()

    def begin(self) -> None:
        """Finds the global step and opens the writer."""
        super().begin()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Saves what the session starts from."""
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                self._get_saver(), self.save_path, self._step, self.writer, lambda: self.leads()
            )
            if self._save_graph_def and self.writer is not None:
                from harness.training.readiness import write_graph_text

                write_graph_text(session.graph, self._dir)
                self.writer.add_graph(session.graph)
        step = int(session.run(self._step))
        self._save(session, step)
        self._timer.update_last_triggered_step(step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Saves when it is time."""
        step = int(run_values.results)
        if self._checkpoints is not None:
            self._checkpoints.inspect(run_context.session)
        moved = self._timer.should_trigger_for_step(step)
        if self._soon.is_set():
            self._soon.clear()
            moved = True
        if moved or self._timer.secs_are_over():
            due = moved or self._has_changed(run_context.session)
            self._timer.update_last_triggered_step(step)
            if due and self._save(run_context.session, step):
                run_context.request_stop()

    def save_soon(self) -> None:
        """Has the next step save, in whatever thread this is called."""
        self._soon.set()

    def end(self, session: rt.Session) -> None:
        """Saves the last steps."""
        step = int(session.run(self._step))
        assert self._checkpoints is not None
        if self._listeners and (step != self._timer.last_triggered_step() or self._has_changed(session)):
            self._announce_and_save(session, step)
        self._checkpoints.save(session)  # also where the last one was skipped or had no room
        for listener in self._listeners:
            listener.end(session, step)

    def leave(self, session: rt.Session) -> None:
        """Saves the present step; called instead of ``end`` when training is interrupted (SIGTERM, Ctrl-C)."""
        if self._checkpoints is not None:
            self._checkpoints.save(session)

    def settle(self, secs: float) -> None:
        """Waits for a save that is under way, at most so many seconds; called when training ends with an error."""
        if self._checkpoints is not None:
            self._checkpoints.settle(secs)

    def _has_changed(self, session: rt.Session) -> bool:
        return self._checkpoints is not None and self._checkpoints.changed(session)

    def _save(self, session: rt.Session, step: int) -> bool:
        """Saves; returns whether a listener wants training to stop."""
        assert self._checkpoints is not None
        with costs_one_checkpoint(session):
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
            from harness.training.readiness import saver

            self._saver = saver(rt.get_default_graph())
        if self._saver is None:
            raise ValueError("CheckpointSaverHook: the graph has no variables to save")
        return self._saver
