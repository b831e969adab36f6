"""Files of a checkpoint: their checksums, and that they survive a power cut."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable
from typing import BinaryIO

from runtime.errors import DiskAwayError, OpError, PermissionDeniedError

NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)
"""Only these say that there is no such file."""
_NOT_NOW = frozenset(
    number
    for name in (
        "EAGAIN EBUSY EINTR EMFILE ENFILE ENOMEM ENOBUFS ESTALE ETIMEDOUT EHOSTDOWN EHOSTUNREACH ENETDOWN ENETRESET "
        "ENETUNREACH ENOTCONN ENOLINK ECONNABORTED ECONNREFUSED ECONNRESET EREMOTEIO ESHUTDOWN EKEYEXPIRED EKEYREVOKED"
    ).split()
    if (number := getattr(errno, name, None)) is not None
)
"""These say nothing of the file, but of the way to it: a file server that is away, a process without resources."""
TEXT_BYTES = 256 << 20
TEXT_ITEMS = 8 << 20
"""How much a file of JSON may hold: as objects, its items take up to a hundred times as much memory as on disk."""
READ_BLOCK = 256 << 10
"""Bytes read at once for a checksum: they are still in the processor's cache when they are summed."""


def raise_if_barred(error: Exception, path: str) -> None:
    """Raises the error for a file that cannot be read now, or may not be; returns where it is another failure.

    Raises:
        UnavailableError, PermissionDeniedError: nothing is known of damage.
    """
    if isinstance(error, OSError) and (other := barred(error, path)) is not None:
        raise other from None


def barred(error: OSError, path: str) -> OpError | None:
    """What keeps this process from a file, where that says nothing of the file: it is no sign of damage.

    Args:
        error: of the operating system.
        path: what was to be read.

    Returns:
        PermissionDeniedError, DiskAwayError where another try may do, or None: something is wrong with the file.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(
            f"{path} cannot be read by the user that this runs as (uid {os.geteuid()}): {error}"
        )
    if error.errno in _NOT_NOW:
        return DiskAwayError(f"{path} cannot be read now: {error}")
    return None


def barred_in(text: str, path: str) -> OpError | None:
    """The same for the text of an error of a library that gives no number."""
    for number in (errno.EACCES, errno.EPERM, *_NOT_NOW):
        if f"OS error {number}:" in text or os.strerror(number) in text:
            return barred(OSError(number, os.strerror(number)), path)
    return None


def checksum(path: str) -> tuple[int, int]:
    """(size in bytes, CRC-32) of a regular file; OSError for anything else, which may have no end."""
    with _opened(path) as file:
        return _summed(file)


def is_as_saved(
    path: str,
    size: int,
    crc: int,
    root_check: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Whether a file has the size and the CRC-32 that it had; no more than ``size`` bytes are read.

    Args:
        path: of the file.
        size: that it had, in bytes.
        crc: its CRC-32.
        root_check: given the path that the file has without links once it is open; raises if it must not be read.
        check: called before each block; ends the reading by raising.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with _opened(path, root_check) as file:
        return os.fstat(file.fileno()).st_size == size and _summed(file, size, check) == (size, crc)


def small_text(path: str) -> str:
    """The text of a small local file; whoever can write it may have made it something else, or large.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than such files are.
        UnicodeDecodeError: it is no text.
    """
    with _opened(path) as file:
        data = file.read(TEXT_BYTES + 1)
    if not is_small(data):
        raise OSError(errno.EFBIG, "is larger than a file of this kind is", path)
    return data.decode()


def is_small(text: bytes) -> bool:
    """Whether JSON text can be read without more memory than such a file is worth."""
    return len(text) <= TEXT_BYTES and sum(map(text.count, (b"[", b"{", b","))) <= TEXT_ITEMS


def _opened(path: str, root_check: Callable[[str], None] | None = None) -> BinaryIO:
    file = open(path, "rb", buffering=0, opener=_without_waiting)
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        if root_check is not None:
            root_check(os.path.realpath(f"/proc/self/fd/{file.fileno()}"))  # of what was opened, wherever a link leads
    except BaseException:
        file.close()
        raise
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # to open a pipe may wait for ever


def _summed(file: BinaryIO, most: float = float("inf"), check: Callable[[], None] = lambda: None) -> tuple[int, int]:
    size, crc = 0, 0
    buffer = memoryview(bytearray(READ_BLOCK))
    while size <= most and (count := file.readinto(buffer)):  # type: ignore[attr-defined]  # it is a FileIO
        check()
        size += count
        crc = zlib.crc32(buffer[:count], crc)
    return size, crc


def is_inside(name: str) -> bool:
    """Whether a relative path stays in the directory that it begins in: no ``..``, and not absolute."""
    return bool(name) and "\0" not in name and not os.path.isabs(name) and ".." not in name.split("/")


class Checksums:
    """Checksums of the files of a directory, some of them taken while others are still being written.

    Every file is written from its beginning to its end, once: a checksum counts when the file has not grown since.

    Args:
        directory: the directory; need not be there yet.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._sizes: dict[str, int] = {}
        self._sums: dict[str, tuple[int, int]] = {}

    def advance(self) -> None:
        """Takes the checksums of files that have not grown since the last call: most likely they are finished."""
        before, self._sizes = self._sizes, {name: self._size(name) for name in files_below(self._directory)}
        for name, size in self._sizes.items():
            if before.get(name) == size and self._sums.get(name, (-1, 0))[0] != size:
                self._sums[name] = checksum(os.path.join(self._directory, name))

    def finish(self) -> dict[str, tuple[int, int]]:
        """By path relative to the directory, (size, CRC-32) of every file, once all are written."""
        found = {}
        for name in files_below(self._directory):
            known = self._sums.get(name)
            same = known is not None and known[0] == self._size(name)
            found[name] = known if known is not None and same else checksum(os.path.join(self._directory, name))
        return found

    def _size(self, name: str) -> int:
        try:
            return os.stat(os.path.join(self._directory, name)).st_size
        except FileNotFoundError:  # renamed meanwhile
            return -1


def files_below(directory: str) -> list[str]:
    """Paths of all files below a directory, relative to it, sorted."""
    found = [
        os.path.relpath(os.path.join(where, f), directory) for where, _, files in os.walk(directory) for f in files
    ]
    return sorted(found)


def sync_tree(directory: str, *, files: bool) -> None:
    """Makes a directory tree survive a power cut: its directories, and its files too when ``files``."""
    for where, _, names in os.walk(directory, topdown=False):
        if files:
            for name in names:
                sync(os.path.join(where, name))
        sync(where)


def sync(path: str) -> None:
    """``fsync`` of a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
