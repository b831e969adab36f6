"""The tasks of a cluster as one task knows them: their addresses, their rights and the channels to them."""

from collections.abc import Sequence

from runtime import concurrency
from runtime.cluster.spec import ClusterSpec, TaskId, agree, join_address, split_address
from runtime.errors import InvalidArgumentError, PermissionDeniedError
from runtime.master import tasks
from runtime.master.tasks import LocalTask, RemoteTask, Task
from runtime.trust import roles
from runtime.trust.security import Security
from runtime.wire.connection import current_identity
from runtime.wire.dial import ChannelOptions


class TaskPeers:
    """The addresses of all tasks, and the channels to the other tasks. Thread safe.

    Args:
        cluster: All tasks with their addresses. The task's own port may be 0 until `settle`.
        own: The task.
        hosts: Addresses of this machine on which the task listens.
        security: Security settings of the cluster; None for the default of the process.

    Attributes:
        cluster: The cluster from the task's own view, with the port in place of a port 0.
        address: ``host:port`` of the task's control plane.
        dialled: ``host:port`` of the control plane by each name that a client may dial; empty
            before `settle`.
    """

    def __init__(
        self, cluster: ClusterSpec, own: TaskId, hosts: Sequence[str], security: Security | None
    ) -> None:
        self.cluster = cluster
        self.address = cluster.task_address(own.job, own.index)
        self.dialled: Sequence[str] = ()
        self._own = own
        self._hosts = hosts
        self._security = security
        self._known = _addresses_of(cluster)
        # Other tasks know this process as a client by its own id. The incarnation will not do: a
        # task that continues from its backup takes over the incarnation of a process whose lanes
        # the other tasks remember.
        self._client_id = concurrency.random_id(63) | 1
        self._lock = concurrency.Lock()
        self._tasks: dict[str, Task] = {}

    def settle(self, port: int) -> None:
        """Notes the port of the task's control plane, once the port is open.

        Args:
            port: The port; in place of a port 0, else the port in the cluster.
        """
        assert port and not self.dialled
        host, given = split_address(self.address)
        self.dialled = [join_address(name, port) for name in (host, *self._hosts)]
        # A cluster with a port 0 names no address of this task, so no other task has used it.
        if port != given:
            self.address = self.dialled[0]
            jobs: dict[str, dict[int, str]] = {}
            for task, address in self.cluster.tasks().items():
                jobs.setdefault(task.job, {})[task.index] = (
                    self.address if task == self._own else address
                )
            self.cluster = ClusterSpec(jobs)
            self._known = _addresses_of(self.cluster)

    def learn_addresses(self, cluster: ClusterSpec) -> None:
        """Learns the addresses of the other ps from the cluster of a worker.

        Args:
            cluster: Cluster of the worker.
        """
        # Only a ps that was started with a cluster of its own task alone needs to learn, and only
        # from a cluster that contains the task.
        if len(self.cluster.tasks()) == 1 and agree(self.cluster, cluster):
            self._known.update(
                {
                    str(task): address
                    for task, address in cluster.tasks().items()
                    if task.job == "ps"
                }
            )

    def find(self, name: str) -> Task:
        """Returns another task of the cluster, for a direct transfer of tensors.

        Args:
            name: Name of the task.

        Raises:
            InvalidArgumentError: The address of the task is unknown.
        """
        with self._lock:
            found = self._tasks.get(name)
            # The task was restarted without its state. A channel belongs to one process, so a new
            # channel is needed.
            if isinstance(found, RemoteTask) and found.peer.lost:
                found.close(0)
                found = None
            if found is None:
                address = self._known.get(name)
                if address is None:
                    raise InvalidArgumentError(
                        f"nobody has told it where {name} is", task=str(self._own)
                    )
                # A server of this process may have been started since, and needs no connection.
                local = tasks.find_local(address)
                if local is not None:
                    return LocalTask(name, local)
                found = self._tasks[name] = RemoteTask(
                    name, address, self._client_id, ChannelOptions(), self._security
                )
            return found

    def check_is_task(self, task: str) -> None:
        """Checks that the present call of the tensor channel comes from ``task``.

        A client without a certificate passes.

        Args:
            task: Name of the task.

        Raises:
            PermissionDeniedError: The certificate belongs to another task or host, or the cluster
                has no such task.
        """
        # Only the own cluster counts. The addresses that were learned come from clients, which may
        # lie.
        address = _addresses_of(self.cluster).get(task)
        if address is None:
            raise PermissionDeniedError(f"the cluster has no {task}", task=str(self._own))
        roles.check_is_task(current_identity(), task, split_address(address)[0])

    def check_is_one_of(self, names: frozenset[str]) -> None:
        """Checks that the present fetch of a tensor comes from a task of ``names``.

        A client without a certificate passes.

        Args:
            names: Names of the tasks for which the tensor is held; empty for any task.

        Raises:
            PermissionDeniedError: The certificate belongs to another task or host.
        """
        who = current_identity()
        if not names or not who.names or who.task in names:
            return
        # A task at an unknown address may be on any host, so a certificate without a task passes
        # for such a task.
        addresses = [self._known.get(name) for name in names]
        if not who.task and any(
            a is None or who.names_host(split_address(a)[0]) for a in addresses
        ):
            return
        raise PermissionDeniedError(
            f"the tensor is held for {', '.join(sorted(names))}, and the certificate is that of "
            f"{who}",
            task=str(self._own),
        )

    def close(self) -> None:
        """Closes the channels to other tasks."""
        with self._lock:
            closed, self._tasks = list(self._tasks.values()), {}
        for task in closed:
            task.close(0)


def _addresses_of(cluster: ClusterSpec) -> dict[str, str]:
    return {str(task): address for task, address in cluster.tasks().items()}
