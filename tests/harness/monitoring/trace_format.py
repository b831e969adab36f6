"""A strict reader of the Trace Event Format that Perfetto and chrome://tracing take.

After "Trace Event Format" (Google, 2016): what each kind of event must have, and nothing that a
viewer would guess at.
"""

import json
import math
from collections import defaultdict
from typing import Any

_REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},  # complete
    "i": {"name", "ts", "s", "pid", "tid"},  # instant
    "M": {"name", "pid", "args"},  # metadata
}
_METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def problems(text: str) -> list[str]:
    """What is wrong with a trace, a line for each; none when it is valid.

    Args:
        text: the file, a JSON object with ``traceEvents``.
    """
    trace = json.loads(text, parse_constant=lambda name: f"not JSON: {name}")
    events = trace["traceEvents"]
    unit = trace.get("displayTimeUnit", "ms")
    found = [] if unit in ("ms", "ns") else [f"unknown unit {unit}"]
    named: set[tuple[int, int | None]] = set()
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        wrong = _problem(event)
        if wrong:
            found.append(f"{wrong}: {event}")
        elif event["ph"] == "M":
            named |= (
                {(event["pid"], event.get("tid"))} if event["name"].endswith("_name") else set()
            )
        else:
            rows[event["pid"], event["tid"]].append(event)
    for (pid, tid), row in rows.items():
        found += [f"process {pid} has no name"] if (pid, None) not in named else []
        found += [f"thread {pid}/{tid} has no name"] if (pid, tid) not in named else []
        starts = [event["ts"] for event in row]
        found += (
            [f"thread {pid}/{tid} is not in the order of time"] if starts != sorted(starts) else []
        )
        found += _crossings(row)
    return found


def _problem(event: dict[str, Any]) -> str:
    missing = _REQUIRED.get(event.get("ph", ""), {"ph of a known kind"}) - event.keys()
    if missing:
        return f"without {', '.join(sorted(missing))}"
    if not isinstance(event["name"], str) or not event["name"]:
        return "no name"
    if any(type(event[key]) is not int for key in ("pid", "tid") if key in event):
        return "pid or tid is no integer"
    if any(not _is_time(event[key]) for key in ("ts", "dur") if key in event):
        return "a time that is no number of 0 or more"
    if not isinstance(event.get("args", {}), dict):
        return "args that are no object"
    if event["ph"] == "M":
        key, kind = _METADATA.get(event["name"], ("", object))
        if not key or type(event["args"].get(key)) is not kind:
            return "metadata that no viewer reads"
        if event["name"].startswith("thread") and "tid" not in event:
            return "without tid"
    return (
        "a scope that is none" if event["ph"] == "i" and event["s"] not in ("g", "p", "t") else ""
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _crossings(row: list[dict[str, Any]]) -> list[str]:
    """Complete events of one thread that overlap without one lying in the other: viewers draw those wrong."""
    found, open_until = [], []
    for event in sorted((e for e in row if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-6:
            open_until.pop()
        # microseconds; the sum of two floats is not exact
        if open_until and end > open_until[-1] + 1e-3:
            found.append(
                f"{event['name']} at {event['ts']} overlaps its neighbour on "
                f"{event['pid']}/{event['tid']}"
            )
        open_until.append(end)
    return found
