"""Misuse: a tensor where JAX expects an array, a common mistake of users of JAX.

The error says the cure.
"""

import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import numpy as np
from absl import logging

from runtime import concurrency
from runtime.errors import InvalidArgumentError

_frozen: set[str] = set()
"""Names of operations of which a warning was logged."""
_traced: ContextVar[str] = ContextVar("the function of rt.call that JAX traces", default="")


class TensorInsideError(InvalidArgumentError):
    """The use of a tensor inside a function of ``rt.call`` that is not among the arguments."""


@contextlib.contextmanager
def traced(what: str, fn: object) -> Iterator[None]:
    """Marks a block in which JAX traces a function of ``rt.call``.

    Args:
        what: name of the operation.
        fn: the function.
    """
    # A signal that raises between the set and the try would leave the name of the function behind.
    generators = list(_find_generators(fn, set()))
    before = _random_states(generators)
    token = _traced.set(what)
    try:
        yield
    finally:
        _traced.reset(token)
    if what not in _frozen and _random_states(generators) != before:
        _frozen.add(what)
        logging.warning(
            "%r draws random numbers of NumPy or Python while it is traced, as by jax.jit: every "
            "step gets the same; call rt.call(f, rt.random_key(), ...) and draw with jax.random",
            what,
        )


def _random_states(generators: Sequence[np.random.Generator]) -> tuple[object, ...]:
    found = np.random.get_state(legacy=False)
    own = [repr(generator.bit_generator.state) for generator in generators]
    # Each draw moves the position, or uses up the second number of a Gaussian pair.
    return found["state"].get("pos"), found["has_gauss"], concurrency.random_state(), own


def _find_generators(value: object, seen: set[object]) -> Iterator[np.random.Generator]:
    """Yields the generators that a function names, or a function that it was given."""
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        value = value.__self__
    if isinstance(value, np.random.Generator):
        yield value
    if not isinstance(value, types.FunctionType) or value in seen:
        return
    seen.add(value)
    names = inspect.getclosurevars(value)
    for found in names.nonlocals.values():
        yield from _find_generators(found, seen)
    for found in names.globals.values():
        # The functions of other modules are too many.
        if getattr(found, "__module__", value.__module__) == value.__module__:
            yield from _find_generators(found, seen)


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
