"""Mistakes that cost a run without an error: each is one warning, with the cure."""

import pathlib
from concurrent import futures

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness.training.run.services import StepCounter

pytestmark = pytest.mark.usefixtures("graph")


def model() -> tuple[rt.Tensor, rt.Variable]:
    w = rt.Variable(np.ones(2, np.float32), name="w")
    return rt.call(lambda w: (w * w).sum(), w, name="loss"), w


@pytest.mark.parametrize("counts", [False, True])
def test_uncounted_step_warns(counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A graph that trains and never counts its global step warns before the first step."""
    step = harness.get_or_create_global_step()
    loss, _ = model()
    optimizer = harness.Optimizer(optax.sgd(0.1))
    optimizer.minimize(loss, global_step=step if counts else None)
    with harness.Supervisor().managed_session(""):
        assert ("nothing counts the global step 'global_step:0'" in caplog.text) != counts


def test_uncounted_step_of_hooks_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A monitored session warns of a global step that nothing counts."""
    harness.get_or_create_global_step()
    harness.Optimizer(optax.sgd(0.1)).minimize(model()[0])
    with harness.MonitoredSession():
        assert "nothing counts the global step" in caplog.text


def test_graph_without_training_counts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A graph that only reads its variables need not count."""
    harness.get_or_create_global_step()
    model()
    with harness.Supervisor().managed_session(""):
        assert "nothing counts" not in caplog.text


@pytest.mark.parametrize("saves", [False, True])
def test_missing_logdir_warns_once(
    saves: bool, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A chief of a cluster without a log directory warns at its start that nothing is saved."""
    harness.get_or_create_global_step()
    with rt.Server.create_local_server() as server:
        supervisor = harness.Supervisor(logdir=tmp_path if saves else None)
        with supervisor.managed_session(server.target):
            assert caplog.text.count("no checkpoints are written") == (not saves)


def test_fetched_nan_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """A scalar that is NaN is named once, also where no checkpoint would show it."""
    harness.get_or_create_global_step()
    x = rt.placeholder(np.float32, [], name="x")
    loss = x * 1
    with harness.Supervisor().managed_session("") as session:
        session.run(loss, {x: 1.0})
        assert "NaN" not in caplog.text
        for _ in range(3):
            session.run([loss], {x: np.nan})
    assert caplog.text.count(" is NaN: if this is the loss") == 1


@pytest.mark.parametrize("saves", [False, True])
def test_stopped_ps_names_its_checkpoints(
    saves: bool, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ps that is stopped early promises a checkpoint only where the chief writes some."""
    harness.get_or_create_global_step()
    with rt.Server.create_local_server() as server:
        supervisor = harness.Supervisor(logdir=tmp_path if saves else None)
        session = supervisor.prepare_or_wait_for_session(server.target)
        served = futures.ThreadPoolExecutor().submit(server.join)
        server.stop()
        served.result(20)
        session.close()
        supervisor.coord.request_stop()
    assert ("it goes on from the newest checkpoint" in caplog.text) == saves
    assert ("there are no checkpoints to go on from" in caplog.text) != saves


def test_rate_begins_with_first_step() -> None:
    """No step rate is written before the first step."""
    counter = StepCounter("global_step", None)
    assert [counter.count(step, now) for step, now in ((0, 0.0), (0, 1.0), (6, 3.0), (6, 5.0))] == [
        None,
        None,
        3.0,
        0.0,
    ]
