"""Operators and indexing on tensors and variables, each one operation of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from runtime.errors import InvalidArgumentError
from runtime.graph import misuse
from runtime.graph.op_kinds import Shape
from runtime.tensor_spec import DType

_call: Callable[..., Any]

Result = TypeVar("Result", covariant=True)


def make_operations_with(call: Callable[..., Any]) -> None:
    """Sets the function that adds an operation to the graph: ``ops.call``, whose module imports this one."""
    global _call
    _call = call


class Operators(Generic[Result]):
    """Python's operators on the values of tensors and variables, which give ``Result``s."""

    __slots__ = ()
    __array_ufunc__ = None  # so that numpy leaves `array * tensor` to us
    __array_priority__ = 100

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        misuse.explain_to_jax(cls)

    @property
    def name(self) -> str:
        """The name of the tensor."""
        raise NotImplementedError

    @property
    def shape(self) -> Shape | None:
        """Its static shape."""
        raise NotImplementedError

    @property
    def dtype(self) -> DType:
        """Its dtype."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        misuse.check_not_traced(self.name)
        raise AttributeError(f"no method {name!r} here: {misuse.cure(self.name)}")

    def __add__(self, other: TensorLike) -> Result:
        return _binary("add", operator.add, self, other)

    def __radd__(self, other: TensorLike) -> Result:
        return _reflected("add", operator.add, self, other)

    def __sub__(self, other: TensorLike) -> Result:
        return _binary("sub", operator.sub, self, other)

    def __rsub__(self, other: TensorLike) -> Result:
        return _reflected("sub", operator.sub, self, other)

    def __mul__(self, other: TensorLike) -> Result:
        return _binary("mul", operator.mul, self, other)

    def __rmul__(self, other: TensorLike) -> Result:
        return _reflected("mul", operator.mul, self, other)

    def __truediv__(self, other: TensorLike) -> Result:
        return _binary("truediv", operator.truediv, self, other)

    def __rtruediv__(self, other: TensorLike) -> Result:
        return _reflected("truediv", operator.truediv, self, other)

    def __floordiv__(self, other: TensorLike) -> Result:
        return _binary("floordiv", operator.floordiv, self, other)

    def __rfloordiv__(self, other: TensorLike) -> Result:
        return _reflected("floordiv", operator.floordiv, self, other)

    def __mod__(self, other: TensorLike) -> Result:
        return _binary("mod", operator.mod, self, other)

    def __rmod__(self, other: TensorLike) -> Result:
        return _reflected("mod", operator.mod, self, other)

    def __pow__(self, other: TensorLike) -> Result:
        return _binary("pow", operator.pow, self, other)

    def __rpow__(self, other: TensorLike) -> Result:
        return _reflected("pow", operator.pow, self, other)

    def __matmul__(self, other: TensorLike) -> Result:
        return _binary("matmul", operator.matmul, self, other)

    def __rmatmul__(self, other: TensorLike) -> Result:
        return _reflected("matmul", operator.matmul, self, other)

    def __and__(self, other: TensorLike) -> Result:
        return _binary("and", operator.and_, self, other)

    def __rand__(self, other: TensorLike) -> Result:
        return _reflected("and", operator.and_, self, other)

    def __or__(self, other: TensorLike) -> Result:
        return _binary("or", operator.or_, self, other)

    def __ror__(self, other: TensorLike) -> Result:
        return _reflected("or", operator.or_, self, other)

    def __xor__(self, other: TensorLike) -> Result:
        return _binary("xor", operator.xor, self, other)

    def __rxor__(self, other: TensorLike) -> Result:
        return _reflected("xor", operator.xor, self, other)

    def __lt__(self, other: TensorLike) -> Result:
        return _binary("Less", operator.lt, self, other)

    def __le__(self, other: TensorLike) -> Result:
        return _binary("LessEqual", operator.le, self, other)

    def __gt__(self, other: TensorLike) -> Result:
        return _binary("Greater", operator.gt, self, other)

    def __ge__(self, other: TensorLike) -> Result:
        return _binary("GreaterEqual", operator.ge, self, other)

    def __neg__(self) -> Result:
        return _unary("Neg", operator.neg, self)

    def __pos__(self) -> Result:
        return _unary("pos", operator.pos, self)

    def __abs__(self) -> Result:
        return _unary("Abs", abs, self)

    def __invert__(self) -> Result:
        return _unary("LogicalNot", operator.invert, self)

    def __getitem__(self, item: object) -> Result:
        _check_bounds(self, item)
        picked: Result = _apply("strided_slice", _item, self, item)
        return picked


TensorLike: TypeAlias = Operators[object] | npt.ArrayLike
"""What stands where a tensor is wanted: a tensor, a variable, or what numpy makes an array of."""


def _check_bounds(tensor: Operators[object], item: object) -> None:
    """Raises IndexError for a number that an axis of known size has not."""
    shape = tensor.shape
    if shape is None:
        return
    for axis, index in _numbers(item, shape):
        size = shape[axis]
        if isinstance(index, int | np.integer) and size is not None and not -size <= index < size:
            raise IndexError(f"index {index} is out of bounds for axis {axis} of {tensor.name!r} with size {size}")


def _item(array: jax.Array, item: Any) -> jax.Array:
    """Picks ``array[item]``.

    Where a number in ``item`` is out of bounds, the result is NaN, or the integer or bool furthest from zero. XLA
    raises no errors, and would pick the last element.
    """
    picked = array[item]
    inside = [(-array.shape[axis] <= i) & (i < array.shape[axis]) for axis, i in _numbers(item, array.shape)]
    if all(isinstance(ok, bool | np.bool_) and ok for ok in inside):
        return picked
    return jnp.where(jnp.all(jnp.stack([jnp.asarray(ok) for ok in inside])), picked, _nothing(picked.dtype))


def _nothing(dtype: DType) -> jax.Array:
    if jnp.issubdtype(dtype, np.inexact):
        return jnp.asarray(np.nan, dtype)
    if dtype == np.bool_:
        return jnp.asarray(True)
    limits = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return jnp.asarray(limits.min if limits.min < 0 else limits.max, dtype)


def _numbers(item: object, shape: Shape) -> list[tuple[int, Any]]:
    """Finds (axis, number) for each integer or integer scalar in an index.

    The list is empty if an index is of another kind.
    """
    parts = item if isinstance(item, tuple) else (item,)
    if not all(_is_number(p) or p is None or p is ... or isinstance(p, slice) for p in parts):
        return []
    taken = sum(p is not None and p is not ... for p in parts)
    found, axis = [], 0
    for part in parts:
        if _is_number(part) and axis < len(shape):
            found.append((axis, part))
        axis += 0 if part is None else len(shape) - taken if part is ... else 1
    return found


def _is_number(part: object) -> bool:
    if isinstance(part, int | np.integer):
        return not isinstance(part, bool)
    return getattr(part, "shape", None) == () and getattr(part, "dtype", np.dtype(bool)).kind in "iu"


def _unary(name: str, fn: Callable[..., object], self: Operators[Result]) -> Result:
    made: Result = _apply(name, fn, self)
    return made


def _binary(name: str, fn: Callable[..., object], self: Operators[Result], other: TensorLike) -> Result:
    made: Result = _apply(name, fn, self, _literal(self, other))
    return made


def _reflected(name: str, fn: Callable[..., object], self: Operators[Result], other: TensorLike) -> Result:
    made: Result = _apply(name, fn, _literal(self, other), self)
    return made


def _apply(name: str, fn: Callable[..., object], *operands: object) -> Any:
    for value in operands:
        if isinstance(value, Operators) and value.dtype.hasobject:
            raise InvalidArgumentError(f"{name}: {value.name!r} is a string tensor; arithmetic works on numbers only")
    return _call(fn, *operands, name=name)


def _literal(tensor: Operators[object], other: TensorLike) -> TensorLike:
    """Converts a list of numbers, or an array of Python's, to an array.

    The array has the tensor's dtype if that loses nothing.
    """
    if isinstance(other, np.ndarray) and other.dtype == object:
        other = other.tolist()
    elif not isinstance(other, list | tuple):
        return other
    array = np.asarray(other)
    whole, floating = array.dtype.kind in "iu", jnp.issubdtype(tensor.dtype, np.floating)
    fits = floating and (whole or array.dtype.kind == "f") or whole and tensor.dtype.kind in "iu"
    return array.astype(tensor.dtype) if fits else array
