"""TensorFlow 1's names on JAX: ``import harness.tf1 as tf``.

The names of TensorFlow 1.0 and the older ones of 0.8, with their argument names and orders, over
``runtime`` and ``harness``. What is not here fails by name, saying what to use instead;
``docs/tf1_names.md`` lists everything.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import runtime as _rt
from harness.tf1.graph import config as _config
from harness.tf1.graph import framework as _framework
from harness.tf1.names import missing as _missing
from harness.tf1.names import table as _table
from harness.tf1.ops import dtypes as _dtypes
from harness.tf1.ops import shapes as _shapes

_rt.lowlevel.set_default_graph_type(_framework.Graph)

NAMESPACES = {
    "app": "names.app",
    "compat": "names.compat",
    "contrib": "train.contrib",
    "data": "inputs.data",
    "errors": "names.errors",
    "flags": "names.flags",
    "gfile": "inputs.gfile",
    "graph_util": "train.graph_util",
    "image": "inputs.image",
    "io": "inputs.io",
    "keras": "tools.keras_datasets",
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

_IN_TF = """
    graph.initializers graph.messages graph.partitions graph.scopes graph.variables inputs.parsing inputs.queues
    inputs.readers
    loops.control_flow loops.row_loops loops.tensor_array loops.while_loops names.compat ops.array_ops ops.clip_ops
    ops.join_ops ops.math_ops ops.python_ops ops.random_ops ops.slices ops.sparse ops.string_ops ops.value_ops train.summary
    """
"""Modules that add names of ``tf`` itself to the table."""

for _module in _IN_TF.split():
    importlib.import_module(f"{__name__}.{_module}")

_table.add_names(
    "tf",
    {
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
    "Others",
)
# The release whose names these are; it has no commit of TensorFlow's.
_table.add_names("tf", dict.fromkeys(("VERSION", "__version__"), "1.0.0"))
_table.add_names("tf", dict.fromkeys(("GIT_VERSION", "__git_version__"), "bellwether"))
_table.add_names(
    "tf", {name: _table.Later(f"{__name__}.{where}") for name, where in NAMESPACES.items()}
)
_table.add_names("tf", _dtypes.DTYPES)

_in_table, __dir__ = _missing.namespace("tf")


def __getattr__(name: str) -> Any:
    return (
        importlib.import_module(f"{__name__}.{_BESIDE[name]}")
        if name in _BESIDE
        else _in_table(name)
    )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``harness.tf1.nn`` and the like for ``import harness.tf1.nn`` and ``from harness.tf1.nn import relu``."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a module of ``tf`` that lies elsewhere."""
        package, _, name = fullname.rpartition(".")
        known = package == __name__ and (name in NAMESPACES or name in _BESIDE)
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leaves the empty module to Python; see ``importlib.abc.Loader``."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Puts the module of ``tf`` in the place of the empty one."""
        sys.modules[module.__name__] = __getattr__(module.__name__.rpartition(".")[2])


# Behind the finders of files: ``layers`` and ``train`` lie here.
sys.meta_path.append(_Finder())
