"""local_cluster: all tasks of a small cluster in this process, for notebooks and first tries."""

from __future__ import annotations

import contextlib
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from runtime.cluster.spec import ClusterSpec
from runtime.errors import InvalidArgumentError, UnknownError
from runtime.graph.placement import device, replica_device_setter
from runtime.server.server import Server

_TRIES = 5


@dataclass
class InProcessCluster:
    """A cluster of which all tasks are in this process; ``with`` stops it, and so does ``stop``.

    Attributes:
        cluster: its tasks and their addresses.
        servers: the servers by (job, task index).
    """

    cluster: ClusterSpec
    servers: dict[tuple[str, int], Server] = field(repr=False)

    @property
    def target(self) -> str:
        """The target of sessions of worker 0, the chief."""
        return self.target_of(0)

    def target_of(self, worker: int) -> str:
        """What a session of a worker connects to."""
        return self.servers["worker", worker].target

    def device(self, worker: int = 0) -> AbstractContextManager[None]:
        """A device scope for the graph of a worker: variables on the ps, in turn, and all else on the worker."""
        own = f"/job:worker/task:{worker}"
        if "ps" not in self.cluster.jobs:
            return device(own)
        return device(replica_device_setter(cluster=self.cluster, worker_device=own))

    def stop(self) -> None:
        """Stops all servers, the workers first; does nothing the second time."""
        for _, server in sorted(self.servers.items(), reverse=True):
            server.stop()

    def __enter__(self) -> InProcessCluster:
        """Gives the cluster itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.stop()


def local_cluster(ps: int = 1, workers: int = 2, **server_options: Any) -> InProcessCluster:
    """Starts a cluster in this process, on free ports that only this machine reaches.

        with rt.local_cluster(ps=1, workers=2) as cluster, cluster.device():
            ...

    Args:
        ps: number of parameter servers.
        workers: number of workers.
        **server_options: further arguments of each ``Server``.

    Raises:
        InvalidArgumentError: there is no worker, or a negative number of ps.
    """
    if workers < 1 or ps < 0:
        raise InvalidArgumentError(
            f"a local cluster has at least one worker and no negative ps, not ps={ps}, {workers=}"
        )
    for left in reversed(range(_TRIES)):
        hosts = _free_addresses(ps + workers)
        cluster = ClusterSpec({job: own for job, own in (("ps", hosts[:ps]), ("worker", hosts[ps:])) if own})
        with contextlib.ExitStack() as started:
            try:
                servers = {
                    (task.job, task.index): started.enter_context(
                        Server(cluster, task.job, task.index, **server_options)
                    )
                    for task in cluster.tasks()
                }
            except UnknownError:  # somebody took a port between our looking and our listening
                if not left:
                    raise
                continue
            started.pop_all()
            return InProcessCluster(cluster, servers)
    raise AssertionError("the last try returns or raises")


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
