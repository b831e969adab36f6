"""The data sets of Keras from local files, laid out as Keras 3 lays them out."""

import gzip
import os
import pathlib
import pickle
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

import harness.tf1 as tf

DRAW = np.random.default_rng(0)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The directory of data sets."""
    (tmp_path / "datasets").mkdir()
    places = dict.fromkeys(("KERAS_HOME", "MNIST_DIR", "XDG_CACHE_HOME"), str(tmp_path))
    with mock.patch.dict(os.environ, places):
        yield tmp_path / "datasets"


def write_idx(directory: pathlib.Path) -> None:
    directory.mkdir()
    for name, shape in (("train", (3, 2, 2)), ("t10k", (2, 2, 2))):
        for kind, array in (
            ("images-idx3", np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)),
            ("labels-idx1", np.arange(shape[0], dtype=np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            content = gzip.compress(head + array.tobytes())
            (directory / f"{name}-{kind}-ubyte.gz").write_bytes(content)


def test_mnist_is_read_from_files(directory: pathlib.Path) -> None:
    """MNIST is read from the archive, or else from IDX files; a missing one is named."""
    with pytest.raises(FileNotFoundError, match=r"downloads nothing: put .*mnist\.npz there"):
        tf.keras.datasets.mnist.load_data()
    write_idx(directory / "mnist")
    (x, y), (x_test, _) = tf.keras.datasets.mnist.load_data()
    assert (x.shape, y.tolist(), x_test.shape) == ((3, 2, 2), [0, 1, 2], (2, 2, 2))
    arrays = {name: DRAW.integers(0, 9, 4) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(directory / "mnist.npz", **arrays)
    (x, y), (_, y_test) = tf.keras.datasets.mnist.load_data()
    np.testing.assert_array_equal([x, y, y_test], [arrays[n] for n in ("x_train", "y_train", "y_test")])  # fmt: skip


def test_fashion_mnist_is_read(directory: pathlib.Path) -> None:
    """The clothes are read from a directory of their own, which is named when it is missing."""
    with pytest.raises(FileNotFoundError, match="fashion-mnist is not there"):
        tf.keras.datasets.fashion_mnist.load_data()
    write_idx(directory / "fashion-mnist")
    (x, _), (_, y) = tf.keras.datasets.fashion_mnist.load_data()
    assert x.dtype == np.uint8 and x.shape == (3, 2, 2) and y.tolist() == [0, 1]


def test_houses_are_split_as_keras(directory: pathlib.Path) -> None:
    """The rows of the houses come in Keras's order (seed 113, ten rows, by Keras 3.15)."""
    np.savez(directory / "boston_housing.npz", x=np.arange(10) * 10, y=np.arange(10))
    (x, y), (x_test, y_test) = tf.keras.datasets.boston_housing.load_data()
    np.testing.assert_array_equal(x, y * 10)
    np.testing.assert_array_equal(x_test, y_test * 10)
    assert [*y, *y_test] == ORDER


ORDER = [9, 3, 6, 1, 0, 7, 4, 8, 2, 5]


def write_cifar(path: pathlib.Path, key: str, labels: list[int]) -> np.ndarray:
    path.parent.mkdir(exist_ok=True)
    data = DRAW.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    path.write_bytes(pickle.dumps({b"data": data, key.encode(): labels}, protocol=2))
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def test_pictures_of_cifar_are_read(directory: pathlib.Path) -> None:
    """The batches of CIFAR become pictures with channels last, and labels in a column."""
    batches = directory / "cifar-10-batches-py"
    parts = [write_cifar(batches / f"data_batch_{n}", "labels", [n, n]) for n in range(1, 6)]
    write_cifar(batches / "test_batch", "labels", [7])
    (x, y), (_, y_test) = tf.keras.datasets.cifar10.load_data()
    np.testing.assert_array_equal(x, np.concatenate(parts))
    assert y.ravel().tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5] and y_test.tolist() == [[7]]
    for name in ("train", "test"):
        write_cifar(directory / "cifar-100-python" / name, "coarse_labels", [3])
    _, (_, y) = tf.keras.datasets.cifar100.load_data("coarse")
    assert y.tolist() == [[3]] and y.dtype == np.uint8
    with pytest.raises(ValueError, match="label_mode"):
        tf.keras.datasets.cifar100.load_data("large")


def test_other_pickles_are_refused(directory: pathlib.Path) -> None:
    """A pickle that would run code is not read."""

    class Harmful:
        def __reduce__(self) -> object:
            return print, ("code",)

    path = directory / "cifar-100-python" / "train"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(ValueError, match=r"none of CIFAR's: it wants .*\.print"):
        tf.keras.datasets.cifar100.load_data()
