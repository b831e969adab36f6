"""The books of a chaos run: what each worker's ledger says it did, added up against the global step at the end.

A worker writes a line when it begins a step, when it has done one (with the number that the step counted), and when
it logs. A number is counted once in each period between two restores, so the numbers of a period tell how many steps
were done, how many are not accounted for, and how many the restore at its end has lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One line of a ledger.

    Attributes:
        at: ``time.monotonic()``.
        what: "begin", "done", "log".
        step: the number that the step counted, of "done".
        text: of "log".
    """

    at: float
    what: str
    step: int = 0
    text: str = ""

    @classmethod
    def parse(cls, line: str) -> Entry | None:
        """An entry from its line; None for one that was cut off in the middle by a kill."""
        kind, _, rest = line.partition(" ")
        at, _, value = rest.partition(" ")
        try:
            if kind == "B":
                return cls(float(at), "begin")
            if kind == "D":
                return cls(float(at), "done", int(value))
            if kind == "L":
                return cls(float(at), "log", text=value)
        except ValueError:
            return None
        return None

    def line(self) -> str:
        """As it is written, without the end of the line."""
        if self.what == "log":
            return f"L {self.at:.6f} {self.text}"
        return f"B {self.at:.6f}" if self.what == "begin" else f"D {self.at:.6f} {self.step}"


@dataclass(frozen=True)
class Restore:
    """One restore, as the chief logged it.

    Attributes:
        at: ``time.monotonic()`` of the log line.
        step: the global step that it went back to.
        live: the global step before, None when it was lost with its task.
    """

    at: float
    step: int
    live: int | None


@dataclass
class Books:
    """The result.

    Attributes:
        done: steps that a worker knows it has done.
        unknown: steps that were begun and whose end nobody knows: their worker was killed, or they were run again.
        kept: the global step at the end.
        lost: steps lost by restores, as logged by the chief, or by the workers where the chief could not know.
        restores: how many restores.
        wrong: what does not add up, in words.
    """

    done: int = 0
    unknown: int = 0
    kept: int = 0
    lost: int = 0
    restores: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.done} steps done + {self.unknown} of unknown end; {self.kept} kept + {self.lost} lost by "
            f"{self.restores} restores"
        )


_BACK = re.compile(r"restored .*: back from step (\d+) to step (\d+),")
_ON = re.compile(r"restored .*: training goes on from step (\d+)")
_INITIALISED = re.compile(r"ALL STEPS SO FAR ARE LOST")
_LOST_HERE = re.compile(r"at step (\d+): (\d+) steps are lost \(step (\d+) was the last seen here\)")


def restores(ledgers: Iterable[Sequence[Entry]]) -> list[Restore]:
    """The restores, in order of time."""
    found = []
    for entry in (entry for ledger in ledgers for entry in ledger if entry.what == "log"):
        if match := _BACK.search(entry.text):
            found.append(Restore(entry.at, int(match[2]), int(match[1])))
        elif match := _ON.search(entry.text):
            found.append(Restore(entry.at, int(match[1]), None))
        elif _INITIALISED.search(entry.text):
            found.append(Restore(entry.at, 0, None))
    return sorted(found, key=lambda restore: restore.at)


def add_up(ledgers: Sequence[Sequence[Entry]], final_step: int) -> Books:
    """Adds up.

    Args:
        ledgers: one for each life of a worker.
        final_step: the global step at the end.
    """
    books = Books(kept=final_step)
    back = restores(ledgers)
    books.restores = len(back)
    done = sorted((e for ledger in ledgers for e in ledger if e.what == "done"), key=lambda e: e.at)
    books.done = len(done)
    books.unknown = sum(_unknown(ledger) for ledger in ledgers)
    unaccounted = 0
    for number, (start, end) in enumerate(zip([None, *back], [*back, None], strict=True)):
        # A step that was done just before the restore may be written down just after it: its number tells.
        first = 0 if start is None else start.step
        period = _numbers(done, start, end, back, number)
        last = max(period, default=first)
        live = final_step if end is None else end.live
        if live is None:
            live = last
        twice = len(period) - len(set(period))
        if twice:
            books.wrong.append(f"period {number}: {twice} numbers were counted twice")
        if last > live:
            books.wrong.append(f"period {number}: step {last} was done, but the global step was {live}")
        missing = (live - first) - len(set(period))
        unaccounted += missing
        if end is not None:
            books.lost += live - end.step
    if not 0 <= unaccounted <= books.unknown:
        books.wrong.append(f"{unaccounted} counted steps are nobody's; {books.unknown} have an unknown end")
    if not books.done <= books.kept + books.lost <= books.done + books.unknown:
        books.wrong.append(f"done and kept + lost differ: {books}")
    return books


def _unknown(ledger: Sequence[Entry]) -> int:
    """Steps that were begun and not done, and attempts at a step that a recovery has cut off."""
    begun = sum(entry.what == "begin" for entry in ledger) - sum(entry.what == "done" for entry in ledger)
    return begun + sum(entry.what == "log" and entry.text.startswith("recovering:") for entry in ledger)


def _numbers(
    done: Sequence[Entry], start: Restore | None, end: Restore | None, back: Sequence[Restore], number: int
) -> list[int]:
    """The numbers counted in a period."""
    began = float("-inf") if start is None else start.at
    ended = float("inf") if end is None else end.at
    return [entry.step for entry in done if began < entry.at <= ended]
