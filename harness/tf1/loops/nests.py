"""Nests of tensors (lists, tuples and dictionaries of them), and the operations that functions of a program become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.tree_util import PyTreeDef

import runtime as rt
from harness.tf1.loops.subgraph import Subgraph
from harness.tf1.ops.lift import constant, holds_tensors, is_tensor, operand
from harness.tf1.ops.shapes import TensorShape

Nest: TypeAlias = Any
"""A tensor, or lists, tuples and dictionaries of tensors, nested."""
Made: TypeAlias = Callable[..., Nest]
"""A function of a program that makes a nest."""
Arrays: TypeAlias = list[jax.Array]


class Unwritten:
    """A leaf of a nest that becomes a tensor when its shape is known: a ``tf.TensorArray`` without rows."""

    dtype: rt.lowlevel.DType
    written: rt.Tensor | None
    """What was written last, for its shape."""

    def content(self) -> rt.Tensor:
        """Returns the tensor. Raises ValueError when its shape is not known."""
        raise NotImplementedError

    def like(self, value: rt.Tensor) -> rt.Tensor:
        """Returns the tensor, whose rows must have the shape of ``value``."""
        raise NotImplementedError


def flatten_nest(nest: Nest) -> tuple[list[object], PyTreeDef]:
    """Returns the leaves of a nest, None among them, and its structure."""
    # JAX drops None, where a function of the program has forgotten to return a tensor.
    return jax.tree.flatten(nest, is_leaf=lambda leaf: leaf is None)


def unflatten_nest(structure: PyTreeDef, leaves: Sequence[object]) -> Nest:
    """Returns the nest of this structure."""
    return jax.tree.unflatten(structure, leaves)


def as_tensors(nest: Nest, what: str) -> tuple[list[rt.Tensor], PyTreeDef]:
    """Returns the leaves of a nest as tensors, and its structure.

    An operation becomes a tensor that waits for it.

    Raises:
        ValueError: a leaf is None.
    """
    leaves, structure = flatten_nest(nest)
    return [leaf_as_tensor(leaf, what) for leaf in leaves], structure


def leaf_as_tensor(leaf: Nest, what: str) -> rt.Tensor:
    """Returns a leaf as a tensor, as ``as_tensors`` makes it."""
    if leaf is None:
        raise ValueError(f"{what} must give tensors, not None")
    if isinstance(leaf, Unwritten):
        return leaf.content()
    if isinstance(leaf, rt.Operation):
        # An operation has no value that a compiled conditional could return.
        with rt.control_dependencies([leaf]):
            return rt.identity(True, "control_dependency")
    return rt.as_tensor(
        leaf if is_tensor(leaf) else operand(leaf) if holds_tensors(leaf) else constant(leaf)
    )


def check_callable(**functions: object) -> None:
    """Raises TypeError for the first argument that cannot be called, by name."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} must be callable.")


def unpack_single(nest: Nest, strict: bool) -> Nest:
    """Returns ``x`` for ``[x]``, as TensorFlow does, unless ``strict``."""
    # A named tuple is one value to the program, also with a single field.
    single = isinstance(nest, list | tuple) and len(nest) == 1 and not hasattr(nest, "_fields")
    return nest[0] if single and not strict else nest


def shapes_agree(one: rt.Tensor, other: rt.Tensor) -> bool:
    """Returns True if both may be of one shape."""
    return TensorShape(one.shape).is_compatible_with(other.shape)


def add_operation(
    fn: Callable[..., object], name: str, parts: Sequence[Subgraph], *inputs: object
) -> list[rt.Tensor]:
    """Adds one operation ``fn(*inputs, arrays captured by each of parts ...)``."""
    types = [t for part in parts for t in part.wide_types]
    captured = [list(part.captured) for part in parts]
    count = len(inputs) + len(captured)
    # The dtypes ask for 64-bit mode, and are no arguments of the function.
    with rt.control_dependencies([op for part in parts for op in part.after]):
        made = rt.call(lambda *args: fn(*args[:count]), *inputs, *captured, *types, name=name)
    return list(made)
