"""Figures of tasks over a span of time: rates and means from two reports of a task, and their tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import runtime as rt

_NUMBER = re.compile(r"[\d.]+( [KMGT]?B|%)?")
_GIVEN_UP = (
    *("INCARNATION", "CONN", "VARS", "CPU", "BYTES", "MEM", "QUEUE", "STALE", "APPLY MS", "PULL/COMP/PUSH"),
    *("STEP MS", "ROLE", "STEPS/S", "STEP"),
)
"""The columns that are left out on a narrow terminal, in this order."""
_GAP = 2


@dataclass(frozen=True)
class Figures:
    """The figures of a task between two reports; None without such work.

    Attributes:
        steps_per_sec: training steps that sessions on this task ran.
        step_ms: mean time of a step, milliseconds.
        pull_ms: part of a step that reads the variables.
        compute_ms: part of a step that computes.
        push_ms: part of a step that sends updates and waits for them. Pipelined steps have no parts.
        bytes_per_step: tensor bytes that a step sent and received.
        updates_per_sec: updates that were applied to variables of this task.
        apply_ms: mean time to apply an update from the network, with the wait for its turn, milliseconds.
        staleness_mean: mean number of other updates between the reading and the update of variables.
        staleness_max: the largest such number.
        queue_depth: most calls that were running or waiting at once.
        received_per_sec: bytes that came over the tensor channel.
        sent_per_sec: bytes that went out over it.
        cpu_percent: of one core, 100 is one core busy.
        checkpoint_seconds: mean time of a checkpoint that the task coordinated.
        checkpoint_bytes: mean size of a checkpoint.
        recovery_seconds: mean time that training stood still for a recovery.
        gauges: figures that are not sums, as reported.
    """

    steps_per_sec: float | None = None
    step_ms: float | None = None
    pull_ms: float | None = None
    compute_ms: float | None = None
    push_ms: float | None = None
    bytes_per_step: float | None = None
    updates_per_sec: float | None = None
    apply_ms: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    queue_depth: float | None = None
    received_per_sec: float | None = None
    sent_per_sec: float | None = None
    cpu_percent: float | None = None
    checkpoint_seconds: float | None = None
    checkpoint_bytes: float | None = None
    recovery_seconds: float | None = None
    gauges: Mapping[str, float] = field(default_factory=dict)


_RATES = {
    "steps_per_sec": "steps_total",
    "updates_per_sec": "updates_total",
    "received_per_sec": "bytes_received_total",
    "sent_per_sec": "bytes_sent_total",
}
"""Figures that are a growing sum per second, with the name of the sum."""
_PARTS = ("pull", "compute", "push")
"""Parts of a step, which a pipelined step does not have."""
_MEANS = {f"{part}_ms": (f"{part}_seconds_total", "steps_total", 1e3) for part in ("step", *_PARTS)} | {
    "bytes_per_step": ("step_bytes_total", "steps_total", 1.0),
    "apply_ms": ("apply_seconds_total", "applied_total", 1e3),
    "checkpoint_seconds": ("checkpoint_seconds_total", "checkpoints_total", 1.0),
    "checkpoint_bytes": ("checkpoint_bytes_total", "checkpoints_total", 1.0),
    "recovery_seconds": ("recovery_seconds_total", "recoveries_total", 1.0),
}
"""Figures that are means: names of the sum and of the count, and units of the figure in a unit of the sum."""


def figures(before: rt.TaskReport | None, now: rt.TaskReport, seconds: float) -> Figures:
    """Returns the figures of a task between two reports.

    Args:
        before: the earlier report. None, or a report of an earlier process of the task, counts from the start.
        now: the later report.
        seconds: seconds between the reports, or since the start.
    """
    if before is not None and before.incarnation != now.incarnation:
        before = None
    past = {} if before is None else before.values

    def grown(name: str) -> float:
        return now.values.get(name, 0.0) - past.get(name, 0.0)

    def rate(name: str) -> float | None:
        return grown(name) / seconds if seconds > 0 and now.values.get(name) else None

    def mean(total: str, count: str, scale: float) -> float | None:
        return grown(total) / grown(count) * scale if grown(count) > 0 else None

    found: dict[str, Any] = {figure: rate(name) for figure, name in _RATES.items()}
    found |= {figure: mean(*names) for figure, names in _MEANS.items()}
    # Pipelined steps overlap their parts, so the parts have no times of their own.
    if grown("compute_seconds_total") <= 0:
        found |= dict.fromkeys(f"{part}_ms" for part in _PARTS)
    if before is not None:
        found |= _staleness([n - o for n, o in zip(now.staleness, before.staleness, strict=True)])
    else:
        found |= _staleness(now.staleness)
    return Figures(
        **found,
        queue_depth=now.values.get("queue_depth_max"),
        cpu_percent=(rate("cpu_seconds_total") or 0.0) * 100,
        gauges={name: value for name, value in now.values.items() if not name.endswith("_total")},
    )


def _staleness(behind: Sequence[int]) -> dict[str, Any]:
    """Returns mean and maximum of the staleness of updates; element i counts those that were i updates behind."""
    late = [i for i, count in enumerate(behind) if count]
    if not late:
        return {}
    mean = sum(i * behind[i] for i in late) / sum(behind)
    return {"staleness_mean": mean, "staleness_max": late[-1]}


def sizes(count: float) -> str:
    """Returns a number of bytes for people.

    >>> sizes(318_000), sizes(1_500)
    ('318 KB', '1.5 KB')
    """
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes any size")


def number_columns(rows: Sequence[Sequence[str]]) -> frozenset[int]:
    """Returns the columns that have only numbers below the heading, which are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    return frozenset(
        i for i, column in enumerate(columns) if all(_NUMBER.fullmatch(cell) for cell in column[1:] if cell)
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text with aligned columns, numbers to the right; the first row is the heading."""
    rows = [[rt.lowlevel.printable(cell) for cell in row] for row in rows]
    numbers = number_columns(rows)
    columns = [_aligned(column, number in numbers) for number, column in enumerate(zip(*rows, strict=True))]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def fitting(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Returns the columns of a table that fit a terminal of so many characters; the last column is cut off.

    >>> fitting([["TASK", "CPU", "ERROR"], ["ps", "3%", "no route to host"]], width=14)
    [['TASK', 'ERROR'], ['ps', 'no rout…']]
    """
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


def _width(rows: Sequence[Sequence[str]], column: int) -> int:
    return max(len(row[column]) for row in rows)


def _aligned(column: Sequence[str], right: bool) -> list[str]:
    width = max(map(len, column))
    return [cell.rjust(width) if right else cell.ljust(width) for cell in column]
