"""A cluster whose tasks have certificates of their roles, over TCP alone: trains, saves, loses a ps and goes on."""

from pathlib import Path

import pytest

import runtime as rt
from harness.certs import CA
from harness.monitoring.sampler import ClusterSampler
from tests.harness import cluster_kit
from tests.harness.cluster_kit import Cluster, consistent
from tests.kit import certificates
from tests.kit.processes import Task

pytestmark = pytest.mark.chaos


class Roles:
    """Certificates of roles, by one CA."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.authority = directory, CA.make()

    def env(self, role: str, task: str = "") -> dict[str, str]:
        """The environment of a process that has a role."""
        said = f"bellwether://run/{role}{task and '/'}{task}"
        directory = certificates.make(
            self.directory / f"{role}{task.replace('/', '')}", self.authority, role=said
        )
        return {"BELLWETHER_SECURITY": str(directory), "BELLWETHER_FAST_PATH": "0"}


@pytest.fixture
def roles(tmp_path: Path) -> Roles:
    return Roles(tmp_path)


def ps_of(c: Cluster, roles: Roles, index: int) -> Task:
    task = c.start("ps", index, env=roles.env("ps", f"ps/{index}"))
    task.hear("SERVING")
    return task


def worker_of(c: Cluster, roles: Roles, index: int) -> Task:
    return c.worker(index, env=roles.env("worker" if index else "chief", f"worker/{index}"))


def test_every_role_can_do_its_part(tmp_path: Path, roles: Roles) -> None:
    """Tasks with certificates of their roles train, save, lose a ps and continue."""
    backup = {"ps_backups": 1, "ps_backups_lag": 0}
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path / "run"), backup=backup) as c:
        ps = [ps_of(c, roles, 0), ps_of(c, roles, 1)]
        chief, other = worker_of(c, roles, 0), worker_of(c, roles, 1)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        assert other.request("steps", 7) == 17
        for worker in (chief, other):
            worker.tell("train")
            worker.hear("STEP")
        ps[1].kill()
        ps[1] = ps_of(c, roles, 1)  # it shows that it is ps 1, and so is given the backup
        assert ps[1].said_so_far("LOG", "goes on from its backup")
        for worker in (chief, other):
            worker.hear("STEP")
            worker.tell("pause")
        done = chief.hear("TRAINED")[1] + other.hear("TRAINED")[1]
        assert consistent(chief.request("values")) == 17 + done
        observer = rt.Security.from_text(roles.env("observer")["BELLWETHER_SECURITY"])
        other.tell("end")
        assert other.wait() == 0
        spec = rt.ClusterSpec(c.spec)
        found = ClusterSampler(spec, observer, 30.0).sample()
        assert [(state.task, state.problem, state.fate) for state in found] == [
            ("/job:ps/task:0", "", ""),
            ("/job:ps/task:1", "", ""),
            ("/job:worker/task:0", "", ""),
            ("/job:worker/task:1", "", "done"),  # the run records tell
        ]
        chief.tell("end")
        assert [t.wait() for t in (chief, *ps)] == [0, 0, 0]


def test_worker_role_cannot_lead(tmp_path: Path, roles: Roles) -> None:
    """A client with the role worker cannot become chief."""
    with cluster_kit.cluster(1, 1, logdir=str(tmp_path / "run")) as c:
        ps_of(c, roles, 0)
        task = c.start("worker", 0, env=roles.env("worker", "worker/0"))
        said = str(task.hear("ERROR")[1])
        assert "'run.claim' is for the role chief, and this client has the role worker" in said
