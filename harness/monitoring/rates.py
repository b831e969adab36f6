"""Figures of tasks over a span of time: rates and means from two reports of a task, and their tables."""

import re
from collections.abc import Mapping, Sequence

import runtime as rt

_NUMBER = re.compile(r"[\d.]+( [KMGT]?B|%)?")
_RATES = {
    "steps_per_sec": "steps_total",
    "updates_per_sec": "updates_total",
    "received_per_sec": "bytes_received_total",
    "sent_per_sec": "bytes_sent_total",
}
"""Figures that are a growing sum per second, with the name of the sum."""
_PARTS = ("pull_ms", "compute_ms", "push_ms")
"""Parts of a step, which a pipelined step does not have."""
_MEANS = {
    "step_ms": ("step_seconds_total", "steps_total", 1e3),
    "pull_ms": ("pull_seconds_total", "steps_total", 1e3),
    "compute_ms": ("compute_seconds_total", "steps_total", 1e3),
    "push_ms": ("push_seconds_total", "steps_total", 1e3),
    "bytes_per_step": ("step_bytes_total", "steps_total", 1.0),
    "apply_ms": ("apply_seconds_total", "applied_total", 1e3),
    "checkpoint_seconds": ("checkpoint_seconds_total", "checkpoints_total", 1.0),
    "checkpoint_bytes": ("checkpoint_bytes_total", "checkpoints_total", 1.0),
    "recovery_seconds": ("recovery_seconds_total", "recoveries_total", 1.0),
}
"""Figures that are means: names of the sum and of the count, and units of the figure in a unit of the sum."""
assert {*_RATES.values(), *(name for mean in _MEANS.values() for name in mean[:2])} <= (
    rt.lowlevel.METRICS.keys()
), "a figure of no metric would be left out without a word"


def figures(before: rt.TaskReport | None, now: rt.TaskReport, seconds: float) -> dict[str, float]:
    """Returns the figures of a task between two reports, by name; a figure without such work is left out.

    Beside the rates and means above there are the mean and the maximum of the staleness,
    ``queue_depth`` (most calls that were running or waiting at once) and ``cpu_percent`` (100 is
    one core busy).

    Args:
        before: the earlier report. None, or a report of an earlier process of the task, counts from
            the start.
        now: the later report.
        seconds: seconds between the reports, or since the start.
    """
    values = now.values
    past: Mapping[str, float] = {}
    behind = now.staleness
    # A task that was started again counts from zero.
    if before is not None and before.incarnation == now.incarnation:
        past, behind = (
            before.values,
            tuple(n - o for n, o in zip(behind, before.staleness, strict=True)),
        )
    grown = {
        name: value - past.get(name, 0.0)
        for name, value in values.items()
        if name.endswith("_total")
    }
    # Two reports may come within one tick of the clock.
    seconds = max(seconds, 1e-9)
    found = {
        figure: grown[total] / seconds for figure, total in _RATES.items() if values.get(total)
    }
    # A mean without new work would divide by zero.
    for figure, (total, count, scale) in _MEANS.items():
        if grown.get(count, 0.0) > 0:
            found[figure] = grown.get(total, 0.0) / grown[count] * scale
    # Pipelined steps overlap their parts, so the parts have no times of their own.
    if grown.get("compute_seconds_total", 0.0) <= 0:
        found = {figure: value for figure, value in found.items() if figure not in _PARTS}
    found |= _staleness_figures(behind)
    if values.get("calls_total"):
        found["queue_depth"] = values["queue_depth_max"]
    found["cpu_percent"] = grown.get("cpu_seconds_total", 0.0) / seconds * 100
    return found


def _staleness_figures(behind: Sequence[int]) -> dict[str, float]:
    """Returns the mean and the maximum of the steps that updates were behind; nothing without updates."""
    late = [steps for steps, count in enumerate(behind) if count]
    if not late:
        return {}
    mean = sum(steps * count for steps, count in enumerate(behind)) / sum(behind)
    return {"staleness_mean": mean, "staleness_max": late[-1]}


def sizes(count: float) -> str:
    """Returns a number of bytes for people.

    >>> sizes(318_000), sizes(1_500)
    ('318 KB', '1.5 KB')
    """
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return (
                f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
            )
        count /= 1000
    raise AssertionError("the last unit takes any size")


def number_columns(rows: Sequence[Sequence[str]]) -> frozenset[int]:
    """Returns the columns that have only numbers below the heading, which are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    return frozenset(
        i
        for i, column in enumerate(columns)
        if all(_NUMBER.fullmatch(cell) for cell in column[1:] if cell)
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text with aligned columns, numbers to the right; the first row is the heading."""
    # Cells come from other processes, and could hold escapes of a terminal.
    rows = [[rt.lowlevel.printable(cell) for cell in row] for row in rows]
    numbers = number_columns(rows)
    columns = [
        _align_column(column, number in numbers)
        for number, column in enumerate(zip(*rows, strict=True))
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _align_column(column: Sequence[str], right: bool) -> list[str]:
    width = max(map(len, column))
    return [cell.rjust(width) if right else cell.ljust(width) for cell in column]
