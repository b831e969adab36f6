"""Kills, freezes and cuts of every role, in clusters of real processes with a network between them."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from tests.faults import PRELOAD, FaultPlan, LocalCluster, no_leaks
from tests.kit.waits import until

pytestmark = pytest.mark.chaos

COMMAND = ["python", "-m", "tests.harness.training.start.fault_program"]


@contextlib.contextmanager
def started(
    *flags: str, ps: int = 2, workers: int = 2, links: bool = False
) -> Iterator[LocalCluster]:
    env = {"JAX_PLATFORMS": "cpu"}
    with (
        no_leaks(),
        LocalCluster(
            [*COMMAND, *flags], ps=ps, workers=workers, links=links, preload=PRELOAD, env=env
        ) as cluster,
    ):
        yield cluster


def wait_checkpoint(logdir: Path) -> None:
    """Waits until there is something to restore."""
    until(lambda: harness.latest_checkpoint(str(logdir)), "a checkpoint is there")


def sums(cluster: LocalCluster) -> list[float]:
    """Returns the additions of the workers' last lives, the global step, and the least and greatest sum of each ps."""
    return [float(number) for number in cluster.expect("worker:0", r"SUMS (.*)")[1].split()]


def ends_exactly(cluster: LocalCluster, end: Path) -> bool:
    """Ends the workers; returns True if each addition has counted once."""
    end.touch()
    done, *rest = sums(cluster)
    assert {cluster.wait(task) for task in cluster.tasks if task.startswith("worker")} == {0}
    return rest == [done] * 5


@pytest.mark.parametrize("reset", [False, True], ids=["drop", "reset"])
def test_cuts_keep_additions_exact(reset: bool, tmp_path: Path) -> None:
    """Cut connections lose and double no addition."""
    with started(f"--until={tmp_path}/end", links=True) as cluster:
        plan = FaultPlan(seed=1)
        for number in range(6):
            at = (number + 1) * 80
            plan = plan.cut(
                f"worker:{number % 2}", f"ps:{number // 2 % 2}", at_step=at, secs=0.3, reset=reset
            )
        injected = cluster.run(plan)
        assert len(injected) == 6 and not any(fault.skipped for fault in injected)
        assert ends_exactly(cluster, tmp_path / "end")
        assert not cluster.lines("worker:0", "recovering|lost contact")


def test_long_cut_is_noticed(tmp_path: Path) -> None:
    """A long cut is logged at its begin and end, and no addition is lost."""
    with started(f"--until={tmp_path}/end", links=True, workers=1) as cluster:
        cluster.run(FaultPlan(seed=2).cut("worker:0", "ps:1", at_step=100, secs=4))
        cluster.expect("worker:0", r"No answer from /job:ps/task:1 at \S+:\d+ for")
        cluster.expect("worker:0", r"/job:ps/task:1 at \S+:\d+ answers again")
        assert ends_exactly(cluster, tmp_path / "end")


def test_cuts_last_until_healed(tmp_path: Path) -> None:
    """Cuts without a time last until they are healed, and no addition is lost."""
    with started(f"--until={tmp_path}/end", links=True) as cluster:
        plan = (
            FaultPlan(seed=8)
            .cut("worker:0", "ps:1", at_step=100)
            .cut("worker:1", "ps:1", after_secs=0.1)
        )
        told: list[str] = []
        injected = cluster.run(plan, say=told.append)
        assert told[0] == "fault plan: seed 8" and told[-1].endswith(
            "s: cut worker:1 from ps:1 0.1 s later"
        )
        assert not any(fault.skipped for fault in injected)
        for worker in ("worker:0", "worker:1"):
            cluster.heal(worker, "ps:1")
        assert ends_exactly(cluster, tmp_path / "end")


def test_freezes_keep_additions_exact(tmp_path: Path) -> None:
    """Frozen tasks lose and double no addition."""
    with started(f"--until={tmp_path}/end") as cluster:
        plan = (
            FaultPlan(seed=3)
            .freeze("ps", 1, at_step=100, secs=1)
            .freeze("worker", 1, at_step=300, secs=1)
        )
        cluster.run(plan.freeze("ps", 0, at_step=500, secs=3))
        assert ends_exactly(cluster, tmp_path / "end")


def finish(cluster: LocalCluster, end: Path) -> tuple[float, list[float]]:
    """Trains on a bit, ends the workers, and gives the global step and what is on the ps tasks."""
    cluster.wait_step((cluster.step() or 0) + 100)
    end.touch()
    _, step, *ends = sums(cluster)
    assert [cluster.wait("worker:0"), cluster.wait("worker:1")] == [0, 0]
    return step, ends


def test_killed_worker_leaves_half_step(tmp_path: Path) -> None:
    """A killed worker leaves one half step at most, and each stage is atomic."""
    with started(f"--until={tmp_path}/end") as cluster:
        cluster.run(FaultPlan(seed=4).kill("worker", 1, at_step=200, restart_secs=0))
        cluster.expect("worker:1", "start number 2")
        cluster.expect("worker:1", "READY")
        step, ends = finish(cluster, tmp_path / "end")
        assert ends[0] == ends[1] and ends[2] == ends[3]  # a stage is atomic
        # a half step of the killed one, and one of the other's now
        assert max(abs(end - step) for end in ends) <= 2
        assert not cluster.lines("worker:0", "recovering")


def test_killed_chief_loses_no_step(tmp_path: Path) -> None:
    """A killed chief loses no step."""
    with started(f"--until={tmp_path}/end", f"--logdir={tmp_path}/run") as cluster:
        cluster.run(FaultPlan(seed=5).kill("worker", 0, at_step=200, restart_secs=0))
        cluster.expect("worker:0", "keep the live model")
        step, _ = finish(cluster, tmp_path / "end")
        assert step >= 300
        assert not cluster.lines("worker:1", "recovering|are lost")


@pytest.mark.parametrize("ps", [0, 1])
def test_killed_ps_returns_at_one_step(ps: int, tmp_path: Path) -> None:
    """After the restart of a killed ps all ps hold one step."""
    with started(
        f"--until={tmp_path}/end", f"--logdir={tmp_path}/run", "--save_secs=0.3"
    ) as cluster:
        wait_checkpoint(tmp_path / "run")
        cluster.run(FaultPlan(seed=6).kill("ps", ps, at_step=500, restart_secs=0))
        cluster.expect("worker:0", r"restored .*/\d+: (training goes on|back) from step \d+")
        for worker in ("worker:0", "worker:1"):
            cluster.expect(worker, r"recovered within .* at step")
        step, ends = finish(cluster, tmp_path / "end")
        assert max(abs(end - step) for end in ends) <= 1  # what the other one does now


def test_killed_ps_and_chief_return(tmp_path: Path) -> None:
    """After the restart of a killed ps and chief all ps hold one step."""
    with started(
        f"--until={tmp_path}/end", f"--logdir={tmp_path}/run", "--save_secs=0.3"
    ) as cluster:
        cluster.run(
            FaultPlan(seed=7)
            .kill("ps", 1, at_step=500, restart_secs=0)
            .kill("worker", 0, restart_secs=0.2)
        )
        cluster.expect("worker:0", "start number 2")
        cluster.expect("worker:0", "READY")
        cluster.expect("worker:1", r"recovered within .* at step")
        step, ends = finish(cluster, tmp_path / "end")
        assert max(abs(end - step) for end in ends) <= 2


def test_cluster_output_tells_the_story() -> None:
    """A LocalCluster shows the output and lives of its tasks and names mistakes."""
    command = [
        "python",
        "-c",
        "import sys, time; print('hello', *sys.argv[1:], flush=True); time.sleep(60)",
    ]
    with no_leaks(), LocalCluster(command, ps=1, workers=1) as cluster:
        found = cluster.expect(
            "worker:0", r"hello .*--worker_hosts=(\S+) --job_name=worker --task_index=0"
        )
        assert found[1] == cluster.addresses["worker:0"]
        cluster.kill("worker:0")
        assert cluster.wait("worker:0") == -9
        with pytest.raises(RuntimeError, match="has ended without a line like 'more'"):
            cluster.expect("worker:0", "more")
        with pytest.raises(TimeoutError, match="wrote no line like 'more' within 0.05 s"):
            cluster.expect("ps:0", "more", 0.05)
        with pytest.raises(RuntimeError, match="ps:0 runs already"):
            cluster.start("ps:0")
        cluster.start("worker:0")
        cluster.expect("worker:0", "hello")
        assert [life.code for life in cluster.lives("worker:0")] == [-9, None]
        with pytest.raises(ValueError, match="no task 'worker:1'"):
            cluster.running("worker:1")
        with pytest.raises(RuntimeError, match="links=True"):
            cluster.cut("worker:0", "ps:0")
        assert not re.search(
            "worker", " ".join(line.text for line in cluster.lines("ps:0", "job_name=worker"))
        )
