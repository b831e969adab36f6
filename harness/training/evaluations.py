"""What an evaluator remembers and decides: which checkpoint is next, which is best, whether more training helps.

Pure functions of what was evaluated so far. The file in which an evaluator keeps that is the only state it has.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime import DataLossError
from runtime.lowlevel import storage

FORMAT = 1


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint was worth.

    Attributes:
        step: the global step of the checkpoint.
        saved_at: Unix time of its save, in seconds. A step that is saved again, after a loss, is another checkpoint.
        metrics: what the evaluation gave, by name.
    """

    step: int
    saved_at: float
    metrics: Mapping[str, float]

    @property
    def key(self) -> tuple[int, float]:
        """What tells this checkpoint from others of the run directory."""
        return self.step, self.saved_at


@dataclass(frozen=True)
class Goal:
    """What is wanted of the metrics.

    Attributes:
        best_by: name of the metric that decides; empty when none does.
        mode: whether "max" or "min" of it is best.
        min_delta: how much better than the best so far an evaluation must be to count as better.
        patience: evaluations without a better one after which training is to end; None never ends it.

    Raises:
        ValueError: these make no sense together.
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
            raise ValueError("patience is a number of evaluations above 0, and needs best_by, the metric that decides")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"min_delta is a number that is not negative, not {self.min_delta!r}")


@dataclass(frozen=True)
class Standing:
    """Where a run stands by its evaluations.

    Attributes:
        best: the best evaluation; None while there is none with a finite value.
        since_best: how many evaluations of later steps were no better.
        stop: why training is to end, in words; empty while it is not.
    """

    best: Evaluation | None = None
    since_best: int = 0
    stop: str = ""


def standing(evaluations: Iterable[Evaluation], goal: Goal) -> Standing:
    """Which evaluation is the best, and whether training is to end, by the order of the steps.

    A value that is not finite is no better than any.
    """
    if not goal.best_by:
        return Standing()
    sign = 1.0 if goal.mode == "max" else -1.0
    best: Evaluation | None = None
    since = 0
    for evaluation in sorted(evaluations, key=lambda e: e.key):
        value = sign * evaluation.metrics.get(goal.best_by, math.nan)
        highest = -math.inf if best is None else sign * best.metrics[goal.best_by]
        if math.isfinite(value) and value > highest + (goal.min_delta if best is not None else 0.0):
            best, since = evaluation, 0
        else:
            since += 1
    if goal.patience is None or since < goal.patience:
        return Standing(best, since)
    at = "never was finite" if best is None else f"was best at step {best.step} ({best.metrics[goal.best_by]:.6g})"
    return Standing(best, since, f"{goal.best_by} {at} and no better in {since} evaluations since")


def next_key(found: Iterable[tuple[int, float]], done: Iterable[Evaluation], over: bool) -> tuple[int, float] | None:
    """Which checkpoint to evaluate next; None when all are evaluated.

    While training goes on the oldest, as it is the next to be deleted. When training is over the newest: whoever ends
    an evaluator that is late loses the least.

    Args:
        found: step and time of each checkpoint there is.
        done: what was evaluated.
        over: whether training is over.
    """
    left = set(found) - {evaluation.key for evaluation in done}
    return (max if over else min)(left, key=lambda key: (key[1], key[0]), default=None)


def added(evaluations: Sequence[Evaluation], new: Evaluation) -> tuple[Evaluation, ...]:
    """The evaluations with one more, which takes the place of one of the same step: that was lost and trained again."""
    return (*(kept for kept in evaluations if kept.step != new.step), new)


def to_text(evaluations: Iterable[Evaluation]) -> str:
    """The evaluations as a file has them."""
    rows = [{"step": e.step, "saved_at": e.saved_at, "metrics": dict(e.metrics)} for e in evaluations]
    return json.dumps({"format": FORMAT, "evaluations": rows}, indent=1) + "\n"


def from_text(text: str, where: str) -> tuple[Evaluation, ...]:
    """Reads what ``to_text`` gave.

    Raises:
        DataLossError: it is damaged, or of a later format; names ``where``.
    """
    try:
        told = json.loads(text)
        if told["format"] > FORMAT:
            raise DataLossError(f"{where} has format {told['format']}; this version reads up to {FORMAT}")
        return tuple(
            Evaluation(int(row["step"]), float(row["saved_at"]), {n: float(v) for n, v in row["metrics"].items()})
            for row in told["evaluations"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        advice = "delete it to have every checkpoint evaluated again"
        raise DataLossError(f"{where} is damaged ({type(error).__name__}: {error}): {advice}") from None


def load(path: str) -> tuple[Evaluation, ...]:
    """The evaluations of a file; none where there is no file. Raises as ``from_text``."""
    try:
        return from_text(storage.small_text(path), path)
    except FileNotFoundError:
        return ()


def store(path: str, evaluations: Iterable[Evaluation]) -> None:
    """Writes the file, whole or not at all."""
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(to_text(evaluations))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
