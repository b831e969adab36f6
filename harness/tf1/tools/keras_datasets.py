"""``tf.keras.datasets``: the small data sets of Keras, from local files. Nothing is downloaded."""

from __future__ import annotations

import os
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from harness.tf1.names.missing import Namespace, namespace
from harness.tf1.names.table import add_names
from harness.tf1.tools import mnist_data

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Inputs and labels."""
Split = tuple[Arrays, Arrays]
"""The training data, and the test data."""

_ORIGIN = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"


def _data_directory() -> pathlib.Path:
    return pathlib.Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "datasets"


def _local_path(name: str, origin: str) -> pathlib.Path:
    """Returns the path of a file or directory of Keras's cache. Raises FileNotFoundError when it is missing."""
    path = _data_directory() / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there, and harness.tf1 downloads nothing: put {origin} there"
        )
    return path


def load_mnist(path: str = "mnist.npz") -> Split:
    """Reads the digits from Keras's ``mnist.npz``, or from the IDX files that ``mnist_data`` finds.

    Args:
        path: a file name in ``~/.keras/datasets``, or a path.

    Raises:
        FileNotFoundError: neither is there.
    """
    try:
        found = _local_path(path, _ORIGIN + "mnist.npz")
    except FileNotFoundError as error:
        try:
            return _read_idx(_data_directory() / "mnist", mnist_data.SOURCE_URL)
        except FileNotFoundError as other:
            raise FileNotFoundError(f"{error}; {other}") from None
    with np.load(found, allow_pickle=False) as arrays:
        return (
            (arrays["x_train"], arrays["y_train"]),
            (arrays["x_test"], arrays["y_test"]),
        )


def load_fashion_mnist() -> Split:
    """Reads the clothes from the four IDX files in ``~/.keras/datasets/fashion-mnist``.

    Raises FileNotFoundError when they are missing.
    """
    return _read_idx(_local_path("fashion-mnist", f"the four files of {_ORIGIN}"), _ORIGIN)


def _read_idx(directory: pathlib.Path, origin: str) -> Split:
    images, labels, test_images, test_labels = mnist_data.read_idx_files(directory, origin)
    return (images, labels), (test_images, test_labels)


def load_boston_housing(
    path: str = "boston_housing.npz", test_split: float = 0.2, seed: int = 113
) -> Split:
    """Reads the prices of houses from ``~/.keras/datasets``.

    Args:
        path: a file name there, or a path.
        test_split: the share of the test data.
        seed: of the order.

    Raises:
        FileNotFoundError: the file is missing.
    """
    with np.load(_local_path(path, _ORIGIN + "boston_housing.npz"), allow_pickle=False) as arrays:
        x, y = arrays["x"], arrays["y"]
    # Keras draws the order so; another generator would give other splits than published results.
    order = np.random.RandomState(seed).permutation(len(x))
    x, y = x[order], y[order]
    end = int(len(x) * (1 - test_split))
    return (x[:end], y[:end]), (x[end:], y[end:])


def load_cifar10() -> Split:
    """Reads ten kinds of pictures from ``~/.keras/datasets/cifar-10-batches-py``.

    Raises FileNotFoundError when it is missing.
    """
    directory = _local_path("cifar-10-batches-py", _CIFAR + "cifar-10-python.tar.gz, unpacked,")
    parts = [_read_batch(directory / f"data_batch_{n}", "labels") for n in range(1, 6)]
    train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return train, _read_batch(directory / "test_batch", "labels")


def load_cifar100(label_mode: str = "fine") -> Split:
    """Reads a hundred kinds of pictures from ``~/.keras/datasets/cifar-100-python``.

    Args:
        label_mode: "fine", or "coarse" for twenty groups.

    Raises:
        FileNotFoundError: the directory is missing.
        ValueError: another ``label_mode``.
    """
    if label_mode not in ("fine", "coarse"):
        raise ValueError(
            f"`label_mode` must be one of `'fine'`, `'coarse'`. Received: label_mode={label_mode}."
        )
    directory = _local_path("cifar-100-python", _CIFAR + "cifar-100-python.tar.gz, unpacked,")
    train, test = (_read_batch(directory / n, f"{label_mode}_labels") for n in ("train", "test"))
    return train, test


class _ArraysOnly(pickle.Unpickler):
    """A reader of pickles that hold arrays: any other pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module.endswith(".multiarray"):
            return np.zeros(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, coding: text.encode(coding)
        self._refuse(module, name)

    def _refuse(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"the file is none of CIFAR's: it wants {module}.{name}")


def _read_batch(path: pathlib.Path, key: str) -> Arrays:
    """Returns pictures, [n, 32, 32, 3], and labels, [n, 1]."""
    with path.open("rb") as file:
        content = dict(_text_keys(_ArraysOnly(file, encoding="bytes").load()))
    pictures = np.asarray(content["data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return pictures, np.asarray(content[key], np.uint8).reshape(-1, 1)


def _text_keys(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        yield key.decode() if isinstance(key, bytes) else key, value


for _name, _load in {
    "mnist": load_mnist,
    "fashion_mnist": load_fashion_mnist,
    "boston_housing": load_boston_housing,
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
}.items():
    add_names(f"tf.keras.datasets.{_name}", {"load_data": _load})
    add_names("tf.keras.datasets", {_name: Namespace(f"tf.keras.datasets.{_name}")})
add_names("tf.keras", {"datasets": Namespace("tf.keras.datasets")})

__getattr__, __dir__ = namespace("tf.keras")
