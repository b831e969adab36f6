"""Ready or not: the operations that tell whether a model may be used, and the tasks that a session needs for it."""

from __future__ import annotations

from typing import Any

import numpy as np

import runtime as rt


def operations(graph: rt.Graph, wait_secs: float) -> tuple[rt.Tensor, rt.Tensor]:
    """Two string tensors with the names of global variables without a value: at once, and after a wait for them.

    Args:
        graph: its global variables are looked at; the two operations are added to it.
        wait_secs: how long the second one waits at most, on the variables' own tasks.
    """
    variables = graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES)
    with graph.as_default(), rt.device(None), rt.control_dependencies(None), rt.name_scope(None):
        missing = rt.report_uninitialized_variables(variables, name="global_variables_missing")
        return missing, rt.wait_until_initialized(variables, wait_secs, name="global_variables_awaited")


def reason(session: rt.Session, ready_op: Any) -> str:
    """What a ready operation misses, in words; empty when it is ready or there is no such operation.

    Ready is: no operation, no value, an int32 value, or no elements. Names of variables that are not initialised are
    listed; a FailedPreconditionError about an uninitialised variable means not ready too (a ready operation of the
    old kind, which asserts).

    Args:
        session: where to run it.
        ready_op: tensor or operation, or None.
    """
    if ready_op is None:
        return ""
    try:
        value = session.run(ready_op)
    except rt.FailedPreconditionError as error:
        if "uninitialized" not in str(error):
            raise
        return str(error)
    if value is None or np.asarray(value).dtype == np.int32 or np.asarray(value).size == 0:
        return ""
    names = [item.decode() if isinstance(item, bytes) else str(item) for item in np.ravel(value)]
    return "Variables not initialized: " + ", ".join(names)


def default_filters(graph: rt.Graph) -> tuple[str, ...]:
    """Device filters under which absent tasks that a graph does not need block nobody.

    They are the ps tasks and every task that an operation of the graph names; a session's own task is always in. A
    variable without a job may live anywhere: then there is no filter.

    Args:
        graph: the graph that sessions will run.
    """
    found = {"/job:ps"}
    devices: dict[str, bool] = {}
    variables = {v.op.name for v in graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES)}
    for op in graph.get_operations():
        devices[op.device] = devices.get(op.device, False) or op.name in variables
    for device, holds_variables in devices.items():
        spec = rt.DeviceSpec.parse(device)
        if spec.job is None:
            if holds_variables:
                return ()
        elif spec.task is not None:
            found.add(f"/job:{spec.job}/task:{spec.task}")
        elif holds_variables and spec.job != "ps":
            found.add(f"/job:{spec.job}")
    return tuple(sorted(found))
