"""Graphs, sessions, scopes and control: the names of ``tf`` that are the runtime's own, by TensorFlow's arguments."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

import runtime as rt
from harness.tf1.graph.config import apply as _apply
from harness.tf1.graph.indexed_slices import find_part
from harness.tf1.names.table import TABLE
from harness.tf1.ops.lift import Public, constant, operand
from harness.tf1.ops.shapes import get_shape, set_shape
from harness.tf1.ops.slices import pick_item
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf", "Graphs, sessions and control")

_Tuple = type(())  # ``tuple`` is TensorFlow's function here


@public.add()
class GraphKeys(rt.GraphKeys):
    """Names of the standard collections."""

    VARIABLES = rt.GraphKeys.GLOBAL_VARIABLES
    MODEL_VARIABLES = "model_variables"
    MOVING_AVERAGE_VARIABLES = "moving_average_variables"
    REGULARIZATION_LOSSES = "regularization_losses"
    UPDATE_OPS = "update_ops"
    ACTIVATIONS = "activations"
    WEIGHTS = "weights"
    BIASES = "biases"
    TABLE_INITIALIZERS = "table_initializer"


class _AnySession(type):
    """The class that makes ``isinstance(s, tf.Session)`` true for the sessions of a Supervisor."""

    def __instancecheck__(cls, instance: object) -> bool:
        # Programs without a Supervisor need not import one.
        from harness.training.start.managed_session import ManagedSession

        return isinstance(instance, rt.Session | ManagedSession)


@public.add()
class Session(rt.Session, metaclass=_AnySession):
    """``rt.Session``, which takes a ``tf.ConfigProto`` too."""

    def __init__(self, target: str = "", graph: rt.Graph | None = None, config: Any = None) -> None:
        super().__init__(target, graph, _apply(config))


@public.add()
class InteractiveSession(rt.InteractiveSession):
    """``rt.InteractiveSession``."""

    def __init__(self, target: str = "", graph: rt.Graph | None = None, config: Any = None) -> None:
        super().__init__(target, graph, _apply(config))


@dataclass(frozen=True, kw_only=True)
class RunOptions(rt.RunOptions):
    """``rt.RunOptions``; ``output_partition_graphs`` is accepted, without an effect."""

    output_partition_graphs: bool = False


def _as_graph_def(graph: rt.Graph) -> Any:
    from harness.tensorboard.graph_def import graph_def

    return graph_def(graph)


def write_graph(graph_or_graph_def: Any, logdir: str, name: str, as_text: bool = True) -> str:
    """Writes a graph, or its message, as TensorFlow's ``GraphDef``; gives the path of the file."""
    # Programs that write no graph need no text format.
    from google.protobuf import text_format

    message = graph_or_graph_def
    if isinstance(message, rt.Graph):
        message = _as_graph_def(message)
    os.makedirs(logdir, exist_ok=True)
    path = os.path.join(logdir, name)
    text = text_format.MessageToString(message).encode() if as_text else message.SerializeToString()
    with open(path, "wb") as file:
        file.write(text)
    return path


# -- graphs and what belongs to them ---------------------------------------------------------------


class _AnyGraph(type):
    """The class that makes ``isinstance(g, tf.Graph)`` true for the graphs of ``rt``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, rt.Graph)


@public.add()
class Graph(rt.Graph, metaclass=_AnyGraph):
    """``rt.Graph``, whose tensors, operations and sessions have TensorFlow's methods too."""

    # Programs unfinalize a graph by this private name of TensorFlow's.
    _unsafe_unfinalize = rt.Graph.unsafe_unfinalize

    def as_graph_def(self, from_version: int | None = None, add_shapes: bool = False) -> Any:
        """Returns the graph as TensorFlow's message, as event files hold it."""
        return _as_graph_def(self)

    def extra_attribute(self, owner: object, name: str) -> Any:
        """Returns what TensorFlow's programs find under ``name`` of a tensor, operation, variable or session."""
        for kind, names in _EXTRA.items():
            if isinstance(owner, kind) and name in names:
                return names[name](owner)
        return super().extra_attribute(owner, name)

    def pick_item(self, tensor: Any, item: object) -> rt.Tensor:
        """Adds the operation ``tensor[item]``; the ends of slices may be tensors."""
        return pick_item(tensor, item)


_EXTRA: Mapping[Any, Mapping[str, Callable[[Any], Any]]] = {
    rt.Tensor | rt.Variable: {
        "get_shape": lambda tensor: functools.partial(get_shape, tensor),
        "set_shape": lambda tensor: functools.partial(set_shape, tensor),
    },
    rt.Tensor: {
        "consumers": lambda tensor: (
            lambda: [op for op in tensor.graph.get_operations() if tensor in op.inputs]
        ),
        # Programs read these of tf.IndexedSlices, which tf.gradients gives in TensorFlow for a
        # gather.
        "values": functools.partial(find_part, name="values"),
        "indices": functools.partial(find_part, name="indices"),
        "dense_shape": functools.partial(find_part, name="dense_shape"),
    },
    rt.Operation: {
        "values": lambda op: lambda: [*op.outputs],
        "node_def": lambda op: SimpleNamespace(name=op.name, op=op.type, device=op.device),
    },
    rt.Session: {"graph_def": lambda session: _as_graph_def(session.graph)},
}
"""Class -> TensorFlow's attribute of its objects -> the function that makes the attribute of an object."""


# -- scopes ----------------------------------------------------------------------------------------


@public.add()
def device(device_name_or_function: Any) -> contextlib.AbstractContextManager[None]:
    """Calls ``rt.device``."""
    return rt.device(device_name_or_function)


@public.add()
def name_scope(
    name: str | None, default_name: str | None = None, values: object = None
) -> contextlib.AbstractContextManager[str]:
    """Calls ``rt.name_scope``; ``default_name`` where ``name`` is None."""
    return rt.name_scope(default_name if name is None else name)


@public.add()
def op_scope(
    values: object, name: str | None, default_name: str | None = None
) -> contextlib.AbstractContextManager[str]:
    """Calls ``name_scope``, with the argument order of before 1.0."""
    return name_scope(name, default_name, values)


@public.add()
def control_dependencies(
    control_inputs: Iterable[object] | None,
) -> contextlib.AbstractContextManager[None]:
    """Calls ``rt.control_dependencies``."""
    return rt.control_dependencies(control_inputs)


@public.add()
@contextlib.contextmanager
def colocate_with(op: object, ignore_existing: bool = False) -> Iterator[None]:
    """Places the operations made within where ``op`` asked to be."""
    # The open device scopes must not be merged with the device of ``op``.
    with rt.device(None), rt.device(rt.get_default_graph().as_operation(op).device or None):
        yield


@public.add()
def add_to_collection(name: str, value: object) -> None:
    """Calls ``Graph.add_to_collection`` of the default graph."""
    rt.get_default_graph().add_to_collection(name, value)


@public.add()
def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """Calls ``Graph.get_collection`` of the default graph."""
    return rt.get_default_graph().get_collection(key, scope)


@public.add()
def get_collection_ref(key: str) -> list[Any]:
    """Calls ``Graph.get_collection_ref`` of the default graph."""
    return rt.get_default_graph().get_collection_ref(key)


# -- control ---------------------------------------------------------------------------------------


@public.add()
def tuple(
    tensors: Sequence[rt.TensorLike],
    name: str | None = None,
    control_inputs: Sequence[object] | None = None,
) -> list[rt.Tensor | None]:
    """Returns the tensors, each of which waits for all of them."""
    # Gradients come in with None for variables that take no part, and go out so.
    gate = [t for t in tensors if t is not None]
    with rt.name_scope(name or "tuple"), rt.control_dependencies([*gate, *(control_inputs or ())]):
        return [None if t is None else rt.identity(t, "control_dependency") for t in tensors]


@public.add()
def stop_gradient(input: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Calls ``jax.lax.stop_gradient``; ``tf.gradients`` gives None through it."""
    return rt.lowlevel.without_derivative(
        rt.stop_gradient(operand(input), name=name or "StopGradient")
    )


@public.add()
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    name: str = "gradients",
    colocate_gradients_with_ops: bool = False,
    gate_gradients: object = False,
    aggregation_method: object = None,
    stop_gradients: Any = None,
) -> list[Any]:
    """Calls ``rt.gradients``: a tensor or None for each of ``xs``, beside its forward operation."""
    # TensorFlow returns a list for a single x, too.
    many = list(xs) if isinstance(xs, list | _Tuple) else [xs]
    # JAX has no derivative of nothing, where TensorFlow returns None for each x.
    if not many or isinstance(ys, list | _Tuple) and not ys:
        return [None] * len(many)
    if any(each is None for each in (*(ys if isinstance(ys, list | _Tuple) else [ys]), *many)):
        raise AttributeError(
            "tf.gradients: None is no tensor; it is the derivative by what a tensor does not depend on"
        )
    stopped = [] if stop_gradients is None else stop_gradients
    stopped = stopped if isinstance(stopped, list | _Tuple) else [stopped]
    return list(rt.gradients(ys, many, grad_ys, stop_gradients=stopped, name=name or "gradients"))


@public.add()
def Print(
    input_: rt.TensorLike,
    data: Sequence[rt.TensorLike],
    message: str | None = None,
    first_n: int | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``rt.Print``: returns ``input_``, and prints ``data`` on the task where that is used."""
    shown, most = [constant(d) for d in data], 3 if summarize is None else summarize
    return rt.Print(operand(input_), shown, message or "", first_n, most, name)


@public.add()
def Assert(
    condition: rt.TensorLike,
    data: Sequence[rt.TensorLike],
    summarize: int | None = None,
    name: str | None = None,
) -> rt.Operation:
    """Calls ``rt.check``: fails the step with InvalidArgumentError unless all of ``condition`` is true."""
    return _check(constant(condition), "assertion failed", data, summarize, name)


def _check(
    holds: rt.TensorLike,
    said: str,
    data: Sequence[rt.TensorLike],
    summarize: int | None,
    name: str | None,
) -> rt.Operation:
    shown = [constant(d) for d in data]
    most = 3 if summarize is None else summarize
    return rt.check(holds, f"{said.lstrip()}: ", shown, summarize=most, name=name)


def _add_comparison(shown: str, comparison: str, sign: str) -> None:
    told = f"x {sign} y"

    def check(
        x: rt.TensorLike,
        y: rt.TensorLike,
        data: Sequence[rt.TensorLike] | None = None,
        summarize: int | None = None,
        message: str | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        x, y = convert_to_tensor(x), convert_to_tensor(y)
        data = [x, y] if data is None else data
        said = f"{message or ''} {told} does not hold for all elements"
        return _check(TABLE["tf"][comparison](x, y), said, data, summarize, name or shown)

    public.define(shown, check, f"``rt.check`` of ``{told}`` for all elements.")


def _add_sign(shown: str, comparison: str, sign: str) -> None:
    told = f"x {sign} 0"

    def check(
        x: rt.TensorLike,
        data: Sequence[rt.TensorLike] | None = None,
        summarize: int | None = None,
        message: str | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        x = convert_to_tensor(x)
        data = [x] if data is None else data
        said = f"{message or ''} {told} does not hold for all elements"
        return _check(TABLE["tf"][comparison](x, 0), said, data, summarize, name or shown)

    public.define(shown, check, f"``rt.check`` of ``{told}`` for all elements.")


_add_comparison("assert_equal", "equal", "==")
_add_comparison("assert_greater", "greater", ">")
_add_comparison("assert_greater_equal", "greater_equal", ">=")
_add_comparison("assert_less", "less", "<")
_add_comparison("assert_less_equal", "less_equal", "<=")
_add_sign("assert_negative", "less", "<")
_add_sign("assert_non_negative", "greater_equal", ">=")
_add_sign("assert_positive", "greater", ">")


@public.add()
def check_numerics(tensor: rt.TensorLike, message: str, name: str | None = None) -> rt.Tensor:
    """Returns ``tensor``; the step fails with ``message`` unless all of ``tensor`` is finite."""
    value = operand(tensor)
    finite = TABLE["tf"]["is_finite"](value)
    with rt.control_dependencies([rt.check(finite, f"{message}: not finite: ", [value])]):
        return rt.identity(value, name or "CheckNumerics")


@public.add()
def verify_tensor_all_finite(t: rt.TensorLike, msg: str, name: str | None = None) -> rt.Tensor:
    """Calls ``check_numerics``."""
    return check_numerics(t, msg, name or "VerifyFinite")


@public.add()
def assert_rank(
    x: rt.TensorLike,
    rank: int,
    data: Sequence[rt.TensorLike] | None = None,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> rt.Operation:
    """Checks the number of axes when the graph is built, or in the step where the number is unknown before."""
    value = constant(x)
    if value.shape is None:
        holds = rt.call(lambda array: jnp.asarray(jnp.ndim(array) == rank), value)
        said = f"{message or ''} the rank is not {rank}"
        data = [value] if data is None else data
        return _check(holds, said, data, summarize, name or "assert_rank")
    if len(value.shape) != rank:
        raise ValueError(
            f"{message or ''} {value.name} has rank {len(value.shape)}, not {rank}".lstrip()
        )
    return rt.no_op(name or "assert_rank")


public.update(
    {
        "Operation": rt.Operation,
        "RunMetadata": rt.RunMetadata,
        "RunOptions": RunOptions,
        "Tensor": rt.Tensor,
        "get_default_graph": rt.get_default_graph,
        "get_default_session": rt.get_default_session,
        "group": rt.group,
        "no_op": rt.no_op,
        "reset_default_graph": rt.reset_default_graph,
    }
)
