"""The MNIST reader of TensorFlow's tutorials: ``tensorflow.examples.tutorials.mnist.input_data``.

The reader downloads nothing; ``read_data_sets`` says where the four IDX files are looked for.
"""

from __future__ import annotations

import gzip
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from harness.tf1.ops.dtypes import as_dtype

SOURCE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CLASSES = 10
_UBYTE = 8  # IDX's number for the type of the elements

IMAGE_SIZE = 28
"""Height and width of a picture."""
IMAGE_PIXELS = IMAGE_SIZE * IMAGE_SIZE
"""Numbers in one."""
NUM_CLASSES = 10
"""The digits."""


class DataSet:
    """Images and labels, given out in batches; the order is drawn anew for each epoch.

    Args:
        images: [n, 28, 28, 1] or [n, 784], uint8.
        labels: [n], or [n, 10] one-hot.
        fake_data: must be False.
        one_hot: of labels that are not one-hot yet.
        dtype: float32 scales the pixels to 0..1, uint8 leaves them.
        reshape: images as [n, 784].
        seed: of the order of the examples.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.uint8],
        fake_data: bool = False,
        one_hot: bool = False,
        dtype: DTypeLike = np.float32,
        reshape: bool = True,
        seed: int | None = None,
    ) -> None:
        if fake_data:
            raise ValueError("fake_data is not in harness.tf1: feed zeros")
        wanted = as_dtype(dtype).dtype
        if wanted not in (np.dtype(np.float32), np.dtype(np.uint8)):
            raise TypeError(f"the images are uint8 or float32, not {wanted}")
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
        shown = images.reshape(len(images), int(np.prod(images.shape[1:]))) if reshape else images
        self._images = shown.astype(np.float32) / 255 if wanted == np.float32 else shown
        self._labels = _one_hot(labels) if one_hot and labels.ndim == 1 else labels
        self._draw = np.random.default_rng(seed)
        self._order = np.arange(len(images))
        self._at = 0
        self._epochs_completed = 0
        self._fresh = True

    @property
    def images(self) -> NDArray[np.generic]:
        """All images, in the order of the epoch that is under way."""
        return self._images[self._order]

    @property
    def labels(self) -> NDArray[np.generic]:
        """All labels, in the same order."""
        return self._labels[self._order]

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(self._order)

    @property
    def epochs_completed(self) -> int:
        """The number of complete passes."""
        return self._epochs_completed

    def next_batch(
        self, batch_size: int, fake_data: bool = False, shuffle: bool = True
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Returns the next ``batch_size`` images and labels; what an epoch has left is filled up from the next one.

        Raises:
            ValueError: there are fewer examples than that, or ``fake_data``.
        """
        if fake_data:
            raise ValueError("fake_data is not in harness.tf1: feed zeros")
        if not 0 <= batch_size <= self.num_examples:
            raise ValueError(f"a batch of {batch_size} of {self.num_examples} examples")
        if self._fresh and shuffle:
            self._draw.shuffle(self._order)
        self._fresh = False
        # A copy: a shuffle at the end of the epoch would change a view.
        chosen = self._order[self._at : self._at + batch_size].copy()
        self._at += len(chosen)
        if len(chosen) < batch_size:
            self._epochs_completed += 1
            if shuffle:
                self._draw.shuffle(self._order)
            self._at = batch_size - len(chosen)
            chosen = np.concatenate([chosen, self._order[: self._at]])
        return self._images[chosen], self._labels[chosen]


class Datasets(NamedTuple):
    """The data sets that ``read_data_sets`` returns."""

    train: DataSet
    validation: DataSet
    test: DataSet


def read_data_sets(
    train_dir: str | os.PathLike[str],
    fake_data: bool = False,
    one_hot: bool = False,
    dtype: DTypeLike = np.float32,
    reshape: bool = True,
    validation_size: int = 5000,
    seed: int | None = None,
    source_url: str = SOURCE_URL,
) -> Datasets:
    """Reads MNIST from the first of these that holds the four files, as they are or as ``.gz``.

    1. ``train_dir``
    2. the directory that the environment variable MNIST_DIR names
    3. ``~/.cache/bellwether/mnist``, where this project's MNIST example keeps what it has
        downloaded

    Args:
        train_dir: see above.
        fake_data: must be False.
        one_hot: labels as [n, 10] instead of [n].
        dtype: float32 scales the pixels to 0..1, uint8 leaves them.
        reshape: images as [n, 784] instead of [n, 28, 28, 1].
        validation_size: how many of the training examples are set apart.
        seed: of the order of the examples.
        source_url: where the files can be had, for the message.

    Raises:
        FileNotFoundError: none of the directories has all four; says where they can be had.
        ValueError: a file is none of MNIST's, or ``validation_size`` does not fit.
    """
    images, labels, test_images, test_labels = (
        a[..., np.newaxis] if a.ndim == 3 else a
        for a in read_idx_files(pathlib.Path(train_dir), source_url)
    )
    if not 0 <= validation_size <= len(images):
        raise ValueError(
            f"Validation size should be between 0 and {len(images)}. Received: {validation_size}."
        )

    def made(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> DataSet:
        return DataSet(images, labels, fake_data, one_hot, dtype, reshape, seed)

    return Datasets(
        made(images[validation_size:], labels[validation_size:]),
        made(images[:validation_size], labels[:validation_size]),
        made(test_images, test_labels),
    )


def read_idx_files(train_dir: pathlib.Path, source_url: str) -> list[NDArray[np.uint8]]:
    """Returns images and labels for training, and those for tests; arguments and errors of ``read_data_sets``."""
    return [_read_idx(path) for path in _find_files(train_dir, source_url)]


def _find_files(train_dir: pathlib.Path, source_url: str) -> Sequence[pathlib.Path]:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    places = [train_dir.expanduser(), cache / "bellwether" / "mnist"]
    if os.environ.get("MNIST_DIR"):
        places.insert(1, pathlib.Path(os.environ["MNIST_DIR"]).expanduser())
    for place in places:
        found = [
            path
            for name in _FILES
            for path in (place / name, place / f"{name}.gz")
            if path.is_file()
        ]
        by_name = {path.name.removesuffix(".gz"): path for path in reversed(found)}
        if len(by_name) == len(_FILES):
            return [by_name[name] for name in _FILES]
    looked = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"no MNIST in {looked}: put {', '.join(_FILES)} (or .gz) of {source_url} into one of them"
    )


def _read_idx(path: pathlib.Path) -> NDArray[np.uint8]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        head = file.read(4)
        rank = head[3] if len(head) == 4 and head[:3] == bytes([0, 0, _UBYTE]) else 0
        sizes = np.frombuffer(file.read(4 * rank), ">u4")
        content = (
            np.frombuffer(file.read(int(np.prod(sizes, dtype=np.int64)) + 1), np.uint8)
            if rank
            else head
        )
    if not rank or len(sizes) != rank or len(content) != np.prod(sizes, dtype=np.int64):
        raise ValueError(f"{path} is no MNIST file, or not all of one")
    return content.reshape(sizes.astype(int))  # type: ignore[union-attr]


def _one_hot(labels: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.eye(_CLASSES)[labels]
