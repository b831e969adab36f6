"""A cluster of one task inside one session: what ``Session("")`` runs on. No ports, nothing shared."""

from __future__ import annotations

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
        self.incarnation = concurrency.random_id(63) | 1
        self.address = f"private-{self.incarnation:x}:1"  # a name that no network address can have
        self.worker = Worker(_JOB, 0, _fetch_nothing)
        cluster = ClusterSpec({_JOB: [self.address]})
        self.master = Master(lambda: cluster, (_JOB, 0), self.worker)

    def create_session(self, options: SessionConfig) -> MasterSession:
        """Opens the only session of the server, which goes with the session."""
        tasks.publish(self.address, self)
        try:
            return self.master.create_session(options)
        finally:
            tasks.withdraw(self.address, self)


def _fetch_nothing(task: str, session: int, step: int, slot: int) -> NoReturn:
    raise NotFoundError(f"{task} is not in a private cluster")
