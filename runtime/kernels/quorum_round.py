"""The round of a quorum: the gradients of the present step, from where they come in to where they are applied."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.errors import AbortedError, FailedPreconditionError, InternalError
from runtime.kernels.accumulator import MEAN, reduce_in_order
from runtime.kernels.quorum_values import UNKNOWN, Array, GradientCounts, Rules, Selection, Target

_LINE = 64


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
        """Makes it outlive its caller."""
        if not self.kept:
            self.arrays = [np.array(a) for a in self.arrays]
            self.kept = True


class Round:
    """The pieces of the present step. Not thread safe: the caller holds a lock.

    Args:
        name: for messages.
        rules: how many are needed.
        changed: called when the fate of pieces is known.
    """

    def __init__(self, name: str, rules: Rules, changed: Callable[[], None]) -> None:
        self.counts = GradientCounts()
        self.step: int | None = None
        self.contributions: list[Contribution] = []
        self.target: Target | None = None
        self.last: Selection | None = None
        self.generation = 0
        self.since = 0.0
        self._name = name
        self._rules = rules
        self._id = zlib.crc32(rules.group.encode())
        self._changed = changed
        self._buffers: list[Array] = []

    @property
    def now(self) -> int:
        """The step, or UNKNOWN."""
        return UNKNOWN if self.step is None else self.step

    @property
    def workers(self) -> tuple[int, ...]:
        """Whose gradients are here, one entry for each, in the order in which they came."""
        return tuple(p.worker for p in self.contributions)

    def waited_secs(self) -> float:
        """For how long the first of the pieces has been here."""
        return time.monotonic() - self.since if self.contributions else 0.0

    # -- coming and going --------------------------------------------------------------------------------------

    def add(self, worker: int, arrays: Sequence[Array]) -> Contribution:
        """Adds a piece. A worker that has given all it may was started again, or its connection was cut.

        Its new gradients take the place of the old ones, or, if a chief was promised these, the other way round.
        """
        contribution = Contribution(worker, arrays)
        of_worker = [p for p in self.contributions if p.worker == worker]
        if len(of_worker) >= self._rules.each:
            self.counts.repeated += 1
            old = next((p for p in of_worker if not p.promised), None)
            if old is None:
                return of_worker[-1]
            old.counted = False
            self.contributions = [contribution if p is old else p for p in self.contributions]
            self._changed()
        else:
            if not self.contributions:
                self.since = time.monotonic()
            self.contributions.append(contribution)
        return contribution

    def withdraw(self, contribution: Contribution) -> None:
        """Its caller waits no more: takes it out, or keeps it where a chief was promised it."""
        if not any(p is contribution for p in self.contributions):
            return
        if contribution.promised:
            contribution.keep()
        else:
            self.contributions = [p for p in self.contributions if p is not contribution]

    def renew(self, generation: int) -> None:
        """Takes note of the variables' generation; in a new one, nothing that is here has a meaning."""
        if generation != self.generation:
            self.generation = generation
            self.drop(fenced=True)
            self.step = self.last = None

    def refresh(self, step: int) -> int:
        """Takes note of the variables' step; no piece of another one fits them."""
        if step != self.step:
            self.drop()
            self.step = step
        return step

    def forget(self) -> None:
        """Drops everything, the step too."""
        self.drop()
        self.step = self.last = None

    def drop(self, fenced: bool = False) -> None:
        """Drops the pieces, and counts them."""
        for contribution in self.contributions:
            contribution.counted, contribution.fenced = False, fenced
        self.counts.dropped += len(self.contributions)
        self.contributions.clear()
        self._changed()

    # -- the decision ------------------------------------------------------------------------------------------

    def chosen(self, decision: Selection) -> list[Contribution]:
        """The pieces that a decision names.

        Raises:
            FailedPreconditionError: this is another step.
            InternalError: one is not here.
        """
        if self.step != decision.step:
            raise FailedPreconditionError(f"{self._name} is at step {self.step}, not at {decision.step}")
        chosen: list[Contribution] = []
        for worker, count in Counter(decision.workers).items():
            of_worker = [p for p in self.contributions if p.worker == worker][:count]
            if len(of_worker) < count:
                raise InternalError(f"{self._name}: the gradients of worker {worker} for step {self.step} are gone")
            chosen += of_worker
        return chosen

    def decide(self, chosen: Sequence[Contribution]) -> None:
        """Applies the mean of the chosen pieces, in the order of the workers: the same gradients give the same bits."""
        assert self.target is not None and self.step is not None
        several = None if self._rules.alone else dict.fromkeys(self._rules.tasks, 1)
        try:
            self.target.apply(self._means(sorted(chosen, key=lambda p: p.worker)), (self._id, self.step), several)
        except AbortedError:  # the variables are not what the pieces are for any more: whoever waits must know
            self.drop(fenced=True)
            raise
        taken = {id(p) for p in chosen}
        for contribution in self.contributions:
            contribution.counted = id(contribution) in taken
        self.counts.applied += 1
        self.counts.accepted += len(chosen)
        self.counts.dropped += len(self.contributions) - len(chosen)
        self.contributions.clear()
        self.last = Selection(self.step, tuple(p.worker for p in chosen))
        self.step += 1
        self._changed()

    def _means(self, ordered: Sequence[Contribution]) -> list[Array]:
        columns = list(zip(*(p.arrays for p in ordered), strict=True))
        if len(self._buffers) != len(columns):
            self._buffers = [_aligned(c[0]) for c in columns]
        for i, column in enumerate(columns):
            if self._buffers[i].shape != column[0].shape or self._buffers[i].dtype != column[0].dtype:
                self._buffers[i] = _aligned(column[0])
        return [reduce_in_order(list(c), MEAN, out=b) for c, b in zip(columns, self._buffers, strict=True)]


def _aligned(like: Array) -> Array:
    """Memory of an array's shape and dtype at which XLA reads in place."""
    raw = np.empty(like.nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
