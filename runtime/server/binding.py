"""The addresses on which a task listens.

A task listens only at its address in the cluster. So no host can connect by another interface of
the machine.
"""

import ipaddress
import socket
from collections.abc import Sequence

from absl import logging

from runtime import concurrency
from runtime.cluster import addresses
from runtime.cluster.spec import ClusterSpec, TaskId, split_address
from runtime.errors import InvalidArgumentError
from runtime.server import times

BIND_VARIABLE = "BELLWETHER_BIND"
"""Environment variable: host name or address to listen on, for servers without a ``bind`` argument."""
ALL = ("::", "0.0.0.0")
"""Addresses that mean all interfaces."""
_LOCALHOST = "127.0.0.1"
_LOOPBACK_NAMES = (
    "localhost.localdomain",
    "localhost4",
    "localhost6",
    "ip6-localhost",
    "ip6-loopback",
)


def listen_on(cluster: ClusterSpec, own: TaskId, bind: str | None = None) -> tuple[str, ...]:
    """Returns the addresses on which a task listens.

    Many systems map a host's own name to a loopback address in /etc/hosts. Other hosts of the
    cluster could not reach the task there. So the task then listens on all interfaces, and warns.

    Args:
        cluster: All tasks with their addresses.
        own: The task.
        bind: Host name or address to listen on; by default the task's own.

    Returns:
        At least one address, without brackets; an address of ``ALL`` for all interfaces.

    Raises:
        InvalidArgumentError: The address does not belong to this machine, or cannot be looked up.
            The message names the remedy.

    Examples:
        >>> listen_on(ClusterSpec({"ps": ["localhost:2222"]}), TaskId("ps", 0))
        ('127.0.0.1',)
    """
    given, _ = split_address(cluster.task_address(own.job, own.index))
    host = (bind or given).removeprefix("[").removesuffix("]")
    # Clients dial 127.0.0.1 for "localhost". On ::1, a stranger could listen in the place of this
    # task.
    if host == "localhost":
        return (_LOCALHOST,)
    if host in ALL:
        return (host,)
    instead = (
        f"give Server(bind=...) or {BIND_VARIABLE} an address of this machine, 0.0.0.0 for all of "
        "them" + ("" if bind else f", where connections to {host} are led here")
    )
    try:
        found = addresses.look_up(host, 0, concurrency.monotonic() + times.LOOK_UP_SECS)
    except OSError as error:
        raise InvalidArgumentError(
            f"{host} cannot be listened on: {error}; {instead}", task=str(own)
        ) from None
    here = tuple(dict.fromkeys(str(a.sockaddr[0]) for a in found if _is_of_this_machine(a)))
    if not here:
        told = ", ".join(dict.fromkeys(str(a.sockaddr[0]) for a in found))
        what = (
            f"{host} is no address of this machine"
            if told == host
            else f"{host} is {told}, which is not this machine"
        )
        raise InvalidArgumentError(f"{what}: {instead}", task=str(own))
    if (
        not bind
        and is_loopback(here)
        and not _means_loopback(host)
        and any(split_address(address)[0] != host for address in cluster.tasks().values())
    ):
        logging.warning(
            "%s: %s is %s on this machine, where other hosts do not reach it: listening on all "
            "interfaces; give "
            f"Server(bind=...) or {BIND_VARIABLE} the address to listen on",
            *(own, host, ", ".join(here)),
        )
        return ALL[:1]
    return here


def is_loopback(hosts: Sequence[str]) -> bool:
    """Returns True if all addresses are on the loopback.

    Other machines cannot reach a loopback address.
    """
    return all(ipaddress.ip_address(host).is_loopback for host in hosts)


def _is_of_this_machine(address: addresses.Address) -> bool:
    # The kernel binds a socket only to an address of this machine. The interfaces do not list all
    # of 127.0.0.0/8.
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
