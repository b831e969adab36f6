"""What a training run takes when it is not told otherwise: what is in a graph's collections, or new operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from absl import logging
from google.protobuf import text_format

import runtime as rt


def first_of(graph: rt.Graph, key: str) -> Any:
    """The first item of a collection, None when it is empty; several are told."""
    items = graph.get_collection(key)
    if len(items) > 1:
        logging.info("%d items in the collection %s: the first one is used", len(items), key)
    return items[0] if items else None


def _first_or(graph: rt.Graph, key: str, make: Callable[[], Any]) -> Any:
    found = first_of(graph, key)
    if found is None:
        with graph.as_default(), rt.control_dependencies(None), rt.name_scope(None):
            found = make()
        if found is not None:
            graph.add_to_collection(key, found)
    return found


def ready_op(graph: rt.Graph) -> Any:
    """A string tensor with the names of all variables, global and local, that have no value."""
    return _first_or(graph, rt.GraphKeys.READY_OP, rt.report_uninitialized_variables)


def init_op(graph: rt.Graph) -> Any:
    """An operation that initialises all global variables."""
    return _first_or(graph, rt.GraphKeys.INIT_OP, rt.global_variables_initializer)


def local_init_op(graph: rt.Graph) -> Any:
    """An operation that initialises all local variables; None when there are none."""
    has = bool(graph.get_collection(rt.GraphKeys.LOCAL_VARIABLES))
    return _first_or(graph, rt.GraphKeys.LOCAL_INIT_OP, rt.local_variables_initializer if has else lambda: None)


def saver(graph: rt.Graph) -> Any:
    """A saver of all variables; None when there are none."""

    def make() -> Any:
        from harness.checkpoints.saver import Saver  # Orbax takes its time to be imported: only where it is used

        return Saver()

    has = bool(graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES))
    return _first_or(graph, rt.GraphKeys.SAVERS, make if has else lambda: None)


def summary_op(graph: rt.Graph) -> Any:
    """All summaries merged; None when there are none."""

    def make() -> Any:
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


def ready_for_local_init_op(graph: rt.Graph) -> Any:
    """A string tensor with the names of the global variables that have no value."""
    return _first_or(
        graph,
        rt.GraphKeys.READY_FOR_LOCAL_INIT_OP,
        lambda: rt.report_uninitialized_variables(rt.global_variables(), name="report_uninitialized_globals"),
    )
