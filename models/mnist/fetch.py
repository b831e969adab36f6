"""The cache of downloaded MNIST files: filled once, by whichever process comes first, and whole or absent.

Mirrors are asked all at once and taken in the order they answer, so one that is down or far away costs nothing. A file
is verified before it gets its name. Only this module writes into the cache, so only here are bad files deleted.
"""

import contextlib
import fcntl
import http.client
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import logging
from numpy.typing import NDArray
from tqdm import tqdm

from models.mnist import idx

MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://raw.githubusercontent.com/fgnt/mnist/master",
)
"""Addresses below which the four files lie as `<name>.gz`."""

_ANSWER_SECONDS = 8.0  # all mirrors together, so also what a machine without a network waits before it knows
_READ_SECONDS = 20.0  # for one read to bring anything
_FILE_SECONDS = 600.0  # for one file; the largest is 9.9 MB
_LOCK_SECONDS = 4 * _FILE_SECONDS + 60  # a living holder needs less; a dead one's lock is released by the kernel
_MAX_DOWNLOAD_BYTES = 32 << 20
_CHUNK_BYTES = 64 << 10

# What urllib raises when there is no network, no such host, no such file, or a connection that breaks.
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


class OfflineError(Exception):
    """No mirror could be reached, or none kept its connection until the file was complete."""


def cache_directory() -> Path:
    """Returns `$XDG_CACHE_HOME/bellwether/mnist`, with `~/.cache` where the variable is unset or not absolute."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "bellwether" / "mnist"


def fetch(
    cache: Path, mirrors: Sequence[str] = MIRRORS, checksums: Mapping[str, str] = idx.SHA256
) -> dict[str, NDArray[np.uint8]]:
    """Returns the values of every file of `checksums` by its name, downloading into `cache` what is not there yet.

    Several processes may call this at once: the first downloads, the others wait for it and find the files.

    Args:
      cache: a directory that nobody else writes into; made if need be.
      mirrors: addresses below which the files lie as `<name>.gz`.
      checksums: file name -> SHA-256 of the decompressed file.

    Raises:
      OfflineError: no mirror could be reached.
      CorruptFileError: mirrors were reached, but what they sent is not the file.
      DataError: the cache cannot be written, or another process holds it for too long.
    """
    try:
        found = _read_good(cache, checksums)
        if len(found) == len(checksums):
            return found
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / "lock"):
            found = _read_good(cache, checksums, delete_bad=True)  # again: whoever held the lock has been busy
            for leftover in cache.glob("*.part"):  # of a process that was killed: the lock says nobody writes now
                leftover.unlink()
            for name, data in _download([name for name in checksums if name not in found], mirrors, checksums):
                part = cache / f"{name}.part"
                part.write_bytes(data)
                part.replace(cache / name)
                found[name] = idx.parse(data, cache / name)
    except OSError as error:
        raise idx.DataError(
            f"cannot use the data cache {cache}: {error}; set XDG_CACHE_HOME to a directory that can be written, "
            "or --data_dir to one that holds the MNIST files"
        ) from error
    return found


def _read_good(cache: Path, checksums: Mapping[str, str], delete_bad: bool = False) -> dict[str, NDArray[np.uint8]]:
    """Reads those files of `cache` that are there and whole."""
    good = {}
    for name, sha256 in checksums.items():
        path = cache / name
        try:
            good[name] = idx.read(path, sha256)
        except FileNotFoundError:
            continue
        except idx.CorruptFileError as error:
            if delete_bad:
                logging.warning("%s; it was downloaded, so it is deleted now and downloaded again", error)
                path.unlink()
    return good


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on file `path`; says every 10 s that it waits, and gives up after `_LOCK_SECONDS`."""
    with path.open("w") as file:
        started = told = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                now = time.monotonic()
                if now - started > _LOCK_SECONDS:
                    raise idx.DataError(
                        f"{path} has been held for {now - started:.0f} s; stop the process that does, or set --data_dir"
                    ) from error
                if now - told >= 10:
                    told = now
                    logging.info("waiting for another process to download MNIST (it holds %s)", path)
                time.sleep(0.05)  # flock has no timeout, and an unbounded wait is worse than a late one
        yield  # closing the file releases the lock, and so does the death of this process


def _download(
    names: Sequence[str], mirrors: Sequence[str], checksums: Mapping[str, str]
) -> Iterator[tuple[str, bytes]]:
    """Yields (name, verified decompressed bytes) for each of `names`, from the first mirror that has it."""
    wanted = list(names)
    if not wanted:
        return
    failures: list[Exception] = []
    for mirror in _answering(mirrors, f"{wanted[0]}.gz", failures):
        while wanted:
            name, url = wanted[0], f"{mirror}/{wanted[0]}.gz"
            try:
                data = idx.decompress(_get(url), url)
                idx.parse(data, url, checksums[name])
            except (*_NETWORK_ERRORS, idx.CorruptFileError) as error:
                logging.warning("mirror %s failed: %s", mirror, error)
                failures.append(error)
                break
            del wanted[0]
            yield name, data
        else:
            return
    for failure in failures:
        if isinstance(failure, idx.CorruptFileError):
            raise idx.CorruptFileError(f"{failure}; try again later, or set --data_dir to your own copy") from failure
    reasons = "; ".join(dict.fromkeys(map(str, failures))) or f"none answered in {_ANSWER_SECONDS:g} s"
    raise OfflineError(f"no MNIST mirror could be reached ({reasons})")


def _answering(mirrors: Sequence[str], file: str, failures: list[Exception]) -> Iterator[str]:
    """Yields the mirrors that have `file`, the quickest first; adds the errors of the others to `failures`."""
    answers: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()

    def ask(mirror: str) -> None:
        try:
            with _open("HEAD", f"{mirror}/{file}", _ANSWER_SECONDS):
                answers.put((mirror, None))
        except _NETWORK_ERRORS as error:
            answers.put((mirror, error))

    for mirror in mirrors:
        # Daemons: looking up a name can hang for a minute, and nobody should wait for that, not even at exit.
        threading.Thread(target=ask, args=(mirror,), daemon=True).start()
    deadline = time.monotonic() + _ANSWER_SECONDS
    for _ in mirrors:
        try:
            mirror, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        if error is None:
            yield mirror
        else:
            failures.append(error)


def _open(method: str, url: str, timeout: float) -> http.client.HTTPResponse:
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, method=method), timeout=timeout
        )
        return response
    except urllib.error.HTTPError as error:
        error.close()  # it carries the open connection
        raise


def _get(url: str) -> bytes:
    """Returns the bytes of `url`, with a progress bar."""
    logging.info("downloading %s", url)
    deadline = time.monotonic() + _FILE_SECONDS
    received = bytearray()
    with _open("GET", url, _READ_SECONDS) as response:
        length = response.length  # taken now: the response counts it down
        # disable=None: a bar on a terminal, silence where the output goes to a file or through a launcher.
        with tqdm(desc=url.rpartition("/")[2], total=length, unit="B", unit_scale=True, disable=None) as bar:
            while chunk := response.read(_CHUNK_BYTES):
                received += chunk
                bar.update(len(chunk))
                if len(received) > _MAX_DOWNLOAD_BYTES:
                    raise idx.CorruptFileError(f"{url} is no MNIST file: it is over {_MAX_DOWNLOAD_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{url} is not complete after {_FILE_SECONDS:g} s")
    if length is not None and len(received) < length:
        raise ConnectionError(f"{url} broke off after {len(received):,} of {length:,} bytes")
    return bytes(received)
