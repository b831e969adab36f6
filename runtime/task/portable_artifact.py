"""The frame of a portable artifact: the parts of a StableHLO module as bytes, and whether they fit together.

MLIR's reader trusts sizes and offsets in some of the sections, and a wrong one ends the process. So they are added up
before it sees them. What the sections mean is the reader's business.
"""

from __future__ import annotations

MAGIC = b"ML\xefR"
FORMATS = range(4, 7)
"""The versions of the format that are known here."""
PRODUCER = b"StableHLO_v"

_STRINGS, _DIALECTS, _ATTRIBUTES, _OFFSETS, _OPERATIONS, _RESOURCES, _RESOURCE_OFFSETS, _VERSIONS, _PROPERTIES = range(
    9
)
_REQUIRED = {_STRINGS, _DIALECTS, _ATTRIBUTES, _OFFSETS, _OPERATIONS, _PROPERTIES}


def check_frame(artifact: bytes) -> None:
    """Checks that the sections of an artifact fill it, and their parts fill the sections.

    Raises:
        ValueError: they do not; says where.
    """
    reader = _Reader(artifact)
    if reader.take(len(MAGIC)) != MAGIC:
        raise ValueError("it is not MLIR bytecode")
    if reader.number() not in FORMATS:
        raise ValueError("its bytecode has a version that is not known here")
    if not reader.until_zero().startswith(PRODUCER):
        raise ValueError("it was not written by StableHLO")
    sections: dict[int, bytes] = {}
    while reader.left:
        section, length = reader.take(1)[0], reader.number()
        if section & 0x80:  # padding up to an alignment comes first
            alignment = reader.number()
            if alignment not in (1, 2, 4, 8, 16, 32, 64):
                raise ValueError(f"a section is aligned to {alignment}")
            while reader.at % alignment:
                if reader.take(1) != b"\xcb":
                    raise ValueError("the padding of a section is wrong")
            section &= 0x7F
        if section in sections or section > _PROPERTIES:
            raise ValueError(f"section {section} comes twice or is not known")
        sections[section] = reader.take(length)
    if not _REQUIRED <= sections.keys():
        raise ValueError(f"it has sections {sorted(sections)}")
    if sections.get(_RESOURCES):
        raise ValueError("it has resources")
    _check_strings(_Reader(sections[_STRINGS]))
    _check_offsets(_Reader(sections[_OFFSETS]), len(sections[_ATTRIBUTES]))
    _check_properties(_Reader(sections[_PROPERTIES]))


def _check_strings(reader: _Reader) -> None:
    count = reader.count()
    if sum(reader.number() for _ in range(count)) != reader.left:
        raise ValueError("its strings do not fill their section")


def _check_offsets(reader: _Reader, length: int) -> None:
    """Sizes of attributes and types, in groups of one dialect each; the lowest bit says how one is encoded."""
    wanted = reader.count() + reader.count()
    found = total = 0
    while reader.left:
        reader.number()  # the dialect
        for _ in range(reader.count()):
            total += reader.number() >> 1
            found += 1
    if (found, total) != (wanted, length):
        raise ValueError("its attributes and types do not fill their section")


def _check_properties(reader: _Reader) -> None:
    for _ in range(reader.count()):
        reader.take(reader.number())
    if reader.left:
        raise ValueError("its properties do not fill their section")


class _Reader:
    """Reads numbers of variable length and rows of bytes, never past the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"it ends {count - self.left} bytes too early")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self) -> int:
        """A number whose lowest set bit in the first byte says how many bytes it has."""
        first = self.take(1)
        if not first[0]:
            return int.from_bytes(self.take(8), "little")
        size = (first[0] & -first[0]).bit_length()
        return int.from_bytes(first + self.take(size - 1), "little") >> size

    def count(self) -> int:
        """A number of things, each of which takes a byte at least."""
        count = self.number()
        if count > len(self._data):
            raise ValueError(f"it declares {count:,} parts in {len(self._data):,} bytes")
        return count

    def until_zero(self) -> bytes:
        end = self._data.find(b"\0", self.at)
        if end < 0:
            raise ValueError("it has no producer")
        found = self.take(end - self.at)
        self.take(1)
        return found
