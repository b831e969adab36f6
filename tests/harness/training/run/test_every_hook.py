"""All hooks in one MonitoredTrainingSession, in clusters of real processes, over the death of a ps."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import harness
from tests.faults import PRELOAD, FaultPlan, LocalCluster, no_leaks
from tests.kit.events import read_events

pytestmark = pytest.mark.chaos

COMMAND = ["python", "-m", "tests.harness.training.run.hooks_program"]
ENV = {"JAX_PLATFORMS": "cpu"}
LAST = 5000
"""Steps for some seconds: the death of the ps comes before half of them."""


def _scalars(directory: Path) -> list[tuple[str, int, float]]:
    found: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events*")):
        events: Iterable[Any] = read_events(str(path))
        found += [(v.tag, e.step, v.simple_value) for e in events for v in e.summary.value]
    return found


@pytest.mark.nightly
def test_every_hook_survives_ps_death(tmp_path: Path) -> None:
    """Every hook works over the death of a ps, and no step is lost or doubled."""
    command = [
        *COMMAND,
        f"--directory={tmp_path}",
        f"--last_step={LAST}",
        f"--gate={tmp_path}/gate",
    ]
    with no_leaks(), LocalCluster(command, ps=2, workers=2, preload=PRELOAD, env=ENV) as cluster:
        cluster.expect("worker:1", "FIRST")
        cluster.run(FaultPlan(seed=11).kill("ps", 1, at_step=1000, restart_secs=0))
        (tmp_path / "gate").touch()
        for worker, last in (("worker:1", LAST * 3 // 4), ("worker:0", LAST)):
            cluster.expect(worker, "recovering")
            final = cluster.expect(worker, r"FINAL (\d+)")  # FinalOpsHook
            # StopAtStepHook; each may have one step under way
            assert last <= int(final[1]) <= LAST + 2
        assert [cluster.wait("worker:0"), cluster.wait("worker:1")] == [0, 0]
        told = [
            line.text.partition("LISTENER ")[2] for line in cluster.lines("worker:0", "LISTENER")
        ]
        again = len(cluster.lines("worker:0", r"restored \S+/0: "))  # nothing newer was whole yet
        for worker in ("worker:0", "worker:1"):
            # LoggingTensorHook; what FeedFnHook feeds
            assert len(cluster.lines(worker, r"loss = 8\.0")) >= 1
            assert len(cluster.lines(worker, "FIRST")) == 1
    assert told[:3] == ["begin", "before 0", "after 0"] and told[-1].startswith("end ")
    assert told.count("begin") == 1 and len([t for t in told if t.startswith("end")]) == 1
    saves = told[1:-1]  # the death of the ps may have cut one off: a "before" without its "after"
    assert all(
        saves[n - 1] == t.replace("after", "before")
        for n, t in enumerate(saves)
        if t.startswith("after")
    )
    assert 1 <= saves.count("before 0") <= 1 + again and saves[-1].startswith("after")
    end = int(told[-1].split()[1])
    # CheckpointSaverHook, the session's and one of the user's own
    for path in (tmp_path, tmp_path / "own"):
        newest = harness.latest_checkpoint(str(path))
        assert newest is not None and int(Path(newest).name) == end
        total = harness.load_variable(newest, "total")
        # each step once: none lost, none doubled after the restore
        assert set(total.tolist()) == {float(end)}
    for directory in (tmp_path, tmp_path / "own-summaries"):  # SummarySaverHook
        losses = [(step, value) for tag, step, value in _scalars(directory) if tag == "loss"]
        assert {value for _, value in losses} == {8.0}
        assert max(step for step, _ in losses) > LAST // 2
    for directory in (tmp_path, tmp_path / "rates"):  # StepCounterHook
        assert (
            max(step for tag, step, _ in _scalars(directory) if tag == "global_step/sec")
            > LAST // 2
        )
    traces = sorted((tmp_path / "traces").glob("timeline-*.json"))  # ProfilerHook
    assert traces
    assert any(e.get("name") for e in json.loads(traces[0].read_text())["traceEvents"])


def test_nan_ends_chief_without_save(tmp_path: Path) -> None:
    """A NaN on the chief ends the chief with the error and without another save."""
    command = [*COMMAND, f"--directory={tmp_path}", "--last_step=1000000", "--nan"]
    with no_leaks(), LocalCluster(command, ps=1, workers=1, preload=PRELOAD, env=ENV) as cluster:
        cluster.expect("worker:0", "NanLossDuringTrainingError: NaN loss during training")
        assert cluster.wait("worker:0") == 1
        assert not cluster.lines("worker:0", "LISTENER end")
    newest = harness.latest_checkpoint(str(tmp_path))
    assert newest is not None and Path(newest).name == "0"


def test_late_monitored_worker_ends_well(tmp_path: Path) -> None:
    """A worker with a monitored session that comes after the end has nothing left to do."""
    command = [*COMMAND, f"--directory={tmp_path}", "--last_step=30"]
    with (
        no_leaks(),
        LocalCluster(command, ps=1, workers=2, preload=PRELOAD, env=ENV, start=False) as cluster,
    ):
        cluster.start("ps:0")
        cluster.start("worker:0")
        assert cluster.wait("worker:0") == 0
        cluster.start("worker:1")
        cluster.expect("worker:1", "nothing left to do: the chief has finished training")
        assert cluster.wait("worker:1") == 0
        assert not cluster.lines("worker:1", "FIRST")
