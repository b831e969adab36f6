"""Workers that the ClusterSpec does not name join a training run and leave it: every example is trained once."""

import json
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.harness.data.elastic_task import run
from tests.kit.ports import free_ports
from tests.kit.processes import ROOT, Task

pytestmark = pytest.mark.chaos
LEFT = "left"


class Run:
    """ps tasks, and workers that come and go.

    Args:
        ps: how many.
        named: how many workers the ps know of.
        **options: see ``elastic_task.Counting``.
    """

    def __init__(self, ps: int, named: int = 2, **options: Any) -> None:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(ps + options.pop("workers", 8))]
        self.ps = dict(enumerate(hosts[:ps]))
        self.hosts = hosts[ps:]
        self._options = {"batch": 10, "epochs": 1, "sync": False, **options}
        self._named = {"worker": dict(enumerate(self.hosts[:named]))} if named else {}
        self.tasks: list[Task] = []
        self.servers = [self.server(index) for index in self.ps]

    def server(self, index: int) -> Task:
        """A ps, which knows the workers that were there at first."""
        ps = self.ps if self._named else {index: self.ps[index]}
        task = self._started("ps", index, {**self._options, "cluster": {"ps": ps, **self._named}})
        task.hear("SERVING")
        return task

    def worker(self, index: int, **options: Any) -> Task:
        """A worker, which knows the ps and itself."""
        spec = {"ps": self.ps, "worker": {index: options.pop("host", self.hosts[index])}}
        return self._started("worker", index, {**self._options, "cluster": spec, **options})

    def _started(self, *arguments: Any) -> Task:
        task = Task(run, *arguments)
        self.tasks.append(task)
        return task

    def status(self) -> dict[str, Any]:
        """What ``harness.status`` says of each task."""
        command = [
            sys.executable,
            "-m",
            "harness.status",
            f"--target={self.ps[0]}",
            "--json",
            "--interval=0.1",
        ]
        said = subprocess.run(
            [*command, "--timeout_secs=20"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return {task["task"]: task for task in json.loads(said.stdout)["tasks"]}

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for task in self.tasks:
            if error is not None:
                print(task.story())
            task.close()


def goes_on(task: Task, steps: int = 5) -> None:
    """Waits until a worker has done some more steps."""
    goal = len(task.said) + steps
    task.wait_for(lambda said: len(said) > goal)


@pytest.mark.parametrize(
    "sync",
    [pytest.param(False, id="async", marks=pytest.mark.nightly), pytest.param(True, id="sync")],
)
@pytest.mark.parametrize(
    ("ps", "named"),
    [pytest.param(1, 2, id="1ps"), pytest.param(2, 0, id="2ps", marks=pytest.mark.nightly)],
)
def test_workers_come_and_go_exactly(
    ps: int, named: int, sync: bool, tmp_path: pathlib.Path
) -> None:
    """Workers come, leave and are killed, and every example is trained once."""
    with Run(
        ps, named, sync=sync, examples=10_000, pause=0.2, hurry=str(tmp_path / "hurry")
    ) as cluster:
        workers = [cluster.worker(0), cluster.worker(1)]
        for worker in workers:
            goes_on(worker)
        workers += [cluster.worker(2), cluster.worker(3)]
        for worker in workers:
            goes_on(worker)
        workers[3].kill()
        goes_on(workers[0])
        for worker in workers[1:3]:
            worker.signal(signal.SIGTERM)
        assert [worker.wait() for worker in workers[1:3]] == [143, 143]
        workers[2].expect("left the training run, which goes on without this task")
        goes_on(workers[0])
        shown = cluster.status()
        assert shown["/job:worker/task:0"]["up"] and shown["/job:worker/task:2"]["fate"] == LEFT
        assert shown["/job:worker/task:1"]["fate"] == LEFT
        assert shown["/job:worker/task:3"]["fate"].startswith("gone, no sign of life for")
        (tmp_path / "hurry").touch()
        end = workers[0].hear("END")[1]
        assert [task.wait() for task in (workers[0], *cluster.servers)] == [0] * (ps + 1)
        counted = sum(was for worker in workers for _, _, was in worker.said_so_far("STEP"))
        if sync:
            assert end["accepted"] == 1000 and np.all(end["counts"] > 0)
        else:
            assert end["step"] == 1000 and np.all(end["counts"] == 1)
        # Of those three that did not end by themselves, the last step may have been applied, and
        # nobody told.
        assert 1000 - 3 <= counted <= 1000


def test_killed_chief_loses_no_example(tmp_path: pathlib.Path) -> None:
    """A chief that is killed takes no example along."""
    with Run(1, examples=10_000, pause=0.2, hurry=str(tmp_path / "hurry")) as cluster:
        workers = [cluster.worker(index) for index in range(3)]
        for worker in workers:
            goes_on(worker)
        workers[0].kill()
        goes_on(workers[1])
        again = cluster.worker(0)
        (tmp_path / "hurry").touch()
        end = again.hear("END")[1]
        assert end["step"] == 1000 and np.all(end["counts"] == 1)
        assert [task.wait() for task in (again, *workers[1:], *cluster.servers)] == [0] * 4


def test_restore_rewinds_data_with_model(tmp_path: pathlib.Path) -> None:
    """A ps that dies takes model and place in the data back to one instant; only a worker's step
    under way may repeat.
    """
    with Run(
        1,
        examples=10_000,
        pause=0.05,
        hurry=str(tmp_path / "hurry"),
        logdir=str(tmp_path),
        save_secs=0.5,
    ) as cluster:
        workers = [cluster.worker(index) for index in range(3)]
        for worker in workers:
            goes_on(worker, 20)
        workers[0].expect(r"saved .*/[1-9]\d*$")
        goes_on(workers[0], 20)
        cluster.servers[0].kill()
        cluster.servers[0] = cluster.server(0)
        (tmp_path / "hurry").touch()
        end = workers[0].hear("END")[1]
        counts = end["counts"]
        assert np.all(counts >= 1) and np.all(counts <= 2)
        assert end["step"] == 1000 + np.sum(counts == 2) / 10 and np.sum(counts == 2) <= 3 * 10
        assert [task.wait() for task in workers] == [0] * 3


def test_second_task_of_index_is_refused() -> None:
    """A second task with an index in use is refused, and the first continues."""
    with Run(1, examples=10_000, pause=0.2) as cluster:
        workers = [cluster.worker(0), cluster.worker(2)]
        for worker in workers:
            goes_on(worker)
        second = cluster.worker(2, host=cluster.hosts[5])
        assert second.wait() == 2
        assert (
            f"two tasks say that they are /job:worker/task:2: one at {cluster.hosts[2]}"
            in second.output()
        )
        goes_on(workers[1])


def test_other_data_set_is_refused() -> None:
    """A worker whose data set differs from the run's is refused."""
    with Run(1, examples=10_000, pause=0.2) as cluster:
        chief = cluster.worker(0)
        goes_on(chief)
        other = cluster.worker(2, batch=20)
        assert other.wait() == 2
        assert "this run deals out its data with batch_size=10 (here 20)" in other.output()
        goes_on(chief)
