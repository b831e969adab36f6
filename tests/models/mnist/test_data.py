"""MNIST's data: every bad file is refused by name, the cache is whole or absent, and the batches lose no example."""

import fcntl
import gzip
import hashlib
import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness import exit_codes
from models.mnist import data
from models.mnist import files as mnist_files
from models.mnist.files import DataError
from tests.kit import real_mnist
from tests.kit.changes import SetTimes, SetVariables

ROOT = Path(__file__).parents[3]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = mnist_files.SHA256


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def sums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def write(directory: Path, files: dict[str, bytes], compress: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = directory / (f"{name}.gz" if compress else name)
        path.write_bytes(gzip.compress(content) if compress else content)
    return directory


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A small data set in MNIST's four files."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 28, 28), np.uint8)
    labels = rng.integers(0, 10, 50, np.uint8)
    return {
        TRAIN_IMAGES: idx_bytes(images[:40]),
        TRAIN_LABELS: idx_bytes(labels[:40]),
        TEST_IMAGES: idx_bytes(images[40:]),
        TEST_LABELS: idx_bytes(labels[40:]),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, set_variables: SetVariables) -> Path:
    """An empty cache, no MNIST_DIR, and no proxy between the tests and their own mirrors."""
    set_variables(XDG_CACHE_HOME=str(tmp_path / "cache"), no_proxy="*", MNIST_DIR=None)
    return tmp_path / "cache" / "bellwether" / "mnist"


class Mirror(http.server.ThreadingHTTPServer):
    """An HTTP server of byte strings by path, which remembers what was downloaded from it."""

    daemon_threads = True

    def __init__(self, content: dict[str, bytes], cut: int | None = None) -> None:
        """Serves `content`; of each body only the first `cut` bytes, before the connection closes."""
        super().__init__(("127.0.0.1", 0), _MirrorHandler)
        self.content = content
        self.cut = cut
        self.stall = False
        """Whether to keep silent in the middle of every body until `resume` is set."""
        self.stalled, self.resume = threading.Event(), threading.Event()
        self.downloaded: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class _MirrorHandler(http.server.BaseHTTPRequestHandler):
    server: Mirror

    def do_HEAD(self) -> None:
        self._answer(head_only=True)

    def do_GET(self) -> None:
        self._answer(head_only=False)

    def _answer(self, head_only: bool) -> None:
        name = self.path.lstrip("/")
        body = self.server.content.get(name)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head_only:
            self.server.downloaded.append(name)
            sent = len(body) // 2 if self.server.stall else 0
            self.wfile.write(body[:sent])
            if self.server.stall:
                self.server.stalled.set()
                self.server.resume.wait(timeout=60)
            self.wfile.write(body[sent : self.server.cut])

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test output quiet."""


MakeMirror = Callable[..., Mirror]


@pytest.fixture
def make_mirror() -> Iterator[MakeMirror]:
    """Starts mirrors that are closed again after the test; files are given by their uncompressed name."""
    running: list[tuple[Mirror, threading.Thread]] = []

    def make(content: dict[str, bytes], cut: int | None = None) -> Mirror:
        mirror = Mirror(
            {f"{name}.gz": gzip.compress(plain) for name, plain in content.items()}, cut
        )
        thread = threading.Thread(target=mirror.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((mirror, thread))
        return mirror

    yield make
    for mirror, thread in running:
        mirror.resume.set()
        mirror.shutdown()
        mirror.server_close()
        thread.join(timeout=60)


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port that is taken, so nobody else gets it, but on which nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


def loader(mirror: Mirror, files: dict[str, bytes]) -> subprocess.Popen[bytes]:
    """Starts a process that loads the data from `primary` and prints the number of training images."""
    script = (
        "import json, sys; from models.mnist import data; mirror, checksums = "
        "json.loads(sys.argv[1]);"
        "print(len(data.load(mirrors=[mirror], checksums=checksums).train))"
    )
    command = [sys.executable, "-c", script, json.dumps([mirror.address, sums(files)])]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def visible(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"lock"}


class TestRead:
    """One file."""

    @given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 100))
    def test_written_file_is_read(
        self, tmp_path_factory: pytest.TempPathFactory, shape: list[int], seed: int
    ) -> None:
        """A file in MNIST's format is read as it was written."""
        array = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        path = tmp_path_factory.mktemp("idx") / "file"
        path.write_bytes(idx_bytes(array))
        np.testing.assert_array_equal(
            mnist_files.read(path, sums({"file": idx_bytes(array)})["file"]), array.ravel()
        )

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_every_truncation_is_found(self, tmp_path: Path, suffix: str) -> None:
        """Every truncation of a file is found."""
        content = idx_bytes(np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
        whole = gzip.compress(content) if suffix else content
        path = tmp_path / f"images{suffix}"
        refused = 0
        for cut in range(len(whole)):
            path.write_bytes(whole[:cut])
            try:
                values = mnist_files.read(path, hashlib.sha256(content).hexdigest())
            except DataError as error:
                assert str(error).startswith(f"{path} is not the original file or truncated")
                refused += 1
            else:  # only what follows the content was cut off
                np.testing.assert_array_equal(values, np.arange(18))
        # gzip ends with its own checksum and length
        assert refused >= len(whole) - (10 if suffix else 0)

    def test_checksum_covers_decompressed_bytes(self, tmp_path: Path) -> None:
        """The checksum covers the decompressed bytes."""
        content = idx_bytes(np.arange(4, dtype=np.uint8))
        sha256 = hashlib.sha256(content).hexdigest()
        for level in (1, 9):
            path = tmp_path / f"level{level}.gz"
            path.write_bytes(gzip.compress(content, level))
            np.testing.assert_array_equal(mnist_files.read(path, sha256), np.arange(4))
            with pytest.raises(
                DataError, match=f"is not the original file.*is {sha256}, it must be {'0' * 64}"
            ):
                mnist_files.read(path, "0" * 64)

    @pytest.mark.parametrize("place", [0, -8])
    def test_damaged_gzip_is_found(self, tmp_path: Path, place: int) -> None:
        """A damaged gzip file is called damaged."""
        content = idx_bytes(np.arange(200, dtype=np.uint8))
        compressed = bytearray(gzip.compress(content))
        compressed[place] ^= 1
        path = tmp_path / "images.gz"
        path.write_bytes(compressed)
        with pytest.raises(DataError, match="images.gz is damaged"):
            mnist_files.read(path, hashlib.sha256(content).hexdigest())

    @pytest.mark.parametrize(
        "size", [(64 << 20) + 1, pytest.param(1 << 30, marks=pytest.mark.disk)]
    )
    def test_decompression_is_bounded(self, tmp_path: Path, size: int) -> None:
        """Decompression stops at the size of an MNIST file."""
        path = tmp_path / "bomb.gz"
        with gzip.open(path, "wb", 1) as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
            file.write(bytes(size & 0xFFFFF))
        tracemalloc.start()
        with pytest.raises(DataError, match="bomb.gz is no MNIST file: it holds more than 64 MiB"):
            mnist_files.read(path, "0" * 64)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
        tracemalloc.stop()


class TestGivenDirectory:
    """--data_dir and $MNIST_DIR: used as they are, or an error; never changed, never replaced by something else."""

    @pytest.mark.parametrize("compress", [False, True])
    def test_given_directory_gives_values(
        self, tmp_path: Path, files: dict[str, bytes], compress: bool
    ) -> None:
        """A given directory gives images from 0 to 1 and labels, compressed or not."""
        directory = write(tmp_path / "given", files, compress)
        mnist = data.load(str(directory), checksums=sums(files))
        assert (len(mnist.train), len(mnist.test), mnist.name) == (40, 10, "mnist")
        assert str(directory) in mnist.source and "--data_dir" in mnist.source
        raw = np.frombuffer(files[TRAIN_IMAGES], np.uint8, offset=16).reshape(40, 784)
        assert mnist.train.images.dtype == np.float32
        np.testing.assert_array_equal(mnist.train.images, raw.astype(np.float32) / np.float32(255))
        assert mnist.train.labels.dtype == np.int32
        np.testing.assert_array_equal(mnist.test.labels, list(files[TEST_LABELS][8:]))

    def test_data_dir_beats_the_environment(
        self, tmp_path: Path, files: dict[str, bytes], set_variables: SetVariables
    ) -> None:
        """--data_dir beats MNIST_DIR."""
        set_variables(MNIST_DIR=str(write(tmp_path / "environment", files)))
        assert "environment (MNIST_DIR)" in data.load(None, checksums=sums(files)).source
        flag = write(tmp_path / "flag", files)
        assert "flag (--data_dir)" in data.load(str(flag), checksums=sums(files)).source

    @pytest.mark.parametrize("missing", sorted(mnist_files.SHA256))
    def test_missing_file_is_named(
        self, tmp_path: Path, files: dict[str, bytes], set_variables: SetVariables, missing: str
    ) -> None:
        """A missing file is named with the flag or variable of its directory."""
        directory = write(
            tmp_path / "given", {name: files[name] for name in files if name != missing}
        )
        with pytest.raises(DataError, match=f"--data_dir={directory} has neither {missing} nor"):
            data.load(str(directory), checksums=sums(files))
        set_variables(MNIST_DIR=str(directory))
        with pytest.raises(DataError, match=f"MNIST_DIR={directory} has neither {missing} nor"):
            data.load(None, checksums=sums(files))

    def test_command_ends_with_the_reason(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The data command ends with the reason and the code for data."""
        with pytest.raises(SystemExit) as ended:
            data.main(["data", str(tmp_path)])
        assert ended.value.code == exit_codes.DATA.plain
        assert f"--data_dir={tmp_path} has neither" in capsys.readouterr().err

    def test_missing_directory_is_an_error(self, tmp_path: Path) -> None:
        """A directory that does not exist is an error."""
        with pytest.raises(DataError, match="nowhere has neither"):
            data.load(str(tmp_path / "nowhere"))

    @pytest.mark.parametrize("compress", [False, True])
    def test_corrupt_file_is_named_and_kept(
        self, tmp_path: Path, files: dict[str, bytes], compress: bool
    ) -> None:
        """A corrupt file of the user is named and kept."""
        directory = write(tmp_path / "given", files, compress)
        path = directory / (TEST_IMAGES + (".gz" if compress else ""))
        path.write_bytes(path.read_bytes()[:-100])
        before = path.read_bytes()
        with pytest.raises(
            DataError,
            match=f"{path} is not the original file or truncated.*replace the file.*--data_dir",
        ):
            data.load(str(directory), checksums=sums(files))
        assert path.read_bytes() == before

    def test_other_data_is_refused(self, tmp_path: Path, files: dict[str, bytes]) -> None:
        """Other data in the same format are refused."""
        with pytest.raises(DataError, match=f"{TRAIN_IMAGES} is not the original file"):
            data.load(str(write(tmp_path / "given", files)))


class TestDownload:
    """The cache."""

    def test_data_are_downloaded_once(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror, nobody: str
    ) -> None:
        """The data are downloaded once and then read from the cache."""
        mirror = make_mirror(files)
        first = data.load(mirrors=[mirror.address], checksums=sums(files))
        assert sorted(mirror.downloaded) == sorted(f"{name}.gz" for name in files)
        assert visible(cache) == set(files)
        second = data.load(mirrors=[nobody], checksums=sums(files))
        np.testing.assert_array_equal(first.train.pixels, second.train.pixels)
        assert second.name == "mnist"

    def test_next_mirror_replaces_bad_one(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror, nobody: str
    ) -> None:
        """The next mirror is used when a mirror is down, lacks the file or serves wrong bytes."""
        empty, liar, good = (
            make_mirror({}),
            make_mirror(dict.fromkeys(files, b"advertisement")),
            make_mirror(files),
        )
        addresses = [nobody, empty.address, liar.address, good.address]
        assert len(data.load(mirrors=addresses, checksums=sums(files)).train) == 40
        assert visible(cache) == set(files)

    def test_downloaded_files_are_kept(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """Files that were downloaded before are kept."""
        write(cache, {TRAIN_IMAGES: files[TRAIN_IMAGES]})
        mirror = make_mirror(files)
        data.load(mirrors=[mirror.address], checksums=sums(files))
        assert f"{TRAIN_IMAGES}.gz" not in mirror.downloaded
        assert len(mirror.downloaded) == 3

    def test_corrupt_download_is_replaced(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """A corrupt file in the cache is replaced."""
        write(cache, files | {TRAIN_LABELS: files[TRAIN_LABELS][:-1]})
        mirror = make_mirror(files)
        mnist = data.load(mirrors=[mirror.address], checksums=sums(files))
        assert mirror.downloaded == [f"{TRAIN_LABELS}.gz"]
        np.testing.assert_array_equal(mnist.train.labels, list(files[TRAIN_LABELS][8:]))

    def test_corrupt_download_is_never_used(
        self, cache: Path, files: dict[str, bytes], nobody: str
    ) -> None:
        """Without a network a corrupt file in the cache is deleted and not trained on."""
        write(cache, files | {TRAIN_LABELS: files[TRAIN_LABELS][:-1]})
        assert data.load(mirrors=[nobody], checksums=sums(files)).name == "digits"
        assert visible(cache) == set(files) - {TRAIN_LABELS}

    def test_lying_mirrors_are_an_error(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """Mirrors that all serve wrong bytes are an error."""
        mirror = make_mirror(files | {TRAIN_IMAGES: files[TEST_IMAGES]})
        with pytest.raises(
            DataError,
            match=f"{mirror.address}/{TRAIN_IMAGES}.gz: SHA256 hash.*does not match.*--data_dir",
        ):
            data.load(mirrors=[mirror.address], checksums=sums(files))
        assert visible(cache) == set()

    def test_interrupted_download_leaves_no_file(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """An interrupted download leaves no file."""
        mirror = make_mirror(files, cut=20)
        with pytest.raises(ConnectionError, match="no MNIST mirror"):
            mnist_files.fetch(cache, [mirror.address], sums(files))
        assert mirror.downloaded
        assert visible(cache) == set()

    @pytest.mark.cluster
    def test_killed_download_leaves_no_lock(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """A killed download leaves neither a file nor a lock."""
        mirror = make_mirror(files)
        mirror.stall = True
        with loader(mirror, files) as process:
            assert mirror.stalled.wait(timeout=60)
            process.kill()
        assert visible(cache).isdisjoint(files)  # a temporary file at most
        mirror.stall = False
        mirror.resume.set()
        assert len(data.load(mirrors=[mirror.address], checksums=sums(files)).train) == 40
        assert visible(cache) == set(files)

    def test_stuck_lock_is_named(
        self,
        cache: Path,
        files: dict[str, bytes],
        make_mirror: MakeMirror,
        set_times: SetTimes,
    ) -> None:
        """A lock that is never released is named."""
        set_times(mnist_files, _LOG_SECS=0.1, _LOCK_SECS=0.3)
        cache.mkdir(parents=True)
        with (cache / "lock").open("w") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            with pytest.raises(DataError, match=f"{cache / 'lock'} has been held for"):
                mnist_files.fetch(cache, [make_mirror(files).address], sums(files))

    def test_leftover_file_is_removed(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """The leftover of a killed process is removed."""
        write(cache, {"tmpk1ll3d": b"half"})
        data.load(mirrors=[make_mirror(files).address], checksums=sums(files))
        assert visible(cache) == set(files)

    def test_impossible_cache_is_an_error(
        self, tmp_path: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """A cache that cannot be made is an error with advice."""
        (tmp_path / "cache").write_text("a file where the directory should be")
        with pytest.raises(DataError, match="cannot use the data cache .*XDG_CACHE_HOME"):
            data.load(mirrors=[make_mirror(files).address], checksums=sums(files))

    @pytest.mark.cluster
    def test_concurrent_processes_download_once(
        self, cache: Path, files: dict[str, bytes], make_mirror: MakeMirror
    ) -> None:
        """Processes that start at once download the data once."""
        mirror = make_mirror(files)
        started = [loader(mirror, files) for _ in range(3)]
        assert [process.communicate(timeout=60)[0].strip() for process in started] == [b"40"] * 3
        assert len(mirror.downloaded) == 4
        assert visible(cache) == set(files)


class TestDigits:
    """What stands in for MNIST without a network."""

    def test_digits_have_mnists_format(self, nobody: str) -> None:
        """The digits that stand in for MNIST have its format and a balanced split."""
        mnist = data.load(mirrors=[nobody])
        assert mnist.name == "digits" and "NOT MNIST" in mnist.source
        assert (len(mnist.train), len(mnist.test)) == (1437, 360)
        for split in (mnist.train, mnist.test):
            assert split.images.shape == (len(split), 784) and split.images.dtype == np.float32
            assert 0 == split.images.min() and 0.95 < split.images.max() <= 1
            counts = np.bincount(split.labels, minlength=10)
            assert counts.min() > 0.09 * len(split) and counts.max() < 0.11 * len(split)
        again = data.load(mirrors=[nobody])
        np.testing.assert_array_equal(mnist.train.pixels, again.train.pixels)
        # Each class mean shrunk back to 8x8 correlates with itself most: nothing was flipped,
        # shifted or mixed up.
        means = np.stack(
            [mnist.train.images[mnist.train.labels == digit].mean(0) for digit in range(10)]
        )
        middle = mnist.test.images @ (means - means.mean(0)).T - 0.5 * (
            means**2 - means.mean(0) ** 2
        ).sum(1)
        assert (middle.argmax(1) == mnist.test.labels).mean() > 0.8

    def test_digits_are_announced(self, nobody: str, caplog: pytest.LogCaptureFixture) -> None:
        """A warning says that the data are not MNIST."""
        data.load(mirrors=[nobody])
        warnings = [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ]
        assert any(
            "no MNIST mirror" in text and "NOT MNIST" in text and "--data_dir" in text
            for text in warnings
        )


def numbered(size: int) -> data.DataSplit:
    """A split whose i-th image starts with the bytes of i and whose label is i, so examples can be told apart."""
    pixels = np.zeros((size, 784), np.uint8)
    pixels[:, 0], pixels[:, 1] = np.arange(size) % 256, np.arange(size) // 256
    return data.DataSplit(pixels, np.arange(size, dtype=np.int32))


class TestBatches:
    """The stream of batches."""

    @given(
        size=st.integers(1, 300),
        batch_size=st.integers(1, 70),
        seed=st.integers(0, 2**40),
        num_shards=st.integers(1, 5),
        epochs=st.integers(1, 3),
    )
    def test_epoch_covers_all_shards_once(
        self, size: int, batch_size: int, seed: int, num_shards: int, epochs: int
    ) -> None:
        """An epoch over all shards holds every example once."""
        num_shards = min(num_shards, size)
        seen: Counter[tuple[int, int]] = Counter()  # (epoch, example)
        for shard in range(num_shards):
            batches = data.Batches(numbered(size), batch_size, seed, shard, num_shards)
            shard_size = len(range(shard, size, num_shards))
            drawn: list[int] = []
            while batches.epoch < epochs:
                drawn.extend(batches.next()[1].tolist())
                assert batches.epoch == pytest.approx(len(drawn) / shard_size)
            seen.update(
                (i // shard_size, example) for i, example in enumerate(drawn[: epochs * shard_size])
            )
        assert seen == Counter(
            (epoch, example) for epoch in range(epochs) for example in range(size)
        )

    @given(
        size=st.integers(1, 200),
        first_size=st.integers(1, 50),
        second_size=st.integers(1, 50),
        before=st.integers(0, 12),
        num_shards=st.integers(1, 3),
    )
    def test_restored_stream_continues(
        self, size: int, first_size: int, second_size: int, before: int, num_shards: int
    ) -> None:
        """A restored stream continues where it was, with another batch size too."""
        num_shards = min(num_shards, size)
        stream = data.Batches(numbered(size), 1, 7, num_shards - 1, num_shards)
        expected = [int(stream.next()[1][0]) for _ in range(before * first_size + 5 * second_size)]
        first = data.Batches(numbered(size), first_size, 7, num_shards - 1, num_shards)
        drawn = [label for _ in range(before) for label in first.next()[1].tolist()]
        second = data.Batches(numbered(size), second_size, 7, num_shards - 1, num_shards)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.epoch == first.epoch
        drawn += [label for _ in range(5) for label in second.next()[1].tolist()]
        assert drawn == expected

    def test_batches_pair_images_and_labels(self) -> None:
        """Batches pair images with their labels in aligned buffers that are used once."""
        batches = data.Batches(numbered(1000), 100, seed=3)
        kept = []
        for _ in range(25):
            images, labels = batches.next()
            assert (
                images.shape == (100, 784)
                and images.dtype == np.float32
                and labels.dtype == np.int32
            )
            assert images.flags.c_contiguous and images.ctypes.data % 64 == 0
            kept.append((images, labels))
        for images, labels in kept:  # after all were drawn: no buffer is used twice
            np.testing.assert_array_equal(
                np.rint(images[:, 0] * 255) + 256 * np.rint(images[:, 1] * 255), labels
            )

    def test_epochs_and_seeds_differ(self) -> None:
        """Epochs and seeds differ in their order, and a seed repeats."""

        def epoch(batches: data.Batches) -> list[int]:
            return [label for _ in range(10) for label in batches.next()[1].tolist()]

        one, other = (
            data.Batches(numbered(1000), 100, seed=1),
            data.Batches(numbered(1000), 100, seed=2),
        )
        orders = [epoch(one), epoch(one), epoch(other), list(range(1000))]
        assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])
        assert epoch(data.Batches(numbered(1000), 100, seed=1)) == orders[0]

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
            ({"seed": -1}, "seed must be at least 0, not -1"),
            (
                {"shard_index": 2, "num_shards": 2},
                "shard_index must be from 0 to num_shards - 1 = 1, not 2",
            ),
            ({"shard_index": -1}, "shard_index must be"),
            ({"num_shards": 11}, "10 examples cannot be shared by 11 workers"),
        ],
    )
    def test_bad_batch_arguments_are_refused(
        self, arguments: dict[str, int], complaint: str
    ) -> None:
        """Bad arguments of Batches are refused."""
        with pytest.raises(ValueError, match=complaint):
            data.Batches(numbered(10), **({"batch_size": 2, "seed": 0} | arguments))

    @pytest.mark.parametrize("change", ["seed", "shard_index", "num_shards", "num_examples"])
    def test_state_of_another_stream_is_refused(self, change: str) -> None:
        """The state of another stream is refused."""
        batches = data.Batches(numbered(10), 2, seed=0, shard_index=1, num_shards=3)
        state = batches.state()
        with pytest.raises(ValueError, match=f"saved batches had {change}="):
            batches.restore(state | {change: state[change] + 1})

    @pytest.mark.parametrize("change", [{"epoch": -1}, {"position": -1}, {"position": 11}])
    def test_state_that_points_nowhere_is_refused(self, change: dict[str, int]) -> None:
        """A state with an impossible place is refused."""
        batches = data.Batches(numbered(10), 2, seed=0)
        with pytest.raises(ValueError, match="no such place"):
            batches.restore(batches.state() | change)

    def test_chunks_cover_the_split_in_order(self) -> None:
        """Chunks cover the split in order."""
        chunks = list(numbered(25).chunks(10))
        assert [len(labels) for _, labels in chunks] == [10, 10, 5]
        np.testing.assert_array_equal(
            np.concatenate([labels for _, labels in chunks]), np.arange(25)
        )
        np.testing.assert_array_equal(
            np.concatenate([images for images, _ in chunks]), numbered(25).images
        )


@real_mnist.needed
def test_real_mnist_has_known_figures() -> None:
    """The real MNIST has its known sizes, counts and mean."""
    mnist = data.load(real_mnist.DIRECTORY)
    assert mnist.train.pixels.shape == (60_000, 784) and mnist.test.pixels.shape == (10_000, 784)
    assert np.bincount(mnist.train.labels).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert mnist.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.train.pixels.mean() == pytest.approx(33.318, abs=1e-3)
