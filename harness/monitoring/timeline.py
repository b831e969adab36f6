"""A traced step as a Chrome trace: one picture of all tasks, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    metadata = rt.RunMetadata()
    sess.run(train_op, feeds, rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), metadata)
    harness.timeline.write("step.json", metadata)

Every device is a process of the trace. Its stages are a row. Its transfers are another row, or
several rows for transfers at the same time.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import runtime as rt

_STAGE = "stage"


def chrome_trace(run_metadata: rt.RunMetadata) -> dict[str, object]:
    """Returns the trace as the JSON object of the Trace Event Format, in microseconds from the first event.

    Args:
        run_metadata: metadata of a step run with ``RunOptions.FULL_TRACE``.

    Raises:
        ValueError: The metadata has no trace.
    """
    devices = run_metadata.step_stats.dev_stats
    if not devices:
        raise ValueError(
            "this RunMetadata holds no trace: run the step with RunOptions(trace_level=FULL_TRACE)"
        )
    # Viewers show times from zero on.
    origin = min(_start_nanos(node) for device in devices for node in device.node_stats)
    names: list[dict[str, object]] = []
    events: list[tuple[int, dict[str, object]]] = []
    for number, device in enumerate(devices, 1):
        names += _name_events("process", device.device, number, pid=number)
        operations = _stage_operations(device.node_stats)
        # Longer spans first, so that a span comes before those within.
        spans = sorted(
            (n for n in device.node_stats if ":" in n.node_name),
            key=lambda n: (_start_nanos(n), -_length_nanos(n)),
        )
        stages = [node for node in spans if node.node_name.startswith(_STAGE)]
        transfers = [node for node in spans if not node.node_name.startswith(_STAGE)]
        thread = 0
        for title, nodes in (("stages", stages), ("transfers", transfers)):
            for row in _spread_rows(nodes):
                thread += 1
                names += _name_events("thread", title, thread, pid=number, tid=thread)
                events += [
                    (_start_nanos(node), _make_event(node, number, thread, origin, operations))
                    for node in row
                ]
    events.sort(key=lambda timed: timed[0])
    return {"traceEvents": names + [event for _, event in events], "displayTimeUnit": "ms"}


def write(path: str | os.PathLike[str], run_metadata: rt.RunMetadata) -> None:
    """Writes the trace of a step to a file that Perfetto opens.

    Args:
        path: path of the file, such as "timeline-100.json".
        run_metadata: metadata of a step run with ``RunOptions.FULL_TRACE``.

    Raises:
        ValueError: The metadata has no trace.
    """
    trace = chrome_trace(run_metadata)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


def _name_events(kind: str, name: str, index: int, **ids: int) -> Iterable[dict[str, object]]:
    """Yields the events that name and sort a "process" or a "thread"."""
    for what, value in (("name", name), ("sort_index", index)):
        yield {"name": f"{kind}_{what}", "ph": "M", **ids, "args": {what: value}}


def _spread_rows(nodes: Iterable[Any]) -> list[list[Any]]:
    """Distributes nodes, in the order of time, to as few rows as possible without overlap in a row.

    Viewers read overlapping events of a thread as nested calls, and drop events that do not nest.
    """
    rows: list[list[Any]] = []
    for node in nodes:
        row = next(
            (
                row
                for row in rows
                if _start_nanos(row[-1]) + _length_nanos(row[-1]) <= _start_nanos(node)
            ),
            None,
        )
        if row is None:
            rows.append(row := [])
        row.append(node)
    return rows


def _make_event(
    node: Any,
    process: int,
    thread: int,
    origin: int,
    operations: dict[tuple[int, int, int], list[str]],
) -> dict[str, object]:
    kind, _, wave = node.node_name.partition(":")
    moved = (
        node.output[0].tensor_description.allocation_description.requested_bytes
        if node.output
        else 0
    )
    arguments = {"wave": int(wave), "bytes": moved, "what": node.timeline_label}
    if kind == _STAGE:
        arguments["operations"] = operations.get(_stage_key(node), [])
    length = _length_nanos(node) / 1000
    return {
        "name": node.timeline_label
        if kind == _STAGE and node.timeline_label
        else f"{kind} {moved} B",
        "cat": kind,
        **({"ph": "X", "dur": length} if length else {"ph": "i", "s": "t"}),
        "ts": (_start_nanos(node) - origin) / 1000,
        "pid": process,
        "tid": thread,
        "args": arguments,
    }


def _stage_operations(nodes: Iterable[Any]) -> dict[tuple[int, int, int], list[str]]:
    """Returns the operations of each stage, by the times of the stage."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for node in nodes:
        # Names of stages and transfers have a colon, names of operations have none.
        if ":" not in node.node_name:
            found.setdefault(_stage_key(node), []).append(node.node_name)
    return found


def _stage_key(node: Any) -> tuple[int, int, int]:
    return node.thread_id, _start_nanos(node), _length_nanos(node)


def _start_nanos(node: Any) -> int:
    return int(node.all_start_nanos or node.all_start_micros * 1000)


def _length_nanos(node: Any) -> int:
    return int(node.all_end_rel_nanos or node.all_end_rel_micros * 1000)
