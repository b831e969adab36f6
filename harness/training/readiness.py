"""Readiness: the operations that give a model its values or tell which are missing, and the options of its sessions.

An operation that the user does not give is taken from the graph's collections, or made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from absl import logging
from google.protobuf import text_format

import runtime as rt

_COLLECTION = "bellwether_ready"
_T = TypeVar("_T")

Element: TypeAlias = rt.Tensor | rt.Operation | rt.Variable | str
"""What a session can run: an operation, a tensor or variable, or the name of one."""
Feeds: TypeAlias = Mapping[Any, object]
"""Values by tensor, variable or name; Any, as a mapping's keys are all of one type."""


class CheckpointSaver(Protocol):
    """What saves and restores variables: a ``Saver``, or the user's own."""

    def save(self, sess: rt.Session, save_path: str, global_step: Any = None) -> Any:
        """Saves; gives the path of the checkpoint."""

    def restore(self, sess: rt.Session, save_path: str) -> object:
        """Gives the variables the values of a checkpoint."""


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


def reason(session: rt.Session, ready_op: Element | None) -> str:
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
    """Device filters under which a session does not wait for tasks that its graph does not need.

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


def limit_secs(config: rt.SessionConfig | None, max_wait_secs: float | None) -> float:
    """How long a session is waited for, seconds.

    Args:
        config: its ``start_timeout_secs`` counts where it is less.
        max_wait_secs: what was asked for; None is without a limit.
    """
    start = None if config is None else config.start_timeout_secs
    return min(math.inf if secs is None else secs for secs in (start, max_wait_secs))


def for_recovery(config: rt.SessionConfig | None) -> rt.SessionConfig | None:
    """The options for opening a session again: ``start_timeout_secs`` is about the start of the cluster."""
    return None if config is None else replace(config, start_timeout_secs=None)


def first_of(graph: rt.Graph, key: str) -> Any:
    """The first item of a collection, None when it is empty; that there are several is logged."""
    items = graph.get_collection(key)
    if len(items) > 1:
        logging.info("%d items in the collection %s: the first one is used", len(items), key)
    return items[0] if items else None


def _first_or(graph: rt.Graph, key: str, make: Callable[[], _T]) -> _T:
    found: _T | None = first_of(graph, key)
    if found is not None:
        return found
    with graph.as_default(), rt.control_dependencies(None), rt.name_scope(None):
        made = make()
    if made is not None:
        graph.add_to_collection(key, made)
    return made


def ready_op(graph: rt.Graph) -> Element:
    """A string tensor with the names of all variables, global and local, that have no value."""
    return _first_or(graph, rt.GraphKeys.READY_OP, rt.report_uninitialized_variables)


def init_op(graph: rt.Graph) -> Element:
    """An operation that initialises all global variables."""
    return _first_or(graph, rt.GraphKeys.INIT_OP, rt.global_variables_initializer)


def local_init_op(graph: rt.Graph) -> Element | None:
    """An operation that initialises all local variables; None when there are none."""
    has = bool(graph.get_collection(rt.GraphKeys.LOCAL_VARIABLES))
    return _first_or(graph, rt.GraphKeys.LOCAL_INIT_OP, rt.local_variables_initializer if has else lambda: None)


def saver(graph: rt.Graph) -> CheckpointSaver | None:
    """A saver of all variables; None when there are none."""

    def make() -> CheckpointSaver:
        from harness.checkpoints.saver import Saver  # Orbax takes its time to be imported: only where it is used

        return Saver()

    has = bool(graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES))
    return _first_or(graph, rt.GraphKeys.SAVERS, make if has else lambda: None)


def summary_op(graph: rt.Graph) -> Element | None:
    """All summaries merged; None when there are none."""

    def make() -> rt.Tensor | None:
        from harness.tensorboard.summary import merge_all

        return merge_all()

    return _first_or(graph, rt.GraphKeys.SUMMARY_OP, make)


def write_graph_text(graph: rt.Graph, directory: str) -> None:
    """Writes ``graph.pbtxt``, the graph as a text that people can read, whole or not at all; a full disk is logged."""
    from etils import epath

    from harness.tensorboard.graph_def import graph_def

    folder = epath.Path(directory)  # which may be gs://bucket/run
    path, unfinished = folder / "graph.pbtxt", folder / "graph.pbtxt.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text_format.MessageToString(graph_def(graph)))
        unfinished.replace(path)
    except OSError as error:  # it is for people to look at: no training depends on it
        logging.warning("%s is not written: %s", path, error)
        with contextlib.suppress(OSError):
            unfinished.unlink()


def ready_for_local_init_op(graph: rt.Graph) -> Element:
    """A string tensor with the names of the global variables that have no value."""
    return _first_or(
        graph,
        rt.GraphKeys.READY_FOR_LOCAL_INIT_OP,
        lambda: rt.report_uninitialized_variables(rt.global_variables(), name="report_uninitialized_globals"),
    )
