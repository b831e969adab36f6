"""Reverse-mode differentiation of a graph, operation by operation.

Each backward operation recomputes its forward function inside ``jax.vjp`` and sits on the forward
operation's device, so a model that is spread over tasks differentiates too. Within one stage XLA
merges the recomputed forward with the forward itself: the flop count is that of
``jax.value_and_grad`` (a test shows it).
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, Operation, Tensor
from runtime.graph.op_kinds import ArrayFn, Pure, Read, VariableSpec
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor, identity, pure
from runtime.graph.variable import Variable
from runtime.tensor_spec import AnyArray, dtype_name

# Weak references, so that the operations of a dropped graph can be collected.
_without: weakref.WeakSet[Operation] = weakref.WeakSet()
"""Operations whose derivative is zero everywhere."""
_FLAT_TYPES = frozenset({"OnesLike", "floordiv"})
"""Types of such operations: where a backward pass begins, and the operator ``//``."""


def without_derivative(tensor: Tensor) -> Tensor:
    """Marks the operation of ``tensor`` as one with constant outputs, and returns ``tensor``."""
    _without.add(tensor.op)
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
        ys: A tensor or a sequence of tensors.
        xs: Pytree of tensors and variables.
        grad_ys: Gradients of ``ys`` to start from; ones by default.
        stop_gradients: Tensors and variables taken as constants.
        name: Name scope of the new operations.

    Returns:
        The structure of ``xs`` with a tensor of the same shape and dtype in each place, or the rows
        of a table's gradient. None stands for an x without influence on ``ys``. Under
        ``control_dependencies`` the gradients come after the operations of the dependencies.

    Raises:
        InvalidArgumentError: A ``y`` is not a floating point tensor, or an operation in between has
            no derivative.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     x, y = rt.placeholder("float32", []), rt.placeholder("float32", [])
        ...     slopes = rt.gradients(x * x * y, {"x": x, "y": y})
        ...     {name: slope.item() for name, slope in session.run(slopes, {x: 3.0, y: 2.0}).items()}
        {'x': 12.0, 'y': 9.0}
    """
    outputs = [
        as_tensor(y)
        for y in (ys if isinstance(ys, Sequence) and not isinstance(ys, str | bytes) else [ys])
    ]
    if not outputs:
        raise InvalidArgumentError("gradients: ys is empty")
    starts = _list_starts(grad_ys, len(outputs))
    graph = outputs[0].graph
    reads = _list_reads(graph)
    leaves, tree = jax.tree.flatten(xs)
    targets = [_find_sources(reads, leaf) for leaf in leaves]
    stopped = {tensor for item in stop_gradients for tensor in _find_sources(reads, item)}

    # Open control dependencies must not reach the backward pass: see ``_after_control``.
    with graph.as_default(), graph.name_scope(name) as scope, graph.control_dependencies(None):
        backward = _BackwardPass(
            outputs, {tensor for group in targets for tensor in group}, stopped
        )
        for y, start in zip(outputs, starts, strict=True):
            if not _is_differentiable(y):
                raise InvalidArgumentError(
                    f"gradients: {y.name!r} is {dtype_name(y.dtype)}; only floating point has "
                    "derivatives"
                )
            backward.add(y, _make_ones(y) if start is None else as_tensor(start))
        backward.run()
        # The results of a table's lookups have a gradient each.
        found = [
            [backward.find_gradient(part) for part in zip(group)]
            if isinstance(leaf, HasLookups)
            else [backward.find_gradient(group)]
            for leaf, group in zip(leaves, targets, strict=True)
        ]
    with graph.name_scope(scope):
        results = map(functools.partial(_find_result, graph), leaves, targets, found)
        return jax.tree.unflatten(tree, results)


@runtime_checkable
class HasLookups(Protocol):
    """A table, whose gradient is that of the results of its lookups."""

    def lookup_results(self) -> Sequence[Tensor]:
        """Returns the results of all lookups."""

    def make_gradient(self, gradients: Mapping[Tensor, Tensor | None]) -> object:
        """Returns the gradient by those of lookups' results; None without any."""


def _find_result(
    graph: Graph, x: object, sources: Sequence[Tensor], found: Sequence[Tensor | None]
) -> object:
    """Returns the gradient of an x; for a table the rows of its lookups, whose gradients were found."""
    after = [_after_control(graph, gradient) for gradient in found]
    if isinstance(x, HasLookups):
        return x.make_gradient(dict(zip(sources, after, strict=True)))
    return after[0]


def _list_starts(grad_ys: object, count: int) -> Sequence[Any]:
    """Returns the given gradient of each of ``count`` outputs; None for ones."""
    if grad_ys is None:
        return [None] * count
    # As in TensorFlow 1, a single gradient needs no list.
    starts = grad_ys if isinstance(grad_ys, list | tuple) else [grad_ys]
    if len(starts) != count:
        raise InvalidArgumentError(f"gradients: {count} ys, but {len(starts)} grad_ys")
    return starts


def _after_control(graph: Graph, gradient: Tensor | None) -> Tensor | None:
    """Returns ``gradient`` after the operations of the open ``control_dependencies``.

    The backward operations are pure functions and need not wait. So the backward pass stays in the
    stage of the forward pass, and an update on another task before the gradient costs no round trip
    between the two passes.
    """
    if gradient is None or not graph.under_control:
        return gradient
    return identity(gradient, "gradient", colocate_with=gradient.op)


def _list_reads(graph: Graph) -> dict[tuple[VariableSpec, str], list[Tensor]]:
    """Returns the tensors that read each variable, by specification and device."""
    reads: dict[tuple[VariableSpec, str], list[Tensor]] = defaultdict(list)
    for op in graph.get_operations():
        if isinstance(op.body, Read):
            reads[op.body.variable, op.device].append(op.outputs[0])
    return reads


def _find_sources(
    reads: Mapping[tuple[VariableSpec, str], Sequence[Tensor]], x: TensorLike
) -> Sequence[Tensor]:
    """Finds the tensors whose gradients add up to the gradient of ``x``: for a variable all of its reads."""
    if isinstance(x, HasLookups):
        results: Sequence[Tensor] = x.lookup_results()
        return results
    return reads.get((x.spec, x.device), ()) if isinstance(x, Variable) else [as_tensor(x)]


def _find_between(
    ys: Sequence[Tensor], xs: Collection[Tensor], stopped: Collection[Tensor]
) -> set[Operation]:
    """Finds the operations on a path from an x to a y."""
    on_path: dict[Operation, bool] = {}
    stack = [(y.op, False) for y in ys]
    # Depth first, with a stack: a deep graph would exceed Python's recursion limit.
    while stack:
        op, is_expanded = stack.pop()
        if is_expanded:
            is_flat = op in _without or op.type in _FLAT_TYPES
            on_path[op] = not is_flat and any(
                t in xs or (t not in stopped and on_path[t.op]) for t in op.inputs
            )
        elif op not in on_path:
            on_path[op] = False
            stack.append((op, True))
            stack.extend(
                (t.op, False) for t in op.inputs if t not in stopped and t.op not in on_path
            )
    return {op for op, is_between in on_path.items() if is_between}


def _is_differentiable(tensor: Tensor) -> bool:
    return not tensor.dtype.hasobject and bool(jnp.issubdtype(tensor.dtype, np.inexact))


class _BackwardPass:
    """A backward pass: the gradients that each tensor has received so far.

    Args:
        ys: the tensors where the pass begins.
        xs: the tensors where the pass ends.
        stopped: tensors taken as constants.
    """

    def __init__(
        self, ys: Sequence[Tensor], xs: Collection[Tensor], stopped: Collection[Tensor]
    ) -> None:
        self._xs = xs
        self._stopped = stopped
        self._between = _find_between(ys, xs, stopped)
        self._gradients: dict[Tensor, list[Tensor]] = {}

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds a gradient to a tensor."""
        self._gradients.setdefault(tensor, []).append(gradient)

    def run(self) -> None:
        """Adds the backward operations, from the last operation of the graph to the first."""
        # An operation has a larger number than its inputs, so all gradients of an operation have
        # arrived when its turn comes.
        for op in sorted(self._between, key=lambda op: op.id, reverse=True):
            self._differentiate_operation(op)

    def find_gradient(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Returns the sum of the gradients of ``tensors``; None if no gradient has reached any."""
        parts = [_sum_parts(self._gradients[t]) for t in tensors if t in self._gradients]
        return _sum_parts(parts) if parts else None

    def _differentiate_operation(self, op: Operation) -> None:
        """Adds the backward operation of ``op``, and passes its results to the inputs."""
        # An integer output has no gradient, though a float input may.
        used = [t for t in op.outputs if t in self._gradients and _is_differentiable(t)]
        needed = [i for i, t in enumerate(op.inputs) if self._needs_gradient(t)]
        if not used or not needed:
            return
        if op.type == "Identity":
            self.add(op.inputs[0], _sum_parts(self._gradients[op.outputs[0]]))
        # Of a stateful operation nobody knows how its outputs depend on its inputs.
        elif isinstance(op.body, Pure):
            cotangents = [_sum_parts(self._gradients[t]) for t in used]
            backward = pure(
                Backward(op, tuple(needed), tuple(t.index for t in used)),
                [*op.inputs, *cotangents],
                [(op.inputs[i].shape, op.inputs[i].dtype) for i in needed],
                f"{op.name}_grad",
                type="Gradient",
                colocate_with=op,
                wide=op.wide,
            )
            for place, result in zip(needed, backward.outputs, strict=True):
                self.add(op.inputs[place], result)

    def _needs_gradient(self, tensor: Tensor) -> bool:
        is_on_path = tensor in self._xs or tensor.op in self._between
        return is_on_path and tensor not in self._stopped and _is_differentiable(tensor)


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward function of a pure operation, from its inputs and cotangents to cotangents of inputs.

    Attributes:
        forward: the operation.
        needed: places of the inputs whose cotangents are returned.
        used: places of the outputs whose cotangents are given.
    """

    forward: Operation
    needed: tuple[int, ...]
    used: tuple[int, ...]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the cotangents of the needed inputs."""
        count, body = len(self.forward.inputs), self.forward.body
        assert isinstance(body, Pure)
        inputs, cotangents = list(arrays[:count]), arrays[count:]
        assert len(cotangents) == len(self.used), "an output has no cotangent"

        def forward(*differentiated: jax.Array) -> tuple[AnyArray, ...]:
            for place, array in zip(self.needed, differentiated, strict=True):
                inputs[place] = array
            outputs = body(*inputs)
            return tuple(outputs[i] for i in self.used)

        # The forward pass is computed anew here. XLA merges it with the forward pass of the same
        # stage.
        _, vjp = jax.vjp(forward, *[inputs[i] for i in self.needed])
        return tuple(vjp(tuple(cotangents)))


def _make_ones(y: Tensor) -> Tensor:
    op = pure(
        lambda a: (jnp.ones_like(a),),
        [y],
        [(y.shape, y.dtype)],
        "ones",
        type="OnesLike",
        colocate_with=y.op,
    )
    return op.outputs[0]


def _sum_parts(parts: list[Tensor]) -> Tensor:
    """Returns the sum of tensors, which is left as the only part: a second call adds no operation."""
    if len(parts) > 1:
        first = parts[0]
        total: ArrayFn = lambda *arrays: (sum(arrays[1:], start=arrays[0]),)  # noqa: E731
        parts[:] = pure(
            total, parts, [(first.shape, first.dtype)], "AddN", colocate_with=first.op
        ).outputs
    assert len(parts) == 1, "a second call would add an operation"
    return parts[0]
