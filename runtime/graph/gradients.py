"""Reverse-mode differentiation of a graph, operation by operation.

Each backward operation recomputes its forward function inside ``jax.vjp`` and sits on the forward operation's device,
so a model that is spread over tasks differentiates too. Within one stage XLA merges the recomputed forward with the
forward itself: the flop count is that of ``jax.value_and_grad`` (a test shows it).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, Operation, Tensor
from runtime.graph.op_kinds import ArrayFn, Pure, Read
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor, identity, pure
from runtime.graph.variable import Variable
from runtime.tensor_spec import AnyArray, dtype_name

_without: weakref.WeakKeyDictionary[Operation, str] = weakref.WeakKeyDictionary()
"""Operations that have no derivative -> why not; "" where it is zero everywhere."""


def without_derivative(tensor: Tensor, why: str = "") -> Tensor:
    """Marks the operation behind ``tensor``, and gives ``tensor`` back.

    Args:
        tensor: one of the operation's outputs.
        why: what ``gradients`` says when it is asked for the derivative. Without it the derivative is zero everywhere:
            nothing depends on the operation's inputs through it.
    """
    _without[tensor.op] = why
    return tensor


def gradients(
    ys: TensorLike | Sequence[TensorLike],
    xs: object,
    grad_ys: TensorLike | Sequence[TensorLike | None] | None = None,
    *,
    stop_gradients: Sequence[TensorLike] = (),
    name: str = "gradients",
) -> Any:
    """Computes the derivatives of the sum of ``ys`` with respect to each of ``xs``.

    Args:
        ys: a tensor or a sequence of tensors.
        xs: pytree of tensors and variables.
        grad_ys: gradients of ``ys`` to start from; ones by default.
        stop_gradients: tensors and variables taken as constants.
        name: name scope of the new operations.

    Returns:
        The structure of ``xs`` with a tensor of the same shape and dtype in each place, or None where ``ys`` does not
        depend on it. Under ``control_dependencies`` they are there when those operations have run.

    Raises:
        InvalidArgumentError: a ``y`` is not a floating point tensor, or a derivative is needed that cannot be had.
    """
    outputs = [as_tensor(y) for y in (ys if isinstance(ys, Sequence) and not isinstance(ys, str | bytes) else [ys])]
    if not outputs:
        raise InvalidArgumentError("gradients: ys is empty")
    graph = outputs[0].graph
    leaves, tree = jax.tree.flatten(xs)
    starts = (
        [None] * len(outputs) if grad_ys is None else list(grad_ys if isinstance(grad_ys, list | tuple) else [grad_ys])
    )
    if len(starts) != len(outputs):
        raise InvalidArgumentError(f"gradients: {len(outputs)} ys, but {len(starts)} grad_ys")
    targets = [_sources(graph.get_operations(), leaf) for leaf in leaves]
    wanted = {tensor for group in targets for tensor in group}
    stopped = {tensor for item in stop_gradients for tensor in _sources(graph.get_operations(), item)}

    with graph.as_default(), graph.name_scope(name) as scope, graph.control_dependencies(None):
        between = _between(outputs, wanted, stopped)
        collected: dict[Tensor, list[Tensor]] = {}
        for y, start in zip(outputs, starts, strict=True):
            if not _is_differentiable(y):
                raise InvalidArgumentError(
                    f"gradients: {y.name!r} is {dtype_name(y.dtype)}; only floating point has derivatives"
                )
            collected.setdefault(y, []).append(_ones_like(y) if start is None else as_tensor(start))
        for op in sorted(between, key=lambda op: op.id, reverse=True):
            _differentiate(op, between, wanted, stopped, collected)
        reached = [[_sum(collected[t]) for t in group if t in collected] for group in targets]
        results = [_sum(parts) if parts else None for parts in reached]
    with graph.name_scope(scope):
        return jax.tree.unflatten(tree, [_after_control(graph, result) for result in results])


def _after_control(graph: Graph, gradient: Tensor | None) -> Tensor | None:
    """Returns ``gradient`` as it is after the operations of the open ``control_dependencies``.

    The backward operations themselves need not wait: they are pure functions of tensors. So they stay in the stage of
    the forward pass, and an update on another task that a gradient waits for costs no round trip between the two.
    """
    if gradient is None or not graph.under_control:
        return gradient
    return identity(gradient, "gradient", colocate_with=gradient.op)


def _sources(operations: Sequence[Operation], x: TensorLike) -> list[Tensor]:
    """Finds the tensors whose gradients add up to that of ``x``.

    For a variable these are all of its reads.
    """
    if not isinstance(x, Variable):
        return [as_tensor(x)]
    return [
        op.outputs[0]
        for op in operations
        if isinstance(op.body, Read) and op.body.variable == x.spec and op.device == x.device
    ]


def _between(ys: Sequence[Tensor], xs: set[Tensor], stopped: set[Tensor]) -> set[Operation]:
    """Finds the operations on a path from an x to a y."""
    reached: dict[Operation, bool] = {}
    stack = [(y.op, False) for y in ys]
    while stack:
        op, expanded = stack.pop()
        if op in reached and not expanded:
            continue
        if not expanded:
            reached[op] = False
            stack.append((op, True))
            stack.extend((t.op, False) for t in op.inputs if t not in stopped and t.op not in reached)
            continue
        open_ = _without.get(op) != ""
        reached[op] = open_ and any(t in xs or (t not in stopped and reached.get(t.op, False)) for t in op.inputs)
    return {op for op, on_path in reached.items() if on_path}


def _is_differentiable(tensor: Tensor) -> bool:
    return not tensor.dtype.hasobject and bool(jnp.issubdtype(tensor.dtype, np.inexact))


def _differentiate(
    op: Operation,
    between: set[Operation],
    xs: set[Tensor],
    stopped: set[Tensor],
    collected: dict[Tensor, list[Tensor]],
) -> None:
    """Adds the backward operation of ``op`` and hands its results on to the inputs."""
    used = [t for t in op.outputs if t in collected and _is_differentiable(t)]
    needed = [
        i
        for i, t in enumerate(op.inputs)
        if t not in stopped and (t in xs or t.op in between) and _is_differentiable(t)
    ]
    if not used or not needed:
        return
    if op in _without:
        raise InvalidArgumentError(f"gradients: {op.name!r}: {_without[op]}")
    if op.type == "Identity":
        collected.setdefault(op.inputs[0], []).append(_sum(collected[op.outputs[0]]))
        return
    if not isinstance(op.body, Pure):
        # A stateful operation: nothing is known of how its outputs depend on its inputs.
        return
    fn, indices = op.body.fn, [t.index for t in used]

    def backward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        inputs, cotangents = list(arrays[: len(op.inputs)]), arrays[len(op.inputs) :]

        def forward(*differentiated: jax.Array) -> tuple[AnyArray, ...]:
            for place, array in zip(needed, differentiated, strict=True):
                inputs[place] = array
            outputs = fn(*inputs)
            return tuple(outputs[i] for i in indices)

        _, vjp = jax.vjp(forward, *[inputs[i] for i in needed])
        return tuple(vjp(tuple(cotangents)))

    cotangents = [_sum(collected[t]) for t in used]
    grad = pure(
        backward,
        [*op.inputs, *cotangents],
        [(op.inputs[i].shape, op.inputs[i].dtype) for i in needed],
        f"{op.name}_grad",
        type="Gradient",
        colocate_with=op,
        wide=op.wide,
    )
    for place, result in zip(needed, grad.outputs, strict=True):
        collected.setdefault(op.inputs[place], []).append(result)


def _ones_like(y: Tensor) -> Tensor:
    op = pure(lambda a: (jnp.ones_like(a),), [y], [(y.shape, y.dtype)], "ones", type="OnesLike", colocate_with=y.op)
    return op.outputs[0]


def _sum(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    total: ArrayFn = lambda *arrays: (sum(arrays[1:], start=arrays[0]),)  # noqa: E731
    op = pure(total, parts, [(first.shape, first.dtype)], "AddN", colocate_with=first.op)
    parts[:] = [op.outputs[0]]
    return op.outputs[0]
