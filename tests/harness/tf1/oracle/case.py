"""A case: one call of TensorFlow's, as data, which TensorFlow and harness.tf1 both run.

This module and the tables of cases import neither of the two: ``tf`` is given to them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

STATIC = object()
"""Shape of a placeholder: that of its value."""


@dataclass(frozen=True, eq=False)
class Fed:
    """A placeholder and what is fed to it: nothing of its value is known while the graph is built."""

    values: Any
    dtype: str = "float32"
    shape: Any = STATIC


@dataclass(frozen=True, eq=False)
class Const:
    """``tf.constant``."""

    values: Any
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Var:
    """``tf.Variable`` with this initial value."""

    values: Any
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Np:
    """A numpy array, given as it is."""

    values: Any
    dtype: str = "float32"


@dataclass(frozen=True)
class Type:
    """A data type of ``tf``, by its name."""

    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """Another call, whose result is an argument."""

    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


COMPUTES, REFUSES = "computes", "refuses"
"""What harness.tf1 does with a case in which it is different on purpose: gives some result, or an error."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call.

    Attributes:
        name: stable; begins with the operation's name in ``tf`` and a slash.
        call: what is called.
        slopes: also compares the derivatives of the result by each floating point argument that is
            fed.
        values: False where only dtypes, shapes and names are compared: random numbers.
        asked: what is asked of TensorFlow 2.21, where it has the old name or the old order of
            arguments no more.
        ulps: how many units in the last place a floating point number may be off.
    """

    name: str
    call: Call
    slopes: bool = False
    values: bool = True
    asked: Call | None = None
    ulps: int = 8


def array(values: Any, dtype: str) -> Any:
    """``values`` as numpy's array of TensorFlow's dtype."""
    if dtype == "string":
        return np.asarray(values, object)
    return np.asarray(values, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class Built:
    """A case in a graph: its results, and what must be fed."""

    def __init__(self, tf: Any, case: Case, modern: bool) -> None:
        self.tf = tf
        self.feeds: dict[Any, Any] = {}
        self.results: list[Any] = []
        by: list[Any] = []
        found = self._call(case.asked if modern and case.asked else case.call, by)
        self.results = list(flat(found))
        if case.slopes:
            self.results += self._slopes(by)

    def _call(self, call: Call, by: list[Any]) -> Any:
        args = [self._value(a, by) for a in call.args]
        kwargs = {k: self._value(v, by) for k, v in call.kwargs.items()}
        return function(self.tf, call.op)(*args, **kwargs)

    def _value(self, value: Any, by: list[Any]) -> Any:
        if isinstance(value, Fed):
            fed = array(value.values, value.dtype)
            made = self.tf.placeholder(
                getattr(self.tf, value.dtype), fed.shape if value.shape is STATIC else value.shape
            )
            self.feeds[made] = fed
            if value.dtype in ("float16", "float32", "float64", "bfloat16"):
                by.append(made)
            return made
        if isinstance(value, Const):
            return self.tf.constant(array(value.values, value.dtype))
        if isinstance(value, Var):
            return self.tf.Variable(array(value.values, value.dtype))
        if isinstance(value, Np):
            return array(value.values, value.dtype)
        if isinstance(value, Type):
            return getattr(self.tf, value.name)
        if isinstance(value, Call):
            return self._call(value, by)
        if type(value) in (list, tuple):
            return type(value)(self._value(v, by) for v in value)
        return value

    def _slopes(self, by: list[Any]) -> list[Any]:
        tf = self.tf
        total = [tf.reduce_sum(t) for t in self.results if tf.as_dtype(t.dtype).is_floating]
        return [g for g in tf.gradients(total, by) if g is not None]


def function(tf: Any, op: str) -> Callable[..., Any]:
    """What ``op`` names: in ``tf``, or after an ``@`` one of Python's operators."""
    if op.startswith("@"):
        found: Callable[..., Any] = getattr(operator, op[1:])
        return found
    for part in op.split("."):
        tf = getattr(tf, part)
    named: Callable[..., Any] = tf
    return named


def flat(value: Any) -> Iterable[Any]:
    """The leaves of lists and tuples."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    else:
        yield value


class Table(dict[str, Case]):
    """Cases by name."""

    def add(
        self,
        op: str,
        label: str,
        *args: Any,
        case: dict[str, Any] | None = None,
        asked: Call | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the call ``op(*args, **kwargs)`` as ``op/label``; ``case`` holds other attributes of the case."""
        name = f"{op}/{label}"
        if name in self:
            raise ValueError(f"two cases are called {name}")
        self[name] = Case(name, Call(op, args, kwargs), asked=asked, **(case or {}))
