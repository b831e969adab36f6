"""Seconds that mean "never": services and ends take any number, infinity too."""

import math
import pathlib
import threading

import pytest

import harness
import runtime as rt
from harness.checkpoints.layout import latest_checkpoint

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize("never", [1e10, math.inf])
def test_endless_periods_run_services_once(tmp_path: pathlib.Path, never: float) -> None:
    """Services with endless periods run once, and the end saves."""
    more = harness.get_or_create_global_step().assign_add(1)
    harness.summary.scalar("one", rt.constant(1.0))
    sv = harness.Supervisor(
        logdir=str(tmp_path),
        save_model_secs=never,
        save_summaries_secs=never,
        recovery_wait_secs=never,
        stop_grace_secs=never,
    )
    with sv.managed_session("") as sess:
        saved = threading.Event()
        sv.loop(never, saved.set)
        assert saved.wait(100)
        while latest_checkpoint(str(tmp_path)) is None:
            assert not sv.coord.wait_for_stop(0.01)
        for _ in range(5):
            sess.run(more)
        assert not sv.should_stop()
    path = latest_checkpoint(str(tmp_path))
    assert path is not None and path.endswith("/5")


@pytest.mark.parametrize("never", [1e10, math.inf])
def test_endless_grace_period_ends_normally(tmp_path: pathlib.Path, never: float) -> None:
    """A monitored session with endless periods ends normally and saves."""
    more = harness.get_or_create_global_step().assign_add(1)
    with harness.MonitoredTrainingSession(
        "",
        checkpoint_dir=str(tmp_path),
        save_checkpoint_secs=never,
        save_summaries_secs=never,
        log_step_count_steps=None,
        stop_grace_period_secs=never,
        hooks=[harness.StopAtStepHook(last_step=3)],
    ) as sess:
        while not sess.should_stop():
            sess.run(more)
    path = latest_checkpoint(str(tmp_path))
    assert path is not None and path.endswith("/3")


@pytest.mark.parametrize("never", [1e10, math.inf])
def test_endless_grace_period_raises_error(tmp_path: pathlib.Path, never: float) -> None:
    """An error leaves a monitored session with an endless grace period."""
    more = harness.get_or_create_global_step().assign_add(1)
    with (
        pytest.raises(ZeroDivisionError),
        harness.MonitoredTrainingSession(
            "", checkpoint_dir=str(tmp_path), save_checkpoint_steps=1, stop_grace_period_secs=never
        ) as sess,
    ):
        sess.run(more)
        raise ZeroDivisionError


@pytest.mark.parametrize("never", [1e10, math.inf])
def test_coordinator_accepts_endless_waits(never: float) -> None:
    """A coordinator accepts endless waits and ends them at a stop."""
    coord = harness.Coordinator()
    waiting = threading.Thread(target=coord.wait_for_stop, args=(never,), daemon=True)
    waiting.start()
    coord.request_stop()
    waiting.join(30)
    assert not waiting.is_alive()
    other = threading.Thread(target=lambda: None)
    other.start()
    coord.join([other], stop_grace_period_secs=never)
