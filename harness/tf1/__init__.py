"""TensorFlow 1's names on JAX: ``import harness.tf1 as tf``.

The names of TensorFlow 1.0 and the older ones of 0.8, with their argument names and orders, over ``runtime`` and
``harness``. What is not here fails by name, saying what to use instead; ``docs/tf1.md`` lists everything.
"""

from __future__ import annotations

import importlib
from typing import Any

import runtime as _rt
from harness.tf1 import array_ops as _array_ops
from harness.tf1 import clip_ops as _clip_ops
from harness.tf1 import config as _config
from harness.tf1 import control_flow as _control_flow
from harness.tf1 import dtypes as _dtypes
from harness.tf1 import framework as _framework
from harness.tf1 import initializers as _initializers
from harness.tf1 import join_ops as _join_ops
from harness.tf1 import math_ops as _math_ops
from harness.tf1 import python_ops as _python_ops
from harness.tf1 import queues as _queues
from harness.tf1 import random_ops as _random_ops
from harness.tf1 import scopes as _scopes
from harness.tf1 import shapes as _shapes
from harness.tf1 import slices as _slices
from harness.tf1 import value_ops as _value_ops
from harness.tf1 import variables as _variables
from harness.tf1.missing import absent as _absent

_shapes.install()
_framework.install()
_slices.install()

NAMESPACES = (
    "app",
    "compat",
    "contrib",
    "data",
    "errors",
    "flags",
    "gfile",
    "image",
    "io",
    "layers",
    "logging",
    "losses",
    "metrics",
    "nn",
    "python_io",
    "summary",
    "test",
    "train",
)
"""The modules below, imported on first use."""

NAMES: dict[str, Any] = {
    **_dtypes.DTYPES,
    **_math_ops.OPS,
    **_array_ops.OPS,
    **_join_ops.OPS,
    **_slices.OPS,
    **_value_ops.OPS,
    **_random_ops.OPS,
    **_clip_ops.OPS,
    **_initializers.INITIALIZERS,
    **_variables.OPS,
    **_scopes.OPS,
    **_framework.OPS,
    **_control_flow.OPS,
    **_queues.OPS,
    **_python_ops.OPS,
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
}
"""TensorFlow's name in ``tf`` -> what it is here."""

VERSION = __version__ = "1.0.0"
"""The release of TensorFlow whose names these are."""


GIT_VERSION = __git_version__ = "bellwether"
"""Not a commit of TensorFlow's."""

LATER: dict[str, str] = {
    **dict.fromkeys(
        (
            "AggregationMethod", "AttrValue", "Event", "GraphDef", "HistogramProto", "LogMessage", "NodeDef",
            "SessionLog", "Summary",
        ),
        "messages",
    ),
    **dict.fromkeys(
        (
            "audio_summary", "histogram_summary", "image_summary", "merge_all_summaries", "merge_summary",
            "scalar_summary",
        ),
        "summary",
    ),
    **dict.fromkeys(
        (
            "FixedLenFeature", "FixedLenSequenceFeature", "VarLenFeature", "as_string", "decode_csv", "decode_raw",
            "parse_example", "parse_single_example", "parse_single_sequence_example", "string_join", "string_split",
            "string_to_number",
        ),
        "parsing",
    ),
    **dict.fromkeys(
        (
            "FixedLengthRecordReader", "IdentityReader", "ReaderBase", "TFRecordReader", "TextLineReader",
            "WholeFileReader", "matching_files", "read_file", "write_file",
        ),
        "readers",
    ),
    **dict.fromkeys(
        ("SparseTensor", "SparseTensorValue", "sparse_tensor_to_dense", "sparse_to_dense"), "sparse",
    ),
}  # fmt: skip
"""TensorFlow's name in ``tf`` -> the module that has it, imported on first use."""


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return NAMES[name]
    if name in LATER:
        module = importlib.import_module(f"{__name__}.{LATER[name]}")
        return getattr(module, "OPS", {}).get(name) or getattr(module, name)
    if name in NAMESPACES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(name) if name.startswith("__") else _absent("tf", name)


def __dir__() -> list[str]:
    return sorted([*NAMES, *NAMESPACES, *LATER, "VERSION", "__version__", "GIT_VERSION", "__git_version__"])
