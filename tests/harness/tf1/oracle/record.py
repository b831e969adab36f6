"""Writes down what TensorFlow gives for every case: ``make tf1-oracle``, in the environment of the benchmarks' peers.

Neither JAX nor anything of this project but the cases is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.harness.tf1.oracle.case import Built, Case
from tests.harness.tf1.oracle.tables import CASES, PROGRAMS


def plain(value: Any) -> Any:
    """A value for JSON: numbers in one flat list, complex ones as pairs, strings as text."""
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "SU":
        return [
            v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in array.ravel().tolist()
        ]
    if array.dtype.kind == "c":
        return [p for v in array.ravel().tolist() for p in (v.real, v.imag)]
    if array.dtype.kind in "iu":
        return array.ravel().tolist()
    if array.dtype.kind == "b":
        return array.ravel().astype(int).tolist()
    return [
        float(np.format_float_scientific(v)) if v.dtype.itemsize < 8 else float(v)
        for v in _floats(array)
    ]


def _floats(array: Any) -> Any:
    wide = array.astype(np.float32) if array.dtype.itemsize < 4 else array
    return wide.ravel()


def shape_of(tensor: Any) -> list[int | None] | None:
    """The static shape; None when the rank is not known."""
    found = tensor.get_shape()
    return None if found.ndims is None else found.as_list()


def described(tf: Any, result: Any) -> Any:
    """What is compared before anything runs: dtype, static shape and name; what is no tensor as it is."""
    if result is None or isinstance(result, bool | int | float | str):
        return result
    if isinstance(result, tf.Operation):
        return {"operation": result.name}
    if isinstance(result, tf.Tensor | tf.Variable):
        return [tf.as_dtype(result.dtype).base_dtype.name, shape_of(result), result.name]
    return {"kind": type(result).__name__}


def fetched(tf: Any, result: Any) -> bool:
    """Whether a session can run it."""
    return isinstance(result, tf.Tensor | tf.Variable | tf.Operation)


@contextlib.contextmanager
def session(tf: Any, config: Any = None) -> Iterator[Any]:
    """A session with initialised variables."""
    with tf.Session(config=config) as sess:
        sess.run(tf.global_variables_initializer())
        yield sess


def outcome(tf: Any, case: Case) -> dict[str, Any]:
    """What TensorFlow gives for ``case``: {"build": an error} or {"run": an error} or {"out": ...}."""
    with tf.Graph().as_default():
        try:
            built = Built(tf, case, modern=True)
            out = [described(tf, r) for r in built.results]
        except Exception as error:  # whatever it is: it is what is compared
            return {"build": type(error).__name__}
        tensors = [r for r in built.results if fetched(tf, r)]
        if tensors and case.values:
            try:
                with session(tf) as sess:
                    values = iter(sess.run(tensors, built.feeds))
            except Exception as error:
                return {"run": type(error).__name__, "out": out}
            for i, result in enumerate(built.results):
                if fetched(tf, result):
                    value = next(values)
                    if value is not None:
                        out[i] += [list(np.shape(value)), plain(value)]
        return {"out": out}


def program(tf: Any, run: Callable[[Any], Any]) -> Any:
    """What a program gives: nested lists of [dtype, shape, values]; or {"error": its type}."""
    with tf.Graph().as_default():
        try:
            return _told(run(tf))
        except Exception as error:
            return {"error": type(error).__name__}


def _told(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_told(v) for v in value]
    if value is None or isinstance(value, str):
        return value
    array = np.asarray(value)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "values": plain(array)}


def main(path: str) -> None:
    """Records everything into the file ``path``."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.disable_resource_variables()
    tf.logging.set_verbosity(tf.logging.FATAL)
    cases = {name: outcome(tf, case) for name, case in CASES.items()}
    programs = {name: program(tf, run) for name, run in PROGRAMS.items()}
    with open(path, "w") as out:
        out.write(
            f'{{"tensorflow": {json.dumps(tf.__version__)},\n"cases": {{\n{_lines(cases)}\n}},\n'
        )
        out.write(f'"programs": {{\n{_lines(programs)}\n}}}}\n')


def _lines(found: dict[str, Any]) -> str:
    return ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in found.items()
    )


if __name__ == "__main__":
    main(sys.argv[1])
