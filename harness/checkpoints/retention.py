"""Which checkpoints of a series are kept, and how their directories are called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Retention:
    """The rule of which checkpoints are kept.

    Attributes:
        max_to_keep: the last so many; None or 0 keeps all.
        every_n_hours: besides, one for so many hours; None keeps no more.
        best: besides, the best so many by ``metric``; 0 keeps no more.
        metric: name of the metric.
        best_mode: "max" or "min".
        digits: pads step numbers with zeros to so many digits; None does not pad.
    """

    max_to_keep: int | None = 5
    every_n_hours: float | None = None
    best: int = 0
    metric: str = ""
    best_mode: str = "min"
    digits: int | None = None

    def name_of(self, step: int) -> str:
        """Name of a step's directory."""
        return str(step).zfill(self.digits or 0)

    def named_as(self, names: Sequence[str]) -> Retention:
        """Returns the same with the padding of the steps that are there: Orbax does not see names of another form."""
        padded = next((len(name) for name in names if name.startswith("0") and len(name) > 1), None)
        return replace(self, digits=padded) if names else self

    def metric_of(self, metrics: Mapping[str, float]) -> float:
        """The value that checkpoints are compared by: without one, or with NaN, a checkpoint is the worst."""
        value = float(metrics.get(self.metric, math.nan))
        worst = math.inf if self.best_mode == "min" else -math.inf
        return worst if math.isnan(value) else value
