"""What a Supervisor is given, checked before anything is built on it: one clear line that names the argument."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

import runtime as rt
from harness.training.global_step import can_count

_PARTS = {
    "saver": ("save", "restore"),
    "session_manager": ("prepare_session", "wait_for_session"),
    "summary_writer": ("add_summary", "close"),
}
"""What an object given in place of ours must have."""


def seconds(*, off: bool = False, **given: Any) -> None:
    """Numbers of seconds.

    Args:
        off: None is one too, and stands for 0.
        **given: what is checked, by name.

    Raises:
        TypeError: one is no number.
        ValueError: one is negative or NaN.
    """
    for name, secs in given.items():
        if secs is None and off:
            continue
        if not isinstance(secs, numbers.Real) or isinstance(secs, bool):
            raise TypeError(f"{name} is a number of seconds, not {secs!r}")
        if secs < 0 or math.isnan(secs):
            rest = "; 0 turns a service off" if off else ""
            raise ValueError(f"{name} is a number of seconds and cannot be {secs:g}{rest}")


def values(
    *, graph: Any, is_chief: Any, logdir: Any, checkpoint_basename: Any, init_feed_dict: Any, init_fn: Any
) -> None:
    """What is neither a number nor an operation.

    Raises:
        TypeError: one is of another type.
        ValueError: the name of the checkpoints cannot be one.
    """
    if graph is not None and not isinstance(graph, rt.Graph):
        raise TypeError(f"graph is a runtime.Graph or None, not {graph!r}")
    if not isinstance(is_chief, numbers.Integral | np.bool_):
        raise TypeError(f"is_chief is True or False, not {is_chief!r}")
    if logdir is not None and not isinstance(logdir, str | os.PathLike):
        raise TypeError(f"logdir is the path of a directory or None, not {logdir!r}")
    if not isinstance(checkpoint_basename, str):
        raise TypeError(f"checkpoint_basename is a name, not {checkpoint_basename!r}")
    basename(checkpoint_basename)
    if init_feed_dict is not None and not isinstance(init_feed_dict, Mapping):
        raise TypeError(f"init_feed_dict is a dict of tensors to values, not {init_feed_dict!r}")
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init_fn is a function of the session, not {init_fn!r}")


def basename(name: str) -> None:
    """Raises ValueError unless checkpoints of this name are found again: right below the directory of the run."""
    if os.path.basename(name) != name or name in ("", ".", "..", "replaced"):
        raise ValueError(
            f"checkpoint_basename is the first part of the checkpoints' names, such as model.ckpt, not {name!r}: they "
            "lie right below the log directory"
        )


def operations(graph: rt.Graph, **given: Any) -> None:
    """Operations, tensors or their names; None is nothing.

    Raises:
        TypeError: one is of another type.
        ValueError: one is not in the graph, or is a summary or a global step of the wrong type.
    """
    for name, item in given.items():
        if item is None:
            continue
        try:
            element = graph.as_graph_element(item)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        dtype = np.dtype(element.dtype) if isinstance(element, rt.Tensor) else None
        if name == "summary_op" and (dtype is None or dtype.kind not in "OSUT"):
            raise ValueError(f"summary_op is a string tensor of a serialized summary, not {element!r}")
        if name == "global_step" and (dtype is None or not can_count(element)):
            raise ValueError(f"global_step is a variable that holds a number, not {element!r}")


def parts(default: object, **given: Any) -> None:
    """Objects that stand in for ours.

    Args:
        default: what stands for ours; None is none.
        **given: what is checked, by name.

    Raises:
        TypeError: one lacks a method; names it.
    """
    for name, part in given.items():
        if part is None or part is default:
            continue
        lacking = [method for method in _PARTS[name] if not callable(getattr(part, method, None))]
        if lacking:
            raise TypeError(f"{name} has no {'() and no '.join(lacking)}(): {part!r}")
