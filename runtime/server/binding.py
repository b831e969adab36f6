"""On which addresses a task listens: those that the cluster gives it, so that nobody else is let in by the way."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence

from absl import logging

from runtime.cluster.spec import ClusterSpec, TaskId, split_address
from runtime.errors import InvalidArgumentError
from runtime.wire import addresses

BIND_VARIABLE = "BELLWETHER_BIND"
"""Environment variable: where servers listen that are not told otherwise, instead of at their address."""
ALL = ("::", "0.0.0.0")
"""What stands for all interfaces."""
_LOCALHOST = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
_LOOK_UP_SECS = 10.0


def listen_on(cluster: ClusterSpec, own: TaskId, bind: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the addresses on which a task listens.

    Many systems give a host's own name a loopback address, in their own file of names only. Where the cluster has
    other hosts, these could not reach it; so it listens on all interfaces then, and says so.

    Args:
        cluster: all tasks with their addresses.
        own: the task.
        bind: host name or address to listen on instead of the task's own.
        environ: has ``BELLWETHER_BIND`` or not, which is ``bind`` by default.

    Returns:
        One address at least, without brackets; of ``ALL`` where it is all interfaces.

    Raises:
        InvalidArgumentError: the address is none of this machine; says what to do.
    """
    bind = bind or environ.get(BIND_VARIABLE) or None
    given, _ = split_address(cluster.task_address(own.job, own.index))
    host = (bind or given).removeprefix("[").removesuffix("]")
    if host == "localhost":
        return (_LOCALHOST,)
    if host in ALL:
        return (host,)
    instead = f"give Server(bind=...) or {BIND_VARIABLE} an address of this machine, 0.0.0.0 for all of them" + (
        "" if bind else f", where connections to {host} are led here"
    )
    try:
        found = addresses.look_up(host, 0, time.monotonic() + _LOOK_UP_SECS)
    except OSError as error:
        raise InvalidArgumentError(f"{host} cannot be listened on: {error}; {instead}", task=str(own)) from None
    here = tuple(dict.fromkeys(str(a.sockaddr[0]) for a in found if _is_of_this_machine(a)))
    if not here:
        told = ", ".join(dict.fromkeys(str(a.sockaddr[0]) for a in found))
        what = (
            f"{host} is no address of this machine" if told == host else f"{host} is {told}, which is not this machine"
        )
        raise InvalidArgumentError(f"{what}: {instead}", task=str(own))
    if not bind and is_loopback(here) and not _means_loopback(host) and _has_other_hosts(cluster, host):
        logging.warning(
            "%s: %s is %s on this machine, where other hosts do not reach it: listening on all interfaces; give "
            f"Server(bind=...) or {BIND_VARIABLE} the address to listen on",
            *(own, host, ", ".join(here)),
        )
        return ALL[:1]
    return here


def is_loopback(hosts: Sequence[str]) -> bool:
    """Returns True if only this machine reaches the addresses."""
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


def _is_of_this_machine(address: addresses.Address) -> bool:
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            probe.bind((address.sockaddr[0], 0, *address.sockaddr[2:]))
    except OSError:
        return False
    return True


def _means_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK_NAMES or host.endswith(".localhost")


def _has_other_hosts(cluster: ClusterSpec, host: str) -> bool:
    return any(split_address(address)[0] != host for address in cluster.tasks().values())
