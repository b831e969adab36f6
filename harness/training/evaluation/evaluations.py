"""The memory and the decisions of an evaluator, as pure functions of its evaluations.

They say which checkpoint is next, which is best, and whether training is to end.
``EarlyStoppingHook`` decides by the same functions. The file of the evaluations is the only state.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime import DataLossError
from runtime.lowlevel import durability

FORMAT = 1


@dataclass(frozen=True)
class StepEvaluation:
    """The metrics of one checkpoint.

    Attributes:
        step: Global step of the checkpoint.
        saved_at: Unix time of its save, in seconds. A step that is saved again, after a loss, is
            another checkpoint.
        metrics: Numbers of the evaluation, by name.
    """

    step: int
    saved_at: float
    metrics: Mapping[str, float]

    @property
    def key(self) -> tuple[int, float]:
        """The step and the time, unique among the checkpoints of a run directory."""
        return self.step, self.saved_at


@dataclass(frozen=True)
class EvaluationGoal:
    """The rule by which evaluations are compared.

    Attributes:
        best_by: Name of the metric that decides; empty when none does.
        mode: "max" or "min": the direction of an improvement.
        min_delta: The least improvement that counts.
        patience: Number of evaluations without an improvement after which training is to end; None
            never ends it.

    Raises:
        ValueError: The mode is neither, a number is out of range, or there is ``patience`` without
            ``best_by``.

    Examples:
        >>> losses = [
        ...     StepEvaluation(step, 0.0, {"loss": loss})
        ...     for step, loss in ((10, 0.5), (20, 0.4), (30, 0.6))
        ... ]
        >>> found = standing(losses, EvaluationGoal("loss", mode="min"))
        >>> found.best.step, found.since_best
        (20, 1)
    """

    best_by: str = ""
    mode: str = "max"
    min_delta: float = 0.0
    patience: int | None = None

    def __post_init__(self) -> None:
        """Checks the parts."""
        if self.mode not in ("max", "min"):
            raise ValueError(f"best_mode is 'max' or 'min', not {self.mode!r}")
        if self.patience is not None and (self.patience < 1 or not self.best_by):
            raise ValueError(
                "patience is a number of evaluations above 0, and needs best_by, the metric that "
                "decides"
            )
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"min_delta is a number that is not negative, not {self.min_delta!r}")


@dataclass(frozen=True)
class RunStanding:
    """The state of a run by its evaluations.

    Attributes:
        best: The best evaluation; None while there is none with a finite value.
        since_best: Number of evaluations of later steps without an improvement.
        stop: Reason to end training, in words; empty for none.
    """

    best: StepEvaluation | None = None
    since_best: int = 0
    stop: str = ""


def standing(evaluations: Iterable[StepEvaluation], goal: EvaluationGoal) -> RunStanding:
    """Returns the best evaluation, and the reason to end training, by the order of the steps.

    A value that is not finite is no improvement.

    Args:
        evaluations: The evaluations, in any order.
        goal: The rule by which they are compared.
    """
    if not goal.best_by:
        return RunStanding()
    # With the sign, more is better in both modes.
    sign = 1.0 if goal.mode == "max" else -1.0
    best: StepEvaluation | None = None
    since = 0
    # By step and not by time: an evaluator that died may have done an old step last.
    for evaluation in sorted(evaluations, key=lambda e: e.key):
        value = sign * evaluation.metrics.get(goal.best_by, math.nan)
        highest = -math.inf if best is None else sign * best.metrics[goal.best_by]
        if math.isfinite(value) and value > highest + (goal.min_delta if best is not None else 0.0):
            best, since = evaluation, 0
        else:
            since += 1
    if goal.patience is None or since < goal.patience:
        return RunStanding(best, since)
    at = (
        "never was finite"
        if best is None
        else f"was best at step {best.step} ({best.metrics[goal.best_by]:.6g})"
    )
    return RunStanding(
        best, since, f"{goal.best_by} {at} and no better in {since} evaluations since"
    )


def next_key(
    found: Iterable[tuple[int, float]], done: Iterable[StepEvaluation], over: bool
) -> tuple[int, float] | None:
    """Returns the step and time of the checkpoint to evaluate next; None when all are evaluated.

    During training this is the oldest checkpoint, which is deleted first. After training it is the
    newest: an evaluator that is ended early has then evaluated the checkpoint that matters.

    Args:
        found: Step and time of each checkpoint.
        done: The evaluations so far.
        over: True when training is over.
    """
    # By time first: after a loss of steps the same step is saved again, and is another checkpoint.
    left = set(found) - {evaluation.key for evaluation in done}
    return (max if over else min)(left, key=lambda key: (key[1], key[0]), default=None)


def added(evaluations: Sequence[StepEvaluation], new: StepEvaluation) -> tuple[StepEvaluation, ...]:
    """Returns the evaluations with a new one; an evaluation of the same step gives way."""
    return (*(kept for kept in evaluations if kept.step != new.step), new)


def to_text(evaluations: Iterable[StepEvaluation]) -> str:
    """Returns the evaluations as the text of their file."""
    rows = [
        {"step": e.step, "saved_at": e.saved_at, "metrics": dict(e.metrics)} for e in evaluations
    ]
    return json.dumps({"format": FORMAT, "evaluations": rows}, indent=1) + "\n"


def from_text(text: str, where: str) -> tuple[StepEvaluation, ...]:
    """Reads the text of ``to_text``.

    Args:
        text: The text.
        where: Path of the file, for errors.

    Raises:
        DataLossError: The text is damaged, or of a later format.
    """
    try:
        told = json.loads(text)
        # An older evaluator must not overwrite what it cannot read.
        if told["format"] > FORMAT:
            raise DataLossError(
                f"{where} has format {told['format']}; this version reads up to {FORMAT}"
            )
        return tuple(
            StepEvaluation(
                int(row["step"]),
                float(row["saved_at"]),
                {n: float(v) for n, v in row["metrics"].items()},
            )
            for row in told["evaluations"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        advice = "delete it to have every checkpoint evaluated again"
        raise DataLossError(
            f"{where} is damaged ({type(error).__name__}: {error}): {advice}"
        ) from None


def load(path: str) -> tuple[StepEvaluation, ...]:
    """Returns the evaluations of a file; none where there is no file. Raises as ``from_text``."""
    try:
        return from_text(durability.small_text(path), path)
    except FileNotFoundError:
        return ()


def store(path: str, evaluations: Iterable[StepEvaluation]) -> None:
    """Writes the file, whole or not at all."""
    # Another name until all is on disk: a process that dies here leaves the old file whole.
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(to_text(evaluations))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
