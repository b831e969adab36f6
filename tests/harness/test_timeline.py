"""The Chrome trace of a step."""

import json
import pathlib

import numpy as np
import pytest

import runtime as rt
from harness import timeline
from tests.runtime.kit import TARGET, servers


def test_trace_of_a_step_over_two_tasks(tmp_path: pathlib.Path) -> None:
    metadata = rt.RunMetadata()
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.ones(16, np.float32), name="w")
        with rt.device(TARGET):
            y = rt.numpy.tanh(w, name="y")
        with rt.Session(made[TARGET].target, graph) as session:
            session.run(w.initializer)
            session.run(w.assign_add(y), None, rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE), metadata)
    timeline.write(tmp_path / "step.json", metadata)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [d.device for d in metadata.step_stats.dev_stats]
    stages = [e for e in events if e.get("cat") == "stage"]
    assert [
        (names[e["pid"]].split("/")[1], e["args"]["operations"]) for e in sorted(stages, key=lambda e: e["ts"])
    ] == [
        ("job:ps", ["w"]),
        ("job:worker", ["y"]),
        ("job:ps", ["AssignAdd"]),
    ]
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert all(e["ph"] != "X" or e["dur"] > 0 for e in events)
    assert {e["cat"] for e in events if "cat" in e} == {"stage", "send", "recv"}


def test_metadata_without_a_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="FULL_TRACE"):
        timeline.chrome_trace(rt.RunMetadata())
