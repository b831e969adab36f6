"""SIGTERM in real processes: the chief saves where it is, ends with code 143, and goes on from there when restarted."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.exit_codes import PREEMPTED
from harness.launch import tasks
from harness.training.times import GOES_TOO_SECS, LAST_SAVE_SECS
from runtime.server.training_end import DRAIN_VARIABLE
from tests.faults import PRELOAD, LocalCluster, no_leaks
from tests.harness.cluster_kit import saved_step

EXIT_CODE = PREEMPTED.plain

pytestmark = pytest.mark.cluster

COMMAND = ["python", "-m", "tests.harness.training.stop.preemption_program"]


@contextlib.contextmanager
def started(
    logdir: Path, *flags: str, workers: int = 1, start: bool = True, drain_secs: str = "0"
) -> Iterator[LocalCluster]:
    command = [*COMMAND, f"--logdir={logdir}", *flags]
    env = {"JAX_PLATFORMS": "cpu", DRAIN_VARIABLE: drain_secs}
    with (
        no_leaks(),
        LocalCluster(command, workers=workers, preload=PRELOAD, env=env, start=start) as cluster,
    ):
        yield cluster


def test_preempted_chief_continues_its_data(tmp_path: Path) -> None:
    """A preempted chief saves its step and its place in the data, and continues there."""
    with started(tmp_path) as cluster:
        reached = cluster.wait_step(200)
        cluster.stop("worker:0")
        cluster.expect("worker:0", "SIGTERM: ending within 20 s")
        place = cluster.expect("worker:0", r"AT (\S+)")[1]
        assert cluster.wait("worker:0") == EXIT_CODE
        step = cluster.step()
        assert step is not None and step >= reached
        assert saved_step(tmp_path) == step  # the present one, not that of a timer an hour ago
        assert not cluster.lines("worker:0", "Traceback")
        cluster.start("worker:0")
        cluster.expect("worker:0", "keep the live model")
        assert cluster.expect("worker:0", r"FROM (\S+ \S+)")[1] == f"{step} {place}"
        cluster.wait_step(step + 50)


def test_run_continues_from_preempted_chief(tmp_path: Path) -> None:
    """All tasks continue from the checkpoint of a preempted chief."""
    with started(tmp_path, "--steps=100000000") as cluster:
        cluster.wait_step(100)
        cluster.stop("worker:0")
        place = cluster.expect("worker:0", r"AT (\S+)")[1]
        assert cluster.wait("worker:0") == EXIT_CODE
        cluster.stop("ps:0")  # after the workers, as harness.launch does
        assert cluster.wait("ps:0") == EXIT_CODE
    step = saved_step(tmp_path)
    with started(tmp_path, f"--steps={step + 50}") as cluster:
        assert cluster.expect("worker:0", r"FROM (\S+ \S+)")[1] == f"{step} {place}"
        assert cluster.wait("worker:0") == 0
        cluster.stop("ps:0")
        assert cluster.wait("ps:0") == 0  # training is over: it has done its part
    assert saved_step(tmp_path) == step + 50


def test_ps_serves_until_chief_saves(tmp_path: Path) -> None:
    """A ps that receives SIGTERM first serves until the chief has saved."""
    with started(tmp_path, drain_secs="100") as cluster:
        reached = cluster.wait_step(200)
        cluster.stop("ps:0")
        cluster.expect("ps:0", "SIGTERM: serving on for 100 s at most, for /job:worker/task:0")
        cluster.wait_step(reached + 50)
        cluster.stop("ps:0")  # an engine and a launcher may both send it
        cluster.stop("worker:0")
        assert cluster.wait("worker:0") == EXIT_CODE
        assert cluster.wait("ps:0") == EXIT_CODE
    assert saved_step(tmp_path) >= reached + 50


@pytest.mark.chaos
def test_leaving_ps_is_saved_twice(
    tmp_path: Path,
) -> None:
    """The chief saves at once when a ps is told to go, and once more before the ps goes."""
    with started(tmp_path, drain_secs=f"{GOES_TOO_SECS + LAST_SAVE_SECS + 2:g}") as cluster:
        reached = cluster.wait_step(200)  # an hour before the timer saves
        cluster.stop("ps:0")
        cluster.expect(
            "worker:0",
            r"a ps has been told to go, and serves on for 1\d s at most: saving what it holds",
        )
        first, second = (int(cluster.expect("worker:0", r"saved \S+/(\d+)$")[1]) for _ in range(2))
        assert reached <= first < second
        assert cluster.wait("ps:0") == EXIT_CODE
        cluster.start("ps:0")
        assert int(cluster.expect("worker:0", r"training goes on from step (\d+)")[1]) == second
        cluster.wait_step(second + 50)


def test_ps_drains_for_its_time(tmp_path: Path) -> None:
    """A ps serves on after SIGTERM for its drain time only."""
    with started(tmp_path, drain_secs="0.5") as cluster:
        cluster.wait_step(50)
        cluster.stop("ps:0")
        assert cluster.wait("ps:0") == EXIT_CODE
        cluster.expect("ps:0", "serving on for 0.5 s at most")


def test_launcher_and_server_share_variable() -> None:
    """The launcher and the server use one variable for the drain time."""
    assert DRAIN_VARIABLE == tasks.DRAIN_VARIABLE


@pytest.mark.chaos
def test_preempted_worker_disturbs_nobody(tmp_path: Path) -> None:
    """A preempted worker leaves and comes back without a recovery of the chief."""
    with started(tmp_path, workers=2) as cluster:
        cluster.expect("worker:1", "FROM ")
        cluster.wait_step(200)
        cluster.stop("worker:1")
        assert cluster.wait("worker:1") == EXIT_CODE
        assert not cluster.lines("worker:1", "Traceback")
        cluster.wait_step((cluster.step() or 0) + 50)
        assert not cluster.lines("worker:0", "recovering|lost")
        cluster.start("worker:1")
        cluster.expect("worker:1", "start number 2")
        cluster.expect("worker:1", "FROM ")
        cluster.wait_step((cluster.step() or 0) + 50)


@pytest.mark.chaos
def test_late_end_is_cut_off(tmp_path: Path) -> None:
    """An end that is not done within the grace period is cut off."""
    with started(tmp_path, "--grace_secs=1") as cluster:
        cluster.wait_step(100)
        cluster.freeze("ps:0")  # the last checkpoint has to wait for it
        cluster.stop("worker:0")
        cluster.expect(
            "worker:0", "not done 1 s after SIGTERM: ending now, what was not saved is lost"
        )
        assert cluster.wait("worker:0") == EXIT_CODE
        cluster.thaw("ps:0")


def test_waiting_task_leaves_at_once(tmp_path: Path) -> None:
    """A task that still waits for other tasks leaves at once."""
    with started(tmp_path, start=False) as cluster:
        cluster.start("worker:0")
        cluster.expect("worker:0", "OPENING")
        cluster.stop("worker:0")
        assert cluster.wait("worker:0") == EXIT_CODE
        assert not cluster.lines("worker:0", "Traceback")
