"""The pages of a table: which rows lie in which page, whatever the number of ps."""

from __future__ import annotations

from dataclasses import dataclass

PAGES = 1024
"""Largest number of pages of a table."""
SMALLEST = 2048
"""Rows of the smallest page of a table with several pages."""
CHUNK = 1024
"""Rows of a run of a table's program: its shapes never change, so it is compiled once."""


def page_name(array: str, page: int) -> str:
    """Returns the name of the variable of a page."""
    return f"{array}/page_{page}"


@dataclass(frozen=True)
class Paging:
    """The division of the rows of a table into pages.

    Pages have a power of two of rows, so that a shift finds the page of a row. The division depends
    on the number of rows only, so a checkpoint fits any number of ps.

    Attributes:
        rows: rows of the table.
        shift: the logarithm of the rows of a page.

    Examples:
        >>> Paging.of(10_000)
        Paging(rows=10000, shift=11)
        >>> [Paging.of(10_000).span(page) for page in range(Paging.of(10_000).count)]
        [(0, 2048), (2048, 2048), (4096, 2048), (6144, 2048), (8192, 1808)]
    """

    rows: int
    shift: int

    @classmethod
    def of(cls, rows: int) -> Paging:
        """Returns the division of so many rows."""
        size = max(SMALLEST, -(-rows // PAGES))
        return cls(rows, (size - 1).bit_length())

    @property
    def count(self) -> int:
        """Number of pages."""
        return -(-self.rows >> self.shift)

    def span(self, page: int) -> tuple[int, int]:
        """Returns the first row of a page, and the number of its rows."""
        first = page << self.shift
        return first, min(1 << self.shift, self.rows - first)
