"""Files of a checkpoint: checksums, errors of the disk, and syncing against a power cut."""

import errno
import os
import stat
import zlib
from typing import BinaryIO

from runtime.errors import DiskAwayError, OpError, PermissionDeniedError

NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)
"""Error numbers that mean that a file does not exist."""
_NOT_NOW = frozenset(
    number
    for name in (
        "EAGAIN EBUSY EINTR EMFILE ENFILE ENOMEM ENOBUFS ESTALE ETIMEDOUT EHOSTDOWN EHOSTUNREACH "
        "ENETDOWN ENETRESET ENETUNREACH ENOTCONN ENOLINK ECONNABORTED ECONNREFUSED ECONNRESET "
        "EREMOTEIO ESHUTDOWN EKEYEXPIRED EKEYREVOKED"
    ).split()
    if (number := getattr(errno, name, None)) is not None
)
"""Error numbers about the way to a file: a file server that is away, a process without resources."""
TEXT_BYTES = 256 << 20
TEXT_ITEMS = 8 << 20
"""Limits of a file of JSON, in bytes and in items.

Parsed, the items take up to a hundred times as much memory as on disk.
"""
READ_BLOCK = 256 << 10
"""Bytes read at once for a checksum: few enough to be in the processor's cache for the sum."""


def raise_if_barred(error: Exception, path: str) -> None:
    """Raises the error for a file that cannot be read now, or may not be read.

    Any other error returns, so that the caller may report damage.

    Raises:
        UnavailableError, PermissionDeniedError: The file may be undamaged.
    """
    if isinstance(error, OSError) and (other := barred(error, path)) is not None:
        raise other from None


def barred(error: OSError, path: str) -> OpError | None:
    """Returns the error that keeps this process from a file, unless the file itself is at fault.

    Args:
        error: error of the operating system.
        path: path of the file.

    Returns:
        PermissionDeniedError; DiskAwayError if another attempt may succeed; None if the file is
        missing or damaged.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(
            f"{path} cannot be read by the user that this runs as (uid {os.geteuid()}): {error}"
        )
    if error.errno in _NOT_NOW:
        return DiskAwayError(f"{path} cannot be read now: {error}")
    return None


def barred_in(text: str, path: str) -> OpError | None:
    """Returns the same for the text of a library's error, which has no error number."""
    for number in (errno.EACCES, errno.EPERM, *_NOT_NOW):
        if f"OS error {number}:" in text or os.strerror(number) in text:
            return barred(OSError(number, os.strerror(number)), path)
    return None


def checksum(path: str) -> tuple[int, int]:
    """Returns (size in bytes, CRC-32) of a regular file.

    Raises:
        OSError: The file cannot be read, or is not a regular file: a device may have no end.
    """
    with _open_regular(path) as file:
        return _sum_bytes(file)


def is_as_saved(path: str, size: int, crc: int) -> bool:
    """Returns True if a file has a size in bytes and a CRC-32; of a larger file nothing is read.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with _open_regular(path) as file:
        return os.fstat(file.fileno()).st_size == size and _sum_bytes(file, size) == (size, crc)


def small_text(path: str) -> str:
    """Returns the text of a local JSON file, within limits.

    The file may be large or no file at all, because other users may write there.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is too large.
        UnicodeDecodeError: The content is not text.
    """
    with _open_regular(path) as file:
        # One byte more than the limit shows that the file is too large.
        data = file.read(TEXT_BYTES + 1)
    if not is_small(data):
        raise OSError(errno.EFBIG, "is larger than a file of this kind is", path)
    return data.decode()


def is_small(text: bytes) -> bool:
    """Returns True if JSON text is within the limits of bytes and items."""
    return len(text) <= TEXT_BYTES and sum(map(text.count, (b"[", b"{", b","))) <= TEXT_ITEMS


def _open_regular(path: str) -> BinaryIO:
    # Without O_NONBLOCK, opening a pipe would wait for ever.
    file = open(
        path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
    )
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
    except BaseException:
        file.close()
        raise
    return file


def _sum_bytes(file: BinaryIO, most: float = float("inf")) -> tuple[int, int]:
    size, crc = 0, 0
    buffer = memoryview(bytearray(READ_BLOCK))
    while size <= most and (count := file.readinto(buffer)):  # type: ignore[attr-defined]  # it is a FileIO
        size += count
        crc = zlib.crc32(buffer[:count], crc)
    return size, crc


def is_inside(name: str) -> bool:
    """Returns True if a relative path stays in its directory: no ``..``, and not absolute."""
    return (
        bool(name) and "\0" not in name and not os.path.isabs(name) and ".." not in name.split("/")
    )


def files_below(directory: str) -> list[str]:
    """Returns the paths of all files below a directory, relative to the directory and sorted."""
    found = [
        os.path.relpath(os.path.join(where, f), directory)
        for where, _, files in os.walk(directory)
        for f in files
    ]
    return sorted(found)


def sync_tree(directory: str, *, files: bool) -> None:
    """Syncs a directory tree, so that the tree survives a power cut.

    Args:
        directory: top of the tree.
        files: True syncs the files too, False only the directories.
    """
    for where, _, names in os.walk(directory, topdown=False):
        if files:
            for name in names:
                sync(os.path.join(where, name))
        sync(where)


def sync(path: str) -> None:
    """Calls ``fsync`` for a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
