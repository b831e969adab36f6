"""A container's probes as the kubelet makes them, and what follows from their results.

Its rules (kubernetes.io: Configure Liveness, Readiness and Startup Probes): a gRPC probe connects
anew each time, asks the health service, and has passed when that answers SERVING within
timeoutSeconds. Probes come every periodSeconds. A container whose liveness probe has failed
failureThreshold times in a row is killed.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@dataclass(frozen=True)
class Probe:
    """A probe of a manifest; the defaults are Kubernetes'."""

    port: int
    period_secs: float = 10
    timeout_secs: float = 1
    failure_threshold: int = 3

    @classmethod
    def of(cls, container: dict[str, Any], name: str) -> "Probe | None":
        """The livenessProbe or readinessProbe of a container; None where it has none."""
        told = container.get(name)
        if told is None:
            return None
        fields = {"periodSeconds": "period_secs", "timeoutSeconds": "timeout_secs"}
        fields |= {"failureThreshold": "failure_threshold"}
        assert told.keys() <= {"grpc", *fields} and told["grpc"].keys() == {"port"}, told
        return cls(
            told["grpc"]["port"],
            **{fields[key]: value for key, value in told.items() if key != "grpc"},
        )

    def passes(self, host: str, port: int | None = None, timeout_secs: float | None = None) -> bool:
        """Asks once; another port or time limit than the manifest's may be given."""
        with grpc.insecure_channel(f"{host}:{self.port if port is None else port}") as channel:
            stub, timeout = health_pb2_grpc.HealthStub(channel), timeout_secs or self.timeout_secs
            try:
                told = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
            except grpc.RpcError:
                return False
            return bool(told.status == health_pb2.HealthCheckResponse.SERVING)

    def kills(self, results: Iterable[bool]) -> bool:
        """Whether a container with these results, in their order, is killed."""
        in_a_row = (len(list(run)) for passed, run in itertools.groupby(results) if not passed)
        return any(failures >= self.failure_threshold for failures in in_a_row)
