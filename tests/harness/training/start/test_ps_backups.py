"""A ps whose variables have a backup dies by SIGKILL: it goes on as itself, and no checkpoint is read."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from runtime.proto import services_pb2, services_pb2_grpc
from runtime.proto.run_record_pb2 import RunOrder
from runtime.rpc import rpc
from tests.harness import cluster_kit
from tests.harness.cluster_kit import Cluster, consistent
from tests.kit.ports import free_ports
from tests.kit.processes import Task

pytestmark = pytest.mark.chaos

LAG = 20
SYNC: dict[str, Any] = {"ps_backups": 1, "ps_backups_lag": 0}
ASYNC: dict[str, Any] = {"ps_backups": 1, "ps_backups_lag": LAG}


def tasks_of(c: Cluster) -> tuple[list[Task], list[Task]]:
    """Two ps and two workers."""
    return [c.ps(0), c.ps(1)], [c.worker(0), c.worker(1)]


def replaced(c: Cluster, ps: list[Task], index: int) -> None:
    """Kills a ps, starts it again, and waits until both have a backup again."""
    ps[index].kill()
    neighbour = ps[1 - index]
    # it looks every second, also when there is nothing to send
    neighbour.hear("LOG", "has no backup until")
    ps[index] = c.ps(index)
    neighbour.hear("LOG", "has a backup at .* from now on")


@pytest.mark.parametrize("dies", [0, 1])
def test_synchronous_backups_are_exact(dies: int) -> None:
    """A ps with a synchronous backup that is killed loses and doubles no update."""
    with cluster_kit.cluster(2, 2, backup=SYNC) as c:
        ps, workers = tasks_of(c)
        for worker in workers:
            worker.tell("train")
        for _ in range(3):
            for worker in workers:
                worker.hear("STEP")
            ps[dies].kill()  # both workers are in the middle of something
            ps[dies] = c.ps(dies)
            assert ps[dies].said_so_far(
                "LOG", "goes on from its backup at .* no update that was answered is lost"
            )
        for worker in workers:
            worker.hear("LOG", f"/job:ps/task:{dies} was restarted and goes on from its backup")
            worker.hear("STEP")
        done = cluster_kit.pause(*workers)
        assert not any(worker.said_so_far("LOG", "recover") for worker in workers)
        assert consistent(workers[0].request("values")) == done
        for worker in workers:
            worker.tell("end")
        assert [t.wait() for t in (*workers, *ps)] == [0, 0, 0, 0]


def test_asynchronous_backups_lose_little() -> None:
    """A ps with an asynchronous backup loses no more updates than its log says."""
    with cluster_kit.cluster(2, 2, backup=ASYNC) as c:
        ps, workers = tasks_of(c)
        for worker in workers:
            worker.tell("train")
        kills = 3
        for _ in range(kills):
            for worker in workers:
                worker.hear("STEP")
            ps[0].kill()  # it holds the global step
            ps[0] = c.ps(0)
            assert ps[0].said_so_far("LOG", f"at most {LAG} updates after that are lost")
        for worker in workers:
            worker.hear(
                "LOG", f"/job:ps/task:0 was restarted .* at most {LAG} of its last updates are lost"
            )
            worker.hear("STEP")
            worker.tell("pause")
        done = sum(worker.hear("TRAINED")[1] for worker in workers)
        assert not any(worker.said_so_far("LOG", "recover") for worker in workers)
        step, first, second = workers[0].request("values")
        assert set(first) == {float(done)}  # on the ps that lives
        assert len(set(second)) == 1
        for value in (step, second[0]):
            assert done - kills * LAG <= value <= done


def test_either_ps_may_die_alternately(tmp_path: Path) -> None:
    """Either ps may die once both have a backup again, and a chief may die then too."""
    with cluster_kit.cluster(2, 2, backup=SYNC, logdir=str(tmp_path)) as c:
        ps, workers = tasks_of(c)
        assert workers[0].request("steps", 5) == 5
        replaced(c, ps, 1)
        assert workers[1].request("steps", 5) == 10
        replaced(c, ps, 0)
        assert workers[0].request("steps", 5) == 15
        replaced(c, ps, 1)
        assert consistent(workers[1].request("values")) == 15
        assert not (tmp_path / "model.ckpt").exists()
        workers[0].request("save", answer="SAVED")  # it still coordinates the ps
        workers[0].kill()
        again = c.worker(0)
        assert again.said_so_far("LOG", "keep the live model")
        assert again.request("steps", 5) == 20


def test_checkpoints_continue_with_backups(tmp_path: Path) -> None:
    """Checkpoints continue over the deaths of a ps with a backup."""
    with cluster_kit.cluster(2, 1, backup=SYNC, logdir=str(tmp_path), save_secs=0.02) as c:
        ps = [c.ps(0), c.ps(1)]
        chief = c.worker(0)
        chief.tell("train")
        for _ in range(3):
            chief.hear("STEP")
            ps[1].kill()
            ps[1] = c.ps(1)
            chief.hear("LOG", "was restarted and goes on from its backup")
            chief.hear("STEP")
        done = cluster_kit.pause(chief)
        assert consistent(chief.request("values")) == done
        assert chief.request("save", answer="SAVED").endswith(f"/{done}")
        assert not chief.said_so_far("LOG", "restored")
        chief.tell("end")
        assert chief.wait() == 0


def test_two_deaths_restore_the_checkpoint(tmp_path: Path) -> None:
    """Two ps that die together come back from the checkpoint."""
    with cluster_kit.cluster(2, 1, backup=SYNC, logdir=str(tmp_path)) as c:
        ps = [c.ps(0), c.ps(1)]
        chief = c.worker(0)
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        chief.request("steps", 3)
        for task in ps:
            task.kill()
        chief.tell("steps", 5)
        ps = [c.ps(0), c.ps(1)]
        assert all(task.said_so_far("LOG", "starts empty, it has no backup") for task in ps)
        chief.hear("LOG", "restore the newest checkpoint: .*/job:ps/task:1 has no backup .*/10")
        assert chief.hear("STEPS")[1] == 15
        assert consistent(chief.request("values")) == 15


def test_two_deaths_without_checkpoint_warn() -> None:
    """Two ps that die together without a checkpoint give a loud warning."""
    with cluster_kit.cluster(2, 1, backup=SYNC) as c:
        ps = [c.ps(0), c.ps(1)]
        chief = c.worker(0)
        chief.request("steps", 3)
        for task in ps:
            task.kill()
        chief.tell("steps", 5)
        for i in range(2):
            c.ps(i)
        chief.hear("LOG", "has no backup .* ALL STEPS SO FAR ARE LOST")
        assert chief.hear("STEPS")[1] == 5


def test_ps_death_in_load_reloads() -> None:
    """A ps that dies while its variables are given values is given the values again."""
    with cluster_kit.cluster(2, 1, backup=SYNC, init_fn=True) as c:
        c.ps(0)
        second = c.ps(1)
        chief = c.start("worker", 0)
        chief.hear("INIT_FN")  # the variables have values by now, and nobody may use them yet
        second.kill()
        again = c.ps(1)
        # "it has none" where the order to load came before the first backup was sent
        reason = "(its variables are being given values|it has none)"
        assert again.said_so_far("LOG", f"starts empty, it has no backup: .* {reason}"), (
            again.story()
        )
        chief.tell("go")
        chief.hear("INIT_FN")
        chief.tell("go")
        chief.hear("READY")
        assert chief.request("steps", 3) == 3
        assert consistent(chief.request("values")) == 3


def test_backup_survives_all_workers() -> None:
    """A ps continues from its backup although all workers died with it."""
    with cluster_kit.cluster(2, 2, backup=SYNC) as c:
        ps, workers = tasks_of(c)
        assert workers[0].request("steps", 7) == 7
        for task in (*workers, ps[0]):
            task.kill()
        c.ps(0)
        chief = c.worker(0)
        assert chief.said_so_far("LOG", "keep the live model")
        assert chief.request("steps", 3) == 10
        assert consistent(chief.request("values")) == 10


def test_replaced_frozen_ps_is_refused() -> None:
    """A frozen ps that was replaced answers no order as carried out."""
    with cluster_kit.cluster(2, 1, backup=SYNC) as c:
        c.ps(0)
        second = c.ps(1)
        chief = c.worker(0)
        assert chief.request("steps", 3) == 3
        address = c.spec["ps"][1]
        channel = rpc.open_channel(address)
        stub = services_pb2_grpc.WorkerServiceStub(channel)
        incarnation = stub.Status(services_pb2.StatusRequest(), timeout=60).incarnation
        second.freeze()
        # As a scheduler does that lost sight of a machine: the address leads to another process
        # now.
        moved = [*c.spec["ps"]]
        moved[1] = f"127.0.0.1:{free_ports(1)[0]}"
        again = c.start("ps", 1, cluster={**c.spec, "ps": moved})
        again.hear("SERVING")
        assert again.said_so_far("LOG", "goes on from its backup")
        join = RunOrder(incarnation=incarnation, sender="/job:worker/task:9", join=RunOrder.Join())
        orders = [stub.Run.future(join, timeout=60) for _ in range(8)]
        second.thaw()
        # none of them is in the backup, so none is told that it was carried out
        for order in orders:
            assert order.code() is grpc.StatusCode.ABORTED, order
        channel.close()
        second.hear("LOG", "another process has taken its place")
