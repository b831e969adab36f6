"""Hooks that watch training: log tensors, write summaries and step rates, trace steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.training.hooks.base import (
    EventsHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from harness.training.hooks.timer import SecondOrStepTimer
from harness.training.services import StepCounter

if TYPE_CHECKING:
    from harness.tensorboard.writer import FileWriter
    from harness.training.scaffold import Scaffold

_STANDING_WARNINGS = 5


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
    """

    def __init__(
        self,
        tensors: Mapping[str, rt.TensorLike] | Sequence[rt.Tensor | rt.Variable | str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[Mapping[str, object]], str] | None = None,
    ) -> None:
        if every_n_iter is not None and every_n_secs is not None or (not at_end and every_n_iter == every_n_secs):
            raise ValueError("exactly one of every_n_iter and every_n_secs must be provided, or at_end=True")
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}.")
        self._tensors = dict(tensors) if isinstance(tensors, Mapping) else {_tag(t): t for t in tensors}
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
        due = self._timer is not None and self._timer.should_trigger_for_step(self._steps)
        return SessionRunArgs(self._tensors) if due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the values of a line that was due."""
        if run_values.results is not None:
            self._log(run_values.results)
        self._steps += 1

    def end(self, session: rt.Session) -> None:
        """Logs the last values, with ``at_end``."""
        if self._at_end:
            self._log(session.run(self._tensors))

    def _log(self, values: Mapping[str, object]) -> None:
        secs = self._timer.update_last_triggered_step(self._steps)[0] if self._timer is not None else None
        if self._formatter is not None:
            logging.info("%s", self._formatter(values))
            return
        line = ", ".join(f"{tag} = {values[tag]}" for tag in self._tensors)
        logging.info("%s%s", line, "" if secs is None else f" ({secs:.3f} sec)")


def _tag(tensor: rt.Tensor | rt.Variable | str) -> str:
    return tensor if isinstance(tensor, str) else str(tensor.name)


class StepCounterHook(EventsHook):
    """A hook that writes and logs the rate of global steps, ``global_step/sec``.

    Args:
        every_n_steps: Global steps between rates; exactly one of this and ``every_n_secs``.
        every_n_secs: Seconds between rates.
        output_dir: Directory of the events; nothing is written without it and ``summary_writer``.
        summary_writer: Writer of the caller's own.
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
        self._last: int | None = None
        self._warnings = 0
        self._known: dict[frozenset[rt.Operation], bool] = {}

    def begin(self) -> None:
        """Finds the global step and opens the writer."""
        super().begin()
        self._counter = StepCounter(self._step.op.name, self.writer)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes a rate when one is due, and warns of a global step that stands still."""
        step = int(run_values.results)
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            assert self._counter is not None
            self._counter.count(step, time.monotonic())
        # Few warnings: a program may mean it. The graph is searched once for each set of fetches.
        stands = step == self._last and self._warnings < _STANDING_WARNINGS
        if stands and self._trains(run_context.original_args.fetches):
            self._warnings += 1
            logging.warning(
                "the global step did not move in the last step (%d): give it to the optimizer's minimize()", step
            )
        self._last = step

    def _trains(self, fetches: object) -> bool:
        """Returns True if a step writes a variable: an evaluation need not move the global step."""
        elements = map(self._step.graph.as_graph_element, jax.tree.leaves(fetches))
        operations = frozenset(e if isinstance(e, rt.Operation) else e.op for e in elements)
        if operations not in self._known:
            self._known[operations] = _writes(operations)
        return self._known[operations]


def _writes(operations: Iterable[rt.Operation]) -> bool:
    """Returns True if a step with these operations writes a variable."""
    waiting, seen = list(operations), set()
    while waiting:
        op = waiting.pop()
        if getattr(op.body, "variables", ()):
            return True
        if op not in seen:
            seen.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return False


class SummarySaverHook(EventsHook):
    """A hook that writes summaries at intervals of global steps or seconds.

    Summaries are fetched in the user's own step, with its feeds. Without ``output_dir`` and ``summary_writer`` nothing
    is written, and a warning says so.

    Args:
        save_steps: Steps between summaries; exactly one of this and ``save_secs``.
        save_secs: Seconds between summaries.
        output_dir: Directory of the events.
        summary_writer: Writer of the caller's own.
        scaffold: Scaffold with the summary operation; exactly one of this and ``summary_op``.
        summary_op: String tensor of a serialized summary, or a list of such tensors.

    Raises:
        ValueError: There are both of ``scaffold`` and ``summary_op``, or neither.
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
            logging.warning("SummarySaverHook was given no output_dir and no summary_writer: no summary is written")

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns the summary as a fetch when one is due; the first step always has one."""
        op = self._summary_op if self._scaffold is None else self._scaffold.summary_op
        wanted = op is not None and self.writer is not None
        self._requested = wanted and (self._next is None or self._timer.should_trigger_for_step(self._next))
        return SessionRunArgs({"step": self._step, **({"summary": op} if self._requested else {})})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the summary that was fetched."""
        step = int(run_values.results["step"])
        if self._requested and self.writer is not None:
            # The mark makes TensorBoard forget later points of a run that crashed.
            if self._next is None:
                self.writer.add_session_log("START", step)
            self._timer.update_last_triggered_step(step)
            given = run_values.results["summary"]
            for summary in given if isinstance(given, list | tuple) else [given]:
                self.writer.add_summary(summary, step)
        self._next = step + 1

    def end(self, session: rt.Session) -> None:
        """Flushes the writer."""
        if self.writer is not None:
            self.writer.flush()


class ProfilerHook(EventsHook):
    """A hook that traces a step at intervals.

    A trace is ``timeline-<step>.json`` for Chrome or Perfetto, and run metadata for TensorBoard.

    Args:
        save_steps: Steps between traces; exactly one of this and ``save_secs``.
        save_secs: Seconds between traces.
        output_dir: Directory of the files.
    """

    def __init__(self, save_steps: int | None = None, save_secs: float | None = None, output_dir: str = "") -> None:
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
            from harness.monitoring import timeline

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
