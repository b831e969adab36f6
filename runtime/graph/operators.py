"""Operators and indexing on tensors and variables, each one operation of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Tensor
from runtime.graph.ops import call
from runtime.graph.variable import Variable

_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARE = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "abs": operator.abs,
    "invert": operator.invert,
    "pos": operator.pos,
}


def _numbers_only(name: str, *values: Any) -> None:
    for value in values:
        if isinstance(value, Tensor | Variable) and value.dtype.hasobject:
            raise InvalidArgumentError(f"{name}: {value.name!r} is a string tensor; arithmetic works on numbers only")


def _binary(name: str, fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        _numbers_only(name, self, other)
        return call(fn, self, other, name=name)

    return method


def _reflected(name: str, fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        _numbers_only(name, self, other)
        return call(fn, other, self, name=name)

    return method


def _unary(name: str, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        _numbers_only(name, self)
        return call(fn, self, name=name)

    return method


def _getitem(self: Any, item: Any) -> Any:
    _numbers_only("getitem", self)
    return call(lambda array, index: array[index], self, item, name="getitem")


for _class in (Tensor, Variable):
    for _name, _fn in _BINARY.items():
        setattr(_class, f"__{_name}__", _binary(_name, _fn))
        setattr(_class, f"__r{_name}__", _reflected(_name, _fn))
    for _name, _fn in _COMPARE.items():
        setattr(_class, f"__{_name}__", _binary(_name, _fn))
    for _name, _unary_fn in _UNARY.items():
        setattr(_class, f"__{_name}__", _unary(_name, _unary_fn))
    setattr(_class, "__getitem__", _getitem)  # noqa: B010 - a variable has none of its own to replace
Variable.__array_ufunc__ = None  # type: ignore[attr-defined]
