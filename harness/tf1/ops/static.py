"""Values that must be known before a step runs, such as shapes and axes, given as numbers or as tensors.

XLA compiles for static shapes, so ``tf.reshape(x, tf.stack([tf.shape(x)[0], 10]))`` cannot take its
shape from a tensor that is computed in the step. But the sizes in it are known when the step is
traced, because each shape of a placeholder is traced anew. So a tensor that depends on constants
and on shapes of other tensors only is evaluated then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import runtime as rt
from harness.tf1.ops.shapes import Dimension, TensorShape

Pure = rt.lowlevel.op_kinds.Pure

# Weak, so that a graph that a program has dropped is not kept by its operations.
_shape_ops: weakref.WeakSet[rt.Operation] = weakref.WeakSet()
"""Operations that look at nothing but the static shape of their input."""


def looks_at_shape_only(tensor: rt.Tensor) -> rt.Tensor:
    """Marks the operation behind ``tensor`` (tf.shape, tf.size, tf.rank) and gives ``tensor`` back."""
    _shape_ops.add(tensor.op)
    return tensor


_host_ops: weakref.WeakSet[rt.Operation] = weakref.WeakSet()
"""Operations whose values the client has on its host before the rest of the step runs."""


def known_on_host(op: rt.Operation) -> None:
    """Marks an operation whose values are on the client's host: what a file holds, or an element of a dataset."""
    _host_ops.add(op)


_default_ops: weakref.WeakSet[rt.Operation] = weakref.WeakSet()
"""Operations whose constant is a default, which a step may feed."""


def known_unless_fed(tensor: rt.Tensor) -> rt.Tensor:
    """Marks the operation behind ``tensor`` (tf.placeholder_with_default) and gives ``tensor`` back."""
    _default_ops.add(tensor.op)
    return tensor


def is_default(op: rt.Operation) -> bool:
    """Returns True for an operation that ``known_unless_fed`` has marked."""
    return op in _default_ops


@dataclass(frozen=True, eq=False)
class Deferred:
    """A value that is found while a step is traced.

    Attributes:
        structure: nested lists of numbers and tensors.
        sources: tensors whose shapes it depends on.
    """

    structure: Any
    sources: tuple[rt.Tensor, ...]

    @property
    def found_on_host(self) -> bool:
        """True if the value depends on values, not shapes, of the client's host."""
        return any(_on_host(tensor) for tensor in _tensors(self.structure))

    def value(self, arrays: Sequence[Any]) -> Any:
        """Returns the value as Python numbers, from the sources' arrays (or tracers of them)."""
        known: dict[rt.Tensor, Any] = dict(zip(self.sources, arrays, strict=True))
        # The caller is traced. Shapes are numbers already, so the value can be computed at once.
        with jax.ensure_compile_time_eval():
            return _fill(self.structure, known)


def static(value: object) -> Any:
    """Returns ``value`` as Python numbers and lists, or a ``Deferred`` when it depends on shapes of tensors."""
    if value is None or isinstance(value, str):
        return value
    structure = _plain(value)
    sources: dict[rt.Tensor, None] = {}
    found = _tensors(structure)
    if not found:
        return structure
    for tensor in found:
        _collect(tensor, sources)
    # Without sources, only constants are behind the tensors, whose value is known now.
    deferred = Deferred(structure, tuple(sources))
    return deferred if sources else deferred.value(())


def takes_shapes_only(op: rt.Operation) -> bool:
    """Returns True for a function that ``looks_at_shape_only`` has marked."""
    return op in _shape_ops


def known_while_tracing(tensor: rt.Tensor, defaults: bool = False) -> bool:
    """Returns True if the value depends on constants and on shapes of other tensors only.

    Args:
        tensor: the tensor of the value.
        defaults: whether a default that a step may feed counts as a constant.
    """
    seen: set[rt.Operation] = set()
    stack = [tensor.op]
    while stack:
        op = stack.pop()
        # What lies behind a shape does not count, whatever computes it.
        if op in seen or takes_shapes_only(op) or hasattr(op.body, "value"):
            continue
        if not op.inputs or not _is_pure(op) or not defaults and is_default(op):
            return False
        seen.add(op)
        stack.extend(t.op for t in op.inputs)
    return True


def static_number(value: object, what: str) -> Any:
    """Returns ``value`` where it is known while the graph is built.

    Raises InvalidArgumentError, naming ``what``, where it depends on the step.
    """
    known = static(value)
    if isinstance(known, Deferred):
        raise rt.InvalidArgumentError(
            f"{what} must be known while the graph is built: give numbers, not a tensor"
        )
    return known


def _plain(value: object) -> Any:
    if isinstance(value, TensorShape):
        return [None if d.value is None else d.value for d in value]
    if isinstance(value, Dimension):
        return value.value
    if isinstance(value, rt.Variable):
        return rt.as_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _tensors(structure: object) -> list[rt.Tensor]:
    if isinstance(structure, list):
        return [tensor for item in structure for tensor in _tensors(item)]
    return [structure] if isinstance(structure, rt.Tensor) else []


def _collect(tensor: rt.Tensor, sources: dict[rt.Tensor, None]) -> None:
    """Adds the tensors that the value of ``tensor`` is found from while tracing, and fixes all values between."""
    op = tensor.op
    # Only the shape of the input counts, so what lies behind the input does not.
    if op in _shape_ops:
        sources[op.inputs[0]] = None
    elif _is_pure(op):
        for each in op.inputs:
            _collect(each, sources)
    elif not hasattr(op.body, "value"):
        sources[tensor] = None
        return
    op.graph.fixed.setdefault(tensor, np.asarray(_default_of(op)))


def _default_of(op: rt.Operation) -> rt.lowlevel.Array | None:
    """Returns the value of a constant, or of a default; None for other operations."""
    value: rt.lowlevel.Array | None = getattr(op.body, "value", None)
    return _default_of(op.inputs[0].op) if is_default(op) else value


def _on_host(tensor: rt.Tensor) -> bool:
    op = tensor.op
    if op in _shape_ops or op in _host_ops:
        return op in _host_ops
    return _is_pure(op) and any(_on_host(each) for each in op.inputs)


def _is_pure(op: rt.Operation) -> bool:
    return isinstance(op.body, Pure)


def _fill(structure: object, known: dict[rt.Tensor, Any]) -> Any:
    if isinstance(structure, list):
        return [_fill(item, known) for item in structure]
    if not isinstance(structure, rt.Tensor):
        return structure
    array = _evaluate(structure, known)
    # A tracer has no value before the step, and XLA needs sizes to compile.
    if isinstance(array, jax.core.Tracer):
        raise rt.InvalidArgumentError(
            f"the value of {structure.name!r} is known only in the step, but XLA needs it before: "
            "give Python numbers, or something computed from tf.shape of tensors"
        )
    return np.asarray(array).tolist()


def _evaluate(tensor: rt.Tensor, known: dict[rt.Tensor, Any]) -> Any:
    op, body = tensor.op, tensor.op.body
    if op in _shape_ops:
        assert isinstance(body, Pure), "a shape is computed from its tensor"
        return body(known[op.inputs[0]])[tensor.index]
    if tensor in known:
        return known[tensor]
    if hasattr(body, "value"):
        return body.value
    assert isinstance(body, Pure), f"{op.name} should be among the sources"
    results = body(*(_evaluate(each, known) for each in op.inputs))
    # Operations that several others read are evaluated once.
    known.update(zip(op.outputs, results, strict=True))
    return known[tensor]


def fill_deferred(
    arguments: Mapping[str, Any], arrays: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Replaces every ``Deferred`` in ``arguments`` by its value; ``arrays`` holds each one's source arrays."""
    return {k: v.value(arrays[k]) if isinstance(v, Deferred) else v for k, v in arguments.items()}
