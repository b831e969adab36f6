"""The parts of a Supervisor: its arguments are checked, and each part is taken, found in the graph or made.

The constructor of ``Supervisor`` calls ``assemble_parts`` with its arguments, before anything is started.
"""

import functools
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import runtime as rt
from harness.training.run import services
from harness.training.start import readiness
from harness.training.start.global_step import GlobalStep, can_count, get_global_step
from harness.training.start.readiness import CheckpointSaver, Element
from harness.training.start.session_manager import SessionManager

USE_DEFAULT: Final = 0
"""Stands for "the default"; compared by identity, as None means "off"."""

_DEFAULTS: Mapping[str, Callable[[rt.Graph], Element | None]] = {
    **{
        name: functools.partial(readiness.default_part, name=name)
        for name in ("ready_op", "init_op", "local_init_op", "summary_op")
    },
    # One that is not given is not made, either.
    "ready_for_local_init_op": lambda graph: readiness.first_of(
        graph, rt.GraphKeys.READY_FOR_LOCAL_INIT_OP
    ),
    "global_step": get_global_step,
}
"""By argument that was not given: the function that finds or makes the operation."""

_SERVICE_PERIODS = ("save_summaries_secs", "save_model_secs")
"""Periods of services: None stands for 0, which turns the service off."""

_KINDS: Mapping[str, tuple[Any, str]] = {
    "graph": (rt.Graph | None, "a runtime.Graph or None"),
    "is_chief": (numbers.Integral | np.bool_, "True or False"),
    "logdir": (str | os.PathLike | None, "the path of a directory or None"),
    "checkpoint_basename": (str, "a name"),
    "init_feed_dict": (Mapping | None, "a dict of tensors to values"),
    "init_fn": (Callable | None, "a function of the session"),
}
"""The types of values that are neither numbers nor operations, and their words."""

_METHODS = {
    "saver": ("save", "restore"),
    "session_manager": ("prepare_session", "wait_for_session"),
    "summary_writer": ("add_summary", "close"),
}
"""The methods that an object of the user's own must have."""


@dataclass(frozen=True)
class SupervisorParts:
    """The objects that a Supervisor works with, each checked.

    Attributes:
        graph: The graph.
        logdir: Absolute path of the log directory, since tasks may run in other directories; None
            for none.
        ready_op: String tensor with the names of the variables that are not ready.
        ready_for_local_init_op: The same for what ``local_init_op`` needs.
        init_op: Operation that gives the variables their first values.
        local_init_op: Operation that runs in every new session.
        global_step: The global step.
        summary_op: Operation that the summary timer runs.
        saver: The saver; on tasks that are not the chief only one that was given, else None.
        summary_writer: The writer of events; None on tasks that are not the chief.
        checks_local: True if ``ready_for_local_init_op`` is looked at.
    """

    graph: rt.Graph
    logdir: str | None
    ready_op: Element | None
    ready_for_local_init_op: Element | None
    init_op: Element | None
    local_init_op: Element | None
    global_step: GlobalStep | None
    summary_op: Element | None
    saver: CheckpointSaver | None
    summary_writer: services.EventWriter | None
    checks_local: bool

    def session_manager(self, recovery_wait_secs: float) -> SessionManager:
        """Returns the manager that opens sessions with these operations.

        Args:
            recovery_wait_secs: Seconds between looks at a ready operation of the user's own.
        """
        with self.graph.as_default():
            return SessionManager(
                self.local_init_op,
                self.ready_op,
                self.ready_for_local_init_op if self.checks_local else None,
                self.graph,
                recovery_wait_secs,
            )


def assemble_parts(arguments: Mapping[str, Any]) -> SupervisorParts:
    """Returns the parts of a Supervisor, each given or made.

    Args:
        arguments: The arguments of the Supervisor's constructor, by name; further names are
            ignored.

    Raises:
        TypeError: An argument is of another type, or lacks a method.
        ValueError: A number of seconds is negative, or an operation is not in the graph.
    """
    # All checks come before anything is made: an argument that is wrong leaves no file behind.
    _check_arguments(arguments)
    graph = rt.get_default_graph() if arguments["graph"] is None else arguments["graph"]
    is_chief = arguments["is_chief"]
    # The ps tasks write there too, and may run in another working directory.
    logdir = (
        rt.lowlevel.storage.absolute(os.fspath(arguments["logdir"]))
        if arguments["logdir"]
        else None
    )
    given = {name: value for name, value in arguments.items() if value is not USE_DEFAULT}
    with graph.as_default():
        operations: dict[str, Any] = {
            name: given[name] if name in given else make(graph) for name, make in _DEFAULTS.items()
        }
        # Only the chief saves, and a saver takes long to import.
        saver = (
            given["saver"]
            if "saver" in given
            else readiness.default_part(graph, "saver")
            if is_chief
            else None
        )
        _check_operations(graph, operations)
        asked = given.get("ready_for_local_init_op") is not None
        if asked and operations["local_init_op"] is None and "local_init_op" not in given:
            # The model has no local variables, but the ready operation that was given is still
            # looked at.
            operations["local_init_op"] = rt.no_op()
    return SupervisorParts(
        graph=graph,
        logdir=logdir,
        saver=saver,
        summary_writer=_event_writer(given, logdir) if is_chief else None,
        checks_local=asked or operations["local_init_op"] is not None,
        **operations,
    )


def _event_writer(given: Mapping[str, Any], logdir: str | None) -> services.EventWriter | None:
    # A writer of the user's own needs no directory.
    if "summary_writer" in given or logdir is None:
        return given.get("summary_writer")
    from harness.tensorboard.writer import FileWriter

    return FileWriter(logdir)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for an argument that is neither an operation nor right."""
    for name in (*_SERVICE_PERIODS, "recovery_wait_secs", "stop_grace_secs"):
        _check_seconds(name, arguments[name])
    for name, (kinds, words) in _KINDS.items():
        if not isinstance(arguments[name], kinds):
            raise TypeError(f"{name} is {words}, not {arguments[name]!r}")
    services.check_basename(str(arguments["checkpoint_basename"]))
    for name, methods in _METHODS.items():
        part = arguments[name]
        # Told by its methods: a part of the user's own has no base class here.
        lacking = [method for method in methods if not callable(getattr(part, method, None))]
        if lacking and part is not None and part is not USE_DEFAULT:
            raise TypeError(f"{name} has no {'() and no '.join(lacking)}(): {part!r}")


def _check_seconds(name: str, secs: object) -> None:
    service = name in _SERVICE_PERIODS
    if secs is None and service:
        return
    # True is a number to Python, and is surely a mistake here.
    if not isinstance(secs, numbers.Real) or isinstance(secs, bool):
        raise TypeError(f"{name} is a number of seconds, not {secs!r}")
    if secs < 0 or math.isnan(secs):
        rest = "; 0 turns a service off" if service else ""
        raise ValueError(f"{name} is a number of seconds and cannot be {secs:g}{rest}")


def _check_operations(graph: rt.Graph, operations: Mapping[str, Element | None]) -> None:
    """Raises TypeError or ValueError for an item that is no operation of the graph, or of the wrong type."""
    for name, item in operations.items():
        if item is None:
            continue
        try:
            element = graph.as_graph_element(item)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        dtype = np.dtype(element.dtype) if isinstance(element, rt.Tensor) else None
        # The mistake would otherwise show in the thread that writes summaries, while training runs.
        if name == "summary_op" and (dtype is None or dtype.kind not in "OSUT"):
            raise ValueError(
                f"summary_op is a string tensor of a serialized summary, not {element!r}"
            )
        if name == "global_step" and not (isinstance(element, rt.Tensor) and can_count(element)):
            raise ValueError(f"global_step is a variable that holds a number, not {element!r}")
