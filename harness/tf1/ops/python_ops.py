"""``tf.py_func``, and how operations of ``tf`` are made that run as Python functions on the client's host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public
from harness.tf1.ops.static import known_on_host
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime.lowlevel import Array, DType, python_call

public = Public("tf", "Others")

Shape = Sequence[int | None] | None


def host_ops(
    function: Callable[..., Sequence[object]],
    inputs: Sequence[rt.TensorLike],
    outputs: Sequence[tuple[Shape, object]],
    name: str | None,
    kind: str,
) -> tuple[rt.Tensor, ...]:
    """Adds tensors that ``function`` of numpy arrays gives on the client's host, in whatever step needs them.

    ``outputs`` are the static shape and the dtype of each, ``kind`` TensorFlow's type of the
    operation.
    """
    tensors = [convert_to_tensor(each) for each in inputs]
    declared = [(None if s is None else tuple(s), as_dtype(d).dtype) for s, d in outputs]
    op = python_call(
        lambda session, arrays: function(*arrays), tensors, declared, name=name or kind, type=kind
    )
    known_on_host(op)
    return op.outputs


def host_op(
    function: Callable[..., object],
    inputs: Sequence[rt.TensorLike],
    shape: Shape,
    dtype: object,
    name: str | None,
    kind: str,
) -> rt.Tensor:
    """Adds ``host_ops`` with one output."""
    return host_ops(lambda *arrays: [function(*arrays)], inputs, [(shape, dtype)], name, kind)[0]


def strings(values: Sequence[object], shape: Sequence[int] | None = None) -> Array:
    """Makes a string tensor; [n] where no shape is given."""
    # numpy's own string kinds drop zero bytes at the end.
    found = np.empty(len(values), object)
    found[:] = [v.encode() if isinstance(v, str) else v for v in values]
    return found if shape is None else found.reshape(shape)


def each_string(function: Callable[[bytes], object], texts: Array, dtype: object) -> Array:
    """Applies ``function`` to every element of a string tensor; returns an array of the same shape."""
    wanted = as_dtype(dtype).dtype
    found = np.empty(texts.shape, wanted)
    for place in np.ndindex(texts.shape):
        found[place] = function(texts.item(place))
    return found


def _convert_result(value: object, dtype: np.dtype[Any]) -> object:
    """Converts the result of a Python function as TensorFlow does: Python numbers are 64 bits wide, strings bytes."""
    plain_text = dtype.hasobject and not isinstance(value, np.ndarray)
    array = np.asarray(value, object if plain_text else None)
    return strings(array.ravel().tolist(), array.shape) if array.dtype.kind in "SUO" else array


_ERRORS: dict[type[Exception], type[rt.OpError]] = {
    TypeError: rt.InvalidArgumentError,
    ValueError: rt.InvalidArgumentError,
    StopIteration: rt.OutOfRangeError,
    MemoryError: rt.ResourceExhaustedError,
    NotImplementedError: rt.UnimplementedError,
}
"""TensorFlow's error for an exception of a Python function; UnknownError for all others."""


def _as_error_of_step(error: Exception) -> rt.OpError:
    """Returns the error of the step for an exception of a Python function."""
    if isinstance(error, rt.OpError):
        return error
    fits = (known for kind, known in _ERRORS.items() if isinstance(error, kind))
    return next(fits, rt.UnknownError)(f"{type(error).__name__}: {error}")


def _convert_results(given: Any, types: Sequence[DType], listed: bool) -> Sequence[object]:
    if not types and given is None:
        return []
    parts = list(given) if listed and isinstance(given, list | tuple) else [given]
    # A wrong number of results is refused, with the numbers, where they leave the function.
    if len(parts) != len(types):
        return parts
    return [_convert_result(part, t) for part, t in zip(parts, types, strict=True)]


@public.add()
def py_func(
    func: Callable[..., object],
    inp: Sequence[rt.TensorLike],
    Tout: Any,
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """Calls a Python function of numpy arrays in the process of the session, wherever the other operations run.

    An exception of the function is an error of the step. TypeError and ValueError become InvalidArgumentError,
    StopIteration OutOfRangeError, and an exception that has no kind in TensorFlow UnknownError.
    """
    several = isinstance(Tout, list | tuple)
    types = [as_dtype(t).dtype for t in (Tout if several else [Tout])]

    def call(session: object, arrays: Sequence[Array]) -> Sequence[object]:
        try:
            # TensorFlow gives scalars to the function as numpy's numbers.
            given = func(*(a[()] if a.ndim == 0 else a for a in arrays))
        except Exception as error:
            raise _as_error_of_step(error) from error
        # A list for a single dtype is one array.
        listed = several or len(types) != 1
        return _convert_results(given, types, listed)

    found = python_call(
        call,
        [convert_to_tensor(each) for each in inp],
        [(None, t) for t in types],
        name=name or "PyFunc",
        type="PyFunc",
    )
    return (list(found.outputs) or found) if several else found.outputs[0]
