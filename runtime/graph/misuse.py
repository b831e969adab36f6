"""Misuse: a tensor where JAX expects an array, a common mistake of users of JAX.

The error says the cure.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from absl import logging

from runtime.errors import InvalidArgumentError

_frozen: set[str] = set()
"""Names of operations of which a warning was logged."""
_LIBRARIES = ("harness.optimizers.optimizer", "harness.tf1", "jax", "numpy", "optax", "runtime.")
"""Modules whose functions draw no random numbers of NumPy or Python."""
_traced: ContextVar[str] = ContextVar("the function of rt.call that JAX traces", default="")


class TensorInsideError(InvalidArgumentError):
    """The use of a tensor inside a function of ``rt.call`` that is not among the arguments."""


@contextlib.contextmanager
def traced(what: str) -> Iterator[None]:
    """Marks a block in which JAX traces a function of ``rt.call``.

    Args:
        what: name of the operation.
    """
    # A signal that raises between the set and the try would leave the name of the function behind.
    token = _traced.set(what)
    try:
        yield
    finally:
        _traced.reset(token)


def warn_of_frozen(what: str, numbers: Sequence[bytes], again: Sequence[bytes]) -> None:
    """Logs a warning, once for an operation, if two traces of a function hold different numbers.

    The function has drawn random numbers, or read a clock, while JAX traced it. A trace with more
    or fewer numbers is of another kind, as of a function that counts its calls.
    """
    if what not in _frozen and numbers != again and len(numbers) == len(again):
        _frozen.add(what)
        logging.warning(
            "%r holds other numbers each time that it is traced, as of np.random, random or a clock: "
            "every step gets the same; draw with jax.random in rt.call(f, rt.random_key(), ...), and "
            "feed what changes",
            what,
        )


def may_draw(*functions: object) -> bool:
    """Returns True if a value is a function of the program, and not of JAX or of this library."""
    return any(
        callable(fn) and not str(getattr(fn, "__module__", "")).startswith(_LIBRARIES)
        for fn in functions
    )


def check_not_traced(name: str) -> None:
    """Raises TensorInsideError if the use of tensor ``name`` is inside a traced function."""
    if what := _traced.get():
        raise TensorInsideError(
            f"{name!r} is used by the function of {what!r} but is none of its arguments, so it "
            f"has no value there: pass it as one, rt.call(f, ..., {_suggest_variable(name)})"
        )


def describe_cure(name: str) -> str:
    """Returns the advice for tensor ``name`` with a JAX function or a method of arrays."""
    return (
        f"{name!r} is a tensor of a graph, which has a value only while a step runs; a JAX "
        f"function is applied to it with rt.call(f, {_suggest_variable(name)}), those of "
        "jax.numpy are in rt.numpy, and gradients come from rt.gradients"
    )


def _suggest_variable(name: str) -> str:
    return name.rpartition(":")[0].rpartition("/")[2] or "x"


def explain_to_jax(kind: type) -> None:
    """Makes JAX functions refuse values of a type, with the cure in the error.

    JAX looks types up in a table without a public name. Without the table the error is JAX's own.

    Args:
        kind: a type whose values have a ``name``.
    """

    def refuse(tensor: object) -> object:
        name = str(getattr(tensor, "name", "x"))
        check_not_traced(name)
        raise InvalidArgumentError(describe_cure(name))

    # The table is private to JAX, and may move. Then JAX's own error has to do.
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("jax._src.core").pytype_aval_mappings[kind] = refuse
