"""Host calls: operations that run a kernel of the task in place of a computation."""

from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from runtime.graph.graph import Graph, Operation, Tensor
from runtime.graph.op_kinds import Attrs, Host, Shape
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor


def host_call(
    kernel: str,
    inputs: Sequence[TensorLike] = (),
    outputs: Sequence[tuple[Shape | None, DTypeLike]] = (),
    *,
    attrs: Attrs | None = None,
    name: str | None = None,
    type: str | None = None,  # noqa: A002 - the field's own name
    stateful: bool = False,
    resource: str = "",
) -> Operation:
    """Adds an operation that calls a registered kernel of the task by name.

    No code crosses the wire.

    Args:
        kernel: The registered name, such as "summary/scalar".
        inputs: Tensors, variables, arrays or numbers.
        outputs: (static shape, dtype) of each output; ``object`` stands for strings.
        attrs: JSON-compatible attributes of the call.
        name: Operation name; by default the last part of the kernel's name.
        type: Type of the operation; by default the last part of the kernel's name.
        stateful: True if the operation runs for its effect.
        resource: Name of the store resource of the call. The operation then lives with the
            variables.
    """
    with Graph.of(*inputs).as_default() as graph:
        tensors: list[Tensor] = [as_tensor(i) for i in inputs]
    # The first part of a kernel's name is its room on the task, and says nothing to a reader of the
    # graph.
    label = kernel.rsplit("/", 1)[-1]
    return graph.add_operation(
        type or label,
        Host(kernel, dict(attrs or {}), stateful, resource),
        tensors,
        [(shape, np.dtype(dtype)) for shape, dtype in outputs],
        name=name or label,
    )
