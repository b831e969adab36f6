"""The variables of a graph as a whole: which there are, which have values, and the operations that give them theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.graph.graph import Graph, GraphKeys, Operation, Tensor, get_default_graph, group
from runtime.graph.op_kinds import Host
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor, constant
from runtime.graph.variable import Variable


def global_variables() -> list[Variable]:
    """All variables of the default graph that the cluster shares."""
    return get_default_graph().get_collection(GraphKeys.GLOBAL_VARIABLES)


def trainable_variables() -> list[Variable]:
    """The variables of the default graph that optimizers update by default."""
    return get_default_graph().get_collection(GraphKeys.TRAINABLE_VARIABLES)


def local_variables() -> list[Variable]:
    """The variables of the default graph that stay on the session's own task."""
    return get_default_graph().get_collection(GraphKeys.LOCAL_VARIABLES)


def variables_initializer(var_list: Sequence[Variable], name: str = "init") -> Operation:
    """One operation that gives each variable of ``var_list`` its initial value."""
    return group(*[v.initializer for v in var_list], name=name)


def global_variables_initializer() -> Operation:
    """One operation that initialises all global variables made so far."""
    return variables_initializer(global_variables(), "init")


def local_variables_initializer() -> Operation:
    """One operation that initialises all local variables made so far."""
    return variables_initializer(local_variables(), "init_local")


def is_variable_initialized(variable: Variable, name: str | None = None) -> Tensor:
    """A scalar bool tensor: whether ``variable`` has a value on its task."""
    op = variable.graph.add_operation(
        "IsVariableInitialized",
        Host(
            "is_initialized",
            {"variables": [[variable.spec.container, variable.spec.name]], "local": variable.spec.local},
            resource=variable.spec.name,
        ),
        outputs=[((), np.dtype(np.bool_))],
        name=name or f"{variable.op.name}/IsInitialized",
        colocate_with=variable.op,
    )
    return op.outputs[0]


def report_uninitialized_variables(
    var_list: Sequence[Variable] | None = None, name: str = "report_uninitialized_variables"
) -> Tensor:
    """A 1-D string tensor with the names of the variables that have no value yet (empty when all have one).

    Args:
        var_list: variables to look at; global and local ones of the default graph by default.
        name: operation name.
    """
    return _uninitialized(var_list, name, "uninitialized", [])


def wait_until_initialized(
    var_list: Sequence[Variable] | None = None, timeout_secs: TensorLike = 10.0, name: str = "wait_until_initialized"
) -> Tensor:
    """Waits on the variables' own tasks until all have values, and is told the moment they have.

    Args:
        var_list: variables to wait for; global and local ones of the default graph by default.
        timeout_secs: how long a step that fetches the tensor waits at most: a number, or a scalar tensor of one.
        name: operation name.

    Returns:
        A 1-D string tensor with the names of the variables that have no value even then (empty when all have one).
    """
    return _uninitialized(var_list, name, "wait_initialized", [timeout_secs])


def _uninitialized(var_list: Sequence[Variable] | None, name: str, kernel: str, given: Sequence[TensorLike]) -> Tensor:
    with Graph.of(*(var_list or ()), *given).as_default() as graph:
        return _names_of(graph, var_list, name, kernel, [as_tensor(value) for value in given])


def _names_of(
    graph: Graph, var_list: Sequence[Variable] | None, name: str, kernel: str, inputs: Sequence[Tensor]
) -> Tensor:
    looked_at = list(graph.variables() if var_list is None else var_list)
    by_device: dict[tuple[str, bool], list[Variable]] = {}
    for v in looked_at:
        by_device.setdefault((v.device, v.spec.local), []).append(v)
    with graph.name_scope(name + "/" if graph._by_name.get(name) is None else graph.unique_name(name) + "/"):
        parts = []
        for same_device in by_device.values():
            op = graph.add_operation(
                "UninitializedVariables",
                Host(
                    kernel,
                    {
                        "variables": [[v.spec.container, v.spec.name] for v in same_device],
                        "local": same_device[0].spec.local,
                    },
                ),
                inputs,
                outputs=[((None,), np.dtype(object))],
                name="names",
                colocate_with=same_device[0].op,
            )
            parts.append(op.outputs[0])
        if not parts:
            return constant(np.empty((0,), object), name="names")
        op = graph.add_operation(
            "ConcatStrings", Host("concat"), parts, [((None,), np.dtype(object))], name="all_names"
        )
    return op.outputs[0]
