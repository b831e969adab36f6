"""The standard series of rare events: what happens for real is found in the event file."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest

import harness
import runtime as rt
from tests.harness import cluster_kit
from tests.kit.events import read_events
from tests.kit.waits import until
from tests.runtime.kit import TARGET, servers

pytestmark = pytest.mark.cluster

Series = dict[str, list[float]]


def series_in(logdir: pathlib.Path) -> Series:
    """The values of every scalar, oldest first."""
    found: Series = {}
    for path in sorted(logdir.glob("events*")):
        for event in read_events(str(path)):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append(value.simple_value)
    return found


def wait_for(logdir: pathlib.Path, true: Callable[[Series], bool]) -> Series:
    """The series, once they are as wanted: another process writes them."""
    return until(lambda: found if true(found := series_in(logdir)) else None, every=0.05)


def test_series_show_recoveries_and_checkpoints(tmp_path: pathlib.Path) -> None:
    """The event file shows recoveries, lost steps, and the time and size of checkpoints."""
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path), summary_secs=0.1) as c:
        c.ps(0)
        second = c.ps(1)
        chief = c.worker(0)
        chief.request("steps", 10)
        wait_for(tmp_path, lambda found: "steps_per_sec/worker_0" in found)
        chief.request("save", answer="SAVED")
        assert chief.request("steps", 7) == 17
        before = wait_for(tmp_path, lambda found: "checkpoint_seconds/worker_0" in found)
        assert "recoveries/worker_0" not in before and "steps_lost/worker_0" not in before
        second.kill()
        chief.tell("train")
        chief.hear("LOG", "recovering")
        c.ps(1)
        chief.hear("LOG", "recovered within")
        chief.tell("pause")
        chief.hear("TRAINED")
        found = wait_for(tmp_path, lambda found: "steps_lost/worker_0" in found)
        chief.tell("end")
        assert chief.wait() == 0
    assert found["recoveries/worker_0"][-1] == 1
    assert found["recovery_seconds/worker_0"][0] > 0
    # the step that was cut off may have counted on the ps left
    assert found["steps_lost/worker_0"][-1] in (7, 8)
    assert found["checkpoint_seconds/worker_0"][0] > 0
    # two vectors of four floats, and their description
    assert found["checkpoint_bytes/worker_0"][0] > 2 * 4 * 4


def test_series_show_dropped_gradients(tmp_path: pathlib.Path) -> None:
    """The event file shows a gradient that was dropped as stale."""
    with servers(sockets=True, ps=1, worker=1) as made, harness.FileWriter(tmp_path) as writer:
        series = harness.StandardSeries(made[TARGET].cluster, writer)
        with rt.Graph().as_default() as graph:
            with rt.device("/job:ps/task:0"):
                accumulator = rt.ConditionalAccumulator(np.float32, [2], name="gradients")
                advance = accumulator.set_global_step(5)
                fresh, stale = (
                    accumulator.apply_grad(np.ones(2, np.float32), local_step=step)
                    for step in (5, 4)
                )
            with rt.Session(made[TARGET].target, graph) as session:
                session.run(advance)
                session.run(fresh)
                assert "updates_dropped/ps_0" not in series.write(1)
                session.run(stale)
        series.write(2)
    assert series_in(tmp_path)["updates_dropped/ps_0"] == [1.0]
