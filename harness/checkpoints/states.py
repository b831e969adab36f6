"""What else resumes: small named states of the trainer that ride in the same atomic checkpoint, for each task."""

from __future__ import annotations

import ast
import base64
import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from harness.checkpoints import layout
from harness.checkpoints.manifest import read_manifest
from runtime import InvalidArgumentError
from runtime.lowlevel import DType, register_state

_lock = threading.Lock()
_setters: dict[tuple[str, str], Callable[[Any], None]] = {}
_MARKS = ("__bytes__", "__array__", "__tuple__", "__dict__")
"""Keys of the dictionaries that stand for something else; one of the user's with such a key is written as its items."""


def checkpointable(name: str, get: Callable[[], Any], set: Callable[[Any], None], *, task: str = "") -> None:  # noqa: A002
    """Makes a small state of this process part of every checkpoint: epoch, position in the data, random state.

    It rides in the checkpoint that the chief saves, under this task's name, and comes back through ``set`` when a
    checkpoint is restored (``Saver.restore`` in the chief, ``restore_states`` in the others).

    Args:
        name: unique in this process; a second registration replaces the first.
        get: gives the state: numbers, strings, bytes, arrays, and lists and dictionaries of these. It is called from
            another thread, while training goes on. A state that is not there within two seconds is not saved.
        set: takes what ``get`` gave; arrays of jax come back as arrays of numpy.
        task: when several tasks share the process, ``/job:worker/task:1``, or where tasks of two clusters have one name
            the ``target`` of the server; by default the process's own.

    Raises:
        InvalidArgumentError: the name is empty or has a space.
    """
    if not name or " " in name:
        raise InvalidArgumentError(f"the name {name!r} of a checkpointable state is empty or has a space")
    with _lock:
        _setters[task, name] = set
    register_state(name, lambda: encode(get()), task=task)


def forget_checkpointable(name: str, *, task: str = "") -> None:
    """Takes a state out of later checkpoints."""
    with _lock:
        _setters.pop((task, name), None)
    register_state(name, None, task=task)


def restore_states(checkpoint: str, task: str, target: str = "") -> list[str]:
    """Gives this process's states what a checkpoint holds for a task.

    Args:
        checkpoint: as ``latest_checkpoint`` gives it.
        task: ``/job:worker/task:1``.
        target: of the task's server; see ``checkpointable``.

    Returns:
        The names of the states that were set; others keep what they have.

    Raises:
        ValueError: there is no such checkpoint.
    """
    path = layout.find_checkpoint(checkpoint)
    if path is None:
        raise ValueError(f"Couldn't find a checkpoint at {checkpoint}")
    manifest = read_manifest(path)
    held = manifest.states.get(task, {}) if manifest else {}
    with _lock:
        chosen = {name: set_ for (of, name), set_ in _setters.items() if of in ("", task, target) and name in held}
    for name, set_ in chosen.items():
        set_(decode(held[name]))
    return sorted(chosen)


def encode(value: Any) -> bytes:
    """A state as JSON text. Raises InvalidArgumentError for what has no place in it."""
    return json.dumps(_to_json(value)).encode()


def decode(value: Any) -> Any:
    """The state whose parsed JSON is ``value``."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        dtype, shape, data = value["__array__"]
        return np.frombuffer(base64.b64decode(data), _dtype_of(dtype)).reshape(shape).copy()
    if "__tuple__" in value:
        return tuple(decode(v) for v in value["__tuple__"])
    if "__dict__" in value:
        return {k: decode(v) for k, v in value["__dict__"]}
    return {k: decode(v) for k, v in value.items()}


def _to_json(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value)
        if value.dtype.hasobject:
            raise InvalidArgumentError("a checkpointable state holds an array of objects: use lists")
        array = np.ascontiguousarray(value)
        return {
            "__array__": [_dtype_name(array.dtype), list(np.shape(value)), base64.b64encode(array.tobytes()).decode()]
        }
    if isinstance(value, tuple):
        return {"__tuple__": [_to_json(v) for v in value]}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        items = [(k, _to_json(v)) for k, v in value.items()]
        return {"__dict__": items} if any(mark in value for mark in _MARKS) else dict(items)
    raise InvalidArgumentError(
        f"a checkpointable state holds a {type(value).__name__}: numbers, strings, bytes, numpy arrays, and lists and "
        "dictionaries (with string keys) of these can be saved"
    )


def _dtype_name(dtype: DType) -> str:
    """A dtype as text that ``_dtype_of`` reads; numpy's own text for bfloat16 and its like means mere bytes."""
    if dtype.fields is not None:
        return repr(np.lib.format.dtype_to_descr(dtype))
    return dtype.name if dtype.isbuiltin == 2 else dtype.str


def _dtype_of(name: str) -> DType:
    if name.startswith("["):
        described: DType = np.lib.format.descr_to_dtype(ast.literal_eval(name))
        return described
    return np.dtype(getattr(ml_dtypes, name, name))
