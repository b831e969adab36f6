"""A cluster of one task for ``Session("")``. The cluster has no ports, and shares no variables."""

from typing import NoReturn

from runtime import concurrency
from runtime.cluster.spec import ClusterSpec
from runtime.errors import NotFoundError
from runtime.master import tasks
from runtime.master.config import SessionConfig
from runtime.master.master import Master, MasterSession
from runtime.task.worker import Worker

_JOB = "localhost"


class PrivateServer:
    """The one task of a private cluster."""

    config: SessionConfig | None = None

    def __init__(self) -> None:
        # Never 0, which means that the incarnation is not known.
        self.incarnation = concurrency.random_id(63) | 1
        # No network address has such a name.
        self.address = f"private-{self.incarnation:x}:1"
        self.worker = Worker(_JOB, 0, _refuse_fetch)
        cluster = ClusterSpec({_JOB: [self.address]})
        self.master = Master(lambda: cluster, (_JOB, 0), self.worker)

    def create_session(self, options: SessionConfig) -> MasterSession:
        """Opens the only session of the server. The server ends with the session."""
        tasks.publish(self.address, self)
        try:
            return self.master.create_session(options)
        finally:
            tasks.withdraw(self.address, self)


def _refuse_fetch(task: str, session: int, step: int, slot: int) -> NoReturn:
    raise NotFoundError(f"{task} is not in a private cluster")
