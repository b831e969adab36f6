"""Iterators of datasets: each session's place in one, and the tensors that are the next element."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator as Elements
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import runtime as rt
from harness.tf1.inputs.elements import (
    Component,
    Element,
    Nest,
    Opening,
    Place,
    Source,
    Structured,
    as_arrays,
    declared,
)
from harness.tf1.ops.python_ops import strings
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime import concurrency
from runtime.lowlevel import Array, python_call

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

_numbers = itertools.count()
_by_handle: weakref.WeakValueDictionary[bytes, Iterator] = weakref.WeakValueDictionary()


class _Session(Protocol):
    target: str

    def run(self, fetches: Sequence[rt.Tensor], feed_dict: Any = None) -> list[Array]: ...


class _Stream:
    """The place of a session in a dataset."""

    def __init__(self) -> None:
        self.lock = concurrency.Lock()
        self.place = Place()
        self.elements: Elements[Element] | None = None


class Iterator(Structured):
    """An iterator over the elements of a dataset: ``get_next`` takes the next element in each step.

    Sessions of one server share its place; each session without a server has its own.

    Args:
        structure: of the nest of an element.
        components: its leaves.
        dataset: the dataset of a one-shot iterator.
    """

    def __init__(
        self, structure: PyTreeDef, components: Sequence[Component], dataset: Source | None = None
    ) -> None:
        super().__init__(structure, components)
        self._one_shot = dataset
        self._initializer: rt.Operation | None = None
        self._streams: weakref.WeakKeyDictionary[object, _Stream] = weakref.WeakKeyDictionary()
        self._shared: dict[str, _Stream] = {}
        self._lock = concurrency.Lock()
        self._handle = f"iterator-{next(_numbers)}".encode()
        _by_handle[self._handle] = self

    @staticmethod
    def from_structure(
        output_types: Nest,
        output_shapes: Nest = None,
        shared_name: str | None = None,
        output_classes: object = None,
    ) -> Iterator:
        """Makes an iterator for all datasets of this structure; ``make_initializer`` chooses one."""
        return Iterator(*declared(output_types, output_shapes))

    @staticmethod
    def from_string_handle(
        string_handle: rt.TensorLike,
        output_types: Nest,
        output_shapes: Nest = None,
        output_classes: object = None,
    ) -> Iterator:
        """Makes an iterator that stands in each step for the iterator whose ``string_handle`` is fed."""
        return _Fed(*declared(output_types, output_shapes), convert_to_tensor(string_handle))

    @property
    def initializer(self) -> rt.Operation:
        """The operation that begins again.

        Raises:
            ValueError: a one-shot iterator has no initializer, a reinitializable one has
                ``make_initializer``.
        """
        if self._initializer is None:
            raise ValueError("Iterator does not have an initializer.")
        return self._initializer

    def make_initializer(self, dataset: Source, name: str | None = None) -> rt.Operation:
        """Returns an operation with which the iterator begins with the elements of ``dataset``.

        Raises:
            TypeError: the structure, the dtypes or the shapes differ.
        """
        for mine, other in zip(self.components, dataset.components, strict=False):
            if mine.dtype != other.dtype:
                raise TypeError(
                    f"Expected output types {self.output_types!r} but got dataset with "
                    f"{dataset.output_types!r}."
                )
            if not mine.shape.is_compatible_with(other.shape):
                raise TypeError(
                    f"Expected output shapes {mine.shape} but got dataset with {other.shape}."
                )
        if dataset.structure != self.structure:
            raise TypeError(
                f"Expected elements like {self.output_types!r}, but the dataset's are "
                f"{dataset.output_types!r}"
            )

        def begin(session: _Session, arrays: Sequence[Array]) -> Sequence[object]:
            stream = self._stream(session)
            known = dict(zip(dataset.tensors, arrays, strict=True))
            with stream.lock:
                stream.place = Place(session)
                stream.elements = dataset.open(Opening(stream.place, known))
            return []

        return python_call(
            begin, dataset.tensors, [], name=name or "make_initializer", type="MakeIterator"
        )

    def get_next(self, name: str | None = None) -> Nest:
        """Returns the next element; every step that needs the element takes another one.

        Raises:
            OutOfRangeError: in the step, there are no more.
            FailedPreconditionError: in the step, the initializer has not run.
        """
        outputs = [(c.sizes, c.dtype) for c in self.components]
        op = python_call(
            self._take,
            self._chosen(),
            outputs,
            name=name or "IteratorGetNext",
            type="IteratorGetNext",
        )
        return self.structure.unflatten(list(op.outputs))

    def string_handle(self, name: str | None = None) -> rt.Tensor:
        """Returns a string that stands for the iterator where ``from_string_handle`` is fed."""
        return python_call(
            lambda *_: [strings([self._handle]).reshape(())],
            [],
            [((), np.dtype(object))],
            name=name or "string_handle",
        ).outputs[0]

    def _chosen(self) -> Sequence[rt.Tensor]:
        return ()

    def _stream(self, session: _Session) -> _Stream:
        with self._lock:
            # Sessions of one server share variables in TensorFlow, and iterators are resources like
            # these.
            if session.target:
                return self._shared.setdefault(session.target, _Stream())
            return self._streams.setdefault(session, _Stream())

    def _take(self, session: _Session, _: Sequence[Array]) -> Element:
        stream = self._stream(session)
        with stream.lock:
            # Elements that need parts of the graph are computed by the session that asks for them
            # now.
            stream.place.session = session
            if stream.elements is None:
                if self._one_shot is None:
                    raise rt.FailedPreconditionError(
                        "GetNext() failed because the iterator has not been initialized. Ensure "
                        "that you have run the "
                        "initializer operation for this iterator before getting the next element."
                    )
                # The tensors of the dataset are read once, when the first element is asked for.
                tensors = self._one_shot.tensors
                known = as_arrays(tensors, session.run(list(tensors))) if tensors else []
                opening = Opening(stream.place, dict(zip(tensors, known, strict=True)))
                stream.elements = self._one_shot.open(opening)
            found = next(stream.elements, None)
        if found is None:
            raise rt.OutOfRangeError("End of sequence")
        return found


class _Fed(Iterator):
    """Whichever iterator is fed."""

    def __init__(
        self, structure: PyTreeDef, components: Sequence[Component], handle: rt.Tensor
    ) -> None:
        super().__init__(structure, components)
        self._of = handle

    def _chosen(self) -> Sequence[rt.Tensor]:
        return (self._of,)

    def _take(self, session: _Session, arrays: Sequence[Array]) -> Element:
        chosen = _by_handle.get(arrays[0].item())
        if chosen is None:
            raise rt.InvalidArgumentError(
                f"{arrays[0].item()!r} is no string handle of an iterator of this process"
            )
        return chosen._take(session, ())


def one_shot(dataset: Source) -> Iterator:
    """Makes an iterator; see ``Dataset.make_one_shot_iterator``."""
    fed = [t.name for t in dataset.tensors if t.op.type.startswith("Placeholder")]
    if fed:
        raise ValueError(
            f"Cannot capture a placeholder (name:{fed[0]}, type:Placeholder) by value: use "
            "make_initializable_iterator"
        )
    return Iterator(dataset.structure, dataset.components, dataset)


def initializable(dataset: Source, shared_name: str | None = None) -> Iterator:
    """Makes an iterator; see ``Dataset.make_initializable_iterator``."""
    made = Iterator(dataset.structure, dataset.components)
    made._initializer = made.make_initializer(dataset, "MakeIterator")
    return made
