"""How many processor cores the XLA of one task takes where several tasks share a host.

XLA makes a thread for every core of the host in every process. Where tasks share a host, their threads stand in each
other's way: 1 ps and 4 workers on 2 cores do 25 % more steps a second with one thread each.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from runtime.cluster import ClusterSpec, TaskId, split_address

_VARIABLES = ("PJRT_NPROC", "NPROC")
"""What XLA reads when it makes its threads, first one first."""


def share(cluster: ClusterSpec, own: TaskId, cores: int) -> int:
    """Cores for one task's XLA.

    Workers divide the cores among them: a ps mostly waits for them. A ps takes what it would get if all tasks of the
    host took the same: an update is a short program, which more threads make slower. With one thread, XLA computes one
    large update after the other, whoever they come from; set PJRT_NPROC to let them overlap.

    Args:
        cluster: all tasks with their addresses.
        own: the task.
        cores: of the host.
    """
    here = _host(cluster.task_address(own.job, own.index))
    beside = [task for task, address in cluster.tasks().items() if _host(address) == here]
    if own.job != "ps":
        beside = [task for task in beside if task.job != "ps"]
    return max(1, cores // len(beside))


@contextlib.contextmanager
def limited(cluster: ClusterSpec, own: TaskId) -> Iterator[None]:
    """While JAX finds its devices: limits its threads to the task's share, unless the user has said how many.

    Does nothing in a process whose devices were found before.
    """
    cores = len(os.sched_getaffinity(0))
    threads = share(cluster, own, cores)
    if threads == cores or any(name in os.environ for name in _VARIABLES):
        yield
        return
    os.environ[_VARIABLES[0]] = str(threads)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLES[0], None)


def _host(address: str) -> str:
    host, _ = split_address(address)
    return "localhost" if host in ("localhost", "::1") or host.startswith("127.") else host
