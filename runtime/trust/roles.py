"""Roles: what the client of a task may order, by what its certificate says that it is.

A certificate may hold a name ``bellwether://RUN/ROLE/JOB/INDEX`` (a URI, as `python -m harness.certs --role` writes
it); JOB and INDEX may be left out. Who has none, who shows a token, and processes of the task's own user on the Unix
socket may order everything, as all could before there were roles. Who shows the observer's token is an observer.

``MAY`` is the one place that says which role may give which order.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from runtime.errors import PermissionDeniedError

SCHEME: Final = "bellwether://"
_NAME: Final = re.compile(rf"{SCHEME}([A-Za-z0-9._-]+)/([a-z]+)(?:/([A-Za-z0-9_.-]+)/([0-9]+))?")
_DOMAIN: Final = ".bellwether"
"""The end of the DNS names that say in a certificate which task its holder may serve as."""
_LABEL: Final = re.compile(r"[a-z0-9_-]{1,63}")


class ClientRole(enum.StrEnum):
    """What a client of a task is for."""

    OBSERVER = "observer"
    """Looks: figures and the state of the run."""
    WORKER = "worker"
    """Trains."""
    CHIEF = "chief"
    """Trains and leads the run."""
    PS = "ps"
    """Holds variables; fetches tensors, and backs itself up on its neighbour."""
    ADMIN = "admin"
    """Looks, and clears variables."""


_ALL: Final = frozenset(ClientRole)
_TRAIN: Final = frozenset((ClientRole.WORKER, ClientRole.CHIEF))
_TASKS: Final = _TRAIN | {ClientRole.PS}
_JOBS: Final[Mapping[str, tuple[str, ...]]] = {
    "ps": ("ps",),
    "worker": ("worker", "evaluator"),
    "chief": ("chief", "worker"),
}
"""By the role of a certificate that names no task, the jobs of the tasks that its holder may serve as."""

_ORDERS: Final = {
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
"""By order, the roles that may give it. "unknown" is what this version does not know, and refuses by itself;
"introduce" a status by which a task hears where its peers are; "tensors" a connection of the tensor channel; "stage"
the call of a stage; "quorum" a stage by which a chief decides on a step."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is at the other end of a connection, as far as it has shown that.

    Attributes:
        names: in its certificate; none without one.
        role: None: everything is allowed.
        run: for which its certificate was made; empty when it does not say.
        task: that it is, ``/job:worker/task:1``; empty when its certificate does not say.
    """

    names: tuple[str, ...] = ()
    role: ClientRole | None = None
    run: str = ""
    task: str = ""

    def __str__(self) -> str:
        """What it is called in messages and in the audit log."""
        return " ".join(self.names)

    def is_as(self, other: Identity) -> bool:
        """Whether the two may be one client, at different times or by different ways.

        A process has a certificate over TCP and none on the Unix socket of its user. One that is renewed may have
        further names, and says the same of its task, or else has a name of before.
        """
        if not self.names or not other.names:
            return True
        if (self.role, self.run, self.task) != (other.role, other.run, other.task):
            return False
        common = set(self.names) & set(other.names)
        return bool(self.task) or any(not name.startswith(SCHEME) for name in common)

    def names_host(self, host: str) -> bool:
        """Whether the certificate is one of a host."""
        wild = f"*.{host.partition('.')[2]}" if "." in host else host
        return any(name.lower() in (host.lower(), wild.lower()) for name in self.names)


ANYBODY: Final = Identity()
"""Who has shown no certificate and was let in: by a token, by being the same user, or because everybody is."""
OBSERVER: Final = Identity(role=ClientRole.OBSERVER)
"""Who has shown the observer's token."""


def identity_of(names: Iterable[str]) -> Identity:
    """Who a certificate says that its holder is.

    Args:
        names: its alternative names.

    Raises:
        PermissionDeniedError: it names a role that is none, or several.
    """
    all_names = tuple(shown_to_people(names))
    own = [name for name in all_names if name.lower().startswith(SCHEME)]
    if not own:
        return Identity(all_names)
    parts = _NAME.fullmatch(own[0])
    if len(own) > 1 or parts is None or parts[2] not in _ALL:
        raise PermissionDeniedError(
            f"its certificate says {' and '.join(own)[:300]!r}, which is no role: {SCHEME}RUN/ROLE/JOB/INDEX, where "
            f"ROLE is {', '.join(ClientRole)}"
        )
    run, role, job, index = parts.groups()
    return Identity(all_names, ClientRole(role), run, f"/job:{job}/task:{int(index)}" if job else "")


def check(order: str, who: Identity) -> None:
    """Sees that somebody may give an order.

    Raises:
        PermissionDeniedError: the role does not allow it; names the order, the role and those that do.
    """
    allowed = MAY[order]
    if who.role is not None and who.role not in allowed:
        needed = " or ".join(role for role in ClientRole if role in allowed)
        raise PermissionDeniedError(f"{order!r} is for the role {needed}, and this client has the role {who.role}")


def check_run(own: Identity, who: Identity) -> None:
    """Sees that a client is of the task's own run, where both certificates say of which they are.

    Raises:
        PermissionDeniedError: it is of another.
    """
    if own.run and who.run and own.run != who.run:
        raise PermissionDeniedError(f"this task is of the run {own.run!r}, and the client's certificate of {who.run!r}")


def check_registers(own: Identity, who: Identity) -> None:
    """Checks that a client may register stages on a task: on a worker only that worker and the chief may.

    Args:
        own: identity of the task.
        who: identity of the client.

    Raises:
        PermissionDeniedError: The client is another worker.
    """
    if own.role in _TRAIN and who.role is ClientRole.WORKER and who.task not in ("", own.task):
        raise PermissionDeniedError(f"stages of {own.task or 'a worker'} are for itself and the chief, not {who.task}")


def shown_to_people(names: Iterable[str]) -> list[str]:
    """Returns the names of a certificate without the DNS names of tasks, which say the role once more."""
    return sorted({name for name in names if not name.lower().endswith(_DOMAIN)})


def server_names(said: str) -> list[str]:
    """Returns the DNS names of a certificate with a role: of the tasks that its holder may serve as, and of the run.

    Args:
        said: ``bellwether://RUN/ROLE/JOB/INDEX``, or ``bellwether://RUN/ROLE`` for every task of the role's jobs.

    Returns:
        The names; none for a role that serves as no task.

    Example:
        >>> server_names("bellwether://mnist/ps/ps/0")
        ['0.ps.mnist.bellwether', 'mnist.bellwether']
        >>> server_names("bellwether://mnist/worker")
        ['*.worker.mnist.bellwether', '*.evaluator.mnist.bellwether', 'mnist.bellwether']
    """
    parts = _NAME.fullmatch(said)
    if parts is None or parts[2] not in _JOBS:
        return []
    run, role, job, index = parts.groups()
    tasks = [f"/job:{job}/task:{int(index)}"] if job else [f"/job:{each}/task:*" for each in _JOBS[role]]
    return [_server_name(run, task) for task in (*tasks, "")]


def server_name(own: Iterable[str], task: str) -> str:
    """Returns the DNS name that a client asks of a server's certificate.

    Args:
        own: names in the client's certificate.
        task: that the client means, such as "/job:ps/task:0"; empty where it may be any of the run.

    Returns:
        The name; empty for a client whose certificate is of no task's role: it asks for the name of the host.
    """
    found = [parts for name in own if (parts := _NAME.fullmatch(name))]
    if len(found) != 1 or found[0][2] not in _JOBS:
        return ""
    return _server_name(found[0][1], task)


def has_name(names: Iterable[str], name: str) -> bool:
    """Returns True if a certificate with these names is good for a DNS name."""
    return bool({name, f"*.{name.partition('.')[2]}"} & {shown.lower() for shown in names})


def _server_name(run: str, task: str) -> str:
    job, _, index = task.removeprefix("/job:").partition("/task:")
    return ".".join([index, _label(job), _label(run)] if task else [_label(run)]) + _DOMAIN


def _label(text: str) -> str:
    # DNS compares without case, and a dot separates: such a name of a run or job would be that of another.
    return text if _LABEL.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:32]


def check_serves(names: Sequence[str], task: str) -> None:
    """Checks that the holder of a certificate may serve as a task.

    Args:
        names: in the certificate. A certificate without a role serves as any task.
        task: such as "/job:ps/task:0".

    Raises:
        PermissionDeniedError: The certificate is that of another task, or of no task.
    """
    who = identity_of(names)
    wanted = _server_name(who.run, task)
    if who.role is not None and not has_name(names, wanted):
        raise PermissionDeniedError(not_for_this_server(names, wanted))


def not_for_this_server(names: Iterable[str], wanted: str) -> str:
    """Returns the message about a certificate that lacks the name of the task."""
    who = " ".join(shown_to_people(names))
    return (
        f"it is that of {who}, and has not the name {wanted}: it is another task's or run's, or older than 0.2 "
        "(`python -m harness.certs --renew`, with --role, --tasks and --run as before, writes that name)"
    )


def check_is_task(who: Identity, task: str, host: str) -> None:
    """Sees that a client is the task that it says it is, as far as its certificate tells.

    Args:
        who: the client.
        task: that it says it is.
        host: of that task in the cluster.

    Raises:
        PermissionDeniedError: its certificate is of another task, or, where it names none, of another host.
    """
    if who.task and who.task != task:
        raise PermissionDeniedError(f"the certificate is that of {who.task}, and the order speaks for {task}")
    if who.names and not who.task and not who.names_host(host):
        raise PermissionDeniedError(
            f"the certificate is that of {who}, and the order speaks for {task}, which the cluster has at {host}"
        )
