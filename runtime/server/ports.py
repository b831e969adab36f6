"""Ports that another process has: a server waits for the port for a while, and then names the process."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import psutil
from absl import logging

from runtime import timeouts
from runtime.cluster.spec import ClusterSpec, TaskId, agree
from runtime.errors import InvalidArgumentError, OpError, UnknownError
from runtime.server.report import probe
from runtime.trust.security import Security

_POLL_SECS = 0.1


@dataclass(frozen=True)
class Holder:
    """The task or process that has a port.

    Attributes:
        text: The task or process in words; empty if unknown.
        is_namesake: True for a live task of the same cluster with the same job and index.
        pid: The process id; 0 if unknown.
    """

    text: str = ""
    is_namesake: bool = False
    pid: int = 0


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
        holder = _process(port) if taken else Holder()
        if taken and not tensors:
            holder = _task(holder, task, cluster, security)
        if not taken or holder.pid == os.getpid() or time.monotonic() >= deadline:
            _refuse(f"{kind} {port} of {', '.join(hosts)}", kind, task, problem, holder)
        if not told:
            told = True
            by = f" by {holder.text}" if holder.text else ""
            logging.warning("%s: %s %d is taken%s: trying for %g s", task, kind, port, by, timeouts.PORT_SECS)
        while time.monotonic() < deadline and any(_problem(host, port) for host in hosts):
            time.sleep(_POLL_SECS)


def _refuse(port: str, kind: str, task: TaskId, problem: OSError, holder: Holder) -> NoReturn:
    if holder.is_namesake:
        raise InvalidArgumentError(
            f"two tasks say that they are {task}: {holder.text} lives and serves at {port}, where this one was to "
            "serve: give each an index (--task_index) of its own"
        )
    who = f", by {holder.text}" if holder.text else ""
    raise UnknownError(
        f"cannot listen on {port}: {problem.strerror or problem}{who}; stop what holds it or give {task.job} task "
        f"{task.index} another {kind.replace(' ', '_')}",
        task=str(task),
    )


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


def _task(process: Holder, task: TaskId, cluster: ClusterSpec, security: Security | None) -> Holder:
    """Returns the task that has the port of ``task``, if a task answers there; else the process."""
    try:
        told = probe(cluster.task_address(task.job, task.index), timeouts.ATTEMPT_SECS, security=security)
    except OpError:  # nobody of ours, or one that does not answer
        return process
    if process.pid not in (0, told.pid):  # the name leads to another machine
        return process
    same = agree(told.cluster, cluster)
    text = f"{told.task}{'' if same else ' of another cluster'} (process {told.pid} on {told.host})"
    return Holder(text, same and told.task == str(task), told.pid)


def _process(port: int) -> Holder:
    """Returns the process that has a port of this machine, as far as this user may know."""
    try:
        found = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid]
        pid = min(found, key=lambda c: c.status != psutil.CONN_LISTEN).pid if found else None
        return Holder(f"process {pid} ({psutil.Process(pid).name()})", pid=pid) if pid else Holder()
    except (psutil.Error, OSError):  # it has just ended; or the system tells administrators only
        return Holder()
