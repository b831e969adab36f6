"""A table as safe as a variable: a process dies, and every row equals the global step all the same."""

from pathlib import Path

import numpy as np
import pytest

from tests.harness import cluster_kit
from tests.harness.checkpoints.checkpoint_kit import plain_orbax
from tests.harness.cluster_kit import consistent

pytestmark = pytest.mark.chaos


@pytest.mark.cluster
def test_ps_death_restores_all_rows(tmp_path: Path) -> None:
    """After the death of a ps all rows and the step are those of one checkpoint."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path), table=True) as c:
        c.ps(0)
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        assert other.request("steps", 7) == 17
        second.kill()
        c.ps(1)
        assert chief.request("steps", 5) == 15
        assert other.request("steps", 5) == 20
        assert consistent(chief.request("values")) == 20
        step, arrays = plain_orbax(tmp_path / "model.ckpt")
        assert step == 10 and set(np.unique(arrays["counts"])) == {0, 10}


@pytest.mark.cluster
def test_synchronous_rows_survive_ps(tmp_path: Path) -> None:
    """After the death of a ps two synchronous workers go on from one step of rows and variables."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path), table=True, together=2) as c:
        c.ps(0)
        second = c.ps(1)
        workers = c.worker(0), c.worker(1)

        def train(steps: int) -> list[int]:
            for worker in workers:
                worker.tell("steps", steps)
            return [worker.hear("STEPS")[1] for worker in workers]

        assert train(10) == [10, 10]
        workers[0].request("save", answer="SAVED")
        assert train(3) == [13, 13]
        assert consistent(workers[1].request("values")) == 13
        second.kill()
        c.ps(1)
        assert train(5) == [15, 15]
        assert consistent(workers[0].request("values")) == 15


@pytest.mark.parametrize("dies", [0, 1])
def test_backups_lose_no_row(dies: int) -> None:
    """A ps with a synchronous backup that is killed under training loses and doubles no row."""
    backup = {"ps_backups": 1, "ps_backups_lag": 0}
    with cluster_kit.cluster(2, 2, backup=backup, table=True) as c:
        ps, workers = [c.ps(0), c.ps(1)], [c.worker(0), c.worker(1)]
        for worker in workers:
            worker.tell("train")
        for _ in range(3):
            for worker in workers:
                worker.hear("STEP")
            ps[dies].kill()
            ps[dies] = c.ps(dies)
            assert ps[dies].said_so_far("LOG", "goes on from its backup at .*")
        done = cluster_kit.pause(*workers)
        assert not any(worker.said_so_far("LOG", "recover") for worker in workers)
        assert consistent(workers[0].request("values")) == done


def test_worker_death_counts_once() -> None:
    """A worker that dies in a step has sent a ps rows, dense update and count, or nothing of it."""
    with cluster_kit.cluster(1, 2, table=True) as c:
        c.ps(0)
        chief, other = c.worker(0), c.worker(1)
        other.tell("train")
        other.hear("STEP")
        other.kill()
        done = chief.request("steps", 10)
        assert consistent(chief.request("values")) in (done, done + 1)


def test_save_is_of_one_instant(tmp_path: Path) -> None:
    """A checkpoint that is taken while two workers train has rows and step of one instant."""
    with cluster_kit.cluster(2, 3, logdir=str(tmp_path), table=True) as c:
        c.ps(0)
        c.ps(1)
        chief, *others = (c.worker(index) for index in range(3))
        for worker in others:
            worker.tell("train")
        for _ in range(2):
            path = Path(chief.request("save", answer="SAVED"))
            step, arrays = plain_orbax(path.parent, int(path.name))
            assert set(np.unique(arrays["counts"])) == {0, step}
        done = cluster_kit.pause(*others)
        assert consistent(chief.request("values")) == done
