"""Python calls: operations that are a Python function of the client's process. They never cross the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, Operation
from runtime.graph.op_kinds import PythonCall, Shape
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor
from runtime.tensor_spec import Array, DType, canonical_dtype, dtype_name, shape_fits


def python_call(
    fn: Callable[[Any, Sequence[Array]], Sequence[object]],
    inputs: Sequence[TensorLike] = (),
    outputs: Sequence[tuple[Shape | None, DTypeLike]] = (),
    *,
    name: str,
    type: str | None = None,  # noqa: A002 - the field's own name
) -> Operation:
    """Adds an operation that a session runs by calling ``fn`` in its own process, wherever the other ones run.

    A step with such operations is run as several substeps: what they need is computed first, and what they give is fed
    to the rest. So their outputs may differ in shape from step to step, as a placeholder's may. They have no gradient.

    Args:
        fn: ``fn(session, arrays)`` gives a value for each output. It may run steps of the session.
        inputs: tensors, or what tensors are made of.
        outputs: (static shape, dtype) of each output; ``object`` stands for strings.
        name: operation name.
        type: what a reader of the graph calls it; by default the name's last part.
    """
    with Graph.of(*inputs).as_default() as graph:
        tensors = [as_tensor(i) for i in inputs]
    kind = type or name.rsplit("/", 1)[-1]
    declared = [(shape, canonical_dtype(dtype)) for shape, dtype in outputs]
    return graph.add_operation(kind, PythonCall(fn), tensors, declared, name=name)


def run_python_call(op: Operation, session: object, arrays: Sequence[Array]) -> list[Array]:
    """Calls the function of an operation; gives an array for each of its outputs.

    Raises:
        InvalidArgumentError: what it gave does not fit the operation's outputs; names the operation.
    """
    body = op.body
    assert isinstance(body, PythonCall)
    given = body.function(session, arrays)
    if len(given) != len(op.outputs):
        raise InvalidArgumentError(f"{op.name!r}: its function gave {len(given)} values, not {len(op.outputs)}")
    return [_checked(op.name, value, out.shape, out.dtype) for value, out in zip(given, op.outputs, strict=True)]


def _checked(name: str, value: object, shape: Shape | None, dtype: DType) -> Array:
    array = value if isinstance(value, np.ndarray) else _array(value, dtype)
    if array.dtype != dtype:
        raise InvalidArgumentError(f"{name!r}: its function gave {dtype_name(array.dtype)}, not {dtype_name(dtype)}")
    if shape is not None and not shape_fits(array.shape, shape):
        raise InvalidArgumentError(f"{name!r}: its function gave shape {list(array.shape)}, not {list(shape)}")
    return array


def _array(value: object, dtype: DType) -> Array:
    """Makes an array of a value that is none.

    Bytes are one string, whatever numpy would make of them.
    """
    if dtype.hasobject and isinstance(value, bytes):
        scalar = np.empty((), object)
        scalar[()] = value
        return scalar
    return np.asarray(value)
