"""The tables of `harness.status` on a terminal, coloured and redrawn in place by rich (extra `rich`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import runtime as rt
from harness.monitoring.rates import number_columns

Rows = Sequence[Sequence[str]]

_GIVEN_UP = (
    *("INCARNATION", "CONN", "VARS", "CPU", "BYTES", "MEM", "QUEUE", "STALE", "APPLY MS", "PULL/COMP/PUSH"),
    *("STEP MS", "ROLE", "STEPS/S", "STEP"),
)
"""The columns that a narrow terminal does not show, in this order."""
_GAP = 2
_STATE = 2
"""The column whose colour tells how a task is."""


@dataclass(frozen=True)
class Screen:
    """What is to be seen.

    Attributes:
        tasks: the table of tasks, with its heading.
        styles: the style of each task's row: "up", "warn", "bad" or "over".
        variables: the table of variables, with its heading; empty for none.
        note: a line below; empty for none.
    """

    tasks: Rows
    styles: Sequence[str]
    variables: Rows = ()
    note: str = ""


_COLOURS = {"up": "green", "warn": "yellow", "bad": "bold red", "over": "dim"}


def fitting(rows: Rows, width: int) -> list[list[str]]:
    """The columns of a table that a terminal of so many characters has room for; the last one is cut off."""
    kept = list(range(len(rows[0])))

    def room() -> int:
        return width - sum(_width(rows, column) + _GAP for column in kept[:-1])

    for heading in _GIVEN_UP:
        if room() >= len(rows[0][-1]):
            break
        kept = [column for column in kept if rows[0][column] != heading]
    last = max(room(), 1)
    return [[*(row[column] for column in kept[:-1]), _cut(row[-1], last)] for row in rows]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _width(rows: Rows, column: int) -> int:
    return max(len(row[column]) for row in rows)


@contextlib.contextmanager
def terminal(watch: bool) -> Iterator[Callable[[Screen], None]]:
    """What shows screens on standard output, one in the place of the other with ``watch``.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)

    def table(rows: Rows, numbers: frozenset[int], styles: Sequence[str] = ()) -> Table:
        made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for number, heading in enumerate(rows[0]):
            last = number == len(rows[0]) - 1
            made.add_column(
                heading,
                justify="right" if number in numbers else "left",
                no_wrap=True,
                overflow="ellipsis",
                min_width=None if last else _width(rows, number),
            )
        for row, style in zip(rows[1:], styles or [""] * len(rows), strict=False):
            cells = [Text(rt.lowlevel.printable(cell)) for cell in row]
            if style:
                cells[_STATE].stylize(_COLOURS[style])
            made.add_row(*cells)
        return made

    def drawn(screen: Screen) -> RenderableType:
        rows = fitting(screen.tasks, console.width)
        parts: list[RenderableType] = [table(rows, number_columns(rows), screen.styles)]
        if screen.variables:
            parts += [Text(), table(screen.variables, number_columns(screen.variables))]
        if screen.note:
            parts += [Text(), Text(screen.note, style=_COLOURS["bad"])]
        return Group(*parts)

    if not watch:
        yield lambda screen: console.print(drawn(screen))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda screen: live.update(drawn(screen), refresh=True)
