"""A ps that dies while training ends: the lost steps are an error of the chief, and trained when it starts again."""

from pathlib import Path

import pytest

from tests.harness import cluster_kit
from tests.harness.cluster_kit import Cluster, consistent
from tests.kit.processes import Task

pytestmark = pytest.mark.chaos


def saved_steps(logdir: Path) -> set[int]:
    return {int(path.name) for path in (logdir / "model.ckpt").iterdir() if path.name.isdigit()}


def save(chief: Task) -> None:
    chief.tell("save")
    chief.hear("SAVING")
    chief.tell("go")
    chief.hear("SAVED")


def trained_to_15_saved_at_10(c: Cluster) -> tuple[Task, Task]:
    """The chief, and the second of two ps."""
    c.ps(0)
    second = c.ps(1)
    chief = c.worker(0)
    assert chief.request("steps", 10) == 10
    save(chief)
    assert chief.request("steps", 5) == 15
    return chief, second


def test_ps_killed_at_last_save(
    tmp_path: Path,
) -> None:
    """A ps that is killed at the last save is an error of the chief, and the next chief trains the
    lost steps.
    """
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path), announce_saves=True) as c:
        chief, second = trained_to_15_saved_at_10(c)
        chief.tell("end")
        chief.hear("SAVING")
        second.kill()
        c.ps(1)
        chief.tell("go")
        _, told = chief.hear("ERROR")
        assert "/job:ps/task:1" in told
        assert "back from step 15 to step 10, 5 steps are lost; start this task again" in told
        assert chief.wait() == 1
        assert saved_steps(tmp_path) == {10}
        again = c.start("worker", 0)
        assert again.hear("READY")[1] == 10
        # nobody was told that training is over
        assert again.said_so_far("LOG", "keep the live model")
        assert again.request("steps", 5) == 15
        assert consistent(again.request("values")) == 15
        again.tell("end")
        again.hear("SAVING")
        again.tell("go")
        assert again.wait() == 0
        assert saved_steps(tmp_path) == {10, 15}


def test_ps_absent_at_last_save(
    tmp_path: Path,
) -> None:
    """A ps that stays away at the last save is an error that names the lost steps."""
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path), announce_saves=True, grace_secs=1) as c:
        chief, second = trained_to_15_saved_at_10(c)
        chief.tell("end")
        chief.hear("SAVING")
        second.kill()
        chief.tell("go")
        _, told = chief.hear("ERROR")
        assert "/job:ps/task:1" in told
        newest = f"{tmp_path}/model.ckpt/10"
        assert (
            f"step 15 is not saved, the newest checkpoint is {newest}: steps 11 to 15 are lost"
            in told
        )
        assert chief.wait() == 1


def test_ps_killed_before_the_end(tmp_path: Path) -> None:
    """A ps that is killed after the last step makes the chief end with the lost steps."""
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path), announce_saves=True) as c:
        chief, second = trained_to_15_saved_at_10(c)
        second.kill()
        c.ps(1)
        # such as a last test; the loop that trains is over
        assert consistent(chief.request("values")) == 10
        assert chief.said_so_far("LOG", "5 steps are lost .step 15 was the last seen here")
        chief.tell("end")
        assert "back from step 15 to step 10" in chief.hear("ERROR")[1]
        assert chief.wait() == 1


@pytest.mark.parametrize("monitored", [False, True], ids=["supervisor", "monitored"])
@pytest.mark.parametrize("trained_again", [False, True], ids=["lost", "trained again"])
def test_ps_killed_while_chief_waits(monitored: bool, trained_again: bool, tmp_path: Path) -> None:
    """Steps that are lost while the chief waits are an error, unless other workers train them
    again.
    """
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path), monitored=monitored, save_steps=10) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        if monitored:
            # else one that is due while this one runs is skipped
            cluster_kit.wait_saved(tmp_path, 0)
        assert chief.request("steps", 10) == 10
        if monitored:
            cluster_kit.wait_saved(tmp_path, 10)
        else:
            chief.request("save", answer="SAVED")
        assert chief.request("steps", 5) == 15
        chief.tell("end")
        chief.hear("LOG", "waiting for /job:worker/task:1")
        second.kill()
        c.ps(1)
        chief.hear("LOG", "recovered within")
        if trained_again:
            assert other.request("steps", 7) == 17
        other.tell("end")
        assert other.wait() == 0
        if trained_again:
            assert chief.wait() == 0
            assert 17 in saved_steps(tmp_path)
        else:
            told = chief.hear("ERROR")[1]
            assert (
                "/job:ps/task:1" in told
                and "back from step 15 to step 10, 5 steps are lost" in told
            )
            assert chief.wait() == 1


def test_retrained_steps_are_no_error(tmp_path: Path) -> None:
    """Steps that were lost earlier and trained again are no error."""
    with cluster_kit.cluster(2, 1, logdir=str(tmp_path), announce_saves=True) as c:
        chief, second = trained_to_15_saved_at_10(c)
        second.kill()
        c.ps(1)
        assert chief.request("steps", 2) == 12  # the program goes on, and ends where it likes
        chief.tell("end")
        chief.hear("SAVING")
        chief.tell("go")
        assert chief.wait() == 0
        assert saved_steps(tmp_path) == {10, 12}
