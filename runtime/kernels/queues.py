"""Queues of tuples of arrays: first in first out, padding, and shuffling.

Pure data structures with a condition.
"""

from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import NamedTuple

import numpy as np

from runtime import concurrency
from runtime.errors import CancelledError, InvalidArgumentError, OutOfRangeError
from runtime.observe.trace import nbytes
from runtime.state.cancellation import Cancellation
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import NOBODY, Ledger
from runtime.state.store import Resource
from runtime.tensor_spec import Array, DType, shape_fits

Element = tuple[Array, ...]


class QueuedElement(NamedTuple):
    """An element in a queue.

    Attributes:
        element: The element.
        owner: The session that has added the element.
        nbytes: Bytes of the element, counted for the owner.
    """

    element: Element
    owner: int
    nbytes: int


_ELEMENT_BYTES = 256
"""Bytes of an element beside those of its arrays."""
Shapes = tuple[tuple[int | None, ...] | None, ...]


class QueueResource(Resource):
    """A bounded queue. Thread safe; elements are tuples of arrays, one for each component.

    Waiting dequeues are served in the order of arrival, so small dequeues do not starve a large
    one.

    Args:
        kind: "fifo"; "padding", which fills smaller elements of a batch with zeros to the largest
            size, where a size is None; or "shuffle", from which a random element goes next.
        name: name for errors.
        capacity: most elements in the queue; an enqueue waits while the queue is full. 0 or less
            for no limit.
        dtypes: dtype of each component.
        shapes: shape of each component, None for any shape.
        ledger: count of the bytes of elements.
        min_after_dequeue: elements that stay behind in an open shuffling queue.
        seed: seed of the choices of a shuffling queue; None draws a seed.

    Examples:
        >>> queue = QueueResource("fifo", "numbers", 8, [np.dtype("int32")], ((),))
        >>> queue.enqueue_many([(np.array(n, "int32"),) for n in (3, 1, 4)], Cancellation())
        >>> queue.dequeue_many(2, Cancellation())
        (array([3, 1], dtype=int32),)
    """

    def __init__(
        self,
        kind: str,
        name: str,
        capacity: int,
        dtypes: Sequence[DType],
        shapes: Shapes,
        *,
        ledger: Ledger | None = None,
        min_after_dequeue: int = 0,
        seed: int | None = None,
    ) -> None:
        # TensorFlow gives an unbounded queue the capacity -1.
        self._capacity = capacity if capacity > 0 else 2**62
        if not 0 <= min_after_dequeue < self._capacity:
            raise InvalidArgumentError(
                f"queue {name!r}: min_after_dequeue {min_after_dequeue} is not from 0 to below "
                f"capacity {capacity}"
            )
        self._name = name
        self._dtypes = tuple(dtypes)
        self._shapes = shapes
        self._elements: deque[QueuedElement] = deque()
        self._random = concurrency.Random(seed) if kind == "shuffle" else None
        self._stay = min_after_dequeue
        self._pad = kind == "padding"
        self._ledger = ledger or Ledger()
        self._changed = concurrency.Condition()
        self._closed = False
        self._cancel_enqueues = False
        self._cleared = False
        # The calls that wait, in the order of arrival. Only the first call of each side may act.
        self._takers: deque[object] = deque()
        self._givers: deque[object] = deque()

    def size(self) -> int:
        """Returns the number of elements in the queue."""
        with self._changed:
            return len(self._elements)

    def is_closed(self) -> bool:
        """Returns True if the queue was closed."""
        with self._changed:
            return self._closed

    def waiting(self) -> tuple[int, int]:
        """Returns the numbers of calls that wait to take elements, and to add elements."""
        with self._changed:
            return len(self._takers), len(self._givers)

    def enqueue_many(
        self,
        elements: Sequence[Element],
        cancelled: Cancellation,
        added: Callable[[], None] = lambda: None,
        client: int = NOBODY,
    ) -> None:
        """Adds elements in order, waiting while the queue is full.

        Args:
            elements: the elements, tuples of arrays.
            cancelled: ends the wait.
            added: called after each element.
            client: the session that adds the elements.

        Raises:
            ResourceExhaustedError: too many bytes are kept for the session, or for all.
            InvalidArgumentError: an element has another dtype or shape than the queue; nothing was
                added.
            CancelledError: the queue was closed (before, or with pending enqueues), or the call was
                ended; elements that were added before stay.
        """
        for element in elements:
            self._check_element(element)
        turn = object()
        with self._changed:
            if self._closed:
                raise CancelledError(f"queue {self._name!r} is closed: nothing can be added")
            try:
                # The turn is taken within the block, as the handler of a signal may raise right
                # after it.
                self._givers.append(turn)
                for element in elements:
                    cancelled.wait_for(
                        self._changed,
                        lambda: (
                            self._is_stopped()
                            or self._givers[0] is turn
                            and len(self._elements) < self._capacity
                        ),
                        f"adding to the full queue {self._name!r}",
                        acts=True,
                    )
                    if self._is_stopped():
                        raise CancelledError(
                            f"queue {self._name!r} was closed while an element waited to be added"
                        )
                    self._keep_element(element, client, added)
                    self._changed.notify_all()
            finally:
                self._givers.remove(turn)
                self._changed.notify_all()

    @uninterrupted
    def _keep_element(self, element: Element, client: int, added: Callable[[], None]) -> None:
        # A signal between two of these lines would leave bytes without an element, or an element
        # that is added twice.
        count = nbytes(element) + _ELEMENT_BYTES
        self._ledger.reserve(client, count)
        self._elements.append(QueuedElement(element, client, count))
        added()

    def dequeue(self, cancelled: Cancellation) -> Element:
        """Waits for an element and removes the element.

        Raises:
            OutOfRangeError: the queue is closed and empty.
            CancelledError: the call was ended.
        """
        return self._take_elements(1, False, cancelled)[0]

    def dequeue_many(self, count: int, cancelled: Cancellation, *, up_to: bool = False) -> Element:
        """Removes ``count`` elements, waiting until there are so many, and stacks each component.

        Args:
            count: how many.
            cancelled: ends the wait.
            up_to: True takes the rest of a closed queue, at least one element.

        Raises:
            InvalidArgumentError: components of this queue have no known shape, or differ without
                padding.
            OutOfRangeError: the queue is closed and has fewer elements than that.
            CancelledError: the call was ended.
        """
        if count < 0:
            raise InvalidArgumentError(f"queue {self._name!r}: cannot dequeue {count} elements")
        if (
            any(shape is None for shape in self._shapes)
            or not self._pad
            and any(None in (s or ()) for s in self._shapes)
        ):
            raise InvalidArgumentError(
                f"queue {self._name!r}: dequeue_many needs a fixed shape for every component; it "
                f"has {self._shapes}"
            )
        taken = self._take_elements(count, up_to, cancelled) if count else []
        return tuple(
            _stack_arrays([element[i] for element in taken], shape or (), dtype)
            for i, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True))
        )

    def close(self, cancel_pending_enqueues: bool = False) -> None:
        """Closes the queue to further elements.

        Elements in the queue and elements of waiting enqueues can still be dequeued.

        Args:
            cancel_pending_enqueues: True to end enqueues that wait.
        """
        with self._changed:
            self._closed = True
            self._cancel_enqueues = self._cancel_enqueues or cancel_pending_enqueues
            self._changed.notify_all()

    @uninterrupted
    def clear(self) -> None:
        """Ends all waits: the container of the queue was cleared."""
        with self._changed:
            self._closed = self._cancel_enqueues = self._cleared = True
            self._give_out(self._elements)
            self._changed.notify_all()

    def _is_stopped(self) -> bool:
        return self._closed and self._cancel_enqueues

    def _take_elements(self, count: int, up_to: bool, cancelled: Cancellation) -> list[Element]:
        """Collects ``count`` elements as elements arrive, so that a batch may be larger than the queue."""
        turn = object()
        taken: list[QueuedElement] = []
        with self._changed:
            try:
                self._takers.append(turn)
                while len(taken) < count:
                    cancelled.wait_for(
                        self._changed,
                        lambda: (
                            self._cleared
                            or self._takers[0] is turn
                            and (self._count_available() > 0 or self._is_exhausted())
                        ),
                        f"taking from the queue {self._name!r}",
                        acts=True,
                    )
                    if self._cleared:
                        raise CancelledError(f"queue {self._name!r} was cleared away")
                    # The queue is closed: the elements that were taken go back before the error.
                    if not self._count_available():
                        if up_to and taken:
                            break
                        raise OutOfRangeError(
                            f"queue {self._name!r} is closed and has too few elements "
                            f"(requested {count}, current size {len(taken)})"
                        )
                    self._take_one(taken)
                    self._changed.notify_all()
                return self._give_out(taken)
            except BaseException:
                if self._cleared:
                    self._give_out(taken)
                self._elements.extendleft(reversed(taken))
                raise
            finally:
                self._takers.remove(turn)
                self._changed.notify_all()

    @uninterrupted
    def _take_one(self, taken: list[QueuedElement]) -> None:
        elements = self._elements
        if self._random is not None:
            i = self._random.randrange(len(elements))
            # The order of the rest has no meaning in a shuffling queue, so a swap is enough.
            elements[i], elements[0] = elements[0], elements[i]
        taken.append(elements.popleft())

    @uninterrupted
    def _give_out(self, taken: MutableSequence[QueuedElement]) -> list[Element]:
        """Empties a sequence of elements and releases their bytes."""
        for kept in taken:
            self._ledger.release(kept.owner, kept.nbytes)
        elements = [kept.element for kept in taken]
        taken.clear()
        return elements

    def _count_available(self) -> int:
        # After the close no element comes that could be mixed with the rest.
        left = len(self._elements)
        return left if self._closed else max(0, left - self._stay)

    def _is_exhausted(self) -> bool:
        """Returns True if no element will come: the queue is closed and empty, and no enqueue waits."""
        return (
            self._closed and (self._cancel_enqueues or not self._givers) and not len(self._elements)
        )

    def _check_element(self, element: Element) -> None:
        if len(element) != len(self._dtypes):
            raise InvalidArgumentError(
                f"queue {self._name!r} takes {len(self._dtypes)} components, not {len(element)}"
            )
        for i, (array, dtype, shape) in enumerate(
            zip(element, self._dtypes, self._shapes, strict=True)
        ):
            if array.dtype != dtype:
                raise InvalidArgumentError(
                    f"queue {self._name!r}: component {i} is {array.dtype.name}, the queue takes "
                    f"{dtype.name}"
                )
            if shape is not None and not shape_fits(array.shape, shape):
                raise InvalidArgumentError(
                    f"queue {self._name!r}: component {i} has shape {array.shape}, the queue takes "
                    f"{shape}"
                )


def _stack_arrays(arrays: list[Array], shape: tuple[int | None, ...], dtype: DType) -> Array:
    if not arrays:
        # A batch without elements has the shape of the component, with 0 for an open dimension.
        return np.empty((0, *(d or 0 for d in shape)), dtype)
    if all(a.shape == arrays[0].shape for a in arrays):
        return np.stack(arrays)
    # Only a padding queue gets here: the shapes differ.
    size = tuple(max(a.shape[i] for a in arrays) for i in range(len(shape)))
    out = (
        np.full((len(arrays), *size), b"", object)
        if dtype.hasobject
        else np.zeros((len(arrays), *size), dtype)
    )
    for place, array in zip(out, arrays, strict=True):
        place[tuple(slice(0, n) for n in array.shape)] = array
    return out
