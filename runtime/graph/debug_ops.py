"""``Print`` shows values on the task where it runs; ``check`` fails a step whose values are wrong."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, Operation, Tensor
from runtime.graph.host_ops import host_call
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor, identity


def Print(  # noqa: N802 - TF1's name
    x: TensorLike,
    data: Sequence[TensorLike],
    message: str = "",
    first_n: int | None = None,
    summarize: int = 3,
    name: str | None = None,
) -> Tensor:
    """Gives ``x``, and prints ``message`` and ``data`` whenever ``x`` is used, on stderr of the task that it is on.

    ``x`` itself stays where it is and keeps its derivative.

    Args:
        x: any tensor.
        data: tensors to show, numbers or strings.
        message: what stands in front of them.
        first_n: print only so many times in each session; always by default.
        summarize: how many elements of each tensor to show.
        name: name scope of the operations.
    """
    with Graph.of(x, *data).as_default() as graph, graph.name_scope(name or "Print"):
        tensor = as_tensor(x)
        shown = host_call(
            "print",
            list(data),
            attrs={"message": str(message), "summarize": int(summarize), "first_n": -1 if first_n is None else first_n},
            name="print",
            type="Print",
            stateful=True,
        )
        with graph.control_dependencies([shown]):
            return identity(tensor, "value")


def check(
    predicate: TensorLike, message: str, data: Sequence[TensorLike] = (), *, summarize: int = 3, name: str | None = None
) -> Operation:
    """Makes an operation that fails the step unless all of ``predicate`` is true.

    It runs when it is fetched or when something depends on it: ``with rt.control_dependencies([rt.check(...)]):``.

    Args:
        predicate: bool tensor of any shape.
        message: what the error says; it goes on with ``data``.
        data: tensors to show in the error, numbers or strings.
        summarize: how many elements of each tensor to show.
        name: operation name.

    Raises:
        InvalidArgumentError: ``predicate`` is not bool; and, when the step runs, not all of it is true.
    """
    with Graph.of(predicate, *data).as_default():
        tensor = as_tensor(predicate)
    if tensor.dtype.kind != "b":
        raise InvalidArgumentError(f"check: {tensor.name!r} must be bool, compare it with something")
    return host_call(
        "check",
        [tensor, *data],
        attrs={"message": str(message), "summarize": int(summarize)},
        name=name or "check",
        type="Check",
        stateful=True,
    )
