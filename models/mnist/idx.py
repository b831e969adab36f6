"""The four files of MNIST: reading the IDX format, and refusing anything that is not exactly what it should be.

IDX is MNIST's own format: two zero bytes, a type byte (0x08: unsigned byte), the number of dimensions, each dimension
as a big-endian uint32, then the values row by row. See http://yann.lecun.com/exdb/mnist, "FILE FORMATS".
"""

import hashlib
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

SHA256: Mapping[str, str] = MappingProxyType(
    {
        TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    }
)
"""SHA-256 of each file after decompression (mirrors compress differently, so the `.gz` files have no fixed sum)."""

_UNSIGNED_BYTE = 0x08
# Longer than any of the four files. A file or a download that claims more is stopped here, not when memory is full.
_MAX_BYTES = 64 << 20


class DataError(ValueError):
    """The data cannot be used as it is; the message names the file and says what to do."""


class CorruptFileError(DataError):
    """A file is not what it should be: truncated, damaged, or another file altogether."""


def find(directory: Path, name: str) -> Path | None:
    """Returns the path of file `name` in `directory`, decompressed or else as `.gz`; None where there is neither."""
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def read(path: Path, sha256: str | None = None) -> NDArray[np.uint8]:
    """Reads one IDX file of unsigned bytes, decompressing it if its name ends in `.gz`.

    Args:
      path: the file.
      sha256: the SHA-256 that the decompressed bytes must have, in hexadecimal; None checks the format only.

    Returns:
      uint8 array of the shape in the file's header, read-only: a view of the file's bytes.

    Raises:
      CorruptFileError: the file is truncated, damaged, or another file than the checksum says.
    """
    data = path.read_bytes()
    return parse(decompress(data, path) if path.suffix == ".gz" else data, path, sha256)


def decompress(data: bytes, origin: Path | str) -> bytes:
    """Decompresses gzip `data`; `origin` is named in the CorruptFileError that bad data raises."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: gzip framing, whose CRC is checked too
    try:
        plain = decompressor.decompress(data, _MAX_BYTES)
    except zlib.error as error:
        raise CorruptFileError(f"{origin} is damaged: {error}") from error
    if decompressor.unconsumed_tail:
        raise CorruptFileError(f"{origin} is no MNIST file: it decompresses to more than {_MAX_BYTES >> 20} MiB")
    if not decompressor.eof:
        raise CorruptFileError(f"{origin} is truncated: the compressed data stops after {len(data):,} bytes")
    return plain


def parse(data: bytes, origin: Path | str, sha256: str | None = None) -> NDArray[np.uint8]:
    """Checks the bytes of one IDX file and returns its values; arguments, result and errors as in `read`."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTE:
        raise CorruptFileError(f"{origin} is no IDX file of bytes: it starts with {data[:4].hex() or 'nothing'}")
    header = 4 + 4 * data[3]
    if len(data) < header:
        raise CorruptFileError(f"{origin} is truncated inside its header, after {len(data)} bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, offset=4)
    expected = header + int(np.prod(shape, dtype=object))  # Python integers: four dimensions may overflow 64 bits
    if len(data) != expected:
        fault = "truncated" if len(data) < expected else "damaged"
        raise CorruptFileError(f"{origin} is {fault}: it has {len(data):,} bytes, its header {shape} says {expected:,}")
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise CorruptFileError(f"{origin} is not the original file: its SHA-256 is {found}, it must be {sha256}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
