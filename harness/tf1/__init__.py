"""TensorFlow 1's names on JAX: ``import harness.tf1 as tf``.

The names of TensorFlow 1.0 and the older ones of 0.8, with their argument names and orders, over ``runtime`` and
``harness``. What is not here fails by name, saying what to use instead; ``docs/tf1_names.md`` lists everything.
"""

from __future__ import annotations

import importlib
from typing import Any

import runtime as _rt
from harness.tf1.graph import config as _config
from harness.tf1.graph import framework as _framework
from harness.tf1.graph import initializers as _initializers
from harness.tf1.graph import messages as _messages
from harness.tf1.graph import scopes as _scopes
from harness.tf1.graph import variables as _variables
from harness.tf1.inputs import parsing as _parsing
from harness.tf1.inputs import queues as _queues
from harness.tf1.inputs import readers as _readers
from harness.tf1.loops import control_flow as _control_flow
from harness.tf1.loops import row_loops as _row_loops
from harness.tf1.loops import tensor_array as _tensor_array
from harness.tf1.loops import while_loops as _while_loops
from harness.tf1.names.missing import absent as _absent
from harness.tf1.ops import array_ops as _array_ops
from harness.tf1.ops import clip_ops as _clip_ops
from harness.tf1.ops import dtypes as _dtypes
from harness.tf1.ops import join_ops as _join_ops
from harness.tf1.ops import math_ops as _math_ops
from harness.tf1.ops import python_ops as _python_ops
from harness.tf1.ops import random_ops as _random_ops
from harness.tf1.ops import shapes as _shapes
from harness.tf1.ops import slices as _slices
from harness.tf1.ops import sparse as _sparse
from harness.tf1.ops import string_ops as _string_ops
from harness.tf1.ops import value_ops as _value_ops
from harness.tf1.train import summary as _summary

_rt.lowlevel.set_default_graph_type(_framework.Graph)

NAMESPACES = {
    "app": "names.app",
    "compat": "names.compat",
    "contrib": "train.contrib",
    "data": "inputs.data",
    "errors": "names.errors",
    "flags": "names.flags",
    "gfile": "inputs.gfile",
    "image": "inputs.image",
    "io": "inputs.io",
    "layers": "layers",
    "logging": "names.logging",
    "losses": "layers.losses",
    "metrics": "layers.metrics",
    "nn": "layers.nn",
    "python_io": "inputs.python_io",
    "summary": "train.summary",
    "test": "graph.test",
    "train": "train",
}
"""Modules of ``tf`` -> where they are, below here; imported on first use."""

_BESIDE = {
    "file_io": "inputs.file_io",
    "messages": "graph.messages",
    "mnist_data": "tools.mnist_data",
    "mnist_model": "tools.mnist_model",
    "pywrap": "train.pywrap",
}
"""Modules that stand for others of TensorFlow's, which were not in ``tf``."""

GROUPS: dict[str, dict[str, Any]] = {
    "Arithmetic": _math_ops.OPS,
    "Tensors": _array_ops.OPS | _join_ops.OPS | _slices.OPS | _value_ops.OPS,
    "Random tensors": _random_ops.OPS,
    "Limits": _clip_ops.OPS,
    "Variables": _variables.OPS,
    "Variable scopes": _scopes.OPS,
    "Initial values": _initializers.OPS,
    "Graphs, sessions and control": _framework.OPS,
    "Conditionals and loops": _control_flow.OPS | _while_loops.OPS | _row_loops.OPS | _tensor_array.OPS,
    "Queues": _queues.OPS,
    "Files and their readers": _readers.OPS,
    "Examples, text and sparse tensors": _parsing.OPS | _string_ops.OPS | _sparse.OPS,
    "Summaries by their old names": _summary.OPS,
    "Messages": _messages.OPS,
    "Others": _python_ops.OPS
    | {
        "ConfigProto": _config.ConfigProto,
        "DType": _dtypes.DType,
        "DeviceSpec": _rt.DeviceSpec,
        "Dimension": _shapes.Dimension,
        "GPUOptions": _config.GPUOptions,
        "GraphOptions": _config.GraphOptions,
        "OpError": _rt.OpError,
        "OptimizerOptions": _config.OptimizerOptions,
        "TensorShape": _shapes.TensorShape,
        "as_dtype": _dtypes.as_dtype,
        "newaxis": None,
    },
}
"""A heading of docs/tf1_names.md -> TensorFlow's name in ``tf`` -> what it is here."""

NAMES: dict[str, Any] = _dtypes.DTYPES | {name: what for names in GROUPS.values() for name, what in names.items()}
"""TensorFlow's name in ``tf`` -> what it is here."""

VERSION = __version__ = "1.0.0"
"""The release of TensorFlow whose names these are."""


GIT_VERSION = __git_version__ = "bellwether"
"""Not a commit of TensorFlow's."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return NAMES[name]
    if where := NAMESPACES.get(name) or _BESIDE.get(name):
        return importlib.import_module(f"{__name__}.{where}")
    raise AttributeError(name) if name.startswith("__") else _absent("tf", name)


def __dir__() -> list[str]:
    return sorted([*NAMES, *NAMESPACES, "VERSION", "__version__", "GIT_VERSION", "__git_version__"])
