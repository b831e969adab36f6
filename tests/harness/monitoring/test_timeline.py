"""The Chrome trace of a step."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime as rt
from harness import timeline
from tests.harness.monitoring.trace_format import problems
from tests.runtime.kit import TARGET, servers


def test_trace_covers_two_tasks(tmp_path: pathlib.Path) -> None:
    """The trace of a step shows the stages and transfers of both tasks in order."""
    metadata = rt.RunMetadata()
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.ones(16, np.float32), name="w")
        with rt.device(TARGET):
            y = rt.numpy.tanh(w, name="y")
        with rt.Session(made[TARGET].target, graph) as session:
            session.run(w.initializer)
            session.run(
                w.assign_add(y), None, rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), metadata
            )
    timeline.write(tmp_path / "step.json", metadata)
    assert problems((tmp_path / "step.json").read_text()) == []
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [d.device for d in metadata.step_stats.dev_stats]
    stages = [e for e in events if e.get("cat") == "stage"]
    assert [
        (names[e["pid"]].split("/")[1], e["args"]["operations"])
        for e in sorted(stages, key=lambda e: e["ts"])
    ] == [
        ("job:ps", ["w"]),
        ("job:worker", ["y"]),
        ("job:ps", ["AssignAdd"]),
    ]
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert all(e["ph"] != "X" or e["dur"] > 0 for e in events)
    assert {e["cat"] for e in events if "cat" in e} == {"stage", "send", "recv"}


def test_concurrent_transfers_have_own_rows() -> None:
    """Transfers at the same time have rows of their own."""
    metadata = rt.RunMetadata()
    with servers(sockets=True, ps=2, worker=2) as made, rt.Graph().as_default() as graph:
        variables = []
        for task in range(2):
            with rt.device(f"/job:ps/task:{task}"):
                variables.append(rt.Variable(np.ones(256, np.float32), name=f"w{task}"))
        towers = []
        for task in range(2):
            with rt.device(f"/job:worker/task:{task}"):
                towers.append(rt.numpy.tanh(variables[0] * variables[1], name=f"tower{task}"))
        with rt.device("/job:ps/task:0"):
            update = variables[0].assign_add(towers[0] + towers[1])
        with rt.Session(made[TARGET].target, graph) as session:
            session.run(rt.global_variables_initializer())
            session.run(update, None, rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), metadata)
    trace = timeline.chrome_trace(metadata)
    assert problems(json.dumps(trace)) == []
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert len(processes) == 4


spans = st.lists(
    st.tuples(
        st.sampled_from(["stage", "send", "recv", "fetch"]),
        st.integers(0, 10**7),
        st.integers(0, 10**6),
    )
)


@given(st.lists(spans, min_size=1, max_size=3).filter(any))
def test_any_spans_make_a_valid_trace(devices: list[list[tuple[str, int, int]]]) -> None:
    """Any spans make a valid trace with one event each, from time 0 on."""
    metadata = rt.RunMetadata()
    base = 1_700_000_000_000_000_000
    for number, nodes in enumerate(devices):
        device = metadata.step_stats.dev_stats.add(device=f"/job:worker/task:{number}")
        for kind, start, length in nodes:
            device.node_stats.add(
                node_name=f"{kind}:1",
                all_start_nanos=base + start,
                all_end_rel_nanos=length,
                timeline_label="what",
            )
    trace = timeline.chrome_trace(metadata)
    assert problems(json.dumps(trace)) == []
    shown = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert len(shown) == sum(map(len, devices))
    assert min(event["ts"] for event in shown) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dur": -1}, "no number of 0 or more"),
        ({"dur": float("nan")}, "no number of 0 or more"),
        ({"tid": "a"}, "no integer"),
        ({"tid": 7}, "thread 1/7 has no name"),
        ({"pid": 3}, "process 3 has no name"),
        ({"ph": "Q"}, "of a known kind"),
        ({"name": ""}, "no name"),
        ({"ts": 4.0}, "overlaps its neighbour"),
        ({"ts": 40.0}, "not in the order of time"),
    ],
)
def test_trace_reader_is_strict(change: dict[str, Any], said: str) -> None:
    """The reader of these tests finds every wrong field of an event."""

    def event(ts: float) -> dict[str, Any]:
        return {
            "name": "a",
            "cat": "stage",
            "ph": "X",
            "ts": ts,
            "dur": 5.0,
            "pid": 1,
            "tid": 1,
            "args": {},
        }

    names = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "p"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "t"}},
    ]
    assert (
        problems(json.dumps({"traceEvents": [*names, event(0.0), event(10.0), event(20.0)]})) == []
    )
    found = problems(
        json.dumps({"traceEvents": [*names, event(0.0), event(10.0) | change, event(20.0)]})
    )
    assert found and said in found[0]


def test_metadata_without_a_trace_is_refused() -> None:
    """Metadata of a run without a full trace is refused."""
    with pytest.raises(ValueError, match="FULL_TRACE"):
        timeline.chrome_trace(rt.RunMetadata())
