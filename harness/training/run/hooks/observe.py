"""Hooks that watch training: log tensors, write summaries and step rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from absl import logging

import runtime as rt
from harness.training.run.hooks.base import (
    EventsHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from harness.training.run.hooks.timer import SecondOrStepTimer
from harness.training.run.services import StepCounter
from runtime import concurrency

if TYPE_CHECKING:
    from harness.tensorboard.writer import FileWriter
    from harness.training.start.scaffold import Scaffold


class LoggingTensorHook(SessionRunHook):
    """A hook that logs tensors: in the first step, then at intervals, or at the end.

    Args:
        tensors: Tensors or their names, by tag; or a list of these.
        every_n_iter: Steps of this worker between lines; at most one of this and ``every_n_secs``.
        every_n_secs: Seconds between lines.
        at_end: True to log at the end too.
        formatter: Returns the line for a mapping of tags to values.

    Raises:
        ValueError: There are both intervals or none at all, or one is not positive.

    Examples:
        >>> import harness
        >>> hook = harness.LoggingTensorHook({"loss": "loss:0"}, every_n_secs=10)
    """

    def __init__(
        self,
        tensors: Mapping[str, rt.TensorLike] | Sequence[rt.Tensor | rt.Variable | str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[Mapping[str, object]], str] | None = None,
    ) -> None:
        if (
            every_n_iter is not None
            and every_n_secs is not None
            or (not at_end and every_n_iter == every_n_secs)
        ):
            raise ValueError(
                "exactly one of every_n_iter and every_n_secs must be provided, or at_end=True"
            )
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}.")
        self._tensors = (
            dict(tensors)
            if isinstance(tensors, Mapping)
            else {str(getattr(t, "name", t)): t for t in tensors}
        )
        self._formatter = formatter
        self._at_end = at_end
        timed = every_n_iter is not None or every_n_secs is not None
        self._timer = SecondOrStepTimer(every_n_secs, every_n_iter) if timed else None
        self._steps = 0

    def begin(self) -> None:
        """Forgets the steps of an earlier session."""
        self._steps = 0
        if self._timer is not None:
            self._timer.reset()

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Returns the tensors as fetches when a line is due."""
        # Fetched only when a line is due: to fetch a large tensor costs each step.
        due = self._timer is not None and self._timer.should_trigger_for_step(self._steps)
        return SessionRunArgs(self._tensors) if due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the values when a line was due."""
        if run_values.results is not None:
            self._log_values(run_values.results)
        # Steps of this worker, as TF1 counts here: the hook needs no global step.
        self._steps += 1

    def end(self, session: rt.Session) -> None:
        """Logs the last values, with ``at_end``."""
        if self._at_end:
            self._log_values(session.run(self._tensors))

    def _log_values(self, values: Mapping[str, object]) -> None:
        secs = (
            self._timer.update_last_triggered_step(self._steps)[0]
            if self._timer is not None
            else None
        )
        if self._formatter is not None:
            logging.info("%s", self._formatter(values))
            return
        line = ", ".join(f"{tag} = {values[tag]}" for tag in self._tensors)
        logging.info("%s%s", line, "" if secs is None else f" ({secs:.3f} sec)")


class StepCounterHook(EventsHook):
    """A hook that writes the rate of global steps, ``global_step/sec``.

    Args:
        every_n_steps: Global steps between rates; exactly one of this and ``every_n_secs``.
        every_n_secs: Seconds between rates.
        output_dir: Directory of the events; nothing is written without it and ``summary_writer``.
        summary_writer: Writer of the caller's own.

    Examples:
        >>> import harness
        >>> hook = harness.StepCounterHook(every_n_steps=100)
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: FileWriter | None = None,
    ) -> None:
        super().__init__(output_dir, summary_writer)
        self._timer = SecondOrStepTimer(every_n_secs, every_n_steps)
        self._counter: StepCounter | None = None

    def begin(self) -> None:
        """Finds the global step and opens the writer."""
        super().begin()
        # Made anew for each run, so that a pause between two runs is no rate.
        self._counter = StepCounter(self._step.op.name, self.writer)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes a rate when one is due."""
        step = int(run_values.results)
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            assert self._counter is not None
            self._counter.count(step, concurrency.monotonic())


class SummarySaverHook(EventsHook):
    """A hook that writes summaries at intervals of global steps or seconds.

    Summaries are fetched in the user's own step, with its feeds. Without ``output_dir`` and
    ``summary_writer`` nothing is written, and a warning says so.

    Args:
        save_steps: Steps between summaries; exactly one of this and ``save_secs``.
        save_secs: Seconds between summaries.
        output_dir: Directory of the events.
        summary_writer: Writer of the caller's own.
        scaffold: Scaffold with the summary operation; exactly one of this and ``summary_op``.
        summary_op: String tensor of a serialized summary, or a list of such tensors.

    Raises:
        ValueError: There are both of ``scaffold`` and ``summary_op``, or neither.

    Examples:
        >>> import harness
        >>> hook = harness.SummarySaverHook(save_secs=60, output_dir="/tmp/run", scaffold=harness.Scaffold())
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: FileWriter | None = None,
        scaffold: Scaffold | None = None,
        summary_op: rt.Tensor | Sequence[rt.Tensor] | None = None,
    ) -> None:
        if (scaffold is None) == (summary_op is None):
            raise ValueError("Exactly one of scaffold or summary_op must be provided.")
        super().__init__(output_dir, summary_writer)
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._scaffold = scaffold
        self._summary_op = summary_op
        self._next: int | None = None
        self._requested = False

    def begin(self) -> None:
        """Finds the global step and opens the writer."""
        super().begin()
        if self.writer is None:
            logging.warning(
                "SummarySaverHook was given no output_dir and no summary_writer: no summary is "
                "written"
            )

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns the summary as a fetch when a summary is due, as in the first step."""
        op = self._summary_op if self._scaffold is None else self._scaffold.summary_op
        wanted = op is not None and self.writer is not None
        # The step after the last one: a step that is fetched together with the summary is known too
        # late.
        self._requested = wanted and (
            self._next is None or self._timer.should_trigger_for_step(self._next)
        )
        return SessionRunArgs({"step": self._step, **({"summary": op} if self._requested else {})})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the summary that was fetched."""
        step = int(run_values.results["step"])
        if self._requested and self.writer is not None:
            # The mark makes TensorBoard forget later points of a run that crashed.
            if self._next is None:
                self.writer.add_session_log("START", step)
            self._timer.update_last_triggered_step(step)
            # A list of summaries gives a list of values.
            given = run_values.results["summary"]
            for summary in given if isinstance(given, list | tuple) else [given]:
                self.writer.add_summary(summary, step)
        self._next = step + 1

    def end(self, session: rt.Session) -> None:
        """Flushes the writer."""
        if self.writer is not None:
            self.writer.flush()
