"""Handwritten digits to learn from: which copy of MNIST is read, and the batches that each worker draws from it.

`python -m models.mnist.data [directory]` reads the data once, with a progress bar for a download,
and logs the result. Run before the workers start, the command saves them the wait.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import app, logging
from numpy.typing import NDArray

from harness import exit_codes
from models.mnist import files
from models.mnist.files import DataError

IMAGE_SIDE = 28
IMAGE_PIXELS = IMAGE_SIDE * IMAGE_SIDE
NUM_CLASSES = 10

Images = NDArray[np.float32]
"""[N, 784], one row per image, 0 (background) to 1 (ink)."""
Labels = NDArray[np.int32]
"""[N], 0 to 9."""


@dataclass(frozen=True, eq=False)
class DataSplit:
    """Images and their labels.

    The pixels stay bytes and are scaled batch by batch. A batch of 100 takes 29 us, and 26 us from
    a table of floats: the division takes the time that reading a quarter of the memory saves. The
    table would cost every process 140 MB, and half a second before the first step.
    """

    pixels: NDArray[np.uint8]
    """uint8 [N, 784], 0 to 255."""
    labels: Labels
    """[N], 0 to 9."""

    def __post_init__(self) -> None:
        assert len(self.pixels) == len(self.labels)

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.labels)

    @property
    def images(self) -> Images:
        """All images as float32 [N, 784] in 0..1; scaled at each access."""
        return scale(self.pixels)

    def chunks(self, size: int) -> Iterator[tuple[Images, Labels]]:
        """Yields everything once, in order, `size` images at a time; the last chunk may be smaller."""
        for start in range(0, len(self), size):
            yield scale(self.pixels[start : start + size]), self.labels[start : start + size]


@dataclass(frozen=True, eq=False)
class MnistData:
    """The training and the test examples.

    Attributes:
        train: examples to train on.
        test: examples to test on.
        name: `mnist`, or `digits` for scikit-learn's. Tasks of one cluster must agree on the name.
        source: origin of the files, in words.
    """

    train: DataSplit
    test: DataSplit
    name: str
    source: str

    def __str__(self) -> str:
        """Returns one line for the log."""
        return f"{self.source}, {len(self.train)} training and {len(self.test)} test images"


def scale(pixels: NDArray[np.uint8]) -> Images:
    """Returns `pixels` / 255 as float32, in memory that XLA can read without a copy of its own."""
    # XLA's CPU client borrows an argument only if the memory is aligned to 64 bytes, and numpy
    # aligns to 16. The copy that this avoids takes 11 us for 100 images.
    buffer = np.empty(pixels.size + 16, np.float32)
    start = -buffer.ctypes.data % 64 // 4
    images = buffer[start : start + pixels.size].reshape(pixels.shape)
    return np.divide(pixels, np.float32(255), out=images, dtype=np.float32)


def load(
    data_dir: str | None = None,
    *,
    mirrors: Sequence[str] = files.MIRRORS,
    checksums: Mapping[str, str] = files.SHA256,
) -> MnistData:
    """Reads MNIST from the first of these that is given: `data_dir`, `$MNIST_DIR`, the cache of downloaded files.

    An empty cache is filled by download. Without a network, scikit-learn's 1,797 digits stand in,
    with a warning.

    Args:
      data_dir: directory of the four IDX files, decompressed or as `.gz`. Never written to.
      mirrors: addresses below which the files lie as `<name>.gz`.
      checksums: file name -> SHA-256 of the decompressed file, in hexadecimal.

    Raises:
      DataError: A file is missing or damaged, or neither MNIST nor scikit-learn is there. A
        directory that was named but cannot be used is always an error, so that no run trains on
        other data unnoticed.
    """
    for setting, directory in (
        ("--data_dir", data_dir),
        ("MNIST_DIR", os.environ.get("MNIST_DIR")),
    ):
        if directory:
            found = _read_directory(Path(directory).expanduser(), setting, checksums)
            return _make_mnist(found, f"MNIST from {directory} ({setting})")
    import pooch

    cache = pooch.os_cache("bellwether") / "mnist"
    try:
        return _make_mnist(
            files.fetch(cache, mirrors, checksums), f"MNIST from {cache} (downloaded)"
        )
    except ConnectionError as error:
        return _make_digits(error)


def _read_directory(
    directory: Path, setting: str, checksums: Mapping[str, str]
) -> dict[str, NDArray[np.uint8]]:
    found = {}
    for name, sha256 in checksums.items():
        path = next(
            (path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None
        )
        if path is None:
            advice = f"copy the four MNIST files there, or leave {setting} unset to download them"
            raise DataError(f"{setting}={directory} has neither {name} nor {name}.gz; {advice}")
        try:
            found[name] = files.read(path, sha256)
        except DataError as error:
            raise DataError(
                f"{error}; replace the file, or leave {setting} unset to download a good one"
            ) from error
    return found


def _make_mnist(values: Mapping[str, NDArray[np.uint8]], source: str) -> MnistData:
    train, test = (
        DataSplit(
            values[f"{part}-images-idx3-ubyte"].reshape(-1, IMAGE_PIXELS),
            values[f"{part}-labels-idx1-ubyte"].astype(np.int32),
        )
        for part in ("train", "t10k")
    )
    return MnistData(train, test, "mnist", source)


def _make_digits(reason: Exception) -> MnistData:
    """Returns scikit-learn's handwritten digits in the format of MNIST.

    As in MNIST, a digit of 20x20 pixels lies in the middle of 28x28.
    """
    try:
        from scipy.ndimage import zoom
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(
            f"{reason}; set --data_dir to a directory with the four MNIST files, or install "
            "scikit-learn, whose digits are used where there is no network"
        ) from error
    small, labels = load_digits(return_X_y=True)  # [1797, 64], 0 to 16
    enlarged = [
        zoom(image, 20 / 8, order=3, grid_mode=True, mode="nearest")
        for image in small.reshape(-1, 8, 8) / 16
    ]
    images = np.pad(np.clip(enlarged, 0, 1), [(0, 0), (4, 4), (4, 4)])
    pixels = np.rint(images * 255).astype(np.uint8).reshape(-1, IMAGE_PIXELS)
    parts = train_test_split(
        pixels, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    train_pixels, test_pixels, train_labels, test_labels = parts
    source = "scikit-learn's bundled digits, enlarged: NOT MNIST"
    notice = [
        f"{reason}.",
        f"Training on {source} ({len(train_labels)} training and {len(test_labels)} test images).",
        "Accuracies are not comparable with those on MNIST. To train on MNIST, set --data_dir or "
        "MNIST_DIR.",
    ]
    logging.warning("\n%s", "\n".join(f"*** {line}" for line in notice))
    return MnistData(
        DataSplit(train_pixels, train_labels), DataSplit(test_pixels, test_labels), "digits", source
    )


class Batches:
    """An endless stream of shuffled batches for one of several workers.

    A restarted worker resumes the stream with `restore`.

    Every epoch has its own permutation of the whole split, made from (seed, epoch) alone, of which
    this shard takes every `num_shards`-th example. Workers with the same seed therefore never share
    an example within an epoch, and together see each exactly once. All batches have the same size,
    so XLA compiles for one shape. A batch that reaches the end of an epoch is completed from the
    next epoch, so no example is dropped.

        batches = data.Batches(mnist.train, 100, seed=1, shard_index=0, num_shards=2)
        images, labels = batches.next()
    """

    def __init__(
        self,
        split: DataSplit,
        batch_size: int,
        seed: int,
        shard_index: int = 0,
        num_shards: int = 1,
    ) -> None:
        """Starts at the beginning of epoch 0.

        Args:
          split: the examples.
          batch_size: examples per batch, at least 1; may be more than an epoch of the shard.
          seed: of the shuffling, at least 0; the same for all shards.
          shard_index: which shard this is, from 0.
          num_shards: how many workers share the split.

        Raises:
          ValueError: an argument is out of its range, or the split has fewer examples than shards.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, not {seed}")
        if not 0 <= shard_index < num_shards:
            raise ValueError(
                f"shard_index must be from 0 to num_shards - 1 = {num_shards - 1}, not "
                f"{shard_index}"
            )
        if len(split) < num_shards:
            raise ValueError(f"{len(split)} examples cannot be shared by {num_shards} workers")
        self._split = split
        self._batch_size = batch_size
        self._seed = seed
        self._shard_index = shard_index
        self._num_shards = num_shards
        # Epoch and position change in one assignment: a checkpoint reads both from another thread.
        self._place = 0, 0
        self._order = self._shuffle_epoch(0)

    @property
    def epoch(self) -> float:
        """Number of passes over the shard so far, such as 1.5 in the middle of the second pass."""
        epoch, position = self._place
        return epoch + position / len(self._order)

    def next(self) -> tuple[Images, Labels]:
        """Returns the next batch: images float32 [batch_size, 784] in 0..1 and labels int32 [batch_size], both new."""
        epoch, position = self._place
        chosen = self._order[position : position + self._batch_size]
        position += len(chosen)
        while len(chosen) < self._batch_size:
            epoch += 1
            self._order = self._shuffle_epoch(epoch)
            more = self._order[: self._batch_size - len(chosen)]
            position = len(more)
            chosen = np.concatenate([chosen, more])
        assert len(chosen) == self._batch_size and position <= len(self._order)
        self._place = epoch, position
        return scale(self._split.pixels[chosen]), self._split.labels[chosen]

    def state(self) -> dict[str, int]:
        """Returns the position of the stream, for `restore` in another process."""
        epoch, position = self._place
        return self._stream_identity() | {"epoch": epoch, "position": position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues at the position of another stream, whose batch size may differ.

        Args:
          state: position that `state` returned.

        Raises:
          ValueError: The seed, the shard or the number of examples differ.
        """
        # All checks come before a change.
        for name, here in self._stream_identity().items():
            if int(state[name]) != here:
                raise ValueError(
                    f"the saved batches had {name}={state[name]}, these have {here}: use the same"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self._order):
            raise ValueError(
                f"the saved batches were at epoch {epoch}, position {position}: no such place"
            )
        self._place = epoch, position
        self._order = self._shuffle_epoch(epoch)

    def _stream_identity(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "shard_index": self._shard_index,
            "num_shards": self._num_shards,
            "num_examples": len(self._split),
        }

    def _shuffle_epoch(self, epoch: int) -> NDArray[np.int64]:
        permutation = np.random.default_rng((self._seed, epoch)).permutation(len(self._split))
        return permutation[self._shard_index :: self._num_shards]


def main(argv: Sequence[str]) -> None:
    """Reads the data once and logs the result, as the module's docstring says."""
    try:
        logging.info("data: %s", load(argv[1] if len(argv) > 1 else None))
    except DataError as error:
        exit_codes.leave(exit_codes.DATA, str(error))


if __name__ == "__main__":
    app.run(main)
