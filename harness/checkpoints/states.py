"""States of the trainer: small named values of each task in the same atomic checkpoint as the variables."""

import ast
import base64
import json
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from harness.checkpoints.manifest import read_manifest
from harness.checkpoints.reader import path_of
from runtime import InvalidArgumentError, concurrency
from runtime.lowlevel import DType, register_state

_lock = concurrency.Lock()
_setters: dict[tuple[str, str], Callable[[Any], None]] = {}
_MARKS = ("__bytes__", "__array__", "__tuple__", "__dict__")
"""Keys of dictionaries that stand for other types.

A user's dictionary with such a key is written as items.
"""


def checkpointable(
    name: str, get: Callable[[], Any], set: Callable[[Any], None], *, task: str = ""
) -> None:  # noqa: A002
    """Adds a small state of this process to every checkpoint: epoch, position in the data, random state.

    The checkpoint of the chief has the state under this task's name. A restore calls ``set``: in
    the chief by ``Saver.restore_latest``, in other tasks by ``restore_states``.

        harness.checkpointable("data", batches.state, batches.restore)

    Args:
        name: name, unique in this process; a second registration replaces the first.
        get: returns the state: numbers, strings, bytes, arrays, and lists and dictionaries of
            these. Another thread calls the function while training continues. A state that takes
            longer than two seconds is not saved.
        set: called with the state of a checkpoint; arrays of JAX become arrays of numpy.
        task: ``/job:worker/task:1`` if several tasks share the process, or the ``target`` of the
            server if tasks of two clusters have the same name. By default the only task of the
            process.

    Raises:
        InvalidArgumentError: The name is empty or has a space.
    """
    if not name or " " in name:
        raise InvalidArgumentError(
            f"the name {name!r} of a checkpointable state is empty or has a space"
        )
    with _lock:
        _setters[task, name] = set
    register_state(name, lambda: encode(get()), task=task)


def forget_checkpointable(name: str, *, task: str = "") -> None:
    """Removes a state from later checkpoints."""
    with _lock:
        _setters.pop((task, name), None)
    register_state(name, None, task=task)


def restore_states(checkpoint: str, task: str, target: str = "") -> list[str]:
    """Sets the states of this process that a checkpoint holds for a task.

        harness.restore_states(harness.latest_checkpoint("logdir"), "/job:worker/task:1")

    Args:
        checkpoint: path of the checkpoint, from ``latest_checkpoint``.
        task: name of the task, such as ``/job:worker/task:1``.
        target: target of the task's server; see ``checkpointable``.

    Returns:
        The names of the states that were set, sorted. Other states do not change.

    Raises:
        ValueError: There is no such checkpoint.
    """
    manifest = read_manifest(path_of(checkpoint))
    held = manifest.states.get(task, {}) if manifest else {}
    with _lock:
        chosen = {
            name: set_
            for (of, name), set_ in _setters.items()
            if of in ("", task, target) and name in held
        }
    # Without the lock, because a function may register another state.
    for name, set_ in chosen.items():
        set_(decode(held[name]))
    return sorted(chosen)


def encode(value: Any) -> bytes:
    """Returns a state as JSON text; raises InvalidArgumentError for a type that JSON cannot hold."""
    return json.dumps(_to_json(value)).encode()


def decode(value: Any) -> Any:
    """Returns the state whose parsed JSON is ``value``."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__array__" in value:
        dtype, shape, data = value["__array__"]
        # Copied, as an array over bytes cannot be written to.
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
            raise InvalidArgumentError(
                "a checkpointable state holds an array of objects: use lists"
            )
        array = np.ascontiguousarray(value)
        return {
            "__array__": [
                _dtype_name(array.dtype),
                list(np.shape(value)),
                base64.b64encode(array.tobytes()).decode(),
            ]
        }
    if isinstance(value, tuple):
        return {"__tuple__": [_to_json(v) for v in value]}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        items = [(k, _to_json(v)) for k, v in value.items()]
        return {"__dict__": items} if any(mark in value for mark in _MARKS) else dict(items)
    raise InvalidArgumentError(
        f"a checkpointable state holds a {type(value).__name__}: numbers, strings, bytes, numpy "
        "arrays, and lists and dictionaries (with string keys) of these can be saved"
    )


def _dtype_name(dtype: DType) -> str:
    """Returns a dtype as text for ``_dtype_of``; numpy's own text of bfloat16 means plain bytes."""
    if dtype.fields is not None:
        return repr(np.lib.format.dtype_to_descr(dtype))
    return dtype.name if dtype.isbuiltin == 2 else dtype.str


def _dtype_of(name: str) -> DType:
    if name.startswith("["):
        described: DType = np.lib.format.descr_to_dtype(ast.literal_eval(name))
        return described
    return np.dtype(getattr(ml_dtypes, name, name))
