"""Limits: how much of a task others may use. Over one, a `ResourceExhaustedError` says which, and how to change it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import psutil

from runtime import retired
from runtime.errors import InvalidArgumentError, ResourceExhaustedError

VARIABLE: Final = "BELLWETHER_LIMITS"
"""Environment variable with the limits of servers that are given none: ``connections=100,hello_secs=5``."""
_MAX_MESSAGE: Final = 2**31 - 1
_TENSORS_SHARE: Final = 5 / 8
"""Part of the files that a process may open, for connections to the tensor port; the gRPC port has a quarter of it."""


def _limit(default: int | float, of: str, help: str, most: float = math.inf, words: str = "") -> Any:
    """Returns a field for a limit.

    Args:
        default: the default; with ``words``, the part of this machine's memory that it is.
        of: the group of the limit.
        help: the meaning of the limit.
        most: the largest value that it may have.
        words: the default in words; the number by default.
    """
    told = words or f"{default:,}".removesuffix(".0")
    metadata = {"default": told, "of": of, "help": help, "most": most}
    if words:
        return field(default_factory=lambda: int(psutil.virtual_memory().total * default), metadata=metadata)
    return field(default=default, metadata=metadata)


_PORTS, _CALLS, _MEMORY, _PROGRAMS, _RUN = "ports", "calls", "memory", "programs", "run and checkpoints"


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
        _PORTS,
        "Connections to the tensor port; a sixteenth of them for one client, a quarter as many to the gRPC port. One "
        "more ends one that is idle: of the client that has most, the one that was silent longest.",
    )
    handshakes: int = _limit(
        128, _PORTS, "Connections that have not shown who they are. One more ends the oldest silent one."
    )
    hello_secs: float = _limit(10.0, _PORTS, "Seconds that a connection has to show who it is.", most=600.0)
    rpc_idle_secs: float = _limit(
        3600.0,
        _PORTS,
        "Seconds after which a connection to the gRPC port without a call is closed; its client makes another.",
    )
    payload_bytes: int = _limit(
        4 << 30, _CALLS, "Bytes of one call whose tensors describe themselves (strings, elements of queues)."
    )
    request_bytes: int = _limit(
        64 << 20, _CALLS, "Bytes of one message of gRPC, a request or an answer; none is compressed.", _MAX_MESSAGE
    )
    registrations: int = _limit(
        32, _CALLS, "Stages registered at once, which may have to be compiled. One more waits its turn."
    )
    waiting_calls: int = _limit(
        1024,
        _CALLS,
        "Calls at once that may wait: steps and sessions of clients elsewhere, waits for the run record; a quarter of "
        "them of one connection.",
    )
    sessions: int = _limit(
        1024,
        _CALLS,
        "Sessions of clients elsewhere whose steps this task runs, a sixteenth of them opened by one connection. Four "
        "times as many may have stages here.",
    )
    client_bytes: int = _limit(
        0.25,
        _MEMORY,
        "Bytes that a task keeps for one session: stages, and up to seven eighths of values (not of variables).",
        words="a quarter of the memory",
    )
    task_bytes: int = _limit(
        0.9,
        _MEMORY,
        "Bytes that a task keeps for all sessions: stages, and up to seven eighths of values and variables.",
        words="nine tenths of the memory",
    )
    program_secs: float = _limit(
        600.0, _PROGRAMS, "Seconds that a program of another process may run. One that runs longer ends the task."
    )
    participants: int = _limit(4096, _RUN, "Tasks in the run record.")
    checkpoint_jobs: int = _limit(16, _RUN, "Saves and restores under way.")

    # What nobody has to change: constants, and what follows from the fields.
    frame_secs: ClassVar[float] = 30.0
    """Seconds that a call may be on its way at whatever rate."""
    frame_rate: ClassVar[int] = 64 << 10
    """Bytes a second that a call must come at, on average, when it takes longer than ``frame_secs``."""
    calls: ClassVar[int] = 64
    """Calls at once that ask and wait for nothing; one more waits its turn. So are the two below."""
    orders: ClassVar[int] = 64
    checkpoint_orders: ClassVar[int] = 64
    order_secs: ClassVar[float] = 21600.0
    """Seconds that one order about a checkpoint may take."""
    run_order_secs: ClassVar[float] = 60.0
    """Seconds that one order to the run record waits; a client asks again to wait longer."""
    pause_secs: ClassVar[float] = 10.0
    """Seconds that one order holds updates back, for a checkpoint."""
    session_plans: ClassVar[int] = 512
    """Plans of one session of a client elsewhere; one more ends the least recently used."""
    plan_slots: ClassVar[int] = 1 << 20
    """Values between the stages of one plan."""
    session_stages: ClassVar[int] = 4096
    """Stages of one session."""
    spare_stages: ClassVar[int] = 256
    """Stages kept without a session, for the next one of an equal graph."""

    @property
    def client_connections(self) -> int:
        """Connections of one client to the tensor port."""
        return max(4, self.connections // 16)

    @property
    def client_lanes(self) -> int:
        """Lanes remembered of one client; one more ends the memory of its oldest that is closed."""
        return max(1, self.connections // 4)

    @property
    def rpc_connections(self) -> int:
        """Connections to the gRPC port; one more is closed."""
        return max(1, self.connections // 4)

    @property
    def client_waiting_calls(self) -> int:
        """Calls at once that may wait, of one connection."""
        return max(1, self.waiting_calls // 4)

    @property
    def client_sessions(self) -> int:
        """Sessions of clients elsewhere that one connection has opened."""
        return max(1, self.sessions // 16)

    @property
    def stage_sessions(self) -> int:
        """Sessions with stages; one more ends the oldest that is not connected."""
        return 4 * self.sessions

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
            LimitRow(found.name, float if found.type == "float" else int, **found.metadata)
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
            if gone := retired.explain_name(f"Limits({name}=)"):
                raise InvalidArgumentError(f"{source}: {gone}")
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
        return dataclasses.replace(self, connections=max(1, min(self.connections, int(descriptors * _TENSORS_SHARE))))

    def exceeded(self, name: str, what: str, task: str = "") -> ResourceExhaustedError:
        """The error of a request that is over a limit.

        Args:
            name: of the limit, or of a constant or what follows from a limit.
            what: was asked for, or is there already.
            task: whose limit it is.
        """
        change = f" (--limit_{name}, Server(limits=), {VARIABLE})" if name in self.__dict__ else ""
        error = ResourceExhaustedError(f"{what}: the limit {name} is {getattr(self, name)}{change}", task=task)
        error.limit = name
        return error


# A name that is gone gets the line about it. A dataclass makes its constructor itself, so this stands behind it.
Limits.__init__ = retired.explains_arguments(Limits.__init__)  # type: ignore[method-assign]
