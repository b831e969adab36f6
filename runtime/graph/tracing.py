"""From a JAX function to shapes and jaxprs: the only module that traces user code.

Each operation is traced by itself, under 64-bit mode exactly when one of its own arrays is 64 bits wide. So an int64
global step can live in a program whose other parts keep JAX's 32-bit defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.graph.bodies import ArrayFn, Shape

ClosedJaxpr = Any

_UNKNOWN_SIZES = (5040, 10080)
"""What stands for an unknown dimension while shapes are inferred: two sizes that most reshapes divide.
An output dimension that differs between the two depends on an unknown one. Nothing of that size is ever allocated."""


def is_64_bit(dtype: np.dtype[Any]) -> bool:
    """Whether JAX holds ``dtype`` only in 64-bit mode."""
    return bool(dtype.kind in "iuf" and dtype.itemsize == 8) or dtype == np.complex128


def x64_enabled() -> bool:
    """Whether the caller runs JAX in 64-bit mode, for the process or in a context."""
    return jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8


def needs_64_bit(dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Whether any of ``dtypes`` needs JAX's 64-bit mode."""
    return any(is_64_bit(dtype) for dtype in dtypes)


def aval(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that stands for a tensor."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)  # type: ignore[no-untyped-call]


def trace(fn: ArrayFn, avals: Sequence[jax.ShapeDtypeStruct], wide: bool) -> ClosedJaxpr:
    """The jaxpr of ``fn`` for these arguments; ``wide`` traces it in 64-bit mode."""
    with jax.enable_x64(wide):
        return jax.make_jaxpr(fn)(*avals)


def infer(
    fn: Callable[..., Any], inputs: Sequence[tuple[Shape | None, np.dtype[Any]]], what: str, wide: bool | None = None
) -> tuple[Any, list[tuple[Shape | None, np.dtype[Any]]]]:
    """Infers the output structure, static shapes and dtypes of ``fn``.

    Args:
        fn: a JAX function of flat arrays giving a pytree of arrays.
        inputs: (static shape, dtype) of each argument; unknown ranks count as unknown vectors.
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
    unknown = any(shape is None or None in shape for shape, _ in inputs)
    found = []
    for size in _UNKNOWN_SIZES if unknown else _UNKNOWN_SIZES[:1]:
        avals = [
            aval([size if d is None else d for d in ((None,) if shape is None else shape)], dtype)
            for shape, dtype in inputs
        ]
        try:
            with jax.enable_x64(wide):
                found.append(jax.eval_shape(fn, *avals))
        except Exception as error:
            shapes = ", ".join(f"{dtype.name}{'?' if shape is None else list(shape)}" for shape, dtype in inputs)
            raise InvalidArgumentError(f"{what}({shapes}): {_one_line(error)}") from error
    leaves, tree = jax.tree.flatten(found[0])
    others = jax.tree.leaves(found[-1])
    outputs: list[tuple[Shape | None, np.dtype[Any]]] = []
    for leaf, other in zip(leaves, others, strict=True):
        if len(leaf.shape) != len(other.shape):
            outputs.append((None, np.dtype(leaf.dtype)))
            continue
        dims = tuple(a if a == b else None for a, b in zip(leaf.shape, other.shape, strict=True))
        outputs.append((dims, leaf.dtype))
    return tree, outputs


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"
