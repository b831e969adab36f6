"""Clusters of real processes for the recovery tests, driven by what they say, killed and frozen at will."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from tests.harness import cluster_program
from tests.kit.ports import free_ports
from tests.kit.processes import Task
from tests.kit.waits import until


class Cluster:
    """A cluster on this machine; its tasks are started one by one, as often as wanted."""

    def __init__(self, ps: int, workers: int, **options: Any) -> None:
        ports = iter(free_ports(ps + workers))
        self.spec = {
            "ps": [f"127.0.0.1:{next(ports)}" for _ in range(ps)],
            "worker": [f"127.0.0.1:{next(ports)}" for _ in range(workers)],
        }
        self.options = options
        self._tasks: list[Task] = []

    def start(self, job: str, index: int, **options: Any) -> Task:
        """Starts a task."""
        given = {**self.options, **options}
        spec, env = given.pop("cluster", self.spec), given.pop("env", None)
        task = Task(cluster_program.run, job, index, spec, given, env=env)
        self._tasks.append(task)
        return task

    def ps(self, index: int) -> Task:
        """Starts a ps and waits until it serves."""
        task = self.start("ps", index)
        task.hear("SERVING")
        return task

    def worker(self, index: int, **options: Any) -> Task:
        """Starts a worker and waits until its session is ready."""
        task = self.start("worker", index, **options)
        task.hear("READY")
        return task

    def close(self) -> None:
        """Ends all tasks."""
        for task in self._tasks:
            task.close()


@contextlib.contextmanager
def cluster(ps: int, workers: int, **options: Any) -> Iterator[Cluster]:
    """A cluster for one test."""
    made = Cluster(ps, workers, **options)
    try:
        yield made
    finally:
        made.close()


def wait_saved(logdir: Path, step: int) -> None:
    """Waits until a checkpoint that is written in the background is there."""
    # it gets this name when it is whole
    until((logdir / "model.ckpt" / str(step)).is_dir, f"step {step} is saved")


def consistent(values: list[Any]) -> int:
    """The step that the variables agree on; fails when they do not."""
    step, first, second = values
    assert set(first) == set(second) == {float(step)}, values
    return int(step)


def pause(*workers: Task) -> int:
    """Pauses workers that train; returns the steps that they have done."""
    for worker in workers:
        worker.tell("pause")
    return sum(worker.hear("TRAINED")[1] for worker in workers)


def check_freeze(ps: Task, index: int, *workers: Task) -> None:
    """Freezes a ps under workers that train, and checks that no step is lost or doubled."""
    for worker in workers:
        worker.tell("train")
        worker.hear("STEP")
    ps.freeze()
    for worker in workers:
        worker.hear("LOG", f"No answer from /job:ps/task:{index}")
    for worker in workers:
        worker.tell("pause")
    ps.thaw()
    done = sum(worker.hear("TRAINED")[1] for worker in workers)
    assert not any(worker.said_so_far("LOG", "recovering") for worker in workers)
    assert consistent(workers[0].request("values")) == done


def saved_step(logdir: Path) -> int:
    """The step of the newest checkpoint."""
    path = harness.latest_checkpoint(str(logdir))
    assert path is not None
    return int(Path(path).name)
