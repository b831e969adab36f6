"""TensorFlow's modules by name, for programs that are run unchanged: ``python -m harness.tf1 program.py``.

After ``install()`` every ``import tensorflow...`` succeeds. A module answers for the names that
``harness.tf1`` has; one that is not here at all is an empty module, which fails, saying what to use
instead, when something of it is used. So an import whose names are never used costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import harness.tf1 as tf
from harness.tf1.names.missing import absent, advice

ROOT = "tensorflow"

MODULES: Mapping[str, str] = {
    "tensorflow": "",
    "tensorflow.compat.v1": "",
    "tensorflow.compat.v1.train": "train",
    "tensorflow.core.protobuf.config_pb2": "",
    "tensorflow.core.protobuf.cluster_pb2": "train",
    "tensorflow.core.protobuf.tensorflow_server_pb2": "train",
    "tensorflow.core.util.event_pb2": "",
    "tensorflow.core.framework.summary_pb2": "",
    "tensorflow.core.framework.graph_pb2": "",
    "tensorflow.core.framework.node_def_pb2": "",
    "tensorflow.core.framework.attr_value_pb2": "",
    "tensorflow.python.lib.io.file_io": "file_io",
    "tensorflow.python.platform.tf_logging": "logging",
    "tensorflow.python.pywrap_tensorflow": "pywrap",
    "tensorflow.python.client.device_lib": "messages",
    "tensorflow.python.client.timeline": "messages",
    "tensorflow.examples.tutorials.mnist.input_data": "mnist_data",
    "tensorflow.examples.tutorials.mnist.mnist": "mnist_model",
    "tensorflow.contrib.learn.python.learn.datasets.mnist": "mnist_data",
}
"""TensorFlow's module -> the module of ``harness.tf1`` that answers for it; "" is ``harness.tf1`` itself."""

_PYTHON_PACKAGES = frozenset(
    """
    client data debug estimator feature_column framework grappler keras layers lib lib.io ops platform profiler
    saved_model summary summary.writer tools training user_ops util
    """.split()
)
"""Packages of ``tensorflow.python``, of which programs take modules; modules are what they take names of."""


_EVERYWHERE = (
    "",
    "train",
    "nn",
    "summary",
    "layers",
    "losses",
    "gfile",
    "errors",
    "app",
    "flags",
    "logging",
    "compat",
)
"""Where names of ``tensorflow.python`` are looked for, in this order."""


class Module(types.ModuleType):
    """One of TensorFlow's modules."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # so that modules are found below it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in dir(tf):
            raise AttributeError(name)
        for module in _find_answering(self.__name__):
            if name in _list_names(module):
                return getattr(module, name)
        # TensorFlow's packages import their modules, so a program reads them as attributes.
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise not_here(f"{self.__name__}.{name}")

    def __dir__(self) -> list[str]:
        return sorted(
            {name for module in _find_answering(self.__name__) for name in _list_names(module)}
        )

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raises AttributeError: a program imported this module for a function that is not here."""
        raise not_here(self.__name__)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        """Raises AttributeError: a program imported this module for a class that is not here."""
        raise not_here(self.__name__)


def _find_answering(full: str) -> list[Any]:
    """Returns the modules of ours, in the order of asking, that have the names of one of TensorFlow's."""
    if full in MODULES:
        return [_our_module(MODULES[full])]
    _, *parts = full.split(".")
    if parts[:2] == ["compat", "v1"]:
        parts = parts[2:]
    if parts[0] == "python":
        if ".".join(parts[1:]) in _PYTHON_PACKAGES or len(parts) == 1:
            return []
        first = [parts[-1]] if parts[-1] in tf.NAMESPACES else []
        return [_our_module(name) for name in (*first, *_EVERYWHERE)]
    module, rest = tf, parts
    while rest and rest[0] in dir(module):
        inner = getattr(module, rest[0])
        if not isinstance(inner, types.ModuleType):
            break
        module, rest = inner, rest[1:]
    # The files of a package of contrib are in its "python", which the package answers for.
    return [] if module is tf or rest and rest[0] != "python" else [module]


def _our_module(name: str) -> Any:
    return getattr(tf, name) if name else tf


def _list_names(module: Any) -> Sequence[str]:
    """Lists TensorFlow's names in a module of ours, without its own imports."""
    if "__dir__" in vars(module):
        return dir(module)
    return [
        n
        for n, value in vars(module).items()
        if not n.startswith("_") and not isinstance(value, types.ModuleType)
    ]


def is_tensorflow(full: str) -> bool:
    """Returns True for ``tensorflow`` and the modules below."""
    return full == ROOT or full.startswith(f"{ROOT}.")


def not_here(full: str) -> AttributeError:
    """Makes the error for a name that is not here."""
    _, _, below = full.partition(".")
    while below.startswith(("compat.v1.", "python.")):
        below = below.removeprefix("compat.v1.").removeprefix("python.")
    namespace, _, name = f"tf.{below}".rpartition(".")
    found = (
        []
        if advice(f"tf.{below}")
        else [where for where in _EVERYWHERE if name in _list_names(_our_module(where))]
    )
    if found:
        there = ".".join(part for part in ("tf", found[0], name) if part)
        return AttributeError(f"{full} is not in harness.tf1, but {there} is")
    return absent(namespace, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of TensorFlow's."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a module for ``tensorflow`` and every name below."""
        if not is_tensorflow(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="harness.tf1", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Makes the module; see ``importlib.abc.Loader``."""
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs nothing: the module is complete."""


def install() -> None:
    """Lets every import of TensorFlow find ``harness.tf1``, also where TensorFlow itself is installed.

    Raises:
        RuntimeError: TensorFlow has been imported already.
    """
    # A program may be run by another that has installed the modules already.
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if ROOT in sys.modules:
        raise RuntimeError(
            "TensorFlow is imported already: harness.tf1 must be installed before that"
        )
    # In front of all finders: an installed TensorFlow is passed over.
    sys.meta_path.insert(0, _Finder())
