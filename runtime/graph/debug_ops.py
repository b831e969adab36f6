"""``Print`` shows values on the task of the operation.

``check`` fails a step whose values are wrong.
"""

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
    """Returns ``x``, and prints ``message`` and ``data`` on stderr of the operation's task in each step with ``x``.

    ``x`` stays on its device and keeps its derivative.

    Args:
        x: Any tensor.
        data: Tensors to show, numbers or strings.
        message: Text in front of the tensors.
        first_n: Number of prints in each session; without limit by default.
        summarize: Number of elements to show of each tensor.
        name: Name scope of the operations.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     x = rt.constant([1.0, 2.0])
        ...     session.run(rt.Print(x, [x, "done"], message="x is ")).tolist()
        [1.0, 2.0]
    """
    with Graph.of(x, *data).as_default() as graph, graph.name_scope(name or "Print"):
        tensor = as_tensor(x)
        shown = host_call(
            "print",
            list(data),
            attrs={
                "message": str(message),
                "summarize": int(summarize),
                "first_n": -1 if first_n is None else first_n,
            },
            name="print",
            type="Print",
            stateful=True,
        )
        with graph.control_dependencies([shown]):
            return identity(tensor, "value")


def check(
    predicate: TensorLike,
    message: str,
    data: Sequence[TensorLike] = (),
    *,
    summarize: int = 3,
    name: str | None = None,
) -> Operation:
    """Makes an operation that fails the step unless all elements of ``predicate`` are true.

    A step runs the check if the check is fetched, or if a fetched operation depends on the check.

    Args:
        predicate: Bool tensor of any shape.
        message: Text of the error, before ``data``.
        data: Tensors to show in the error, numbers or strings.
        summarize: Number of elements to show of each tensor.
        name: Operation name.

    Raises:
        InvalidArgumentError: ``predicate`` is not bool. In a step: an element of ``predicate`` is
            false.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     x = rt.placeholder("float32", [])
        ...     with rt.control_dependencies([rt.check(x > 0.0, "x must be positive", [x])]):
        ...         root = x**0.5
        ...     print(session.run(root, {x: 9.0}))
        3.0
    """
    with Graph.of(predicate, *data).as_default():
        tensor = as_tensor(predicate)
    if tensor.dtype.kind != "b":
        raise InvalidArgumentError(
            f"check: {tensor.name!r} must be bool, compare it with something"
        )
    return host_call(
        "check",
        [tensor, *data],
        attrs={"message": str(message), "summarize": int(summarize)},
        name=name or "check",
        type="Check",
        stateful=True,
    )
