"""Readiness: the operations that initialise a model and name its missing values, and the options of its sessions.

The Supervisor and the scaffold of a monitored session take from here each operation that the user
does not give. It comes from the graph's collections, or is made.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
from absl import logging

import runtime as rt
from harness.checkpoints.saver import Saver

_COLLECTION = "bellwether_ready"

Element: TypeAlias = rt.Tensor | rt.Operation | rt.Variable | str
"""A fetch of a session: an operation, a tensor or variable, or a name."""
Feeds: TypeAlias = Mapping[Any, object]
"""Values by tensor, variable or name; Any, as a mapping's keys are all of one type."""


class CheckpointSaver(Protocol):
    """A saver of variables: a ``Saver``, or the user's own."""

    def save(self, sess: rt.Session, save_path: str, global_step: Element | None = None) -> object:
        """Saves; returns the path of the checkpoint."""

    def restore(self, sess: rt.Session, save_path: str) -> object:
        """Sets the variables to the values of a checkpoint."""


def operations(graph: rt.Graph) -> tuple[rt.Tensor, rt.Tensor, rt.Tensor]:
    """Returns the tensors that name the global variables without a value.

    Args:
        graph: The graph. The tensors are added to it, once for each set of variables.

    Returns:
        A string tensor with the names; a string tensor that first waits for the values; and a
        float32 placeholder of shape () for the seconds of that wait at most.

    Raises:
        RuntimeError: The graph is finalized and lacks the tensors.
    """
    variables = graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES)
    # The graph may have got more variables since the last call: then new operations are made.
    for count, made in graph.get_collection(_COLLECTION):
        if count == len(variables):
            found: tuple[rt.Tensor, rt.Tensor, rt.Tensor] = made
            return found
    # Outside the caller's scopes: a device, a dependency or a prefix of theirs is not meant for
    # these operations.
    with graph.as_default(), rt.device(None), rt.control_dependencies(None), rt.name_scope(None):
        missing = rt.report_uninitialized_variables(variables, name="global_variables_missing")
        secs = rt.constant(np.float32(0), name="global_variables_await_secs")
        awaited = rt.wait_until_initialized(variables, secs, name="global_variables_awaited")
    graph.add_to_collection(_COLLECTION, (len(variables), (missing, awaited, secs)))
    return missing, awaited, secs


def reason(session: rt.Session, ready_op: Element | None) -> str:
    """Returns the reason why a model is not ready, in words; empty for none.

    A model is ready where the operation returns no value, an int32 value or no elements, or there
    is no operation. Names of variables are listed. An error about an uninitialised variable means
    not ready too: ready operations of an old kind are assertions.

    Args:
        session: Session in which the operation runs.
        ready_op: Tensor or operation, or None.
    """
    if ready_op is None:
        return ""
    try:
        value = session.run(ready_op)
    except rt.lowlevel.UninitializedError as error:
        return str(error)
    # TF1 takes each of these for ready.
    if value is None or np.asarray(value).dtype == np.int32 or np.asarray(value).size == 0:
        return ""
    names = [item.decode() if isinstance(item, bytes) else str(item) for item in np.ravel(value)]
    return "Variables not initialized: " + ", ".join(names)


@dataclass(frozen=True)
class ReadyOperations:
    """The operations that run in every new session, and say if the model is ready.

    Attributes:
        local_init_op: Operation that runs in every new session.
        local_init_feed_dict: Feeds of ``local_init_op``.
        ready_op: String tensor with the names of what is not ready, empty when all is.
        ready_for_local_init_op: The same for what ``local_init_op`` needs.
        recovery_wait_secs: Seconds between two looks at a ready operation of the user's own.
    """

    local_init_op: Element | None
    local_init_feed_dict: Feeds | None
    ready_op: Element | None
    ready_for_local_init_op: Element | None
    recovery_wait_secs: float

    def init_local(self, session: rt.Session) -> str:
        """Runs the local init operation when the global variables are ready; returns the missing names, or nothing."""
        missing = reason(session, self.ready_for_local_init_op)
        if not missing and self.local_init_op is not None:
            session.run(self.local_init_op, self.local_init_feed_dict)
        return missing

    def missing(self, session: rt.Session) -> str:
        """Returns the reason why the model is not ready, after the local init; empty for none."""
        return self.init_local(session) or reason(session, self.ready_op)

    def make_ready(self, session: rt.Session, done: str) -> None:
        """Runs the local init, as the chief.

        Args:
            session: Session whose global variables have values.
            done: Words for the way in which they got the values.

        Raises:
            RuntimeError: The model is not ready after all.
        """
        missing = self.init_local(session)
        if missing:
            raise RuntimeError(
                f"Init operations did not make model ready for local_init. {done}, {missing}"
            )
        not_ready = reason(session, self.ready_op)
        if not_ready:
            raise RuntimeError(
                f"Init operations did not make model ready. {done}, "
                f"local_init_op: {getattr(self.local_init_op, 'name', None)}, error: {not_ready}"
            )


def default_filters(graph: rt.Graph) -> tuple[str, ...]:
    """Returns device filters under which a session does not wait for tasks that its graph does not need.

    The needed tasks are the ps tasks and every task that an operation names; a session's own task
    is always in. A variable without a job may live anywhere: then there is no filter.

    Args:
        graph: The graph that sessions will run.
    """
    # The ps tasks are always in: the run records lie there, also of a graph without variables.
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


def filtered(
    config: rt.SessionConfig | None, graph: rt.Graph, start_secs: float
) -> rt.SessionConfig:
    """Returns session options with device filters, and a time limit for opening the session.

    Args:
        config: Options of the user, or None.
        graph: The graph that the session will run.
        start_secs: The time limit, in seconds.
    """
    config = config or rt.SessionConfig()
    filters = tuple(config.device_filters) or default_filters(graph)
    return replace(config, device_filters=filters, start_timeout_secs=start_secs)


def with_start_timeout(config: rt.SessionConfig | None, secs: float) -> rt.SessionConfig:
    """Returns session options under which a step waits ``secs`` seconds at least for a silent task.

    A new session could not know whether the silent task has done its part of the step; the old
    session will.

    Args:
        config: Options of the user, or None.
        secs: Seconds.
    """
    config = config or rt.SessionConfig()
    return replace(config, reconnect_secs=max(config.reconnect_secs, secs))


def limit_secs(config: rt.SessionConfig | None, max_wait_secs: float | None) -> float:
    """Returns the longest wait for a session, in seconds.

    Args:
        config: Options, whose ``start_timeout_secs`` counts where it is less.
        max_wait_secs: The longest wait that the caller asks for; None is without a limit.
    """
    start = None if config is None else config.start_timeout_secs
    return min(math.inf if secs is None else secs for secs in (start, max_wait_secs))


def first_of(graph: rt.Graph, key: str) -> Any:
    """Returns the first item of a collection, or None; a line of the log tells of several."""
    items = graph.get_collection(key)
    if len(items) > 1:
        logging.info("%d items in the collection %s: the first one is used", len(items), key)
    return items[0] if items else None


def _merge_summaries() -> rt.Tensor | None:
    from harness.tensorboard.summary import merge_all

    return merge_all()


PARTS: Mapping[str, tuple[str, Callable[[], object]]] = {
    "ready_op": (rt.GraphKeys.READY_OP, rt.report_uninitialized_variables),
    "ready_for_local_init_op": (
        rt.GraphKeys.READY_FOR_LOCAL_INIT_OP,
        lambda: rt.report_uninitialized_variables(
            rt.global_variables(), name="report_uninitialized_globals"
        ),
    ),
    "init_op": (rt.GraphKeys.INIT_OP, rt.global_variables_initializer),
    "local_init_op": (
        rt.GraphKeys.LOCAL_INIT_OP,
        lambda: rt.local_variables_initializer() if rt.local_variables() else None,
    ),
    "saver": (rt.GraphKeys.SAVERS, lambda: Saver() if rt.global_variables() else None),
    "summary_op": (rt.GraphKeys.SUMMARY_OP, _merge_summaries),
}
"""The collection of each part of a model that may be given, and the function that makes the part."""


def default_part(graph: rt.Graph, name: str) -> Any:
    """Returns a part of a model that was not given: the first one of its collection, else a new one.

    Args:
        graph: The graph.
        name: Name of the part: ``ready_op``, ``ready_for_local_init_op``, ``init_op``,
            ``local_init_op``, ``saver`` or ``summary_op``.

    Returns:
        None for a part that the graph needs not: a ``local_init_op`` without local variables, a
        ``saver`` without variables, a ``summary_op`` without summaries.
    """
    key, make = PARTS[name]
    found = first_of(graph, key)
    if found is not None:
        return found
    with graph.as_default(), rt.control_dependencies(None), rt.name_scope(None):
        made = make()
    if made is not None:
        graph.add_to_collection(key, made)
    return made
