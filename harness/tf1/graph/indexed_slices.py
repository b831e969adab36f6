"""IndexedSlices: the rows of a gradient, for programs that average or clip the gradients of a lookup.

Gradients are dense here. The gradient of a gather is a tensor, which counts as ``IndexedSlices`` of
all its rows. So a program may read the parts and make new slices of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.ops.lift import Public, constant
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf", "Graphs, sessions and control")

_LOOKUPS = ("Gather", "embedding_lookup")
"""Types of the operations whose gradient TensorFlow gives as slices."""


class _Parts(NamedTuple):
    values: rt.Tensor
    indices: rt.Tensor
    dense_shape: rt.Tensor


_KNOWN = "__indexed_slices"
"""Collection of a graph: the tensors of slices with their parts, made once as a graph may be final later."""


def _known(graph: rt.Graph) -> dict[rt.Tensor, _Parts]:
    return dict(graph.get_collection(_KNOWN))


class _IsSlices(type):
    def __instancecheck__(cls, tensor: object) -> bool:
        return isinstance(tensor, rt.Tensor) and (
            tensor in _known(tensor.graph) or _is_of_lookup(tensor)
        )


@public.add()
class IndexedSlices(metaclass=_IsSlices):
    """Rows of a tensor that is zero elsewhere; a dense tensor here, which keeps the parts.

    The rows of one place add up. Without ``dense_shape``, ``indices`` come from the gradients of
    one table.
    """

    def __new__(  # type: ignore[misc]
        cls, values: rt.TensorLike, indices: rt.TensorLike, dense_shape: Any = None
    ) -> rt.Tensor:
        """Returns the dense tensor."""
        rows, places = convert_to_tensor(values), convert_to_tensor(indices)
        shape = _find_size(places) if dense_shape is None else rt.as_tensor(dense_shape)
        known = None if shape is None else getattr(shape.op.body, "value", None)
        if known is None:
            raise ValueError(
                "tf.IndexedSlices: give dense_shape, with the numbers of the whole shape: tensors "
                "are dense here"
            )
        size = int(np.asarray(known)[0])

        def add_rows(rows: jax.Array, places: jax.Array) -> jax.Array:
            return jnp.zeros((size, *rows.shape[1:]), rows.dtype).at[places].add(rows)

        dense: rt.Tensor = rt.call(add_rows, rows, places, name="IndexedSlices")
        assert shape is not None
        dense.graph.add_to_collection(_KNOWN, (dense, _Parts(rows, places, shape)))
        return dense


def find_part(tensor: rt.Tensor, name: str) -> rt.Tensor:
    """Returns the values, the indices or the dense shape of slices.

    Args:
        tensor: Tensor of slices.
        name: Name of the part.

    Raises:
        AttributeError: The tensor is no slices.
    """
    parts = _known(tensor.graph).get(tensor)
    if parts is None:
        if not _is_of_lookup(tensor):
            raise AttributeError(
                f"gradients are dense here: {tensor.name!r} is the whole tensor, not "
                f"tf.IndexedSlices with {name}"
            )
        shape = [size for size in tensor.shape or () if size is not None]
        graph = tensor.graph
        # TensorFlow makes the parts with the gradient, so a program may read them in a final graph.
        is_final = graph.finalized
        graph.unsafe_unfinalize()
        try:
            # The parts are constants of the whole graph, wherever they are first asked for.
            with graph.as_default(), rt.name_scope(None), rt.control_dependencies(None):
                places = constant(np.arange(shape[0], dtype=np.int32))
                parts = _Parts(tensor, places, constant(np.array(shape, np.int64)))
        finally:
            graph.finalized = is_final
        tensor.graph.add_to_collection(_KNOWN, (tensor, parts))
    found: rt.Tensor = getattr(parts, name)
    return found


def _is_of_lookup(tensor: rt.Tensor) -> bool:
    """Returns True for the gradient of a table whose rows were looked up, and which was used for nothing else."""
    op = tensor.op
    # The gradients of several lookups of one table are added up.
    if op.type == "AddN":
        return all(map(_is_of_lookup, op.inputs))
    # The table is the first input of a lookup, so its gradient is the first output.
    if op.type != "Gradient" or tensor.index or tensor.shape is None or None in tensor.shape:
        return False
    return any(
        other.type in _LOOKUPS
        and op.name.endswith(f"{other.name}_grad")
        and other.inputs[0] is op.inputs[0]
        for other in tensor.graph.get_operations()
    )


def _find_size(indices: rt.Tensor) -> rt.Tensor | None:
    """Returns the dense shape of the slices from which ``indices`` are computed; None for none."""
    shapes = {p.indices.op: p.dense_shape for p in _known(indices.graph).values()}
    stack, seen = [indices.op], set[rt.Operation]()
    while stack:
        op = stack.pop()
        if op in shapes:
            return shapes[op]
        if op not in seen:
            seen.add(op)
            stack.extend(tensor.op for tensor in op.inputs)
    return None
