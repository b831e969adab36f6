"""Tracing: a JAX function becomes a jaxpr, or the shapes of its results. No other module traces user code.

Each operation is traced by itself. It is traced in 64-bit mode when one of its own arrays is 64 bits wide, or when JAX
was in that mode as the operation was made. So a program may count an int64 global step and compute in 32 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError, one_line
from runtime.graph import misuse
from runtime.graph.op_kinds import ArrayFn, Shape
from runtime.tensor_spec import DType

_UNKNOWN_SIZES = (5040, 10080)
"""What stands for an unknown dimension while shapes are inferred: two sizes that most reshapes divide.
An output dimension that differs between the two depends on an unknown one. Nothing of that size is ever allocated."""

_SMALLEST = 1
"""Tried besides: what a slice (``x[:100]``) or a minimum cuts all large sizes down to depends on an unknown one too.
If no dimension is the same for it and for one large size, the other large size would tell nothing more."""


def is_64_bit(dtype: DType) -> bool:
    """Whether JAX holds ``dtype`` only in 64-bit mode."""
    return bool(dtype.kind in "iuf" and dtype.itemsize == 8) or dtype == np.complex128


def has_less_than_a_byte(dtype: DType) -> bool:
    """Whether XLA packs several elements of ``dtype`` into a byte: int4 and the like."""
    if dtype.itemsize > 1 or dtype.hasobject or dtype.kind == "b":
        return False
    limits_of = ml_dtypes.finfo if jnp.issubdtype(dtype, np.floating) else ml_dtypes.iinfo
    return int(limits_of(dtype).bits) < 8


def x64_enabled() -> bool:
    """Whether the caller runs JAX in 64-bit mode, for the process or in a context."""
    return jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8


def needs_64_bit(dtypes: Sequence[DType]) -> bool:
    """Whether any of ``dtypes`` needs JAX's 64-bit mode."""
    return any(is_64_bit(dtype) for dtype in dtypes)


def aval(shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The abstract array that stands for a tensor."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def trace(fn: ArrayFn, avals: Sequence[jax.ShapeDtypeStruct], wide: bool) -> ClosedJaxpr:
    """The jaxpr of ``fn`` for these arguments; ``wide`` traces it in 64-bit mode."""
    with jax.enable_x64(wide):
        return jax.make_jaxpr(fn)(*avals)


_guessing: ContextVar[bool] = ContextVar("guessing", default=False)


def sizes_are_guesses() -> bool:
    """Whether a function is traced with made-up sizes, to find the static shape of what it gives.

    A size that does not fit says nothing then: such a function gives something of the shape that it would have.
    """
    return _guessing.get()


def infer(
    fn: Callable[..., object], inputs: Sequence[tuple[Shape | None, DType]], what: str, wide: bool | None = None
) -> tuple[PyTreeDef, list[tuple[Shape | None, DType]]]:
    """Infers the output structure, static shapes and dtypes of ``fn``.

    Args:
        fn: a JAX function of flat arrays giving a pytree of arrays.
        inputs: (static shape, dtype) of each argument.
        what: names the operation in errors.
        wide: force 64-bit mode on or off; by default on when an input is 64 bits wide.

    Returns:
        The tree structure of the result, and (static shape, dtype) of its leaves.

    Raises:
        InvalidArgumentError: JAX cannot trace the function with these shapes; the text is JAX's own, after ``what``.
    """
    if any(dtype.hasobject for _, dtype in inputs):
        raise InvalidArgumentError(f"{what}: a string tensor cannot be an argument of a numeric function")
    if wide is None:
        wide = needs_64_bit([dtype for _, dtype in inputs]) or x64_enabled()
    failed: list[Exception] = []

    def tried(guesses: Sequence[tuple[int, int]]) -> list[object]:
        results = []
        for rank, size in guesses:
            avals = [
                aval([size if d is None else d for d in ((None,) * rank if shape is None else shape)], dtype)
                for shape, dtype in inputs
            ]
            token = _guessing.set(bool(size))
            try:
                with jax.enable_x64(wide), misuse.traced(what):
                    results.append(jax.eval_shape(fn, *avals))
            except Exception as error:
                failed.append(error)
            finally:
                _guessing.reset(token)
        return results

    large, smallest, exact = _guesses([shape for shape, _ in inputs])
    found, least = tried(large[:1]), tried(smallest)
    if not (len(large) == 2 and found and least and _differ(found[0], least[0])):
        found += tried(large[1:])
    if found:
        found += [result for result in least if _same_structure(result, found[0])]
    else:
        found = least + tried(exact)
    if not found:
        if isinstance(failed[0], misuse.TensorInsideError):
            raise failed[0]
        shapes = ", ".join(f"{dtype.name}{'?' if shape is None else list(shape)}" for shape, dtype in inputs)
        raise InvalidArgumentError(f"{what}({shapes}): {type(failed[0]).__name__}: {one_line(failed[0])}") from failed[
            0
        ]
    leaves, tree = jax.tree.flatten(found[0])
    versions = zip(*(jax.tree.leaves(result) for result in found), strict=True)
    shapes_of = [_common_shape([leaf.shape for leaf in same]) for same in versions]
    return tree, [(shape, leaf.dtype) for shape, leaf in zip(shapes_of, leaves, strict=True)]


def _same_structure(one: object, other: object) -> bool:
    structure: object = jax.tree.structure(one)
    return structure == jax.tree.structure(other)


def _differ(one: object, other: object) -> bool:
    """Whether two results of the same structure and ranks agree in no dimension: all of them are unknown then."""
    if not _same_structure(one, other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(len(a.shape) == len(b.shape) and all(map(operator.ne, a.shape, b.shape)) for a, b in pairs)


_Guesses = list[tuple[int, int]]


def _guesses(shapes: Sequence[Shape | None]) -> tuple[_Guesses, _Guesses, _Guesses]:
    """What to put in the place of unknown ranks and sizes: (rank, size) pairs of large sizes, the smallest, exact ones.

    An unknown size that must agree with a known one (``[None] + [3]``) fails with any size but that, or 1: the exact
    ones are for when no large one works.
    """
    if all(shape is not None and None not in shape for shape in shapes):
        return [(0, 0)], [], []
    ranks = range(5) if None in shapes else range(1)
    known = dict.fromkeys(d for shape in shapes if shape is not None for d in shape if d is not None)
    return (
        [(rank, size) for rank in ranks for size in _UNKNOWN_SIZES],
        [(rank, _SMALLEST) for rank in ranks],
        [(rank, size) for rank in ranks for size in known if size != _SMALLEST],
    )


def _common_shape(shapes: Sequence[tuple[int, ...]]) -> Shape | None:
    """The dimensions in which all ``shapes`` agree."""
    if len({len(shape) for shape in shapes}) > 1:
        return None
    return tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*shapes, strict=True))
