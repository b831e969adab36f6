"""The gradients of a synchronous step, from arrival to mean.

A quorum owns the collection and guards the collection by its lock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime import concurrency
from runtime.kernels.accumulator import MEAN, reduce_in_order
from runtime.tensor_spec import Array, aligned


@dataclass
class GradientCounts:
    """The fate of pushed gradients.

    Attributes:
        applied: aggregates applied.
        accepted: gradients in the aggregates.
        dropped: stale gradients, of another step or too late.
        repeated: gradients of a worker beyond the worker's share of the step.
    """

    applied: int = 0
    accepted: int = 0
    dropped: int = 0
    repeated: int = 0


@dataclass(eq=False)
class Contribution:
    """The gradients of one worker for one step.

    Attributes:
        worker: number of the worker.
        arrays: views of the caller's memory, valid as long as the caller waits; or copies once
            ``kept``.
        promised: True once the chief knows of the gradients, so that the gradients stay for a
            decision.
        kept: True if the arrays are copies.
        counted: True if the gradients were applied, False if they were dropped, None until then.
        fenced: True if a restore, or the loss of the variables' values, has dropped the gradients.
    """

    worker: int
    arrays: Sequence[Array]
    promised: bool = False
    kept: bool = False
    counted: bool | None = None
    fenced: bool = False

    def keep(self) -> None:
        """Copies the arrays, as the caller's memory is used again after the call."""
        if not self.kept:
            self.arrays = [np.array(a) for a in self.arrays]
            self.kept = True


class StepGradients:
    """The contributions to the present step, in the order of arrival.

    Args:
        each: most gradients of one worker.
        of_rows: True for gradients of a table: the first array of a contribution has rows, and the
            second has their ids, which ascend.

    Attributes:
        counts: the fate of all gradients so far.
        entries: the undecided contributions.
        since: ``time.monotonic()`` at which the first entry came.

    Examples:
        >>> gradients = StepGradients(each=1)
        >>> chosen = [gradients.add(worker, [np.full(2, float(worker))]) for worker in (1, 3)]
        >>> gradients.mean_of(chosen)
        [array([2., 2.])]
    """

    def __init__(self, each: int, of_rows: bool = False) -> None:
        self.counts = GradientCounts()
        self.entries: list[Contribution] = []
        self.since = 0.0
        self._each = each
        self._of_rows = of_rows
        self._buffers: list[Array] = []

    @property
    def workers(self) -> set[int]:
        """Workers with gradients for this step."""
        return {c.worker for c in self.entries}

    def owes(self, worker: int) -> bool:
        """Returns True if a worker may give this step more gradients."""
        return sum(c.worker == worker for c in self.entries) < self._each

    def add(self, worker: int, arrays: Sequence[Array]) -> Contribution:
        """Adds a contribution.

        A worker gives more than the share of a step after a restart, or after its connection was
        cut. New gradients replace old gradients, but no gradients that a chief was promised.
        """
        contribution = Contribution(worker, arrays)
        if self.owes(worker):
            if not self.entries:
                self.since = concurrency.monotonic()
            self.entries.append(contribution)
            return contribution
        # The worker has no share left.
        self.counts.repeated += 1
        of_worker = [c for c in self.entries if c.worker == worker]
        old = next((c for c in of_worker if not c.promised), None)
        if old is None:
            return of_worker[-1]
        # The push of the old gradients is answered: its caller has given up, or will be told that
        # they were dropped.
        old.counted = False
        self.entries[self.entries.index(old)] = contribution
        return contribution

    def withdraw(self, contribution: Contribution) -> None:
        """Removes a contribution whose caller has stopped waiting, unless a chief was promised the contribution."""
        # Gradients that were decided meanwhile are in no list any more.
        if contribution in self.entries:
            # The caller uses the memory again after the call, and the chief may still choose the
            # gradients.
            if contribution.promised:
                contribution.keep()
            else:
                self.entries.remove(contribution)

    def choose(self, workers: Sequence[int]) -> list[Contribution] | int:
        """Returns the contributions of ``workers``, one for each entry, or the number of a worker with too few."""
        chosen: list[Contribution] = []
        # A worker may have given more gradients since the report. The first ones are those of the
        # report.
        for worker, count in Counter(workers).items():
            of_worker = [c for c in self.entries if c.worker == worker][:count]
            if len(of_worker) < count:
                return worker
            chosen += of_worker
        return chosen

    def settle(self, chosen: Sequence[Contribution]) -> None:
        """Ends the step: the chosen contributions were applied, and the rest came too late."""
        for contribution in self.entries:
            contribution.counted = contribution in chosen
        self.counts.applied += 1
        self.counts.accepted += len(chosen)
        self.counts.dropped += len(self.entries) - len(chosen)
        self.entries.clear()

    def drop(self, fenced: bool = False) -> None:
        """Drops and counts all contributions; ``fenced`` if the variables were restored or have lost their values."""
        for contribution in self.entries:
            contribution.counted, contribution.fenced = False, fenced
        self.counts.dropped += len(self.entries)
        self.entries.clear()

    def mean_of(self, chosen: Sequence[Contribution]) -> list[Array]:
        """Returns the means, added in the order of the workers: always to the same bits.

        A worker without a row of an id counts as a row of zeros. The memory is used again.
        """
        # Sums of floats depend on the order, and workers arrive in any order.
        ordered = sorted(chosen, key=lambda c: c.worker)
        # Each gradient is a row of arrays, and a mean is made for each column.
        columns = list(zip(*(c.arrays for c in ordered), strict=True))
        if self._of_rows:
            rows, ids, *others = columns
            means = (_join_gradients(o, np.empty_like(o[0])) for o in others)
            return [*_mean_of_rows(rows, ids), *means]
        specs = [(column[0].shape, column[0].dtype) for column in columns]
        # Shapes change only with another graph, so the buffers serve all steps.
        if specs != [(buffer.shape, buffer.dtype) for buffer in self._buffers]:
            self._buffers = [aligned(*spec) for spec in specs]
        return [
            _join_gradients(column, buffer)
            for column, buffer in zip(columns, self._buffers, strict=True)
        ]

    def validate(self) -> None:
        """Asserts the invariants."""
        assert all(c.counted is None and not c.fenced for c in self.entries)
        assert max(Counter(c.worker for c in self.entries).values(), default=0) <= self._each
        assert min(vars(self.counts).values()) >= 0 and self.counts.accepted >= self.counts.applied


def _mean_of_rows(rows: Sequence[Array], ids: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the means of the rows of each id, and the ids."""
    unique = np.unique(np.concatenate(ids))
    total = np.zeros((len(unique), *rows[0].shape[1:]), rows[0].dtype)
    for of_worker, own in zip(rows, ids, strict=True):
        # The ids of one worker differ, so each row is added once.
        total[np.searchsorted(unique, own)] += of_worker
    # A worker without a row has a gradient of zero there.
    total /= len(rows)
    return total, unique


def squared_norm(arrays: Sequence[Array]) -> float:
    """Returns the squared Euclidean norm of all arrays together."""
    # The product of narrow floats would overflow in their own type.
    flat = [a.astype(np.result_type(a, np.float32), copy=False).ravel() for a in arrays]
    return sum((float(np.vdot(a, a).real) for a in flat), start=0.0)


def clip(arrays: Sequence[Array], squared: float, most: float) -> None:
    """Scales arrays, a part of all with the squared norm ``squared``, in place: the norm of all is at most ``most``."""
    norm = np.sqrt(np.float64(squared))
    # As in optax, a norm that is no number makes no number of each element.
    if not norm < most:
        with np.errstate(invalid="ignore"):
            for array in arrays:
                np.multiply(array, float(most / norm), out=array)


def _join_gradients(arrays: Sequence[Array], out: Array) -> Array:
    """Returns the mean of gradients, or the joined bits of integers, which are marks."""
    if out.dtype.kind not in "iub":
        return reduce_in_order(list(arrays), MEAN, out=out)
    np.copyto(out, arrays[0])
    for array in arrays[1:]:
        np.bitwise_or(out, array, out=out)
    return out
