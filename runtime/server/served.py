"""The face of a server for its gRPC services and its report."""

from __future__ import annotations

from typing import Protocol

from runtime.cluster.spec import ClusterSpec
from runtime.master.master import Master
from runtime.server.pools import CallPools
from runtime.server.remote_sessions import RemoteSessions
from runtime.task.worker import Worker
from runtime.trust.certificates import Certificates
from runtime.trust.security import Security
from runtime.wire.listener import TensorServer


class Served(Protocol):
    """A server: one task's state and how others reach it."""

    cluster: ClusterSpec
    worker: Worker
    master: Master
    incarnation: int
    started_unix_secs: float
    takeovers: int
    remote_sessions: RemoteSessions
    pools: CallPools
    tensors: TensorServer
    security: Security | None
    certificates: Certificates | None

    def check_session(self, session: int) -> None:
        """Checks, in a servicer method, that a session is not another client's; raises PermissionDeniedError."""

    def hear_of(self, cluster: ClusterSpec) -> None:
        """Notes the addresses of tasks that this task did not know when it started."""

    def check_open(self) -> None:
        """Raises UnavailableError while the server is starting."""
