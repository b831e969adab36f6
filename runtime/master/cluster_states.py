"""The states of a cluster's tasks for a checkpoint: the tasks that train, and those that are done."""

from collections.abc import Mapping
from dataclasses import dataclass

from absl import logging

from runtime import concurrency
from runtime.cluster.spec import ClusterSpec
from runtime.errors import OpError, UnavailableError
from runtime.master.run_orders import find_holders
from runtime.master.tasks import LocalTask, RemoteTask, Task, find_local
from runtime.proto.services_pb2 import CheckpointOrder, CheckpointReply
from runtime.trust.security import Security
from runtime.wire.dial import ChannelOptions


@dataclass(frozen=True)
class ClusterStates:
    """The way of a session to the states of all tasks, also of tasks that the session does not use.

    Attributes:
        session: id of the session.
        cluster: the cluster with all tasks.
        known: the tasks of the session, by name.
        security: certificates or token of the caller, for other tasks.
    """

    session: int
    cluster: ClusterSpec
    known: Mapping[str, Task]
    security: Security | None

    def collect(self, order: CheckpointOrder, timeout: float | None) -> CheckpointReply:
        """Returns the states of all tasks that answer in time.

        A finished task has left its states on the tasks that hold run records.

        Args:
            order: the order for states.
            timeout: seconds.
        """
        found = CheckpointReply()
        alive: dict[str, bytes] = {}
        addresses = {str(task): address for task, address in self.cluster.tasks().items()}
        keepers = {name for name, _ in find_holders(list(addresses.items()))}

        def request(name: str) -> CheckpointReply:
            return self._request(name, addresses[name], order, timeout)

        for name, answer in concurrency.call_all(request, addresses, "states of").items():
            try:
                given = answer.result().states
                if name in keepers:
                    found.states.states.update(given.of_done)
                alive.update({f"{name} {key}": value for key, value in given.states.items()})
            except (UnavailableError, TimeoutError):
                logging.debug("%s does not answer: its state does not go into the checkpoint", name)
            except OpError as error:
                logging.info("no state of %s goes into the checkpoint: %s", name, error)
        # The state of a task that lives is newer than a state left behind.
        found.states.states.update(alive)
        return found

    def _request(
        self, name: str, address: str, order: CheckpointOrder, timeout: float | None
    ) -> CheckpointReply:
        known = self.known.get(name)
        if known is not None or (local := find_local(address)) is None:
            task: Task = known or RemoteTask(
                name, address, self.session, ChannelOptions(), self.security
            )
        else:
            task = LocalTask(name, local)
        try:
            copy = CheckpointOrder()
            copy.CopyFrom(order)
            # A local task calls functions of the user in this process, and only a thread can bound
            # their time.
            if isinstance(task, LocalTask):
                return concurrency.in_thread(
                    lambda: task.send_order(copy, timeout), "states"
                ).result(timeout)
            return task.send_order(copy, timeout)
        finally:
            if known is None and isinstance(task, RemoteTask):
                task.close(self.session)
