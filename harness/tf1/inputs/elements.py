"""The elements of datasets: their components, where they are made, and how several become one.

An element is a list of numpy arrays, one for each component; a dataset knows their nest, dtypes and
static shapes as TensorFlow reports them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import numpy as np

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import is_tensor
from harness.tf1.ops.python_ops import strings
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.sparse import SparseTensor
from runtime import concurrency
from runtime.lowlevel import Array, DType

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

Number = Any
"""A number, None for the default, or a tensor that gives it when the dataset is opened."""
Nest = Any
"""A value, or a tuple or dictionary of nests."""
Element = list[Array]


class Runs(Protocol):
    """The session that runs the parts of the graph of which a dataset is made."""

    def run(
        self, fetches: Sequence[rt.Tensor], feed_dict: Mapping[rt.Tensor, object] | None = None
    ) -> list[Array]:
        """Returns the values of tensors."""


@dataclass(frozen=True)
class Component:
    """One tensor of an element.

    Attributes:
        dtype: of its values.
        shape: static shape.
    """

    dtype: DType
    shape: TensorShape

    @property
    def sizes(self) -> tuple[int | None, ...] | None:
        """The shape as the runtime takes it."""
        return None if self.shape.dims is None else tuple(self.shape.as_list())


@dataclass
class Place:
    """The session that asked for an iterator's last element, where the next one is made."""

    session: Runs | None = None
    memory: dict[object, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Opening:
    """The state with which a dataset is opened.

    Attributes:
        place: of the iterator.
        known: the values of the tensors that the dataset was made from.
    """

    place: Place
    known: Mapping[rt.Tensor, Array]

    def value(self, argument: object) -> Any:
        """Returns the value of an argument, which may be a tensor."""
        return self.known[argument] if isinstance(argument, rt.Tensor) else argument

    def run(self, fetches: Sequence[rt.Tensor], feeds: Mapping[rt.Tensor, object]) -> list[Array]:
        """Returns the values of some tensors of the graph."""
        assert self.place.session is not None
        return as_arrays(fetches, self.place.session.run(list(fetches), feeds))


def as_arrays(tensors: Sequence[rt.Tensor], values: Sequence[object]) -> list[Array]:
    """Converts what a session returned for some tensors to arrays, single strings too."""
    return [
        strings([value]).reshape(())
        if isinstance(value, bytes)
        else np.asarray(value, tensor.dtype)
        for tensor, value in zip(tensors, values, strict=True)
    ]


Open = Callable[[Opening], Iterator[Element]]


class Structured:
    """An object with the nest of an element and the leaves: a dataset or an iterator.

    Args:
        structure: of the nest.
        components: the leaves.
    """

    def __init__(self, structure: PyTreeDef, components: Sequence[Component]) -> None:
        assert structure.num_leaves == len(components), "a component for each leaf"
        self.structure = structure
        self.components = list(components)

    @property
    def output_types(self) -> Nest:
        """The dtypes of an element."""
        return self.structure.unflatten([as_dtype(c.dtype) for c in self.components])

    @property
    def output_shapes(self) -> Nest:
        """The static shapes of an element."""
        return self.structure.unflatten([c.shape for c in self.components])

    @property
    def output_classes(self) -> Nest:
        """The classes of the tensors of an element."""
        return self.structure.unflatten([rt.Tensor] * len(self.components))


def declared(output_types: Nest, output_shapes: Nest) -> tuple[PyTreeDef, list[Component]]:
    """Returns the structure and the leaves that a program declares; shapes are unknown where None is given."""
    types, structure = flatten(output_types)
    shapes = (
        [None] * len(types) if output_shapes is None else structure.flatten_up_to(output_shapes)
    )
    return structure, [
        Component(as_dtype(t).dtype, TensorShape(s)) for t, s in zip(types, shapes, strict=True)
    ]


class Source(Protocol):
    """A dataset, as an iterator sees it."""

    structure: PyTreeDef
    components: list[Component]
    tensors: tuple[rt.Tensor, ...]
    open: Open

    @property
    def output_types(self) -> Nest:
        """The dtypes of an element."""


def is_leaf(value: object) -> bool:
    """Returns True for a value, False for a nest of values."""
    return not isinstance(value, tuple | dict | SparseTensor)


def flatten(nest: Nest) -> tuple[list[Any], PyTreeDef]:
    """Returns the leaves of a nest and its structure; a list is a value, as in ``tf.data``."""
    return jax.tree.flatten(nest, is_leaf=is_leaf)


def tensors_in(*arguments: object) -> tuple[rt.Tensor, ...]:
    """Returns the tensors among some arguments."""
    return tuple(a for a in arguments if isinstance(a, rt.Tensor))


def row(values: Array, index: int) -> Array:
    """Returns a slice; that of a vector of strings stays an array."""
    row = values[index]
    return strings([row]).reshape(()) if values.dtype.hasobject and values.ndim == 1 else row


def draw(held: list[Element], chance: np.random.Generator) -> Element:
    """Takes one of some elements by chance."""
    i = int(chance.integers(len(held)))
    # The last one takes its place: removal from the middle of a list costs its length.
    held[i], held[-1] = held[-1], held[i]
    return held.pop()


def shuffled(
    elements: Iterator[Element], most: int, chance: np.random.Generator
) -> Iterator[Element]:
    """Yields elements in random order, each drawn from ``most`` that are held."""
    if most < 1:
        raise rt.InvalidArgumentError("buffer_size must be greater than zero.")
    held: list[Element] = []
    for element in elements:
        held.append(element)
        if len(held) >= most:
            yield draw(held, chance)
    # The source is at its end: what is held comes in random order too.
    while held:
        yield draw(held, chance)


def stacked(rows: Sequence[Array], place: int) -> Array:
    """Stacks rows to an array. Raises InvalidArgumentError when the shapes differ."""
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise rt.InvalidArgumentError(
                f"Cannot batch tensors with different shapes in component {place}. First element "
                "had shape "
                f"{list(rows[0].shape)} and element {i} had shape {list(row.shape)}."
            )
    return np.stack(rows)


def wanted_shape(shape: object) -> TensorShape:
    """Returns a shape of ``padded_batch``, in which -1 is an unknown size too."""
    if is_tensor(shape):
        raise ValueError("padded_batch: padded_shapes must be known when the graph is built")
    if isinstance(shape, TensorShape):
        return shape
    return TensorShape(
        [None if size is None or size == -1 else size for size in cast("Sequence[Any]", shape)]
    )


def check_padded_shape(own: TensorShape, wanted: TensorShape) -> None:
    """Raises ValueError for a size that is known to be larger than the one it is padded to."""
    sizes = [] if own.dims is None else list(zip(own.as_list(), wanted.as_list(), strict=True))
    if any(size is not None and most is not None and size > most for size, most in sizes):
        raise ValueError(f"The padded shape {wanted} is not compatible with the input shape {own}.")


def literal(value: object) -> object:
    """Returns a value that may be given as a constant."""
    if not is_tensor(value):
        return value
    found = getattr(rt.as_tensor(value).op.body, "value", None)
    if found is None:
        raise ValueError("padded_batch: padding_values must be known when the graph is built")
    return found.item()


def padded_batch(rows: Sequence[Array], shape: TensorShape, fill: object, dtype: DType) -> Array:
    """Stacks rows of different sizes, each filled up.

    Raises InvalidArgumentError for a row that is too large.
    """
    assert rows, "a batch is never empty"
    largest = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    wanted = [
        big if size is None else size for big, size in zip(largest, shape.as_list(), strict=True)
    ]
    if any(big > size for big, size in zip(largest, wanted, strict=True)):
        raise rt.InvalidArgumentError(
            f"Attempted to pad to a smaller size than the input element: {largest} does not fit "
            f"{shape}"
        )
    filler = (b"" if dtype.hasobject else 0) if fill is None else fill
    out = np.full(
        (len(rows), *wanted), filler.encode() if isinstance(filler, str) else filler, dtype
    )
    for i, row in enumerate(rows):
        out[i : i + 1][(slice(None), *(slice(size) for size in row.shape))] = row
    return out


def general(one: TensorShape, other: TensorShape) -> TensorShape:
    """Returns the shape that is true of both shapes."""
    if one.dims is None or other.dims is None or len(one) != len(other):
        return TensorShape(None)
    return TensorShape(
        [a if a == b else None for a, b in zip(one.as_list(), other.as_list(), strict=True)]
    )


def interleaved(parts: Iterator[Iterator[Element]], width: int, block: int) -> Iterator[Element]:
    """Yields the elements of ``width`` parts in turn, ``block`` of each; the next part follows one that has ended."""
    slots: list[Iterator[Element] | None] = [None] * width
    more, at, taken = True, 0, 0
    while more or any(slot is not None for slot in slots):
        now = slots[at]
        # TensorFlow opens a part when its turn comes, not all of them at first.
        if now is None and more:
            slots[at] = next(parts, None)
            more = slots[at] is not None
            continue
        found = None if now is None else next(now, None)
        if found is not None:
            yield found
            taken += 1
            if taken < block:
                continue
        else:
            slots[at] = None
        at, taken = (at + 1) % width, 0


def ahead(source: Iterator[Element], size: int) -> Iterator[Element]:
    """Yields the same elements, which a thread makes up to ``size`` ahead."""
    changed = concurrency.Condition()
    ready: deque[Element] = deque()
    ended: list[BaseException | None] = []
    stopped = concurrency.Event()

    def fill() -> None:
        error: BaseException | None = None
        try:
            for element in source:
                with changed:
                    changed.wait_for(lambda: len(ready) < size or stopped.is_set())
                    if stopped.is_set():
                        return
                    ready.append(element)
                    changed.notify_all()
        except Exception as raised:  # told to whoever takes the next element
            error = raised
        finally:
            with changed:
                ended.append(error)
                changed.notify_all()

    concurrency.in_thread(fill, "prefetch")
    try:
        while True:
            with changed:
                changed.wait_for(lambda: ready or ended)
                if not ready:
                    if ended[0] is not None:
                        raise ended[0]
                    return
                element = ready.popleft()
                changed.notify_all()
            yield element
    finally:
        with changed:
            stopped.set()
            changed.notify_all()
