"""What the gRPC services and the report need to know of the server that they belong to."""

from __future__ import annotations

from typing import Protocol

from runtime.cluster.spec import ClusterSpec
from runtime.master.master import Master
from runtime.server.remote_sessions import RemoteSessions
from runtime.task.worker import Worker
from runtime.trust.certificates import Certificates
from runtime.trust.security import Security
from runtime.wire.listener import ServerCounters


class Served(Protocol):
    """A server: one task's state and how others reach it."""

    cluster: ClusterSpec
    worker: Worker
    master: Master
    incarnation: int
    started_unix_secs: float
    takeovers: int
    remote_sessions: RemoteSessions
    security: Security | None
    certificates: Certificates | None

    @property
    def data_port(self) -> int:
        """Port of the tensor channel."""

    @property
    def unix_path(self) -> str | None:
        """The tensor channel's Unix socket, if it has one."""

    @property
    def transport_counters(self) -> ServerCounters:
        """Figures of the tensor channel."""

    def check_session(self, session: int) -> None:
        """In a servicer method: raises PermissionDeniedError where a session is another client's."""

    def hear_of(self, cluster: ClusterSpec) -> None:
        """Notes where other tasks are, as far as this one was not told when it started."""

    def check_open(self) -> None:
        """Raises UnavailableError when the server has stopped."""
