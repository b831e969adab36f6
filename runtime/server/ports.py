"""The wait for a port that another process holds.

A server waits for a while, because a process at its end may still hold the port. Then the server
fails, with an error that names the process.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Sequence

import psutil
from absl import logging

from runtime import concurrency, timeouts
from runtime.cluster.spec import ClusterSpec, TaskId, agree
from runtime.errors import InvalidArgumentError, OpError, UnknownError
from runtime.server import times
from runtime.server.report import probe
from runtime.trust.security import Security

Holder = tuple[str, int, bool]
"""Holder of a port: its name in words, its process id, and True for a live task of the same name and cluster."""
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
    """Waits until a server can listen on a port, for ``timeouts.PORT_SECS`` at most.

    Args:
        hosts: Addresses of this machine, without brackets.
        port: TCP port; 0 for any free port.
        task: Task of the server.
        cluster: Cluster of the task.
        security: Security settings of the cluster.
        tensors: True for the port of the tensor channel, which does not answer with the name of its
            task.

    Raises:
        InvalidArgumentError: A live task of the same cluster, with the same job and index, has the
            port.
        UnknownError: Another process keeps the port, or this process has no right to the port. The
            message names the port and its holder.
    """
    if not port:
        return
    kind = "data port" if tensors else "port"
    deadline = concurrency.monotonic() + timeouts.PORT_SECS
    told = False
    while problem := next(filter(None, (_find_problem(host, port) for host in hosts)), None):
        # A wait helps only if another process uses the port, not without the right or for a server
        # of this process.
        taken = problem.errno == errno.EADDRINUSE
        who, pid, is_namesake = (
            _find_holder(port, task, cluster, security, tensors) if taken else _UNKNOWN
        )
        by = f" by {who}" if who else ""
        if not taken or pid == os.getpid() or concurrency.monotonic() >= deadline:
            where = f"{kind} {port} of {', '.join(hosts)}"
            if is_namesake:
                raise InvalidArgumentError(
                    f"two tasks say that they are {task}: {who} lives and serves at {where}, where "
                    "this one was to "
                    "serve: give each an index (--task_index) of its own"
                )
            raise UnknownError(
                f"cannot listen on {where}: {problem.strerror or problem}{by and ',' + by}; stop "
                "what holds it or give "
                f"{task.job} task {task.index} another {kind.replace(' ', '_')}",
                task=str(task),
            )
        if not told:
            told = True
            logging.warning(
                "%s: %s %d is taken%s: trying for %g s", task, kind, port, by, timeouts.PORT_SECS
            )
        # A process that ends releases its port without an event to wait for.
        while concurrency.monotonic() < deadline and any(
            _find_problem(host, port) for host in hosts
        ):
            concurrency.sleep(times.PORT_LOOK_SECS)


def _find_problem(host: str, port: int) -> OSError | None:
    """Returns the error of an attempt to bind the port; None if the attempt succeeds."""
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host and socket.has_ipv6 else socket.AF_INET
        ) as tried:
            # gRPC sets the option too, so connections of an earlier process in TIME_WAIT do not
            # block the port.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if tried.family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
            tried.bind((host, port))
    except OSError as error:
        return error
    return None


def _find_holder(
    port: int, task: TaskId, cluster: ClusterSpec, security: Security | None, tensors: bool
) -> Holder:
    """Returns the holder of a port of this machine: the task that answers there, else the process, if known."""
    who, pid = "", 0
    # The process may have ended, and some systems list the connections of other users only for
    # administrators.
    with contextlib.suppress(psutil.Error, OSError):
        found = [
            c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid
        ]
        if found:
            pid = max(found, key=lambda c: c.status == psutil.CONN_LISTEN).pid or 0
            who = f"process {pid} ({psutil.Process(pid).name()})"
    if tensors:
        return who, pid, False
    try:
        told = probe(
            cluster.task_address(task.job, task.index), timeouts.ATTEMPT_SECS, security=security
        )
    # The holder is no task of this project, or does not answer.
    except OpError:
        return who, pid, False
    # The address of the task leads to another machine, so the answer came from another process.
    if pid not in (0, told.pid):
        return who, pid, False
    # Definitions may differ in workers that were added later, so they need not be equal.
    same = agree(told.cluster, cluster)
    who = f"{told.task}{'' if same else ' of another cluster'} (process {told.pid} on {told.host})"
    return who, told.pid, same and told.task == str(task)
