"""A chief that finds the live model of a run with another log directory keeps it, and says so aloud."""

import logging
import pathlib
from collections.abc import Iterator

import pytest

import harness
import runtime as rt
from harness.training.start import policy
from runtime.proto.run_record_pb2 import RunOrder
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import Leadership
from runtime.state.store import Store

pytestmark = pytest.mark.usefixtures("graph")


@pytest.fixture
def target() -> Iterator[str]:
    with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server:
        yield server.target


def train(target: str, logdir: pathlib.Path | None, steps: int, monitored: bool = False) -> int:
    """Trains as a chief of its own, which is then gone; returns the step that it began at."""
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        more = step.assign_add(1)
        if monitored:
            session = harness.MonitoredTrainingSession(target, checkpoint_dir=str(logdir))
        else:
            supervisor = harness.Supervisor(logdir=logdir, save_model_secs=0, save_summaries_secs=0)
            session = supervisor.managed_session(target)
        with pytest.raises(ZeroDivisionError), session as sess:
            began = int(sess.run(step))
            for _ in range(steps):
                sess.run(more)
            raise ZeroDivisionError("the chief dies")
    return began


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return [line for line in found if "log directory" in line]


@pytest.mark.parametrize("monitored", [False, True])
def test_new_directory_over_live_model_warns(
    tmp_path: pathlib.Path, target: str, caplog: pytest.LogCaptureFixture, monitored: bool
) -> None:
    """A new log directory over a live model keeps the model and warns with both directories."""
    old, new = tmp_path / "old", tmp_path / "new"
    assert train(target, old, 5, monitored) == 0
    assert train(target, old, 1, monitored) == 5
    (tmp_path / "link").symlink_to(old)
    assert train(target, tmp_path / "link", 1, monitored) == 6
    assert warnings(caplog) == []
    assert train(target, new, 1, monitored) == 7  # nothing is thrown away
    (line,) = warnings(caplog)
    for part in (str(old), str(new), "step 7", "no checkpoint", "start the ps tasks again too"):
        assert part in line
    assert train(target, new, 1, monitored) == 8  # from now on it is this run's
    assert warnings(caplog) == []


def test_chief_without_directory_is_silent(
    tmp_path: pathlib.Path, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A chief without a log directory does not warn."""
    train(target, None, 1)
    train(target, tmp_path / "a", 1)
    train(target, None, 1)
    assert warnings(caplog) == []
    train(target, tmp_path / "b", 1)
    (line,) = warnings(caplog)
    assert str(tmp_path / "a") in line and "step 3" in line


def test_warning_names_both_runs() -> None:
    """The warning names both directories, the step and the newest checkpoint."""
    live = policy.ClusterReport(
        variables=1, phases={"/job:ps/task:0": "ready"}, logdirs=["/runs/a"]
    )
    assert policy.other_run(live, "", 5) == "" == policy.other_run(live, "/runs/a", 5)
    assert policy.other_run(policy.ClusterReport(), "/runs/b", 5) == ""
    text = policy.other_run(live, "/runs/b", 5)
    assert (
        "of a run in /runs/a" in text
        and "/runs/b, which holds no checkpoint" in text
        and "(at step 5)" in text
    )
    restorable = policy.ClusterReport(
        variables=1, logdirs=["/runs/a"], checkpoint="/runs/b/model.ckpt/7"
    )
    text = policy.other_run(restorable, "/runs/b", None)
    assert "newest checkpoint is /runs/b/model.ckpt/7" in text and "at step" not in text


def test_backup_keeps_the_log_directory() -> None:
    """A task that continues from a backup keeps the run's log directory."""
    one, other = Store().run, Store().run
    leadership = Leadership(1, 7).to_proto()
    for order in (RunOrder(claim=RunOrder.Claim()), RunOrder(open=RunOrder.Open(logdir="/runs/a"))):
        order.leadership.CopyFrom(leadership)
        one.obey(order, "t", Cancellation())
    other.take_up(one.state())
    assert other.obey(RunOrder(inspect=RunOrder.Inspect()), "t", Cancellation()).logdir == "/runs/a"
