"""The processor cores of one task's XLA where several tasks share a host.

XLA makes a thread for every core of the host in every process. The threads of tasks on one host are
in each other's way: 1 ps and 4 workers on 2 cores do 25 % more steps a second with one thread each.

With one thread, XLA computes on the thread of the call (`jax_cpu_enable_async_dispatch` of JAX is
off). Another thread would cost two context switches in every stage, on a machine whose cores are
busy. And the inputs lie in the caches of the core that has received them.
"""

import contextlib
import os
from collections.abc import Iterator

import jax

from runtime.cluster.spec import ClusterSpec, TaskId, split_address

_VARIABLES = ("PJRT_NPROC", "NPROC")
"""Environment variables with the number of XLA's threads. XLA takes the first that is set."""


def share(cluster: ClusterSpec, own: TaskId, cores: int, *, of_job: bool = False) -> int:
    """Returns the number of cores for one task's XLA, or for its background work.

    Workers divide the cores among themselves, because a ps mostly waits for them. The share of a ps
    counts all tasks of the host: an update is a short program, which more threads make slower. With
    one thread, each connection's thread computes the updates of that connection. Updates of
    disjoint variables overlap.

    The tasks of a job write their parts of a checkpoint at the same time. So the background work of
    a task rests the longer the more tasks of the job are on the host.

    Args:
        cluster: All tasks with their addresses.
        own: The task.
        cores: Cores of the host.
        of_job: True for background work. Only the tasks of the same job count then.
    """
    here = _host(cluster.task_address(own.job, own.index))
    jobs = [task.job for task, address in cluster.tasks().items() if _host(address) == here]
    if of_job:
        return max(1, cores // jobs.count(own.job))
    return max(1, cores // (len(jobs) if own.job == "ps" else len(jobs) - jobs.count("ps")))


@contextlib.contextmanager
def limited(cluster: ClusterSpec, own: TaskId) -> Iterator[None]:
    """Limits JAX's threads to the task's share within the block, unless the user has set their number.

    Does nothing in a process that has found its devices before.

    Args:
        cluster: All tasks with their addresses.
        own: The task.
    """
    # A container or a batch system may give the process fewer cores than the host has.
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
        # A process that this one starts has a share of its own.
        os.environ.pop(_VARIABLES[0], None)


def _host(address: str) -> str:
    host, _ = split_address(address)
    return "localhost" if host in ("localhost", "::1") or host.startswith("127.") else host
