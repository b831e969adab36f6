"""The global step: one integer variable that counts the updates of the whole cluster."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from absl import logging

import runtime as rt

NAME = "global_step"


def get_global_step(graph: rt.Graph | None = None) -> Any:
    """The global step of a graph: the one in its collection GLOBAL_STEP, else what is called ``global_step:0``.

    Args:
        graph: the default graph when not given.

    Returns:
        A variable or tensor, or None when there is none (or it is no integer, which is told).
    """
    graph = graph or rt.get_default_graph()
    collected = graph.get_collection(rt.GraphKeys.GLOBAL_STEP)
    if collected:
        if len(collected) > 1:
            logging.info("%d global steps in the collection: the first one is used", len(collected))
        found = collected[0]
    else:
        by_name = [v for v in graph.variables() if v.op.name == NAME]
        if by_name:
            found = by_name[0]
        else:
            try:
                found = graph.get_tensor_by_name(f"{NAME}:0")
            except KeyError:
                return None
    if found.dtype.kind not in "iu":
        logging.warning("the global step %r is %s, not an integer: ignored", found.name, found.dtype.name)
        return None
    return found


def create_global_step(graph: rt.Graph | None = None) -> rt.Variable:
    """Makes the global step: an int64 scalar of value 0, shared by the cluster, not trainable.

    Args:
        graph: the default graph when not given.

    Raises:
        ValueError: the graph has one.
    """
    graph = graph or rt.get_default_graph()
    if get_global_step(graph) is not None:
        raise ValueError("the graph has a global step already: use get_or_create_global_step()")
    here = contextlib.nullcontext() if graph is rt.get_default_graph() else graph.as_default()  # keeps device scopes
    with here, graph.name_scope(None):
        return rt.Variable(
            0,
            dtype=np.int64,
            name=NAME,
            trainable=False,
            collections=[rt.GraphKeys.GLOBAL_VARIABLES, rt.GraphKeys.GLOBAL_STEP],
        )


def get_or_create_global_step(graph: rt.Graph | None = None) -> Any:
    """The global step of a graph, made when there is none.

    Args:
        graph: the default graph when not given.
    """
    found = get_global_step(graph)
    return create_global_step(graph) if found is None else found


def global_step(sess: rt.Session, global_step_tensor: Any) -> int:
    """The value of the global step in a session.

    Args:
        sess: the session.
        global_step_tensor: the global step, a variable or tensor.
    """
    return int(sess.run(global_step_tensor))
