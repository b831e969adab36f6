"""Files of records in TensorFlow's format (TFRecord): each with its length, both with a CRC."""

from __future__ import annotations

import functools
import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import IO, cast

import numpy as np

import runtime as rt
from harness.tf1.ops.lift import Public

public = Public("tf.python_io")

_BLOCK = 4096
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")


@functools.cache
def _tables() -> rt.lowlevel.Array:
    """Returns the share of a byte in the CRC of a block that ends k bytes later: uint32[k * 256 + byte]."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    rows = [table]
    for _ in range(_BLOCK - 1):
        rows.append(table[rows[-1] & 255] ^ (rows[-1] >> 8))
    return np.concatenate(rows)


@functools.cache
def _places(size: int) -> rt.lowlevel.Array:
    return np.arange(size - 1, -1, -1, dtype=np.int32) * 256


def crc32c(data: bytes) -> int:
    """Computes the CRC-32C of ``data``, for all bytes of a block at once: no byte's share depends on another's."""
    tables, crc = _tables(), 0xFFFFFFFF
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start).astype(
            np.int32
        )
        head = min(4, len(block))
        block[:head] ^= np.frombuffer(_CRC.pack(crc), np.uint8)[:head]
        crc = int(np.bitwise_xor.reduce(tables[_places(len(block)) + block])) ^ (
            crc >> 8 * head if head < 4 else 0
        )
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return _CRC.pack((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


@public.add()
class TFRecordCompressionType:
    """The compressions of a file of records."""

    NONE = 0
    ZLIB = 1
    GZIP = 2


_COMPRESSIONS = {"": "", "NONE": "", "ZLIB": "ZLIB", "GZIP": "GZIP", 0: "", 1: "ZLIB", 2: "GZIP"}


@public.add()
class TFRecordOptions:
    """The options with which a file of records is written or read.

    Args:
        compression_type: a ``TFRecordCompressionType``, or the name of one.
    """

    compression_type_map = {0: "", 1: "ZLIB", 2: "GZIP"}

    def __init__(self, compression_type: int | str = 0) -> None:
        self.compression_type = compression_type


def compression(options: TFRecordOptions | int | str | None) -> str:
    """Checks a compression of the caller: "GZIP", "ZLIB" or "". Raises ValueError for anything else."""
    kind = options.compression_type if isinstance(options, TFRecordOptions) else options
    if kind is not None and kind not in _COMPRESSIONS:
        raise ValueError(f"Unsupported compression type: {kind!r}; there are GZIP, ZLIB and none")
    return "" if kind is None else _COMPRESSIONS[kind]


@public.add()
class TFRecordWriter:
    """A writer of records to a file.

    Args:
        path: of the file, which is overwritten.
        options: such as its compression.

    Raises:
        NotFoundError: the directory does not exist.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: TFRecordOptions | TFRecordCompressionType | str | None = None,
    ) -> None:
        kind = compression(cast("TFRecordOptions | str | None", options))
        try:
            self._file: IO[bytes] | None = open(path, "wb")
        except FileNotFoundError as error:
            raise rt.NotFoundError(f"{os.fspath(path)}: {error.strerror}") from None
        if kind == "GZIP":
            self._squeeze = zlib.compressobj(wbits=31)
        elif kind:
            self._squeeze = zlib.compressobj()
        self._compressed = bool(kind)

    def write(self, record: bytes) -> None:
        """Adds one record. Raises FailedPreconditionError after ``close``."""
        if self._file is None:
            raise rt.FailedPreconditionError("Writer is closed.")
        length = _LENGTH.pack(len(record))
        data = b"".join((length, _masked(length), record, _masked(record)))
        self._file.write(self._squeeze.compress(data) if self._compressed else data)

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        if self._file is not None:
            if self._compressed:
                self._file.write(self._squeeze.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            if self._compressed:
                self._file.write(self._squeeze.flush())
            self._file.close()
            self._file = None

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def open_file(path: str, kind: str = "") -> IO[bytes]:
    """Opens a file to read from, decompressed.

    Raises:
        NotFoundError: it is not there.
    """
    try:
        file = cast("IO[bytes]", gzip.open(path) if kind == "GZIP" else open(path, "rb"))
    except FileNotFoundError:
        raise rt.NotFoundError(f"{path}; No such file or directory") from None
    return cast("IO[bytes]", _Inflated(file)) if kind == "ZLIB" else file


class _Inflated:
    """A zlib stream as a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stream = zlib.decompressobj()
        self._ready = b""

    def read(self, size: int = -1) -> bytes:
        while not self._stream.eof and (size < 0 or len(self._ready) < size):
            more = self._file.read(1 << 16)
            self._ready += self._stream.decompress(more) if more else self._stream.flush()
            if not more:
                break
        size = len(self._ready) if size < 0 else size
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken

    def __enter__(self) -> _Inflated:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def records(path: str, kind: str = "") -> Iterator[tuple[int, bytes]]:
    """Yields the records of a file, each with the place at which the record begins.

    Raises:
        NotFoundError: the file is not there.
        DataLossError: it is cut off, or damaged; tells where.
    """
    with open_file(path, kind) as file:
        at = 0
        while head := _read(file, 12, path, at):
            if len(head) < 12:
                raise rt.DataLossError(f"{path}: truncated record at {at}")
            if _masked(head[:8]) != head[8:]:
                raise rt.DataLossError(f"{path}: corrupted record at {at}")
            (size,) = _LENGTH.unpack(head[:8])
            rest = _read(file, size + 4, path, at)
            if len(rest) < size + 4:
                raise rt.DataLossError(f"{path}: truncated record at {at}")
            if _masked(rest[:size]) != rest[size:]:
                raise rt.DataLossError(f"{path}: corrupted record at {at}")
            yield at, rest[:size]
            at += 16 + size


def _read(file: IO[bytes], size: int, path: str, at: int) -> bytes:
    try:
        return file.read(size)
    except (EOFError, OSError, zlib.error) as error:
        raise rt.DataLossError(
            f"{path}: corrupted record at {at}: {rt.lowlevel.one_line(error)}"
        ) from error


@public.add("tf_record_iterator")
def tf_record_iterator(
    path: str | os.PathLike[str],
    options: TFRecordOptions | TFRecordCompressionType | str | None = None,
) -> Iterator[bytes]:
    """Yields the records of a file.

    Args:
        path: of the file.
        options: such as its compression.

    Raises:
        NotFoundError: the file is not there.
        DataLossError: it is cut off, or damaged; tells where.
    """
    kind = compression(cast("TFRecordOptions | str | None", options))
    return (record for _, record in records(os.fspath(path), kind))
