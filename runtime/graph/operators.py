"""Operators and indexing on tensors and variables. Each use adds one operation to the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

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
_Made = TypeVar("_Made")


def make_operations_with(call: Callable[..., Any]) -> None:
    """Sets the function for new operations to ``ops.call``.

    The module of ``call`` imports this module.
    """
    global _call
    _call = call


class _BinaryOperator:
    """An operator of two operands: a method of tensors with the second operand as argument."""

    def __init__(self, name: str, fn: Callable[..., object], reflected: bool = False) -> None:
        self._name, self._fn, self._reflected = name, fn, reflected

    def __get__(self, tensor: Operators[_Made] | None, owner: type) -> Callable[..., _Made]:
        # The class attribute takes both operands, as functools.reduce needs.
        if tensor is None:
            return lambda tensor, other: self.__get__(tensor, owner)(other)

        def apply(other: TensorLike) -> _Made:
            # The literal takes the dtype of the tensor, as in TensorFlow.
            operands = (tensor, _convert_literal(tensor, other))
            made: _Made = _apply_operator(
                self._name, self._fn, *(operands[::-1] if self._reflected else operands)
            )
            return made

        return apply


def _make_pair(name: str, fn: Callable[..., object]) -> tuple[_BinaryOperator, _BinaryOperator]:
    return _BinaryOperator(name, fn), _BinaryOperator(name, fn, reflected=True)


class Operators(Generic[Result]):
    """Python's operators on the values of tensors and variables, with results of type ``Result``."""

    __slots__ = ()
    # With these, numpy leaves `array * tensor` to the operators here.
    __array_ufunc__ = None
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
        """The static shape of the tensor."""
        raise NotImplementedError

    @property
    def dtype(self) -> DType:
        """The dtype of the tensor."""
        raise NotImplementedError

    @property
    def graph(self) -> Any:
        """The graph of the tensor."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # Python, numpy and JAX probe private names, and must find none.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not hasattr(jax.Array, name):
            return self.graph.extra_attribute(self, name)
        # A method of arrays is the common mistake, and its error says the cure.
        misuse.check_not_traced(self.name)
        raise AttributeError(f"no method {name!r} here: {misuse.describe_cure(self.name)}")

    __add__, __radd__ = _make_pair("add", operator.add)
    __sub__, __rsub__ = _make_pair("sub", operator.sub)
    __mul__, __rmul__ = _make_pair("mul", operator.mul)
    __truediv__, __rtruediv__ = _make_pair("truediv", operator.truediv)
    __floordiv__, __rfloordiv__ = _make_pair("floordiv", operator.floordiv)
    __mod__, __rmod__ = _make_pair("mod", operator.mod)
    __pow__, __rpow__ = _make_pair("pow", operator.pow)
    __matmul__, __rmatmul__ = _make_pair("matmul", operator.matmul)
    __and__, __rand__ = _make_pair("and", operator.and_)
    __or__, __ror__ = _make_pair("or", operator.or_)
    __xor__, __rxor__ = _make_pair("xor", operator.xor)
    __lt__ = _BinaryOperator("Less", operator.lt)
    __le__ = _BinaryOperator("LessEqual", operator.le)
    __gt__ = _BinaryOperator("Greater", operator.gt)
    __ge__ = _BinaryOperator("GreaterEqual", operator.ge)

    def __neg__(self) -> Result:
        return _apply_unary("Neg", operator.neg, self)

    def __pos__(self) -> Result:
        return _apply_unary("pos", operator.pos, self)

    def __abs__(self) -> Result:
        # JAX's derivative of abs at 0 is 1, TensorFlow's is 0.
        return _apply_unary("Abs", lambda x: jnp.abs(x) * (x != 0), self)

    def __invert__(self) -> Result:
        return _apply_unary("LogicalNot", operator.invert, self)

    def __getitem__(self, item: object) -> Result:
        picked: Result = self.graph.pick_item(self, item)
        return picked


TensorLike: TypeAlias = Operators[object] | npt.ArrayLike
"""An argument for a tensor: a tensor, a variable, or a value of which numpy makes an array."""


def pick_item(tensor: Operators[Result], item: object) -> Result:
    """Adds the operation ``tensor[item]``."""
    _check_bounds(tensor, item)
    picked: Result = _apply_operator("strided_slice", _pick_array, tensor, item)
    return picked


def _check_bounds(tensor: Operators[object], item: object) -> None:
    """Raises IndexError for a number outside an axis of known size."""
    shape = tensor.shape
    # Without a static shape only the step can tell.
    if shape is None:
        return
    for axis, index in _find_numbers(item, shape):
        size = shape[axis]
        if isinstance(index, int | np.integer) and size is not None and not -size <= index < size:
            raise IndexError(
                f"index {index} is out of bounds for axis {axis} of {tensor.name!r} with size "
                f"{size}"
            )


def _pick_array(array: jax.Array, item: Any) -> jax.Array:
    """Picks ``array[item]``.

    XLA raises no errors, and would pick the last element for a number out of bounds. So the result
    is NaN then, or the integer or bool furthest from zero.
    """
    picked = array[item]
    inside = [
        (-array.shape[axis] <= i) & (i < array.shape[axis])
        for axis, i in _find_numbers(item, array.shape)
    ]
    # Numbers that are known while JAX traces cost nothing in the step.
    if all(isinstance(ok, bool | np.bool_) and ok for ok in inside):
        return picked
    return jnp.where(
        jnp.all(jnp.stack([jnp.asarray(ok) for ok in inside])), picked, _make_filler(picked.dtype)
    )


def _make_filler(dtype: DType) -> jax.Array:
    if jnp.issubdtype(dtype, np.inexact):
        return jnp.asarray(np.nan, dtype)
    if dtype == np.bool_:
        return jnp.asarray(True)
    limits = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return jnp.asarray(limits.min if limits.min < 0 else limits.max, dtype)


def _find_numbers(item: object, shape: Shape) -> list[tuple[int, Any]]:
    """Finds (axis, number) for each integer or integer scalar in an index.

    An index of another kind has none.
    """
    parts = item if isinstance(item, tuple) else (item,)
    if not all(_is_number(p) or p is None or p is ... or isinstance(p, slice) for p in parts):
        return []
    # An ellipsis stands for the axes that no other part takes, and None for none.
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
    return (
        getattr(part, "shape", None) == () and getattr(part, "dtype", np.dtype(bool)).kind in "iu"
    )


def _apply_unary(name: str, fn: Callable[..., object], self: Operators[Result]) -> Result:
    made: Result = _apply_operator(name, fn, self)
    return made


def _apply_operator(name: str, fn: Callable[..., object], *operands: object) -> Any:
    # JAX would name no tensor in its error.
    for value in operands:
        if isinstance(value, Operators) and value.dtype.hasobject:
            raise InvalidArgumentError(
                f"{name}: {value.name!r} is a string tensor; arithmetic works on numbers only"
            )
    return _call(fn, *operands, name=name)


def _convert_literal(tensor: Operators[object], other: TensorLike) -> TensorLike:
    """Converts a list of numbers, or an array of Python objects, to an array.

    The array has the tensor's dtype if the conversion loses nothing.
    """
    # Numpy has an array of objects for numbers of mixed types, which JAX refuses.
    if isinstance(other, np.ndarray) and other.dtype == object:
        other = other.tolist()
    elif not isinstance(other, list | tuple):
        return other
    array = np.asarray(other)
    whole, floating = array.dtype.kind in "iu", jnp.issubdtype(tensor.dtype, np.floating)
    fits = floating and (whole or array.dtype.kind == "f") or whole and tensor.dtype.kind in "iu"
    return array.astype(tensor.dtype) if fits else array
