"""Roles of clients: the orders that a client may give to a task, by the name in the client's certificate.

A certificate may have the URI ``bellwether://RUN/ROLE/JOB/INDEX``, as `python -m harness.certs
--role` writes. JOB and INDEX are optional. A client without a role may give all orders: with a
certificate without the URI, with a token, or on the Unix socket of the task's own user. A client
with the observer's token has the role ``observer``.

``MAY`` is the only table of the orders that each role may give.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.errors import PermissionDeniedError

SCHEME = "bellwether://"
_NAME = re.compile(rf"{SCHEME}([A-Za-z0-9._-]+)/([a-z]+)(?:/([A-Za-z0-9_.-]+)/([0-9]+))?")
_DOMAIN = ".bellwether"
"""End of the DNS names of tasks in a certificate.

The holder of the certificate may serve as these tasks.
"""
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")


class ClientRole(enum.StrEnum):
    """The role of a client. ``MAY`` has the rights of each role."""

    OBSERVER = "observer"
    """Reader of figures and of the state of the run."""
    WORKER = "worker"
    """Task that trains."""
    CHIEF = "chief"
    """Task that trains and leads the run."""
    PS = "ps"
    """Task that holds variables. A ps fetches tensors, and stores a backup on the next ps."""
    ADMIN = "admin"
    """Reader who may also clear variables."""


_ALL = frozenset(ClientRole)
_TRAIN = frozenset((ClientRole.WORKER, ClientRole.CHIEF))
_TASKS = _TRAIN | {ClientRole.PS}
_JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "ps": ("ps",),
    "worker": ("worker", "evaluator"),
    "chief": ("chief", "worker"),
}
"""Jobs as whose tasks a client may serve, by the role in a certificate without JOB and INDEX."""
assert _JOBS.keys() == _TASKS, "a task's role serves as no job"

_ORDERS = {
    _ALL: "status metrics run.inspect unknown",
    _TASKS: "introduce tensors fetch",
    _TRAIN: """
        register unregister trace session step run.join run.rest run.done run.stop run.wait_stop
        run.wait_loaded run.wait_done checkpoint.states checkpoint.changed stage
    """,
    frozenset((ClientRole.CHIEF,)): """
        quorum run.claim run.load run.open run.finish checkpoint.pause checkpoint.let_through
        checkpoint.take checkpoint.write checkpoint.confirm checkpoint.read
        checkpoint.receive checkpoint.commit checkpoint.drop checkpoint.bytes
    """,
    frozenset((ClientRole.PS,)): "backup",
    frozenset((ClientRole.ADMIN,)): "clear",
}
MAY: Final[Mapping[str, frozenset[ClientRole]]] = {
    order: allowed for allowed, orders in _ORDERS.items() for order in orders.split()
}
assert len(MAY) == len(" ".join(_ORDERS.values()).split()), "an order is allowed twice"
"""Roles with the right to an order, by order.

* "unknown": an order that this version does not know. All clients pass this check, and the order
  fails later.
* "introduce": a ``Status`` call by which a task learns the addresses of its peers.
* "tensors": a connection of the tensor channel.
* "stage": the call of a stage.
* "quorum": a stage by which a chief decides on a synchronous step.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a client, as proved by the connection.

    Attributes:
        names: Names in the client's certificate; empty without a certificate.
        role: Role of the client. None allows all orders.
        run: Run in the certificate; empty if the certificate names none.
        task: Task in the certificate, such as ``/job:worker/task:1``; empty if the certificate
            names none.
    """

    names: tuple[str, ...] = ()
    role: ClientRole | None = None
    run: str = ""
    task: str = ""

    def __str__(self) -> str:
        """Returns the name of the client for messages and for the audit log."""
        return " ".join(self.names)

    def is_as(self, other: Identity) -> bool:
        """Returns True if two identities may belong to the same client.

        The identities may come from different times and connections. A renewed certificate may have
        new names. Its role, run and task are those of the old certificate, and without a task at
        least one host name is, too.
        """
        # A process shows a certificate over TCP, and none on the Unix socket of its user.
        if not self.names or not other.names:
            return True
        if (self.role, self.run, self.task) != (other.role, other.run, other.task):
            return False
        common = set(self.names) & set(other.names)
        return bool(self.task) or any(not name.startswith(SCHEME) for name in common)

    def names_host(self, host: str) -> bool:
        """Returns True if the certificate names a host, in full or by a wildcard.

        Examples:
            >>> Identity(names=("*.train.example",)).names_host("w0.train.example")
            True
        """
        wild = f"*.{host.partition('.')[2]}" if "." in host else host
        return any(name.lower() in (host.lower(), wild.lower()) for name in self.names)


ANYBODY = Identity()
"""Identity of a client without a certificate: with a token, of the task's own user, or of an insecure task."""
OBSERVER = Identity(role=ClientRole.OBSERVER)
"""Identity of a client with the observer's token."""


def identity_of(names: Iterable[str]) -> Identity:
    """Returns the identity of the holder of a certificate.

    Args:
        names: Subject's alternative names in the certificate.

    Raises:
        PermissionDeniedError: The certificate names an unknown role, or several roles.

    Examples:
        >>> identity_of(["w1", "bellwether://mnist/worker/worker/1"]).task
        '/job:worker/task:1'
    """
    all_names = tuple(shown_to_people(names))
    own = [name for name in all_names if name.lower().startswith(SCHEME)]
    if not own:
        return Identity(all_names)
    parts = _NAME.fullmatch(own[0])
    # Two URIs could claim two roles. To choose between them would be a guess.
    if len(own) > 1 or parts is None or parts[2] not in _ALL:
        raise PermissionDeniedError(
            f"its certificate says {' and '.join(own)[:300]!r}, which is no role: "
            f"{SCHEME}RUN/ROLE/JOB/INDEX, where "
            f"ROLE is {', '.join(ClientRole)}"
        )
    run, role, job, index = parts.groups()
    return Identity(
        all_names, ClientRole(role), run, f"/job:{job}/task:{int(index)}" if job else ""
    )


def check(order: str, who: Identity) -> None:
    """Checks that a client may give an order.

    Args:
        order: Order, a key of ``MAY``.
        who: Identity of the client.

    Raises:
        PermissionDeniedError: The client's role has no right to the order. The message names the
            roles with the right.

    Examples:
        >>> check("step", Identity(role=ClientRole.WORKER))
        >>> check("clear", Identity(role=ClientRole.WORKER))
        Traceback (most recent call last):
        runtime.errors.PermissionDeniedError: ...
    """
    allowed = MAY[order]
    if who.role is not None and who.role not in allowed:
        needed = " or ".join(role for role in ClientRole if role in allowed)
        raise PermissionDeniedError(
            f"{order!r} is for the role {needed}, and this client has the role {who.role}"
        )


def check_run(own: Identity, who: Identity) -> None:
    """Checks that a client belongs to the run of the task.

    Passes unless both certificates name a run.

    Args:
        own: Identity of the task.
        who: Identity of the client.

    Raises:
        PermissionDeniedError: The client belongs to another run.
    """
    if own.run and who.run and own.run != who.run:
        raise PermissionDeniedError(
            f"this task is of the run {own.run!r}, and the client's certificate of {who.run!r}"
        )


def check_registers(own: Identity, who: Identity) -> None:
    """Checks that a client may register stages on a task.

    A worker takes stages from itself and the chief only.

    Args:
        own: Identity of the task.
        who: Identity of the client.

    Raises:
        PermissionDeniedError: The task is a worker, and the client is another worker.
    """
    if own.role in _TRAIN and who.role is ClientRole.WORKER and who.task not in ("", own.task):
        raise PermissionDeniedError(
            f"stages of {own.task or 'a worker'} are for itself and the chief, not {who.task}"
        )


def shown_to_people(names: Iterable[str]) -> list[str]:
    """Returns the names of a certificate for messages: without the DNS names of tasks, which repeat the role."""
    return sorted({name for name in names if not name.lower().endswith(_DOMAIN)})


def server_names(said: str) -> list[str]:
    """Returns the DNS names for a certificate with a role: of the run, and of each task for the holder to serve as.

    Args:
        said: ``bellwether://RUN/ROLE/JOB/INDEX``, or ``bellwether://RUN/ROLE`` for every task of
            the role's jobs.

    Returns:
        The names; none for the roles observer and admin.

    Examples:
        >>> server_names("bellwether://mnist/ps/ps/0")
        ['0.ps.mnist.bellwether', 'mnist.bellwether']
        >>> server_names("bellwether://mnist/worker")
        ['*.worker.mnist.bellwether', '*.evaluator.mnist.bellwether', 'mnist.bellwether']
    """
    parts = _NAME.fullmatch(said)
    if parts is None or parts[2] not in _JOBS:
        return []
    run, role, job, index = parts.groups()
    tasks = (
        [f"/job:{job}/task:{int(index)}"]
        if job
        else [f"/job:{each}/task:*" for each in _JOBS[role]]
    )
    return [_server_name(run, task) for task in (*tasks, "")]


def server_name(own: Iterable[str], task: str) -> str:
    """Returns the DNS name required by a client in a server's certificate.

    Args:
        own: Names in the client's certificate.
        task: Task that the client means, such as "/job:ps/task:0"; empty for any task of the run.

    Returns:
        The name. Empty for a client without the role of a task: such a client requires the name of
        the host.

    Examples:
        >>> server_name(["bellwether://mnist/worker/worker/1"], "/job:ps/task:0")
        '0.ps.mnist.bellwether'
    """
    found = [parts for name in own if (parts := _NAME.fullmatch(name))]
    if len(found) != 1 or found[0][2] not in _JOBS:
        return ""
    return _server_name(found[0][1], task)


def has_name(names: Iterable[str], name: str) -> bool:
    """Returns True if a certificate is good for a DNS name.

    Args:
        names: Names in the certificate, with wildcards or without.
        name: DNS name, in lower case.

    Examples:
        >>> has_name(["*.ps.mnist.bellwether"], "0.ps.mnist.bellwether")
        True
    """
    return bool({name, f"*.{name.partition('.')[2]}"} & {shown.lower() for shown in names})


def _server_name(run: str, task: str) -> str:
    job, _, index = task.removeprefix("/job:").partition("/task:")
    return ".".join([index, _label(job), _label(run)] if task else [_label(run)]) + _DOMAIN


def _label(text: str) -> str:
    # DNS ignores case and splits names at dots. With capitals or dots, two runs or jobs could have
    # the same DNS name.
    return text if _LABEL.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:32]


def check_serves(names: Sequence[str], task: str) -> None:
    """Checks that the holder of a certificate may serve as a task.

    Args:
        names: Names in the certificate. A certificate without a role serves as any task.
        task: Task, such as "/job:ps/task:0".

    Raises:
        PermissionDeniedError: The certificate belongs to another task or to no task, or names an
            invalid role.

    Examples:
        >>> check_serves(["bellwether://mnist/ps/ps/0", "0.ps.mnist.bellwether"], "/job:ps/task:0")
    """
    who = identity_of(names)
    wanted = _server_name(who.run, task)
    if who.role is not None and not has_name(names, wanted):
        raise PermissionDeniedError(not_for_this_server(names, wanted))


def not_for_this_server(names: Iterable[str], wanted: str) -> str:
    """Returns the message about a certificate without the DNS name of the task.

    Args:
        names: Names in the certificate.
        wanted: Missing DNS name.
    """
    who = " ".join(shown_to_people(names))
    return (
        f"it is that of {who}, and has not the name {wanted}: it is another task's or run's, or "
        "older than 0.2 "
        "(`python -m harness.certs --renew`, with --role, --tasks and --run as before, writes that "
        "name)"
    )


def check_is_task(who: Identity, task: str, host: str) -> None:
    """Checks that an order comes from the task for which the order speaks.

    A client without a certificate passes.

    Args:
        who: Identity of the client.
        task: Task that the client claims to be.
        host: Host of the task in the cluster.

    Raises:
        PermissionDeniedError: The certificate belongs to another task, or names no task and belongs
            to another host.
    """
    if who.task and who.task != task:
        raise PermissionDeniedError(
            f"the certificate is that of {who.task}, and the order speaks for {task}"
        )
    # A certificate without JOB and INDEX serves for all tasks on its host.
    if who.names and not who.task and not who.names_host(host):
        raise PermissionDeniedError(
            f"the certificate is that of {who}, and the order speaks for {task}, which the cluster "
            f"has at {host}"
        )
