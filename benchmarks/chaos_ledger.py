"""The books of a chaos run: what each worker's ledger says it did, added up against the global step at the end.

A worker writes a line when it begins a step, when it has done one (with the number that the step
counted), and when it logs. A number is counted once in each period between two restores, so the
numbers of a period tell how many steps were done, how many are not accounted for, and how many the
restore at its end has lost.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.launch.tasks import ATTEMPT_VARIABLE


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
        """Parses the line of an entry. Returns None for a line that a kill has cut off."""
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
        """Returns the line of the entry, without its end."""
        if self.what == "log":
            return f"L {self.at:.6f} {self.text}"
        return f"B {self.at:.6f}" if self.what == "begin" else f"D {self.at:.6f} {self.step}"


class Ledger(logging.Handler):
    """The file of one life of a task. Its lines survive a kill."""

    def __init__(self, directory: str, task: str, attempt: str | None = None) -> None:
        super().__init__()
        attempt = os.environ.get(ATTEMPT_VARIABLE, "0") if attempt is None else attempt
        path = os.path.join(directory, f"{task}-{attempt}.ledger")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = threading.Lock()

    def enter(self, what: str, step: int = 0, text: str = "") -> None:
        """Writes one entry."""
        line = Entry(time.monotonic(), what, step, text).line()
        with self._write:
            os.write(self._file, f"{line}\n".encode())

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of the log."""
        self.enter("log", text=record.getMessage().replace("\n", " "))


@dataclass(frozen=True)
class Restore:
    """One restore (or initialisation over what was there), as the chief logged it.

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
        unknown: steps that were begun and whose end is unknown: their worker was killed, or they
            were run again.
        kept: the global step at the end.
        lost: steps lost by restores: as the chief logged it, or as far as any worker knew where it
            could not.
        untold: how many of those no log line told, because whoever had seen them was killed too.
        restores: how many restores.
        recoveries: how many recoveries of workers.
        wrong: what does not add up, in words.
    """

    done: int = 0
    unknown: int = 0
    kept: int = 0
    lost: int = 0
    untold: int = 0
    restores: int = 0
    recoveries: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.done} steps done + {self.kept + self.lost - self.done} of {self.unknown} with "
            "unknown end = "
            f"{self.kept} kept + {self.lost} lost in {self.restores} restores ({self.untold} "
            "untold)"
        )


OPENED = "opened a session"
"""What a worker logs when its session is ready."""
_BACK = re.compile(r"restored .*: back from step (\d+) to step (\d+),")
_ON = re.compile(r"restored .*: training goes on from step (\d+)")
_INITIALISED = re.compile(r"^chief: initialise:")
_LOST_HERE = re.compile(r"at step \d+: .*steps are lost \(step (\d+) was the last seen here\)")
_RECOVERED = re.compile(r"^recovered within")
_RECOVERING = re.compile(r"^recovering:")


def restores(ledgers: Iterable[Sequence[Entry]]) -> list[Restore]:
    """Returns the restores, in order of time. The first initialisation restores nothing."""
    found, initialised = [], []
    for entry in (entry for ledger in ledgers for entry in ledger if entry.what == "log"):
        if match := _BACK.search(entry.text):
            found.append(Restore(entry.at, int(match[2]), int(match[1])))
        elif match := _ON.search(entry.text):
            found.append(Restore(entry.at, int(match[1]), None))
        elif _INITIALISED.search(entry.text):
            initialised.append(Restore(entry.at, 0, None))
    again = sorted(initialised, key=lambda restore: restore.at)[1:]
    return sorted([*found, *again], key=lambda restore: restore.at)


def add_up(ledgers: Sequence[Sequence[Entry]], final_step: int) -> Books:
    """Adds up.

    Args:
        ledgers: one for each life of a worker.
        final_step: the global step at the end.
    """
    back = restores(ledgers)
    books = Books(kept=final_step, restores=len(back), unknown=sum(map(_unknown, ledgers)))
    counted: list[list[int]] = [[] for _ in range(len(back) + 1)]
    told: list[int] = [0] * (len(back) + 1)
    for ledger in ledgers:
        books.recoveries += sum(e.what == "log" and bool(_RECOVERED.search(e.text)) for e in ledger)
        for before, period, entry in _by_period(ledger, back):
            if entry.what == "done":
                counted[period].append(entry.step)
            elif match := _LOST_HERE.search(entry.text):
                told[before] = max(told[before], int(match[1]))
                if before == period:
                    books.wrong.append(
                        f"period {period}: a worker lost steps without a restore: {entry.text}"
                    )
    books.done = sum(map(len, counted))
    unclaimed = 0
    for period, numbers in enumerate(counted):
        first = back[period - 1].step if period else 0
        end = back[period] if period < len(back) else Restore(0.0, 0, final_step)
        last = max(numbers, default=first)
        live = max(last, told[period]) if end.live is None else end.live
        twice = len(numbers) - len(set(numbers))
        if twice:
            books.wrong.append(f"period {period}: {twice} numbers were counted twice")
        if last > live:
            books.wrong.append(
                f"period {period}: step {last} was done, but {live} is logged as the last one"
            )
        if min(numbers, default=first + 1) <= first:
            books.wrong.append(
                f"period {period}: step {min(numbers)} was done again after a restore to {first}"
            )
        unclaimed += live - first - len(set(numbers))
        if period < len(back):
            books.lost += live - end.step
            books.untold += max(0, live - max(told[period], end.live or 0, end.step))
    if not 0 <= unclaimed <= books.unknown:
        books.wrong.append(
            f"{unclaimed} counted steps are of no worker, but {books.unknown} have an unknown end"
        )
    if not books.done <= books.kept + books.lost <= books.done + books.unknown:
        books.wrong.append(f"it does not add up: {books}")
    return books


def _unknown(ledger: Sequence[Entry]) -> int:
    """Returns steps that were begun and not done, and attempts at a step that a recovery has cut off."""
    begun = sum(entry.what == "begin" for entry in ledger) - sum(
        entry.what == "done" for entry in ledger
    )
    return begun + sum(
        entry.what == "log" and bool(_RECOVERING.search(entry.text)) for entry in ledger
    )


def _by_period(
    ledger: Sequence[Entry], back: Sequence[Restore]
) -> Iterator[tuple[int, int, Entry]]:
    """The entries of one life of a worker with the number of restores before its session, and before the last one.

    Not by the time of the entry: a worker that sleeps may write down late what it did before a
    restore.
    """
    before = period = 0
    for entry in ledger:
        if entry.what == "log" and (entry.text == OPENED or _RECOVERED.search(entry.text)):
            before, period = period, sum(restore.at <= entry.at for restore in back)
        yield before, period, entry
