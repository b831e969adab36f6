"""Hooks that steer training: stop at a step, at a metric without improvement, and on NaN."""

from collections.abc import Callable

import numpy as np
from absl import logging

import runtime as rt
from harness.checkpoints import layout, manifest, states
from harness.coordinator import Coordinator
from harness.training.evaluation.evaluations import EvaluationGoal, StepEvaluation, added, standing
from harness.training.run.hooks.base import (
    GlobalStepHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

_STATE = "early_stopping"
"""Name of the values of a metric in a checkpoint."""


class StopAtStepHook(GlobalStepHook):
    """A hook that stops training at a global step.

    Several workers end a little above that step, because each worker finishes the step under way.

    Args:
        num_steps: Steps to train from the step of the first session on; exactly one of this and
            ``last_step``.
        last_step: Global step to stop at.

    Raises:
        ValueError: Both numbers are given, or neither.

    Examples:
        >>> import harness
        >>> hook = harness.StopAtStepHook(last_step=1000)
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError("Exactly one of num_steps and last_step must be specified.")
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Counts from the first session's step; stops a run past the last step."""
        step = int(session.run(self._step))
        if self._last_step is None:
            assert self._num_steps is not None
            self._last_step = step + self._num_steps
        if step >= self._last_step:
            coord.request_stop()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stops training at the last step."""
        assert self._last_step is not None
        if int(run_values.results) >= self._last_step:
            run_context.request_stop()


class EarlyStoppingHook(GlobalStepHook):
    """A hook that stops training on all workers when a metric gets no better.

    The chief's hook decides, and the other workers need none. The values since the best one are
    part of each checkpoint, so a chief that is started again continues to count. A value that is
    not finite is no improvement.

    Args:
        metric: The function that the chief calls with the session; it returns a number, such as the
            loss on a validation set. Or a tensor of one number, fetched with a training step.
        patience: Number of values in a row without an improvement after which training stops.
        every_n_steps: Global steps between values.
        mode: "min" or "max": the direction of an improvement.
        min_delta: The least improvement that counts.

    Raises:
        ValueError: ``mode`` is neither, or ``patience`` or ``every_n_steps`` is below 1, or
            ``min_delta`` negative.

    Examples:
        >>> import harness
        >>> hook = harness.EarlyStoppingHook(lambda session: 0.5, patience=5, every_n_steps=500)
        >>> hook.best is None
        True
    """

    def __init__(
        self,
        metric: Callable[[rt.Session], float] | rt.Tensor,
        *,
        patience: int,
        every_n_steps: int = 100,
        mode: str = "min",
        min_delta: float = 0.0,
    ) -> None:
        # A patience of zero would stop training at the first value.
        if patience < 1 or every_n_steps < 1:
            raise ValueError(
                f"patience and every_n_steps are 1 at least, not {patience} and {every_n_steps}"
            )
        self._metric, self._every = metric, every_n_steps
        self._goal = EvaluationGoal("metric", mode, min_delta, patience)
        self._seen: tuple[StepEvaluation, ...] = ()
        self._next_step: int | None = None
        self.leads: Callable[[], bool] = lambda: True
        self.stop_everybody: Callable[[str], None] = lambda reason: None

    @property
    def best(self) -> float | None:
        """The best value; None before the first finite one."""
        best = standing(self._seen, self._goal).best
        return None if best is None else best.metrics["metric"]

    @property
    def best_step(self) -> int:
        """The global step of the best value; 0 before the first finite one."""
        best = standing(self._seen, self._goal).best
        return 0 if best is None else best.step

    def begin(self) -> None:
        """Finds the global step and forgets the values of an earlier run."""
        super().begin()
        # A hook may be used for a second run, of which the first says nothing.
        self._seen, self._next_step = (), None

    def register_state(self, session: rt.Session, checkpoint_dir: str | None) -> None:
        """Continues with the values of the newest checkpoint, where this process has none.

        Args:
            session: The first session of the run, before a checkpoint is saved in it.
            checkpoint_dir: Directory of the checkpoints; None for none.
        """
        # Keyed by the task: two sessions of one process may train on two tasks, as tests do.
        states.checkpointable(
            _STATE, self._get_state, self._set_state, task=session.target or session.task
        )
        if self._seen or checkpoint_dir is None:
            return
        newest = layout.latest_checkpoint(checkpoint_dir)
        try:
            saved = None if newest is None else manifest.read_manifest(newest)
        except rt.DataLossError as error:
            # The session is open, so the tasks kept a live model: no restore needed this
            # checkpoint.
            logging.warning("early stopping counts anew: %s", error)
            saved = None
        held = {} if saved is None else saved.states.get(session.task, {})
        if _STATE in held:
            self._set_state(states.decode(held[_STATE]))

    def forget_state(self, session: rt.Session) -> None:
        """Takes the values out of the checkpoints of later runs of this process."""
        states.forget_checkpointable(_STATE, task=session.target or session.task)

    def _get_state(self) -> list[list[float]]:
        return [[e.step, e.metrics["metric"]] for e in self._seen]

    def _set_state(self, state: list[list[float]]) -> None:
        self._seen = tuple(
            StepEvaluation(int(step), 0.0, {"metric": value}) for step, value in state
        )

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns the global step as a fetch, and the metric where that is a tensor."""
        return SessionRunArgs(
            [self._step] if callable(self._metric) else [self._step, self._metric]
        )

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Compares a value of the metric with the best one, when a value is due."""
        step = int(run_values.results[0])
        if self._next_step is not None and step < self._next_step:
            return
        self._next_step = step + self._every
        # A chief that was replaced must not stop the run of the next chief.
        if not self.leads():
            return
        # The session underneath: a metric that recovers in the middle would mix two models.
        value = float(
            self._metric(run_context.session) if callable(self._metric) else run_values.results[1]
        )
        seen = added(self._seen, StepEvaluation(step, 0.0, {"metric": value}))
        found = standing(seen, self._goal)
        # Values before the best one decide nothing any more, and each checkpoint holds the rest.
        self._seen = tuple(e for e in seen if found.best is None or e.step >= found.best.step)
        if found.stop:
            logging.info("training stops early at step %d: %s", step, found.stop)
            self.stop_everybody(f"training stops early at step {step}: {found.stop}")
            run_context.request_stop()


class NanLossDuringTrainingError(RuntimeError):
    """An error of a ``NanTensorHook``: the loss became NaN."""


class NanTensorHook(SessionRunHook):
    """A hook that ends training when a tensor is NaN.

    Args:
        loss_tensor: The tensor.
        fail_on_nan_loss: True to raise NanLossDuringTrainingError; False to stop training.

    Examples:
        >>> import harness
        >>> hook = harness.NanTensorHook("loss:0", fail_on_nan_loss=False)
    """

    def __init__(self, loss_tensor: rt.TensorLike, fail_on_nan_loss: bool = True) -> None:
        self._tensor = loss_tensor
        self._fail = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns the tensor as a fetch."""
        return SessionRunArgs(self._tensor)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stops training or raises NanLossDuringTrainingError where the tensor has a NaN."""
        if not np.isnan(run_values.results).any():
            return
        if self._fail:
            logging.error("Model diverged with loss = NaN.")
            raise NanLossDuringTrainingError("NaN loss during training.")
        logging.warning("Model diverged with loss = NaN; training stops.")
        run_context.request_stop()
