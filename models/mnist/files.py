"""The four files of MNIST: downloaded once into a cache, checked, and read."""

import contextlib
import hashlib
import io
import os
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import filelock
import numpy as np
from absl import logging
from numpy.typing import NDArray

# Checksums after decompression, because mirrors compress differently.
SHA256: Mapping[str, str] = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
# A file lies below the address of a mirror as <name>.gz.
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://raw.githubusercontent.com/fgnt/mnist/master",
)
_ANSWER_SECS, _READ_SECS, _FILE_SECS = 8.0, 20.0, 300.0
"""The longest waits for an answer, for more bytes, and for a whole file.

Then the next mirror is asked.
"""
_LOG_SECS, _LOCK_SECS = 10.0, 3660.0
"""Time between lines about the wait for a lock, and the longest wait: four slow files of three mirrors take less."""
# A larger file, compressed or not, is refused before it fills the memory.
_MAX_BYTES = 64 << 20


class DataError(ValueError):
    """The error for data that cannot be used. The message names the file and the remedy."""


def fetch(
    cache: Path, mirrors: Sequence[str], checksums: Mapping[str, str]
) -> dict[str, NDArray[np.uint8]]:
    """Reads files from a cache, and first downloads those that are missing or damaged.

    One process downloads, and other processes wait. A file gets its name after it was verified.

    Args:
        cache: directory of the files; created if needed.
        mirrors: addresses below which the files lie as `<name>.gz`, asked in turn.
        checksums: file name -> SHA-256 of the decompressed file, in hexadecimal.

    Returns:
        File name -> values, uint8 [n].

    Raises:
        ConnectionError: No mirror can be reached.
        DataError: Mirrors have other files, or the cache cannot be used.
    """
    try:
        # Without the lock first: most starts find all files.
        with contextlib.suppress(FileNotFoundError, DataError):
            return {name: read(cache / name, sha256) for name, sha256 in checksums.items()}
        cache.mkdir(parents=True, exist_ok=True)
        with _hold_lock(cache / "lock"):
            # Temporary files belong to processes that were killed: a live one would hold the lock.
            for leftover in cache.glob("tmp*"):
                leftover.unlink()
            return {
                name: _read_or_download(cache / name, sha256, mirrors)
                for name, sha256 in checksums.items()
            }
    except ConnectionError:
        raise
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a directory that can be written, or --data_dir to one that has the MNIST files"
        raise DataError(f"cannot use the data cache {cache}: {error}; {advice}") from error


def read(path: Path, sha256: str) -> NDArray[np.uint8]:
    """Returns the values of an IDX file, plain or `.gz`, as uint8 [n].

    Args:
        path: the file.
        sha256: checksum of the decompressed file, in hexadecimal.

    Raises:
        DataError: The content is not the one with that checksum, or too large.
    """
    # Without O_NONBLOCK, opening a pipe would wait for ever.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataError(f"{path} is no MNIST file: it is not a regular file")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DataError(f"{path} is no MNIST file: it holds more than {_MAX_BYTES >> 20} MiB")
    if path.suffix == ".gz":
        content = _UnzippedBuffer(str(path), content).getvalue()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(
            f"{path} is not the original file or truncated: its SHA-256 is {found}, it must be "
            f"{sha256}"
        )
    # The header has four bytes, of which the last counts the dimensions, and four bytes for each
    # dimension.
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])


class _UnzippedBuffer(io.BytesIO):
    """A buffer that unpacks the gzip data written to it, within limits of size and time.

    Args:
        origin: name of the data, for errors.
        data: the first gzip data.
    """

    def __init__(self, origin: str, data: bytes = b"") -> None:
        super().__init__()
        self._origin, self._received, self._deadline = origin, 0, time.monotonic() + _FILE_SECS
        # 16 selects the gzip format, whose CRC zlib checks.
        self._gzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        self.write(data)

    def write(self, data: bytes) -> int:  # type: ignore[override]  # of all buffers only bytes
        self._received += len(data)
        try:
            plain = self._gzip.decompress(data, _MAX_BYTES + 1)
        except zlib.error as error:
            raise DataError(f"{self._origin} is damaged: {error}") from error
        if max(self._received, self.tell() + len(plain)) > _MAX_BYTES:
            raise DataError(
                f"{self._origin} is no MNIST file: it holds more than {_MAX_BYTES >> 20} MiB"
            )
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{self._origin} is not complete after {_FILE_SECS:g} s")
        return super().write(plain)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    for _ in range(round(_LOCK_SECS / _LOG_SECS)):
        with contextlib.suppress(filelock.Timeout), filelock.FileLock(path, timeout=_LOG_SECS):
            return (yield)
        logging.info("waiting for another process to download MNIST (it holds %s)", path)
    raise DataError(
        f"{path} has been held for {_LOCK_SECS:g} s; stop the process that does, or set --data_dir"
    )


def _read_or_download(path: Path, sha256: str, mirrors: Sequence[str]) -> NDArray[np.uint8]:
    if path.exists():
        try:
            return read(path, sha256)
        except DataError as error:
            logging.warning(
                "%s; it was downloaded, so it is deleted now and downloaded again", error
            )
            path.unlink()
    import pooch

    damaged: ValueError | None = None
    for mirror in mirrors:
        url = f"{mirror}/{path.name}.gz"
        try:
            pooch.retrieve(url, sha256, path.name, path.parent, downloader=_download_file)
            return read(path, sha256)
        except ConnectionError as error:
            logging.warning("%s cannot be reached: %s", url, error)
        # Pooch raises ValueError for a file with another SHA-256.
        except ValueError as error:
            logging.warning("%s is not the original file: %s", url, error)
            damaged = damaged or ValueError(f"{url}: {error}")
    if damaged is not None:
        raise DataError(
            f"{damaged}; try again later, or set --data_dir to your own copy"
        ) from damaged
    raise ConnectionError("no MNIST mirror could be reached")


def _download_file(url: str, file: str, _: object) -> None:
    import pooch

    unzipped = _UnzippedBuffer("the download")
    try:
        pooch.HTTPDownloader(sys.stderr.isatty(), 1 << 16, timeout=(_ANSWER_SECS, _READ_SECS))(
            url, unzipped, None
        )
    except OSError as error:
        raise ConnectionError(str(error)) from error
    Path(file).write_bytes(unzipped.getvalue())
