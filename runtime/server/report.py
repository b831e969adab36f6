"""The figures of one task: counters, transport, host, devices and variables.

All figures are read for each report. Between reports nothing is computed.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import psutil

from runtime.cluster.spec import ClusterSpec
from runtime.concurrency import RunningThread, list_threads
from runtime.graph.op_kinds import VariableSpec
from runtime.master.tasks import find_local
from runtime.observe import device_report
from runtime.observe.process_metrics import METRICS, metrics
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc, stage_pb2
from runtime.rpc import rpc
from runtime.server.assembly import TaskCredential, TaskParts
from runtime.server.pools import WAITING
from runtime.state.store import Key
from runtime.tensor_spec import TensorSpec, canonical_dtype
from runtime.trust.security import Security
from runtime.wire.messages import spec_to_proto

_GLOBAL_STEP = ("", "global_step")
_process = psutil.Process()


@dataclass(frozen=True)
class TaskReport:
    """The figures of a task at one time.

    Attributes:
        task: Name of the task, such as ``/job:ps/task:0``.
        cluster: Cluster of the task, from the task's own view.
        incarnation: Random id of the task's process.
        started_unix_secs: Start of serving, seconds since the epoch.
        host: Name of the task's host.
        pid: Id of the task's process.
        values: Figures by name, in seconds and bytes. Figures ending in ``_total`` only grow.
            ``METRICS`` of `runtime.observe.process_metrics` explains each.
        staleness: Numbers of updates that were 0, 1, 2 ... updates behind the changed variables.
        last_error: The last error that the task logged, ``""`` for none.
        last_error_unix_secs: Time of the last error, seconds since the epoch.
        variables: The task's variables, if the request asked for them.
        threads: The running threads of the task's process, if the request asked for them.
        devices: The kind of each device, such as ``NVIDIA H100 80GB HBM3``, by names such as
            ``GPU:0``.
    """

    task: str
    cluster: ClusterSpec
    incarnation: int
    started_unix_secs: float
    host: str
    pid: int
    values: Mapping[str, float]
    staleness: tuple[int, ...]
    last_error: str
    last_error_unix_secs: float
    variables: tuple[VariableSpec, ...] = ()
    threads: tuple[RunningThread, ...] = ()
    devices: Mapping[str, str] = field(default_factory=dict)


class _ReportingServer(Protocol):
    """The part of a server of this process that `probe` needs."""

    def report(self, *, variables: bool, threads: bool) -> TaskReport:
        """Returns the figures of the server's task."""


def report(parts: TaskParts, *, variables: bool, threads: bool) -> pb.MetricsResponse:
    """Returns the figures of a task in this process.

    Args:
        parts: Parts of the task.
        variables: True lists the task's variables, too.
        threads: True lists the running threads of the process, too.
    """
    worker, life = parts.worker, parts.life
    known = worker.store.variables()
    # The error handler of the log keeps the last error of the process.
    error, when = metrics.last_error
    return pb.MetricsResponse(
        task=worker.task,
        cluster=parts.peers.cluster.as_cluster_def(),
        incarnation=life.incarnation,
        started_unix_secs=life.started_unix_secs,
        host=socket.gethostname(),
        pid=os.getpid(),
        values=_task_figures(parts, known),
        staleness=worker.counters.staleness,
        last_error=error,
        last_error_unix_secs=when,
        variables=(
            stage_pb2.VariableSpecDef(name=name, container=container, spec=spec_to_proto(spec))
            for (container, name), spec in (known if variables else ())
        ),
        threads=(
            pb.ThreadDef(owner=t.owner, name=t.name) for t in (list_threads() if threads else ())
        ),
        devices={**device_report.kinds(worker.devices), **worker.executor.meshes},
    )


def _task_figures(parts: TaskParts, known: Sequence[tuple[Key, TensorSpec]]) -> dict[str, float]:
    worker, counted = parts.worker, parts.tensors.counters
    values = {
        **metrics.read(),
        **worker.counters.values(),
        **({} if worker.primary is None else worker.primary.values()),
        "connections": counted.connections,
        "bytes_received_total": counted.bytes_in,
        "bytes_sent_total": counted.bytes_out,
        **_security_figures(parts.credential),
        **_host_figures(),
        **device_report.memory_figures(worker.devices),
        "remote_sessions": len(parts.remote_sessions),
        "remote_calls": parts.pools.running(WAITING),
        "updates_dropped_total": sum(r.dropped_gradients for r in worker.store.resources()),
        "variables": len(known),
        "variable_bytes": sum(0 if spec.is_string else spec.nbytes for _, spec in known),
    }
    # Only the task that holds the global step reports the step.
    if any(key == _GLOBAL_STEP and spec.shape == () for key, spec in known):
        values["global_step"] = float(worker.store.snapshot([_GLOBAL_STEP])[_GLOBAL_STEP])
    # The name of a device follows the name of a figure.
    assert {name.partition("/")[0] for name in values} <= METRICS.keys(), "a figure has no meaning"
    return values


def _security_figures(credential: TaskCredential) -> dict[str, float]:
    if credential.certificates is not None:
        ends = {"certificate_left_seconds": credential.certificates.left_secs()}
        return ends | (
            {"certificate_near_end": 1.0} if credential.certificates.is_near_end() else {}
        )
    return {"insecure": 1.0} if credential.lets_all_in else {}


def _host_figures() -> dict[str, float]:
    times = _process.cpu_times()
    memory = psutil.virtual_memory()
    return {
        "cpu_seconds_total": times.user + times.system,
        "memory_bytes": _process.memory_info().rss,
        "threads": _process.num_threads(),
        "host_cpus": os.cpu_count() or 1,
        "host_load": os.getloadavg()[0],
        "host_memory_used_bytes": memory.total - memory.available,
        "host_memory_bytes": memory.total,
    }


def report_from_proto(message: pb.MetricsResponse) -> TaskReport:
    """Returns a report from its message."""
    return TaskReport(
        message.task,
        ClusterSpec(message.cluster),
        message.incarnation,
        message.started_unix_secs,
        message.host,
        message.pid,
        dict(message.values),
        tuple(message.staleness),
        message.last_error,
        message.last_error_unix_secs,
        tuple(
            VariableSpec(v.name, tuple(v.spec.shape), canonical_dtype(v.spec.dtype), v.container)
            for v in message.variables
        ),
        tuple(RunningThread(thread.owner, thread.name) for thread in message.threads),
        dict(message.devices),
    )


def probe(
    address: str,
    timeout_secs: float = 2.0,
    *,
    variables: bool = False,
    threads: bool = False,
    security: Security | None = None,
) -> TaskReport:
    """Requests the figures of a task.

    Args:
        address: ``host:port`` of the task's gRPC port, or ``grpc://host:port``.
        timeout_secs: Most seconds to wait for the answer; 2 by default.
        variables: True lists the task's variables, too.
        threads: True lists the running threads of the task's process, too.
        security: Certificates or token of the cluster; by default from ``BELLWETHER_SECURITY``,
            else the settings of a server in this process.

    Raises:
        UnauthenticatedError: Task and client do not accept each other's token or certificate. The
            message names the remedy.
        UnavailableError: No process listens at the address.
        DeadlineExceededError: The task did not answer in time.

    Examples:
        >>> from runtime.server.server import Server
        >>> with Server.create_local_server() as server:
        ...     probe(server.target).task
        '/job:local/task:0'
    """
    address = address.removeprefix("grpc://")
    # A server of this process is read directly, so a program needs no credential for its own task.
    local = find_local(address)
    if local is not None:
        return cast(_ReportingServer, local).report(variables=variables, threads=threads)
    channel = rpc.open_channel(address, security)
    try:
        stub = services_pb2_grpc.WorkerServiceStub(channel)
        request = pb.MetricsRequest(variables=variables, threads=threads)
        return report_from_proto(
            rpc.call(stub.Metrics, request, timeout=timeout_secs, task=address)
        )
    finally:
        channel.close()
