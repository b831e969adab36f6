"""Parts that the tests of the runtime share: clusters in this process and clusters of processes."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import runtime as rt
from harness.launch.ports import free_ports
from runtime.master import tasks
from tests.kit.processes import Program

TARGET = "/job:worker/task:0"
SERVE = (
    "import json, sys, runtime as rt; c = json.loads(sys.argv[1]); rt.Server(c, sys.argv[2], int(sys.argv[3])).join()"
)


def addresses(**jobs: int) -> dict[str, list[str]]:
    """A cluster definition with so many tasks of each job, on free ports."""
    ports = iter(free_ports(sum(jobs.values())))
    return {job: [f"localhost:{next(ports)}" for _ in range(count)] for job, count in jobs.items()}


@contextlib.contextmanager
def servers(*, sockets: bool = False, **jobs: int) -> Iterator[dict[str, rt.Server]]:
    """A cluster in this process, its servers by task name.

    Args:
        sockets: let the other tasks talk to worker 0 (and each other) as if they were in other processes.
        **jobs: how many tasks each job has.
    """
    cluster = addresses(**jobs)
    with contextlib.ExitStack() as stack:
        made = {
            f"/job:{job}/task:{i}": stack.enter_context(rt.Server(cluster, job, i))
            for job, hosts in cluster.items()
            for i in range(len(hosts))
        }
        if sockets:
            for name, server in made.items():
                if name != TARGET:
                    tasks.withdraw(server.address, server)
        yield made


def serve(cluster: Mapping[str, Sequence[str]], job: str, index: int, **options: Any) -> Program:
    """One server process of a cluster; ``options`` are those of ``Program``."""
    return Program("python", "-c", SERVE, json.dumps(cluster), job, str(index), **options)


@contextlib.contextmanager
def processes(cluster: Mapping[str, Sequence[str]], *names: tuple[str, int]) -> Iterator[list[Program]]:
    """Server processes for some tasks of a cluster; all gone at the end, by SIGTERM."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(serve(cluster, job, index)) for job, index in names]
        try:
            yield made
        finally:
            for task in made:
                task.thaw()
                task.stop()


def array(*values: Any, dtype: Any = np.int32) -> np.ndarray:
    """A 1-D array."""
    return np.array(values, dtype)


@contextlib.contextmanager
def target_of_kind(kind: str) -> Iterator[str]:
    """A session target: nothing but this process, a server here with a ps over sockets, or a master elsewhere."""
    if kind == "private":
        yield ""
        return
    with servers(sockets=True, ps=1, worker=1) as made:
        server = made[TARGET]
        if kind == "remote master":
            tasks.withdraw(server.address, server)
        yield server.target


KINDS = ("private", "local master", "remote master")
