"""Limits: how much of a task others may use. Over one, a `ResourceExhaustedError` says which, and how to change it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psutil

from runtime.errors import InvalidArgumentError, ResourceExhaustedError

VARIABLE: Final = "BELLWETHER_LIMITS"
"""Environment variable with the limits of servers that are given none: ``connections=100,hello_secs=5``."""
_MAX_MESSAGE: Final = 2**31 - 1
_TENSORS_SHARE: Final = 5 / 8
_CALLS_SHARE: Final = 1 / 4
"""Of the files that a process may open, for connections of the one port and of the other."""


def _limit(default: int | float, of: str, help: str, most: float = math.inf) -> Any:
    """A field: its default, the group that it stands in, what it says of itself, and the largest value it may have."""
    return field(default=default, metadata={"of": of, "help": help, "most": most})


def _share(part: float, words: str, of: str, help: str) -> Any:
    """A field in bytes, by default a part of this machine's memory."""
    metadata = {"of": of, "help": help, "most": math.inf, "default": words}
    return field(default_factory=lambda: int(psutil.virtual_memory().total * part), metadata=metadata)


_TENSORS, _CALLS, _SESSIONS, _MEMORY, _RUN = "tensor port", "gRPC port", "sessions", "memory", "run and checkpoints"
_PROGRAMS = "programs"


class LimitRow(NamedTuple):
    """One limit, for whoever shows them or makes flags of them.

    Attributes:
        name: of the field.
        kind: int or float.
        default: in words.
        of: what it is a limit of.
        help: what it says, in a sentence or two.
        most: the largest value that it may have.
    """

    name: str
    kind: type[int] | type[float]
    default: str
    of: str
    help: str
    most: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of one task others may use. Each field is also a flag of the trainer, ``--limit_`` and its name.

    A client is a session, or another task that fetches tensors; on the gRPC port it is a connection. What a process
    does with its own task has no limit but those of what is held for others.

    Raises:
        InvalidArgumentError: a limit is not above zero, or larger than it may be; names it.
    """

    connections: int = _limit(
        4096,
        _TENSORS,
        "Connections. One more ends one that is idle: of the client that has most, the one that was silent longest.",
    )
    client_connections: int = _limit(
        256, _TENSORS, "Connections of one client; each call that waits has one, and so has the heartbeat."
    )
    client_lanes: int = _limit(
        1024, _TENSORS, "Lanes remembered of one client. One more ends the memory of its oldest that is closed."
    )
    handshakes: int = _limit(
        128, _TENSORS, "Connections that have not shown who they are. One more ends the oldest silent one."
    )
    hello_secs: float = _limit(
        10.0, _TENSORS, "Seconds that a connection has to show who it is, on either port.", most=600.0
    )
    frame_secs: float = _limit(30.0, _TENSORS, "Seconds that a call may be on its way at whatever rate.")
    frame_rate: int = _limit(
        64 << 10, _TENSORS, "Bytes a second that a call must come at, on average, when it takes longer than frame_secs."
    )
    payload_bytes: int = _limit(
        4 << 30, _TENSORS, "Bytes of one call whose tensors describe themselves (strings, elements of queues)."
    )
    request_bytes: int = _limit(64 << 20, _CALLS, "Bytes of one message; none is compressed.", most=_MAX_MESSAGE)
    rpc_connections: int = _limit(1024, _CALLS, "Connections. One more is closed.")
    rpc_idle_secs: float = _limit(
        3600.0, _CALLS, "Seconds after which a connection without a call is closed; its client connects again to call."
    )
    calls: int = _limit(
        64, _CALLS, "Calls at once that ask and wait for nothing, such as status. One more waits its turn."
    )
    orders: int = _limit(64, _CALLS, "Orders at once that wait for nothing. One more waits its turn.")
    checkpoint_orders: int = _limit(
        64, _CALLS, "Orders at once that take, write, read or compare checkpoints. One more waits its turn."
    )
    registrations: int = _limit(
        32, _CALLS, "Stages registered at once, which may have to be compiled. One more waits its turn."
    )
    waiting_calls: int = _limit(
        1024,
        _CALLS,
        "Calls at once that may wait: steps and sessions of clients elsewhere, waits for the run record.",
    )
    client_waiting_calls: int = _limit(256, _CALLS, "Calls at once that may wait, of one connection.")
    order_secs: float = _limit(21600.0, _CALLS, "Seconds that one order about a checkpoint may take.")
    sessions: int = _limit(1024, _SESSIONS, "Sessions of clients elsewhere whose steps this task runs.")
    client_sessions: int = _limit(64, _SESSIONS, "Sessions of clients elsewhere that one connection has opened.")
    session_plans: int = _limit(
        512, _SESSIONS, "Plans of one session of a client elsewhere. One more ends the least recently used."
    )
    plan_slots: int = _limit(1 << 20, _SESSIONS, "Values between the stages of one plan.")
    stage_sessions: int = _limit(
        4096, _SESSIONS, "Sessions with stages. One more ends the oldest that is not connected."
    )
    session_stages: int = _limit(4096, _SESSIONS, "Stages of one session.")
    spare_stages: int = _limit(256, _SESSIONS, "Stages kept without a session, for the next one of an equal graph.")
    held_bytes: int = _share(0.5, "half of the memory", _MEMORY, "Bytes of tensors held for other tasks to fetch.")
    client_held_bytes: int = _share(0.25, "a quarter of the memory", _MEMORY, "Bytes of tensors held for one session.")
    program_secs: float = _limit(
        600.0, _PROGRAMS, "Seconds that a program of another process may run. One that runs longer ends the task."
    )
    participants: int = _limit(4096, _RUN, "Tasks in the run record.")
    run_order_secs: float = _limit(
        60.0, _RUN, "Seconds that one order to the run record waits; who wants to wait on asks again."
    )
    pause_secs: float = _limit(10.0, _RUN, "Seconds that one order holds updates back, for a checkpoint.")
    checkpoint_jobs: int = _limit(16, _RUN, "Saves and restores under way.")

    def __post_init__(self) -> None:
        """Sees that each can be a limit."""
        for row in self.rows():
            value = getattr(self, row.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or (row.kind is float and isinstance(value, float))) or not 0 < value <= row.most:
                kind = "a number" if row.kind is float else "a whole number"
                above = "" if math.isinf(row.most) else f" and at most {row.most:g}"
                raise InvalidArgumentError(f"the limit {row.name} is {value!r}, not {kind} above 0{above}")

    @classmethod
    def rows(cls) -> list[LimitRow]:
        """All limits with their defaults, in words."""
        return [
            LimitRow(
                name=found.name,
                kind=float if found.type == "float" else int,
                default=found.metadata.get("default") or f"{found.default:,}".removesuffix(".0"),
                of=found.metadata["of"],
                help=found.metadata["help"],
                most=found.metadata["most"],
            )
            for found in dataclasses.fields(cls)
        ]

    @classmethod
    def from_text(cls, text: str, source: str = VARIABLE) -> Limits:
        """The limits that a text such as ``connections=100,hello_secs=5`` gives, the others as they are by default.

        Args:
            text: of names and values.
            source: where it stands, for the error.

        Raises:
            InvalidArgumentError: there is no such limit, or its value is none.
        """
        kinds = {row.name: row.kind for row in cls.rows()}
        values: dict[str, int | float] = {}
        for entry in filter(None, map(str.strip, text.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            if name not in kinds:
                raise InvalidArgumentError(f"{source}: there is no limit {name!r}; there are {', '.join(kinds)}")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise InvalidArgumentError(f"{source}: {entry!r} gives no number") from None
        return cls(**values)  # type: ignore[arg-type]  # each is of its field's kind

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Limits:
        """What ``BELLWETHER_LIMITS`` gives.

        Raises:
            InvalidArgumentError: as ``from_text``.
        """
        return cls.from_text(environ.get(VARIABLE, ""))

    def within(self, descriptors: int) -> Limits:
        """The same for a process that may have so many open files: connections must leave some of them to others.

        Args:
            descriptors: as ``ulimit -n`` gives.
        """
        return dataclasses.replace(
            self,
            connections=max(1, min(self.connections, int(descriptors * _TENSORS_SHARE))),
            rpc_connections=max(1, min(self.rpc_connections, int(descriptors * _CALLS_SHARE))),
        )

    def exceeded(self, name: str, what: str, task: str = "") -> ResourceExhaustedError:
        """The error of a request that is over a limit.

        Args:
            name: of the limit.
            what: was asked for, or is there already.
            task: whose limit it is.
        """
        value = getattr(self, name)
        error = ResourceExhaustedError(
            f"{what}: the limit {name} is {value} (--limit_{name}, Server(limits=), {VARIABLE})", task=task
        )
        error.limit = name
        return error
