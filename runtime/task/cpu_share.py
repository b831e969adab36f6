"""The processor cores of one task's XLA where several tasks share a host.

XLA makes a thread for every core of the host in every process. Where tasks share a host, their threads stand in each
other's way: 1 ps and 4 workers on 2 cores do 25 % more steps a second with one thread each.

Where XLA has one thread, it computes on the thread that asks (JAX's own `jax_cpu_enable_async_dispatch` turned off). To
hand a program to another thread and to wait for it is two context switches in every stage, on a machine whose cores are
taken, and what the other thread reads lies in the caches of the core that the first one ran on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

from runtime.cluster.spec import ClusterSpec, TaskId, split_address

_VARIABLES = ("PJRT_NPROC", "NPROC")
"""What XLA reads when it makes its threads, first one first."""


def share(cluster: ClusterSpec, own: TaskId, cores: int, *, of_job: bool = False) -> int:
    """Returns the number of cores for one task's XLA, or for its background work.

    Workers divide the cores among them: a ps mostly waits for them. A ps takes what it would get if all tasks of the
    host took the same: an update is a short program, which more threads make slower. With one thread, each
    connection's thread computes its updates; those of disjoint variables overlap.

    The tasks of a job write their parts of a checkpoint at the same time. Each must rest the longer the more tasks of
    its job are on its host.

    Args:
        cluster: all tasks with their addresses.
        own: the task.
        cores: of the host.
        of_job: True for background work, for which only the tasks of the same job count.
    """
    here = _host(cluster.task_address(own.job, own.index))
    jobs = [task.job for task, address in cluster.tasks().items() if _host(address) == here]
    if of_job:
        return max(1, cores // jobs.count(own.job))
    return max(1, cores // (len(jobs) if own.job == "ps" else len(jobs) - jobs.count("ps")))


@contextlib.contextmanager
def limited(cluster: ClusterSpec, own: TaskId) -> Iterator[None]:
    """Limits JAX's threads to the task's share within the block, unless the user has set their number.

    One thread is the one that asks. Does nothing in a process whose devices were found before.
    """
    cores = len(os.sched_getaffinity(0))
    setting = next((os.environ[name] for name in _VARIABLES if name in os.environ), None)
    threads = share(cluster, own, cores)
    if (setting or str(threads)) == "1":
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if threads == cores or setting is not None:
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
