"""Python calls: operations that call a Python function in the client's process.

The function never crosses the wire.
"""

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
    """Adds an operation that calls ``fn`` in the process of the session, wherever other operations run.

    A step with Python calls runs as several substeps. The inputs of the calls are computed first,
    and their results are fed to the rest. So outputs may differ in shape from step to step, like
    placeholders. Python calls have no gradient.

    Args:
        fn: ``fn(session, arrays)`` returns a value for each output. The function may run steps of
            the session.
        inputs: Tensors, variables, arrays or numbers.
        outputs: (static shape, dtype) of each output; ``object`` stands for strings.
        name: Operation name.
        type: Type of the operation; by default the name's last part.
    """
    with Graph.of(*inputs).as_default() as graph:
        tensors = [as_tensor(i) for i in inputs]
    # The type has no scope, since device functions compare types.
    kind = type or name.rsplit("/", 1)[-1]
    declared = [(shape, canonical_dtype(dtype)) for shape, dtype in outputs]
    return graph.add_operation(kind, PythonCall(fn), tensors, declared, name=name)


def run_python_call(op: Operation, session: object, arrays: Sequence[Array]) -> list[Array]:
    """Calls the function of an operation, and returns an array for each output.

    Raises:
        InvalidArgumentError: the results do not fit the operation's outputs. The message names the
            operation.
    """
    body = op.body
    assert isinstance(body, PythonCall)
    # The function is user code: its errors reach the caller of the step unchanged.
    given = body.function(session, arrays)
    if len(given) != len(op.outputs):
        raise InvalidArgumentError(
            f"{op.name!r}: its function gave {len(given)} values, not {len(op.outputs)}"
        )
    return [
        _check_result(op.name, value, out.shape, out.dtype)
        for value, out in zip(given, op.outputs, strict=True)
    ]


def _check_result(name: str, value: object, shape: Shape | None, dtype: DType) -> Array:
    # Numpy drops zero bytes at the end of a string, unless the array is one of objects.
    kept = object if dtype.hasobject and isinstance(value, bytes) else None
    array = np.asarray(value, kept)
    if array.dtype != dtype:
        raise InvalidArgumentError(
            f"{name!r}: its function gave {dtype_name(array.dtype)}, not {dtype_name(dtype)}"
        )
    if shape is not None and not shape_fits(array.shape, shape):
        raise InvalidArgumentError(
            f"{name!r}: its function gave shape {list(array.shape)}, not {list(shape)}"
        )
    return array
