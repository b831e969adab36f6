"""A small cluster with all tasks in this process, for notebooks and first programs."""

import contextlib
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from runtime.cluster.spec import ClusterSpec
from runtime.errors import InvalidArgumentError, UnknownError
from runtime.graph.placement import device, replica_device_setter
from runtime.server.server import Server
from runtime.task import cpu_share
from runtime.task.devices import local_devices

_TRIES = 5


@dataclass
class InProcessCluster:
    """A cluster with all tasks in this process.

    Runs until ``stop``, or until the end of its ``with`` block.

    Attributes:
        cluster: Tasks of the cluster, with their addresses.
        servers: Servers by (job, task index).
    """

    cluster: ClusterSpec
    servers: dict[tuple[str, int], Server] = field(repr=False)

    @property
    def target(self) -> str:
        """The target for sessions on worker 0, the chief."""
        return self.target_of(0)

    def target_of(self, worker: int) -> str:
        """Returns the target for sessions on a worker.

        Args:
            worker: Task index of the worker.
        """
        return self.servers["worker", worker].target

    def device(self, worker: int = 0) -> AbstractContextManager[None]:
        """Returns a device scope for the graph of a worker: variables on the ps in turn, all else on the worker.

        Args:
            worker: Task index of the worker; 0 by default.
        """
        own = f"/job:worker/task:{worker}"
        if "ps" not in self.cluster.jobs:
            return device(own)
        return device(replica_device_setter(cluster=self.cluster, worker_device=own))

    def stop(self) -> None:
        """Stops all servers. Does nothing the second time."""
        # Workers stop before the ps: a worker under way would take a stopped ps for a lost one.
        for _, server in sorted(self.servers.items(), reverse=True):
            server.stop()

    def __enter__(self) -> "InProcessCluster":
        """Returns the cluster itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the cluster."""
        self.stop()


def local_cluster(ps: int = 1, workers: int = 2, **server_options: Any) -> InProcessCluster:
    """Starts a cluster in this process, on free ports of the loopback.

        with rt.local_cluster(ps=1, workers=2) as cluster, cluster.device():
            ...

    Args:
        ps: Number of parameter servers; 1 by default.
        workers: Number of workers; 2 by default.
        **server_options: Further arguments of each ``Server``.

    Raises:
        InvalidArgumentError: The number of workers is below 1, or the number of ps below 0.
        UnknownError: Other processes took the free ports on each of several attempts.
    """
    if workers < 1 or ps < 0:
        raise InvalidArgumentError(
            f"a local cluster has at least one worker and no negative ps, not ps={ps}, {workers=}"
        )
    # Each try takes new ports, so the port of another process does not come twice.
    for left in reversed(range(_TRIES)):
        hosts = _free_addresses(ps + workers)
        assert len({*hosts}) == ps + workers, "two tasks have one port"
        cluster = ClusterSpec(
            {job: own for job, own in (("ps", hosts[:ps]), ("worker", hosts[ps:])) if own}
        )
        # JAX starts for the workers: a ps that was first would keep JAX off the accelerators.
        with cpu_share.limited(cluster, next(iter(cluster.tasks()))):
            local_devices("worker", 0)
        with contextlib.ExitStack() as started:
            try:
                servers = {
                    (task.job, task.index): started.enter_context(
                        Server(cluster, task.job, task.index, **server_options)
                    )
                    for task in cluster.tasks()
                }
            # Another process may take a port between the choice of the port and the start of the
            # server.
            except UnknownError:
                if not left:
                    raise
                continue
            # The cluster object stops the servers from now on.
            started.pop_all()
            return InProcessCluster(cluster, servers)
    raise AssertionError("the last try returns or raises")


def _free_addresses(count: int) -> list[str]:
    # All sockets stay open until the last has its port, so no port comes twice.
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
