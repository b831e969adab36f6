"""Workers that the ClusterSpec does not name join a training run and leave it: every example is trained once."""

import signal
from typing import Any

import numpy as np
import pytest

from harness.launch.ports import free_ports
from tests.harness.data.elastic_task import run
from tests.kit.processes import Task

pytestmark = pytest.mark.cluster


class Run:
    """ps tasks that know of two workers, and workers that come and go."""

    def __init__(self, ps: int, **options: Any) -> None:
        hosts = [f"127.0.0.1:{port}" for port in free_ports(ps + 6)]
        self._ps = dict(enumerate(hosts[:ps]))
        self._hosts = hosts[ps:]
        self._options = {"batch": 10, "epochs": 1, **options}
        self.tasks: list[Task] = []
        named = {"ps": self._ps, "worker": dict(enumerate(self._hosts[:2]))}
        for index in range(ps):
            self.tasks.append(Task(run, "ps", index, {**self._options, "cluster": named}))
        for task in self.tasks:
            task.hear("SERVING")

    def worker(self, index: int, **options: Any) -> Task:
        """A worker, which knows the ps and itself."""
        spec = {"ps": self._ps, "worker": {index: self._hosts[index]}}
        task = Task(run, "worker", index, {**self._options, "cluster": spec, **options})
        self.tasks.append(task)
        return task

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


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("ps", [1, 2])
def test_two_then_four_then_one(ps: int, sync: bool) -> None:
    with Run(ps, sync=sync, examples=5_000, pause=0.005) as cluster:
        workers = [cluster.worker(0), cluster.worker(1)]
        for worker in workers:
            goes_on(worker)
        workers += [cluster.worker(2), cluster.worker(3)]
        for worker in workers:
            goes_on(worker, 10)
        workers[3].kill()
        goes_on(workers[0], 10)
        for worker in workers[1:3]:
            worker.signal(signal.SIGTERM)
        assert [worker.wait() for worker in workers[1:3]] == [143, 143]
        end = workers[0].hear("END")[1]
        assert workers[0].wait() == 0
        if sync:
            assert end["accepted"] == 500 and np.all(end["counts"] > 0)
        else:
            assert end["step"] == 500 and np.all(end["counts"] == 1)
