"""Ready or not: the operations that tell whether a model may be used, and the tasks that a session needs for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import runtime as rt

_COLLECTION = "bellwether_ready"


def operations(graph: rt.Graph) -> tuple[rt.Tensor, rt.Tensor, rt.Tensor]:
    """What asks for the global variables that have no value.

    Args:
        graph: its global variables are looked at; what is returned is added to it, once for each set of variables.

    Returns:
        A string tensor with their names; one that first waits for them on their own tasks; and the placeholder that
        is fed with how many seconds it waits at most.

    Raises:
        RuntimeError: the graph is finalized and does not have them.
    """
    variables = graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES)
    for count, made in graph.get_collection(_COLLECTION):
        if count == len(variables):
            found: tuple[rt.Tensor, rt.Tensor, rt.Tensor] = made
            return found
    with graph.as_default(), rt.device(None), rt.control_dependencies(None), rt.name_scope(None):
        missing = rt.report_uninitialized_variables(variables, name="global_variables_missing")
        secs = rt.placeholder(np.float32, [], name="global_variables_await_secs")
        awaited = rt.wait_until_initialized(variables, secs, name="global_variables_awaited")
    graph.add_to_collection(_COLLECTION, (len(variables), (missing, awaited, secs)))
    return missing, awaited, secs


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
    except rt.lowlevel.UninitializedError as error:
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


def filtered(config: rt.SessionConfig | None, graph: rt.Graph, start_secs: float) -> rt.SessionConfig:
    """Session options with device filters, and a time limit for opening the session.

    Args:
        config: the user's options, or None.
        graph: the graph that the session will run.
        start_secs: seconds.
    """
    config = config or rt.SessionConfig()
    filters = tuple(config.device_filters) or default_filters(graph)
    return replace(config, device_filters=filters, start_timeout_secs=start_secs)


def with_start_timeout(config: rt.SessionConfig | None, secs: float) -> rt.SessionConfig:
    """Session options under which a step waits ``secs`` seconds at least for a task that is silent but not gone.

    A new session could not know whether the silent task has done what it was asked for; the old one will.
    """
    config = config or rt.SessionConfig()
    return replace(config, reconnect_secs=max(config.reconnect_secs, secs))
