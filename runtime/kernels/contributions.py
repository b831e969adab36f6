"""The gradients that wait for one synchronous step, and their mean.

A quorum owns a collection of them and guards it by its own lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.kernels.accumulator import MEAN, reduce_in_order
from runtime.tensor_spec import Array, aligned


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


@dataclass(eq=False)
class Contribution:
    """One worker's gradients.

    Attributes:
        worker: whose.
        arrays: views of the caller's memory, valid as long as the caller waits; or copies once ``kept``.
        promised: a chief was told that it is here.
        kept: whether the arrays are copies.
        counted: whether it was applied; None while that is open.
        fenced: dropped, as the variables were restored or have lost their values.
    """

    worker: int
    arrays: Sequence[Array]
    promised: bool = False
    kept: bool = False
    counted: bool | None = None
    fenced: bool = False

    def keep(self) -> None:
        """Copies the arrays, so that they outlive the call."""
        if not self.kept:
            self.arrays = [np.array(a) for a in self.arrays]
            self.kept = True


class StepGradients:
    """The contributions to the present step, in the order in which they came.

    Args:
        each: most gradients of one worker.

    Attributes:
        counts: what has happened to all gradients so far.
        entries: the contributions; none of them is decided.
        since: ``time.monotonic()`` at which the first of them came.
    """

    def __init__(self, each: int) -> None:
        self.counts = GradientCounts()
        self.entries: list[Contribution] = []
        self.since = 0.0
        self._each = each
        self._buffers: list[Array] = []

    @property
    def workers(self) -> set[int]:
        """The workers that have given gradients to this step."""
        return {c.worker for c in self.entries}

    def owes(self, worker: int) -> bool:
        """Returns True if a worker may give this step more gradients."""
        return sum(c.worker == worker for c in self.entries) < self._each

    def add(self, worker: int, arrays: Sequence[Array]) -> Contribution:
        """Adds a contribution.

        A worker that has given all it may was started again, or its connection was cut. Its new gradients take the
        place of the old ones, except those that a chief was promised.
        """
        contribution = Contribution(worker, arrays)
        if self.owes(worker):
            if not self.entries:
                self.since = time.monotonic()
            self.entries.append(contribution)
            return contribution
        self.counts.repeated += 1
        of_worker = [c for c in self.entries if c.worker == worker]
        old = next((c for c in of_worker if not c.promised), None)
        if old is None:
            return of_worker[-1]
        old.counted = False
        self.entries[self.entries.index(old)] = contribution
        return contribution

    def withdraw(self, contribution: Contribution) -> None:
        """Removes a contribution whose caller has stopped waiting; keeps one that a chief was promised."""
        if contribution in self.entries:
            if contribution.promised:
                contribution.keep()
            else:
                self.entries.remove(contribution)

    def choose(self, workers: Sequence[int]) -> list[Contribution] | int:
        """Returns the contributions of these workers, one for each entry; or the worker that has too few."""
        chosen: list[Contribution] = []
        for worker, count in Counter(workers).items():
            of_worker = [c for c in self.entries if c.worker == worker][:count]
            if len(of_worker) < count:
                return worker
            chosen += of_worker
        return chosen

    def settle(self, chosen: Sequence[Contribution]) -> None:
        """Ends the step: the chosen contributions were applied, and all others came too late."""
        for contribution in self.entries:
            contribution.counted = contribution in chosen
        self.counts.applied += 1
        self.counts.accepted += len(chosen)
        self.counts.dropped += len(self.entries) - len(chosen)
        self.entries.clear()

    def drop(self, fenced: bool = False) -> None:
        """Drops and counts all contributions; ``fenced`` says that the variables are not those they were made for."""
        for contribution in self.entries:
            contribution.counted, contribution.fenced = False, fenced
        self.counts.dropped += len(self.entries)
        self.entries.clear()

    def mean_of(self, chosen: Sequence[Contribution]) -> list[Array]:
        """Returns the means, added in the order of the workers: always to the same bits. The memory is used again."""
        ordered = sorted(chosen, key=lambda c: c.worker)
        columns = list(zip(*(c.arrays for c in ordered), strict=True))
        specs = [(column[0].shape, column[0].dtype) for column in columns]
        if specs != [(buffer.shape, buffer.dtype) for buffer in self._buffers]:
            self._buffers = [aligned(*spec) for spec in specs]
        return [_joined(column, buffer) for column, buffer in zip(columns, self._buffers, strict=True)]

    def validate(self) -> None:
        """Asserts the invariants."""
        assert all(c.counted is None and not c.fenced for c in self.entries)
        assert max(Counter(c.worker for c in self.entries).values(), default=0) <= self._each
        assert min(vars(self.counts).values()) >= 0 and self.counts.accepted >= self.counts.applied


def _joined(arrays: Sequence[Array], out: Array) -> Array:
    """The mean of several workers' gradients; of integers, which are no gradients, all bits that any of them has."""
    if out.dtype.kind not in "iub":
        return reduce_in_order(list(arrays), MEAN, out=out)
    np.copyto(out, arrays[0])
    for array in arrays[1:]:
        np.bitwise_or(out, array, out=out)
    return out
