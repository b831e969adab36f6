"""A cluster of one task inside one session: what ``Session("")`` runs on. No ports, nothing shared."""

from __future__ import annotations

import secrets
from typing import NoReturn

from runtime.cluster.spec import ClusterSpec
from runtime.errors import NotFoundError
from runtime.master import tasks
from runtime.master.config import SessionConfig
from runtime.master.master import Master, MasterSession
from runtime.state.cancellation import Cancellation
from runtime.task.worker import Worker

_JOB = "localhost"


class _PrivateMaster(Master):
    """A master whose server goes when its only session goes."""

    def __init__(self, server: PrivateServer, cluster: ClusterSpec) -> None:
        super().__init__(cluster, (_JOB, 0), server.worker)
        self._server = server

    def create_session(
        self,
        options: SessionConfig,
        cancelled: Cancellation | None = None,
        waited_secs: float = 0.0,
        foreign: bool = False,
    ) -> MasterSession:
        tasks.publish(self._server.address, self._server)
        try:
            return super().create_session(options, cancelled, waited_secs, foreign)
        finally:
            tasks.withdraw(self._server.address, self._server)


class PrivateServer:
    """The one task of a private cluster."""

    config: SessionConfig | None = None

    def __init__(self) -> None:
        self.incarnation = secrets.randbits(63) | 1
        self.address = f"private-{self.incarnation:x}:1"  # a name that no network address can have
        self.worker = Worker(_JOB, 0, _fetch_nothing)
        self.master = _PrivateMaster(self, ClusterSpec({_JOB: [self.address]}))
        self.worker.registry.connected = self.master.has_session


def _fetch_nothing(task: str, session: int, step: int, slot: int) -> NoReturn:
    raise NotFoundError(f"{task} is not in a private cluster")
