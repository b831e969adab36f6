"""The interface of a server for its gRPC services and its report.

`runtime.server.server` imports the services and the report, so they cannot import `Server` themselves.
"""

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
    """A server: the state of one task, and the ports of the task."""

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
        """Checks that a session belongs to the client of the present gRPC call.

        Raises:
            PermissionDeniedError: The session belongs to another client.
        """

    def hear_of(self, cluster: ClusterSpec) -> None:
        """Learns the addresses of tasks that were unknown at the start."""

    def check_open(self) -> None:
        """Checks that the server has started.

        Raises:
            UnavailableError: The server is starting.
        """
