"""The conditional accumulator: gradients of a step from distinct workers, taken as a mean or a sum."""

from collections.abc import Hashable

import numpy as np

from runtime import concurrency
from runtime.errors import CancelledError, InvalidArgumentError
from runtime.state.cancellation import Cancellation
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import NOBODY, Ledger
from runtime.state.store import Resource
from runtime.tensor_spec import Array, DType, shape_fits

MEAN, SUM = "mean", "sum"


class AccumulatorResource(Resource):
    """The gradients of the present step. Thread safe.

    A gradient is accepted if its step is the accumulator's step or later, and if no gradient of the
    worker waits. So an aggregate of N counts N distinct workers.

    Args:
        dtype: dtype of the gradients.
        shape: shape of the gradients. None, whole or for a dimension, accepts any that is equal for
            all.
        reduction: "mean" or "sum".
        ledger: count of the bytes of waiting gradients.

    Examples:
        >>> accumulator = AccumulatorResource(np.dtype("float32"), (2,), MEAN)
        >>> accumulator.apply_grad(np.array([1, 2], "float32"), local_step=0, worker=0)
        True
        >>> accumulator.apply_grad(np.array([3, 4], "float32"), local_step=0, worker=1)
        True
        >>> accumulator.take_grad(2, Cancellation())
        array([2., 3.], dtype=float32)
    """

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int | None, ...] | None,
        reduction: str = MEAN,
        ledger: Ledger | None = None,
    ) -> None:
        if reduction not in (MEAN, SUM):
            raise InvalidArgumentError(f"reduction {reduction!r} is neither 'mean' nor 'sum'")
        self._dtype = dtype
        self._shape = shape
        self._reduction = reduction
        self._changed = concurrency.Condition()
        self._step = 0
        self._ledger = ledger or Ledger()
        # The gradient of each worker, and the session that it is counted for.
        self._waiting: dict[Hashable, tuple[Array, int]] = {}
        self._dropped = 0
        self._closed = False

    @property
    def num_accumulated(self) -> int:
        """Gradients in the accumulator."""
        with self._changed:
            return len(self._waiting)

    @property
    def dropped_gradients(self) -> int:
        """Dropped gradients: of an older step, or the second gradient of a worker in an aggregate."""
        return self._dropped

    def set_global_step(self, step: int) -> None:
        """Makes ``step`` the present step: later gradients of older steps are dropped."""
        with self._changed:
            self._step = step

    @uninterrupted
    def apply_grad(
        self, gradient: Array, local_step: int, worker: Hashable, client: int = NOBODY
    ) -> bool:
        """Offers a gradient, which is copied.

        Args:
            gradient: an array of the accumulator's dtype and shape.
            local_step: step of the gradient.
            worker: worker of the gradient.
            client: session that owns the bytes.

        Returns:
            True if the gradient was accepted.

        Raises:
            InvalidArgumentError: The gradient has another dtype or shape.
            CancelledError: The accumulator was closed.
            ResourceExhaustedError: Too many bytes are kept for the session, or for all.
        """
        self._check_gradient(gradient)
        with self._changed:
            self._check_open()
            if local_step < self._step or worker in self._waiting:
                self._dropped += 1
                return False
            # A dimension of the shape may be open, but the gradients of one aggregate are added to
            # each other.
            first, _ = next(iter(self._waiting.values()), (gradient, client))
            if first.shape != gradient.shape:
                raise InvalidArgumentError(
                    f"a gradient of shape {gradient.shape} came after one of {first.shape}"
                )
            # The reservation may raise, so nothing has changed before.
            self._ledger.reserve(client, gradient.nbytes)
            # The next call of the client overwrites the memory of the gradient.
            self._waiting[worker] = np.array(gradient), client
            self._changed.notify_all()
            return True

    def take_grad(self, count: int, cancelled: Cancellation) -> Array:
        """Waits for gradients of ``count`` workers, takes all gradients, and advances the step by one.

        Returns:
            The mean (or sum), added in the order of the workers, so that the same gradients give
            the same bits.

        Raises:
            InvalidArgumentError: ``count`` is below 1.
            CancelledError: the call or the accumulator was ended.
        """
        if count < 1:
            raise InvalidArgumentError(f"take_grad takes at least 1 gradient, not {count}")
        with self._changed:
            cancelled.wait_for(
                self._changed,
                lambda: self._closed or len(self._waiting) >= count,
                f"waiting for {count} gradients",
                acts=True,
            )
            self._check_open()
            # The arrays belong to this call from here on, so the sum needs no lock.
            taken = self._take_all()
            self._step += 1
        return reduce_in_order(
            [taken[worker] for worker in sorted(taken, key=str)], self._reduction
        )

    @uninterrupted
    def _take_all(self) -> dict[Hashable, Array]:
        """Takes all gradients and releases their bytes."""
        taken, self._waiting = self._waiting, {}
        for gradient, client in taken.values():
            self._ledger.release(client, gradient.nbytes)
        return {worker: gradient for worker, (gradient, _) in taken.items()}

    def clear(self) -> None:
        """Ends all waits with CancelledError."""
        with self._changed:
            self._closed = True
            self._take_all()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError("the accumulator was cleared away")

    def _check_gradient(self, gradient: Array) -> None:
        if gradient.dtype != self._dtype:
            raise InvalidArgumentError(
                f"the accumulator takes {self._dtype.name}, not {gradient.dtype.name}"
            )
        if self._shape is not None and not shape_fits(gradient.shape, self._shape):
            raise InvalidArgumentError(
                f"the accumulator takes shape {self._shape}, not {gradient.shape}"
            )


def reduce_in_order(arrays: list[Array], reduction: str, out: Array | None = None) -> Array:
    """Returns the mean or sum of arrays of one shape, added from first to last.

    Floats of 16 bits are added in 32. The mean of integers is the first array, as all workers give
    the same step.

    Args:
        arrays: at least one array.
        reduction: "mean" or "sum".
        out: memory for the result.

    >>> reduce_in_order([np.array([1.0, 2.0]), np.array([3.0, 4.0])], MEAN)
    array([2., 3.])
    """
    # Integers are steps, equal for all workers: a mean in floats could round them.
    first = arrays[0]
    if reduction == MEAN and first.dtype.kind in "iub":
        return first
    # A sum in 16 bits would lose most of its digits after a few workers.
    wide = (
        np.dtype(np.float32)
        if first.dtype.itemsize == 2 and first.dtype.kind not in "iub"
        else first.dtype
    )
    total = np.empty(first.shape, wide) if out is None or wide != first.dtype else out
    # The first two arrays are added into the result, which saves a pass over the memory.
    if len(arrays) == 1:
        np.copyto(total, first)
    else:
        np.add(arrays[0], arrays[1], out=total, dtype=wide)
    for array in arrays[2:]:
        np.add(total, array, out=total)
    if reduction == MEAN and len(arrays) > 1:
        np.divide(total, len(arrays), out=total)
    if wide == first.dtype:
        return total
    # The sum was made in 32 bits, so only now the result can go to the memory of the caller.
    narrow = np.empty(first.shape, first.dtype) if out is None else out
    np.copyto(narrow, total, casting="unsafe")
    return narrow
