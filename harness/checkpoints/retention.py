"""The rule of a series: checkpoints to keep, and names of their directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Retention:
    """The rule of which checkpoints are kept.

    Attributes:
        max_to_keep: number of last checkpoints; None or 0 keeps all.
        every_n_hours: hours between further checkpoints; None keeps no further ones.
        best: number of further checkpoints that are the best by ``metric``.
        metric: name of the metric.
        best_mode: "max" or "min".
        digits: number of digits to which zeros pad a step; None does not pad.
    """

    max_to_keep: int | None = 5
    every_n_hours: float | None = None
    best: int = 0
    metric: str = ""
    best_mode: str = "min"
    digits: int | None = None

    def name_of(self, step: int) -> str:
        """Returns the name of a step's directory."""
        return str(step).zfill(self.digits or 0)

    def named_as(self, names: Sequence[str]) -> Retention:
        """Returns this rule with the padding of existing steps, as Orbax does not see names of another form."""
        padded = next((len(name) for name in names if name.startswith("0") and len(name) > 1), None)
        return replace(self, digits=padded) if names else self

    def metric_of(self, metrics: Mapping[str, float]) -> float:
        """Returns the value by which checkpoints are compared; a missing value or NaN is the worst."""
        value = float(metrics.get(self.metric, math.nan))
        worst = math.inf if self.best_mode == "min" else -math.inf
        return worst if math.isnan(value) else value
