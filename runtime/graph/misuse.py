"""A tensor where JAX wants an array: a common mistake of users of JAX. The error says the cure."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextvars import ContextVar

from runtime.errors import InvalidArgumentError

_traced: ContextVar[str] = ContextVar("the function of rt.call that JAX traces", default="")


class TensorInsideError(InvalidArgumentError):
    """A function of ``rt.call`` uses a tensor that is none of its arguments."""


@contextlib.contextmanager
def traced(what: str) -> Iterator[None]:
    """Marks a function that was given to ``rt.call`` as being traced while the block runs.

    ``what`` names the operation.
    """
    token = _traced.set(what)
    try:
        yield
    finally:
        _traced.reset(token)


def check_not_traced(name: str) -> None:
    """Raises TensorInsideError when tensor ``name`` is used by a function that is traced just now."""
    if what := _traced.get():
        raise TensorInsideError(
            f"{name!r} is used by the function of {what!r} but is none of its arguments, so it has no value there: "
            f"pass it as one, rt.call(f, ..., {_variable(name)})"
        )


def cure(name: str) -> str:
    """Returns the text that says how to use tensor ``name`` with a JAX function or a method of arrays."""
    return (
        f"{name!r} is a tensor of a graph, which has a value only while a step runs; a JAX function is applied to it "
        f"with rt.call(f, {_variable(name)}), those of jax.numpy are in rt.numpy, and gradients come from rt.gradients"
    )


def _variable(name: str) -> str:
    return name.rpartition(":")[0].rpartition("/")[2] or "x"


def explain_to_jax(kind: type) -> None:
    """Makes JAX show the cure when one of its functions is given a ``kind``, which has a ``name``.

    JAX looks up what it takes by type, in a table that no public module has; without it the error is JAX's own.
    """

    def refuse(tensor: object) -> object:
        name = str(getattr(tensor, "name", "x"))
        check_not_traced(name)
        raise InvalidArgumentError(cure(name))

    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("jax._src.core").pytype_aval_mappings[kind] = refuse
