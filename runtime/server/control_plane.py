"""The control plane of a task: a gRPC server and its port."""

import functools
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime.cluster.spec import TaskId, join_address
from runtime.errors import UnknownError
from runtime.limits import Limits
from runtime.rpc import rpc
from runtime.rpc.threads import CallThreads
from runtime.trust.certificates import Certificates


class ControlPlane:
    """The gRPC server of a task. Opens no port before `bind`, and starts no thread before `start`.

    Args:
        task: The task.
        hosts: Addresses of this machine to listen on.
        interceptors: Checks of each call, the first one first.
        limits: Limits on connections and messages.
        certificates: Certificates of the task; None for a port without TLS.

    Attributes:
        grpc: The gRPC server, for services to be added before `start`.
        threads: Threads of the calls.
    """

    def __init__(
        self,
        task: TaskId,
        hosts: Sequence[str],
        interceptors: list[grpc.ServerInterceptor],  # type: ignore[type-arg]
        limits: Limits,
        certificates: Certificates | None,
    ) -> None:
        self.threads = CallThreads("grpc")
        self.grpc = grpc.server(
            self.threads, interceptors=interceptors, options=rpc.server_options(limits)
        )
        self._task = task
        self._hosts = hosts
        self._certificates = certificates
        self._is_started = False
        # Probes of Kubernetes call this service, so it exists before the task serves.
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def bind(self, port: int) -> int:
        """Takes a port at all addresses, and returns the port.

        Args:
            port: Port to take; 0 for a free port.

        Raises:
            UnknownError: Another process has the port.
        """
        assert not self._is_started
        add = self.grpc.add_insecure_port
        if self._certificates is not None:
            credentials = rpc.server_credentials(self._certificates)
            add = functools.partial(self.grpc.add_secure_port, server_credentials=credentials)
        # A free port is chosen at the first address and must be the same at all others.
        bound = port
        for host in self._hosts:
            try:
                bound = int(add(join_address(host, bound)))
            except RuntimeError:
                bound = 0
            if not bound:
                raise UnknownError(
                    f"cannot listen on port {port} of {host}: gRPC could not bind it; give "
                    f"{self._task.job} task "
                    f"{self._task.index} another port",
                    task=str(self._task),
                )
        return bound

    def start(self) -> None:
        """Starts to answer calls. Health checks report "not serving" until `announce`."""
        assert not self._is_started
        self._is_started = True
        self.grpc.start()

    def announce(self) -> None:
        """Reports to health checks that the task serves."""
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    def announce_end(self) -> None:
        """Reports to health checks that the task stops."""
        self._health.enter_graceful_shutdown()

    def stop(self, grace_secs: float) -> None:
        """Stops the server and releases the port.

        Args:
            grace_secs: Seconds for the calls under way.
        """
        # gRPC releases a port only at a stop, and stops only a started server.
        if not self._is_started:
            self.start()
        self.grpc.stop(grace_secs).wait()
