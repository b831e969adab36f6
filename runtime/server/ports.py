"""Ports that another process has: a server waits for the port for a while, and then names the process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Sequence

import psutil
from absl import logging

from runtime import timeouts
from runtime.cluster.spec import ClusterSpec, TaskId, agree
from runtime.errors import InvalidArgumentError, OpError, UnknownError
from runtime.server.report import probe
from runtime.trust.security import Security

_POLL_SECS = 0.1


Holder = tuple[str, int, bool]
"""The task or process that has a port: in words, its process id, and True for a live namesake in the same cluster."""
_UNKNOWN: Holder = ("", 0, False)


def wait_for_port(
    hosts: Sequence[str],
    port: int,
    task: TaskId,
    cluster: ClusterSpec,
    security: Security | None,
    *,
    tensors: bool = False,
) -> None:
    """Waits until a server can listen on a port: a process that is dying may hold it for a moment.

    Args:
        hosts: the addresses of this machine, without brackets.
        port: The port; 0 is any free port.
        task: The task of the server.
        cluster: as the task knows it.
        security: what the cluster has in common.
        tensors: True for the port of the tensor channel, which answers no request for a task's name.

    Raises:
        InvalidArgumentError: A live task of the same cluster, with the same job and index, has the port.
        UnknownError: somebody else keeps it, or this process may not have it; names the port, and who has it.
    """
    if not port:
        return
    kind = "data port" if tensors else "port"
    deadline = time.monotonic() + timeouts.PORT_SECS
    told = False
    while problem := next((found for host in hosts if (found := _problem(host, port)) is not None), None):
        taken = problem.errno == errno.EADDRINUSE
        who, pid, is_namesake = _holder(port, task, cluster, security, tensors) if taken else _UNKNOWN
        by = f" by {who}" if who else ""
        if not taken or pid == os.getpid() or time.monotonic() >= deadline:
            where = f"{kind} {port} of {', '.join(hosts)}"
            if is_namesake:
                raise InvalidArgumentError(
                    f"two tasks say that they are {task}: {who} lives and serves at {where}, where this one was to "
                    "serve: give each an index (--task_index) of its own"
                )
            raise UnknownError(
                f"cannot listen on {where}: {problem.strerror or problem}{by and ',' + by}; stop what holds it or give "
                f"{task.job} task {task.index} another {kind.replace(' ', '_')}",
                task=str(task),
            )
        if not told:
            told = True
            logging.warning("%s: %s %d is taken%s: trying for %g s", task, kind, port, by, timeouts.PORT_SECS)
        while time.monotonic() < deadline and any(_problem(host, port) for host in hosts):
            time.sleep(_POLL_SECS)


def _problem(host: str, port: int) -> OSError | None:
    """Returns the reason why the port cannot be taken; None if it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host and socket.has_ipv6 else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: old connections do no harm
            if tried.family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
            tried.bind((host, port))
    except OSError as error:
        return error
    return None


def _holder(port: int, task: TaskId, cluster: ClusterSpec, security: Security | None, tensors: bool) -> Holder:
    """Returns the task that has a port of this machine, if a task answers there; else the process, if known."""
    who, pid = "", 0
    with contextlib.suppress(psutil.Error, OSError):  # it has just ended; or the system tells administrators only
        found = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid]
        if found:
            pid = max(found, key=lambda c: c.status == psutil.CONN_LISTEN).pid or 0
            who = f"process {pid} ({psutil.Process(pid).name()})"
    if tensors:
        return who, pid, False
    try:
        told = probe(cluster.task_address(task.job, task.index), timeouts.ATTEMPT_SECS, security=security)
    except OpError:  # nobody of ours, or one that does not answer
        return who, pid, False
    if pid not in (0, told.pid):  # the name leads to another machine
        return who, pid, False
    same = agree(told.cluster, cluster)
    who = f"{told.task}{'' if same else ' of another cluster'} (process {told.pid} on {told.host})"
    return who, told.pid, same and told.task == str(task)
