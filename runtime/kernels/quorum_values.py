"""What is said about a quorum: its rules, what it updates, its counts, decisions, and reports to a chief."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

UNKNOWN = -1
"""The step of a task that does not lead and has not heard of one yet."""


@dataclass(frozen=True)
class Rules:
    """What a quorum needs.

    Attributes:
        needed: gradients in an aggregate.
        total: workers there are. Below ``needed``, each may give several gradients to one aggregate.
        alone: this task decides by itself; else a chief does.
        leads: this task holds the step counter.
        timeout_secs: how long the first gradient of a step waits before the step goes on without the workers that are
            missing; None for ever.
        tasks: all tasks that hold a part of the step.
        group: what the quorums of these tasks have in common.
    """

    needed: int
    total: int
    alone: bool = True
    leads: bool = True
    timeout_secs: float | None = None
    tasks: tuple[str, ...] = ()
    group: str = ""

    @property
    def each(self) -> int:
        """Most gradients of one worker in an aggregate."""
        return -(-self.needed // self.total)


class Target(Protocol):
    """The variables that a quorum updates."""

    @property
    def generation(self) -> int:
        """Of the variables: another one after each restore."""

    def step(self) -> int:
        """The step counter, where this task leads."""

    def apply(self, inputs: Sequence[Array], key: tuple[int, int], expected: Mapping[str, int] | None) -> None:
        """Applies aggregated gradients, which must move the step on by one, and waits until it is done.

        Args:
            inputs: the aggregated gradients.
            key: names this application in the gate of the task.
            expected: by task, how many applications have this key; None when there is one.
        """


@dataclass
class GradientCounts:
    """What has happened to the gradients that were pushed.

    Attributes:
        applied: aggregates applied.
        accepted: gradients in them.
        dropped: gradients that were stale: of another step, or of this one but too late.
        repeated: gradients of a worker that had given all it may.
    """

    applied: int = 0
    accepted: int = 0
    dropped: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class Selection:
    """Whose gradients were applied at which step, one entry for each gradient."""

    step: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Gathered:
    """What a chief is told.

    Attributes:
        step: the step that the task is at.
        workers: whose gradients of it are here, one entry for each, in the order in which they came.
        seen: the workers that were heard of since it was told last.
        waited_secs: how long the first of these gradients has waited.
    """

    step: int
    workers: tuple[int, ...]
    seen: tuple[int, ...]
    waited_secs: float
