"""Initialisation: lists of a graph's variables, initialisers, and reports of variables without a value."""

from collections.abc import Sequence

import numpy as np

from runtime.graph.graph import Graph, GraphKeys, Operation, Tensor, get_default_graph, group
from runtime.graph.op_kinds import Host
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_tensor, constant
from runtime.graph.variable import Variable


def global_variables() -> list[Variable]:
    """Returns all variables of the default graph that the cluster shares."""
    return get_default_graph().get_collection(GraphKeys.GLOBAL_VARIABLES)


def trainable_variables() -> list[Variable]:
    """Returns the variables of the default graph that optimizers update by default."""
    return get_default_graph().get_collection(GraphKeys.TRAINABLE_VARIABLES)


def local_variables() -> list[Variable]:
    """Returns the variables of the default graph that stay on the session's own task."""
    return get_default_graph().get_collection(GraphKeys.LOCAL_VARIABLES)


def variables_initializer(var_list: Sequence[Variable], name: str = "init") -> Operation:
    """Makes an operation that initialises each variable of ``var_list``.

    Args:
        var_list: The variables.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     a, b = rt.Variable(1.0), rt.Variable(2.0)
        ...     session.run(rt.variables_initializer([a, b]))
        ...     print(session.run(a + b))
        3.0
    """
    return group(*[v.initializer for v in var_list], name=name)


def global_variables_initializer() -> Operation:
    """Makes an operation that initialises all global variables made so far."""
    return variables_initializer(global_variables(), "init")


def local_variables_initializer() -> Operation:
    """Makes an operation that initialises all local variables made so far."""
    return variables_initializer(local_variables(), "init_local")


def is_variable_initialized(variable: Variable, name: str | None = None) -> Tensor:
    """Makes a bool scalar that is true if ``variable`` has a value on its task.

    Args:
        variable: The variable.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     print(session.run(rt.is_variable_initialized(rt.Variable(1.0))))
        False
    """
    op = variable.graph.add_operation(
        "IsVariableInitialized",
        Host(
            "is_initialized",
            {
                "variables": [[variable.spec.container, variable.spec.name]],
                "local": variable.spec.local,
            },
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
    """Makes a 1-D string tensor with the names of the variables without a value.

    Args:
        var_list: The variables; all global and local variables of the default graph by default.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     a, b = rt.Variable(1.0, name="a"), rt.Variable(2.0, name="b")
        ...     session.run(a.initializer)
        ...     session.run(rt.report_uninitialized_variables()).tolist()
        [b'b']
    """
    return _find_uninitialized(var_list, name, "uninitialized", [])


def wait_until_initialized(
    var_list: Sequence[Variable] | None = None,
    timeout_secs: TensorLike = 10.0,
    name: str = "wait_until_initialized",
) -> Tensor:
    """Makes a tensor that waits on the variables' own tasks until all variables have values.

    Args:
        var_list: The variables; all global and local variables of the default graph by default.
        timeout_secs: Limit of the wait in a step: a number, or a scalar tensor.
        name: Operation name.

    Returns:
        A 1-D string tensor with the names of the variables without a value at the end of the wait.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     missing = rt.wait_until_initialized([rt.Variable(1.0, name="a")], timeout_secs=0.1)
        ...     session.run(missing).tolist()
        [b'a']
    """
    return _find_uninitialized(var_list, name, "wait_initialized", [timeout_secs])


def _find_uninitialized(
    var_list: Sequence[Variable] | None, name: str, kernel: str, given: Sequence[TensorLike]
) -> Tensor:
    names = [((None,), np.dtype(object))]
    with Graph.of(*(var_list or ()), *given).as_default() as graph:
        inputs = [as_tensor(value) for value in given]
        # One kernel for each task, instead of one for each variable, saves messages.
        by_device: dict[tuple[str, bool], list[Variable]] = {}
        for v in graph.variables() if var_list is None else var_list:
            by_device.setdefault((v.device, v.spec.local), []).append(v)
        with graph.name_scope(
            name + "/" if graph._by_name.get(name) is None else graph.unique_name(name) + "/"
        ):
            parts = []
            for (_, local), found in by_device.items():
                attrs = {
                    "variables": [[v.spec.container, v.spec.name] for v in found],
                    "local": local,
                }
                op = graph.add_operation(
                    "UninitializedVariables",
                    Host(kernel, attrs),
                    inputs,
                    names,
                    name="names",
                    colocate_with=found[0].op,
                )
                parts.append(op.outputs[0])
            # A graph without variables is initialised, and its report is empty.
            if not parts:
                return constant(np.empty((0,), object), name="names")
            return graph.add_operation(
                "ConcatStrings", Host("concat"), parts, names, name="all_names"
            ).outputs[0]
