"""Static shapes as TensorFlow shows them: ``tensor.get_shape().as_list()``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import runtime as rt


def _arithmetic(fn: Callable[[int, int], int]) -> Callable[[Dimension, Any], Dimension]:
    def compute(left: Dimension, other: Any) -> Dimension:
        right = Dimension(other).value
        return Dimension(None if left.value is None or right is None else fn(left.value, right))

    return compute


class Dimension:
    """One size of a shape; ``.value`` is None when it is known only in the step.

    Arithmetic with an unknown size gives an unknown size; comparing with one gives None, as in
    TensorFlow.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: int | None = (
            value.value if isinstance(value, Dimension) else None if value is None else int(value)
        )

    def __int__(self) -> int:
        if self.value is None:
            raise TypeError("this dimension is known only when the step runs: use tf.shape")
        return self.value

    __index__ = __int__

    __add__ = __radd__ = _arithmetic(operator.add)
    __mul__ = __rmul__ = _arithmetic(operator.mul)
    __sub__, __floordiv__ = _arithmetic(operator.sub), _arithmetic(operator.floordiv)
    __mod__ = _arithmetic(operator.mod)

    def __eq__(self, other: object) -> Any:
        if other is None or isinstance(other, int | Dimension):
            right = Dimension(other).value
            # Unknown sizes may be equal in one step and not in the next.
            return None if self.value is None or right is None else self.value == right
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Dimension({self.value})"

    def __str__(self) -> str:
        return "?" if self.value is None else str(self.value)


class TensorShape:
    """A static shape: any number of ``Dimension``, or an unknown rank.

    Args:
        dims: iterable of int, None or Dimension; None for an unknown rank; another TensorShape.
    """

    __slots__ = ("dims",)

    def __init__(self, dims: Any) -> None:
        if isinstance(dims, TensorShape):
            dims = dims.dims
        elif isinstance(dims, int):
            dims = [dims]
        self.dims: list[Dimension] | None = None if dims is None else [Dimension(d) for d in dims]

    @property
    def ndims(self) -> int | None:
        """Number of dimensions, None when unknown."""
        return None if self.dims is None else len(self.dims)

    @property
    def rank(self) -> int | None:
        """The same as ``ndims``."""
        return self.ndims

    def as_list(self) -> list[int | None]:
        """Returns the sizes, None for each unknown one. Raises ValueError for an unknown rank."""
        return [d.value for d in self._known()]

    def num_elements(self) -> int | None:
        """Returns the product of all sizes, None when one is unknown."""
        return math.prod(map(int, self._known())) if self.is_fully_defined() else None

    def is_fully_defined(self) -> bool:
        """Returns True if all sizes are known."""
        return self.dims is not None and all(d.value is not None for d in self.dims)

    def assert_is_fully_defined(self) -> None:
        """Raises ValueError when a size is not known."""
        if not self.is_fully_defined():
            raise ValueError(f"shape {self} is not fully defined")

    def is_compatible_with(self, other: object) -> bool:
        """Returns True if a tensor could have both shapes."""
        right = TensorShape(other)
        if self.dims is None or right.dims is None:
            return True
        return len(self.dims) == len(right.dims) and all(
            (a == b) is not False for a, b in zip(self, right, strict=True)
        )

    def assert_is_compatible_with(self, other: Any) -> None:
        """Raises ValueError when no tensor could have both shapes."""
        if not self.is_compatible_with(other):
            raise ValueError(f"shapes {self} and {TensorShape(other)} are incompatible")

    def merge_with(self, other: Any) -> TensorShape:
        """Returns the shape that both say together. Raises ValueError when they contradict."""
        self.assert_is_compatible_with(other)
        right = TensorShape(other)
        if self.dims is None or right.dims is None:
            return right if self.dims is None else self
        return TensorShape(
            [b if a.value is None else a for a, b in zip(self.dims, right.dims, strict=True)]
        )

    def concatenate(self, other: Any) -> TensorShape:
        """Returns this shape followed by ``other``; unknown when either rank is."""
        right = TensorShape(other)
        return TensorShape(
            None if self.dims is None or right.dims is None else [*self.dims, *right.dims]
        )

    def with_rank(self, rank: int) -> TensorShape:
        """Returns this shape with the rank. Raises ValueError when the rank is another."""
        if self.dims is None:
            return TensorShape([None] * rank)
        if len(self.dims) != rank:
            raise ValueError(f"shape {self} must have rank {rank}")
        return self

    def _known(self) -> list[Dimension]:
        if self.dims is None:
            raise ValueError("the rank of this shape is known only when the step runs")
        return self.dims

    def __len__(self) -> int:
        return len(self._known())

    # TensorFlow's rule: a shape of no dimensions is true, a shape of unknown rank is not.
    def __bool__(self) -> bool:
        return self.dims is not None

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self._known())

    def __getitem__(self, key: Any) -> Any:
        found = self._known()[key]
        return TensorShape(found) if isinstance(key, slice) else found

    def __eq__(self, other: object) -> bool:
        if other is not None and not isinstance(other, TensorShape | Iterable):
            return NotImplemented
        return self._sizes() == TensorShape(other)._sizes()

    def __hash__(self) -> int:
        return hash(self._sizes())

    def _sizes(self) -> tuple[int | None, ...] | None:
        return None if self.dims is None else tuple(self.as_list())

    def __repr__(self) -> str:
        return f"TensorShape({None if self.dims is None else self.dims!r})"

    def __str__(self) -> str:
        if self.dims is None:
            return "<unknown>"
        sizes = ", ".join(str(d) for d in self.dims)
        return f"({sizes},)" if len(self.dims) == 1 else f"({sizes})"


def get_shape(tensor: Any) -> TensorShape:
    """Returns the static shape of a tensor or variable."""
    return TensorShape(tensor.shape)


def set_shape(tensor: Any, shape: Any) -> None:
    """Merges ``shape`` into a tensor's static shape. Raises ValueError for a contradiction."""
    merged = TensorShape(tensor.shape).merge_with(shape)
    # The shape of a variable is that of its value already.
    if not isinstance(tensor, rt.Variable):
        tensor.shape = None if merged.dims is None else tuple(merged.as_list())


ShapeLike: TypeAlias = TensorShape | rt.TensorLike
"""What says a shape: a ``TensorShape``, numbers, or a tensor that depends on shapes only."""
