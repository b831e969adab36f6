"""The global step: a variable that counts the updates of the whole cluster."""

import contextlib
import weakref
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from absl import logging

import runtime as rt

NAME = "global_step"

GlobalStep: TypeAlias = rt.Variable | rt.Tensor

_warned: weakref.WeakSet[rt.Operation] = weakref.WeakSet()
"""Global steps of a floating dtype, of which a warning was logged."""


def get_global_step(graph: rt.Graph | None = None) -> GlobalStep | None:
    """Returns the global step of a graph: that of its collection GLOBAL_STEP, else ``global_step:0``.

    Args:
        graph: The default graph when not given.

    Returns:
        A variable or tensor; None where there is none, or it holds no number, of which a warning
        tells. A floating type counts; a warning says at which number it stands still.
    """
    graph = graph or rt.get_default_graph()
    # The collection first, as in TF1: the variable there may have any name.
    collected = graph.get_collection(rt.GraphKeys.GLOBAL_STEP)
    if collected:
        if len(collected) > 1:
            logging.info("%d global steps in the collection: the first one is used", len(collected))
        found: GlobalStep = collected[0]
    else:
        by_name = [v for v in graph.variables() if v.op.name == NAME]
        if by_name:
            found = by_name[0]
        else:
            try:
                found = graph.get_tensor_by_name(f"{NAME}:0")
            except KeyError:
                return None
    if not can_count(found):
        logging.warning(
            "the global step %r is %s, not a number: ignored", found.name, found.dtype.name
        )
        return None
    return found


def can_count(step: GlobalStep) -> bool:
    """Returns True if a variable or tensor holds a real number; warns once of a floating dtype.

    Args:
        step: A variable or tensor of any dtype. TensorFlow 1's ``get_variable`` makes a floating
            one where no dtype is given. Such a step counts up to 2 to the number of its digits:
            from there on 1 more is rounded away.
    """
    if np.issubdtype(step.dtype, np.integer):
        return True
    # Of ``jnp``: NumPy does not count bfloat16 among the floating types.
    if not jnp.issubdtype(step.dtype, np.floating):
        return False
    if step.op not in _warned:
        _warned.add(step.op)
        last = 2 ** (jnp.finfo(step.dtype).nmant + 1)  # type: ignore[no-untyped-call]
        logging.warning(
            "the global step %r is %s, which stands still at %d: give it dtype int64",
            step.name,
            step.dtype.name,
            last,
        )
    return True


def create_global_step(graph: rt.Graph | None = None) -> rt.Variable:
    """Makes the global step: an int64 variable of shape () and value 0, shared by the cluster, not trainable.

    Args:
        graph: The default graph when not given.

    Raises:
        ValueError: The graph has a global step.
    """
    graph = graph or rt.get_default_graph()
    if get_global_step(graph) is not None:
        raise ValueError("the graph has a global step already: use get_or_create_global_step()")
    # ``as_default`` would end the device scopes of the caller, which place the variable.
    here = contextlib.nullcontext() if graph is rt.get_default_graph() else graph.as_default()
    with here, graph.name_scope(None):
        return rt.Variable(
            0,
            dtype=np.int64,
            name=NAME,
            trainable=False,
            collections=[rt.GraphKeys.GLOBAL_VARIABLES, rt.GraphKeys.GLOBAL_STEP],
        )


def get_or_create_global_step(graph: rt.Graph | None = None) -> Any:
    """Returns the global step of a graph, made when there is none.

    Args:
        graph: The default graph when not given.

    Returns:
        A variable, or the tensor that ``get_global_step`` finds.
    """
    found = get_global_step(graph)
    return create_global_step(graph) if found is None else found


def warn_if_uncounted(step: GlobalStep | None, graph: rt.Graph) -> None:
    """Warns of a graph that trains variables and has no operation that counts its global step."""
    if not isinstance(step, rt.Variable):
        return
    first = {variable.initializer for variable in graph.variables()}
    updated = {
        spec
        for op in graph.get_operations()
        if op not in first
        for spec in getattr(op.body, "variables", ())
    }
    if step.spec not in updated and any(
        v.spec in updated for v in graph.get_collection(rt.GraphKeys.TRAINABLE_VARIABLES)
    ):
        logging.warning(
            "nothing counts the global step %r: a loop that ends at a step never ends; "
            "call minimize(loss, global_step=...) or apply_gradients(..., global_step=...)",
            step.name,
        )


def global_step(sess: rt.Session, global_step_tensor: GlobalStep | str) -> int:
    """Returns the value of the global step in a session.

    Args:
        sess: The session.
        global_step_tensor: The global step, a variable or tensor.

    Examples:
        >>> import runtime as rt
        >>> from harness.training.start.global_step import get_or_create_global_step, global_step
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     step = get_or_create_global_step()
        ...     _ = session.run(rt.global_variables_initializer())
        ...     global_step(session, step)
        0
    """
    return int(sess.run(global_step_tensor))
