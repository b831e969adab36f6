"""The rule of which checkpoints of a series are kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RetentionRule:
    """The rule of which checkpoints are kept.

    Attributes:
        max_to_keep: number of last checkpoints; None or 0 keeps all.
        every_n_hours: hours between further checkpoints; None keeps no further ones.
    """

    max_to_keep: int | None
    every_n_hours: float | None
