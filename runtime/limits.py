"""Limits on the use of a task by other processes.

A request over a limit fails with a `ResourceExhaustedError`, which names the limit and the ways to
change the limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import psutil

from runtime import retired
from runtime.errors import InvalidArgumentError, ResourceExhaustedError

VARIABLE = "BELLWETHER_LIMITS"
"""Environment variable with the limits of servers without a ``limits`` argument: ``connections=100,hello_secs=5``."""
# gRPC holds the size of a message in a signed number of 32 bits.
_MAX_MESSAGE = 2**31 - 1
# The gRPC port gets a quarter of the tensor port's connections, so a fifth of all open files is
# left for the rest.
_TENSORS_SHARE = 5 / 8
"""Share of the open files of a process for connections to the tensor port."""


def _limit(
    default: int | float, of: str, help: str, most: float = math.inf, words: str = ""
) -> Any:
    """Returns a field for a limit.

    Args:
        default: Default value; with ``words``, the share of this machine's memory.
        of: Group of the limit.
        help: Meaning of the limit, for the user.
        most: Largest valid value.
        words: Default in words; the number itself by default.
    """
    told = words or f"{default:,}".removesuffix(".0")
    metadata = {"default": told, "of": of, "help": help, "most": most}
    # The size of the memory is read when limits are made, not at each import of this module.
    if words:
        return field(
            default_factory=lambda: int(psutil.virtual_memory().total * default), metadata=metadata
        )
    return field(default=default, metadata=metadata)


_PORTS, _CALLS, _MEMORY, _PROGRAMS, _RUN = (
    "ports",
    "calls",
    "memory",
    "programs",
    "run and checkpoints",
)


class LimitRow(NamedTuple):
    """The description of one limit, for flags and pages.

    Attributes:
        name: Name of the field in `Limits`.
        kind: Type of the value, int or float.
        default: Default, in words.
        of: Group of the limit.
        help: Meaning of the limit, in a sentence or two.
        most: Largest valid value.
    """

    name: str
    kind: type[int] | type[float]
    default: str
    of: str
    help: str
    most: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits on the use of one task by other processes.

    Each field is also a flag of the trainer, such as ``--limit_connections``. On the tensor port a
    client is a session, or another task that fetches tensors. On the gRPC port a client is a
    connection. A process may use its own task without limits, except for the memory kept for
    sessions.

    Raises:
        InvalidArgumentError: A limit is not above zero, or is too large. The message names the
            limit.

    Examples:
        >>> limits = Limits(connections=100, hello_secs=5)
        >>> limits.rpc_connections
        25
    """

    connections: int = _limit(
        4096,
        _PORTS,
        "Connections to the tensor port; a sixteenth of them for one client, a quarter as many to "
        "the gRPC port. One "
        "more ends one that is idle: of the client that has most, the one that was silent longest.",
    )
    handshakes: int = _limit(
        128,
        _PORTS,
        "Connections that have not shown who they are. One more ends the oldest silent one.",
    )
    hello_secs: float = _limit(
        10.0, _PORTS, "Seconds that a connection has to show who it is.", most=600.0
    )
    rpc_idle_secs: float = _limit(
        3600.0,
        _PORTS,
        "Seconds after which a connection to the gRPC port without a call is closed; its client "
        "makes another.",
    )
    payload_bytes: int = _limit(
        4 << 30,
        _CALLS,
        "Bytes of one call whose tensors describe themselves (strings, elements of queues).",
    )
    request_bytes: int = _limit(
        64 << 20,
        _CALLS,
        "Bytes of one message of gRPC, a request or an answer; none is compressed.",
        _MAX_MESSAGE,
    )
    registrations: int = _limit(
        32,
        _CALLS,
        "Stages registered at once, which may have to be compiled. One more waits its turn.",
    )
    waiting_calls: int = _limit(
        1024,
        _CALLS,
        "Calls at once that may wait: steps and sessions of clients elsewhere, waits for the run "
        "record; a quarter of "
        "them of one connection.",
    )
    sessions: int = _limit(
        1024,
        _CALLS,
        "Sessions of clients elsewhere whose steps this task runs, a sixteenth of them opened by "
        "one connection. Four "
        "times as many may have stages here.",
    )
    client_bytes: int = _limit(
        0.25,
        _MEMORY,
        "Bytes that a task keeps for one session: stages, and up to seven eighths of values (not "
        "of variables).",
        words="a quarter of the memory",
    )
    task_bytes: int = _limit(
        0.9,
        _MEMORY,
        "Bytes that a task keeps for all sessions: stages, and up to seven eighths of values and "
        "variables.",
        words="nine tenths of the memory",
    )
    program_secs: float = _limit(
        600.0,
        _PROGRAMS,
        "Seconds that a program of another process may run. One that runs longer ends the task.",
    )
    program_share: float = _limit(
        0.9,
        _PROGRAMS,
        "Share of a minute in which programs of one session may keep updates of others waiting. A "
        "session above it may "
        "run no program for as long as it kept them waiting.",
        most=1.0,
    )
    participants: int = _limit(4096, _RUN, "Tasks in the run record.")
    checkpoint_jobs: int = _limit(16, _RUN, "Saves and restores under way.")

    # No user needs to change the limits below, so they are constants or follow from the fields.
    frame_secs: ClassVar[float] = 30.0
    """Seconds that a call may take to arrive at any rate."""
    frame_rate: ClassVar[int] = 64 << 10
    """Least average rate, in bytes a second, of a call that takes longer than ``frame_secs`` to arrive."""
    calls: ClassVar[int] = 64
    """Calls at once that wait for nothing, such as reports. Further calls wait their turn."""
    orders: ClassVar[int] = 64
    """Short orders at once. Further orders wait their turn."""
    checkpoint_orders: ClassVar[int] = 64
    """Orders about checkpoints at once, without the short ones. Further orders wait their turn."""
    order_secs: ClassVar[float] = 21600.0
    """Seconds that an order about a checkpoint may take."""
    run_order_secs: ClassVar[float] = 60.0
    """Seconds that an order to the run record waits. A client repeats the order to wait longer."""
    pause_secs: ClassVar[float] = 10.0
    """Seconds for which an order may hold updates back, for a checkpoint."""
    session_plans: ClassVar[int] = 512
    """Plans of one session of a client elsewhere.

    The next plan replaces the least recently used.
    """
    plan_slots: ClassVar[int] = 1 << 20
    """Values between the stages of one plan."""
    session_stages: ClassVar[int] = 4096
    """Stages of one session."""
    spare_stages: ClassVar[int] = 256
    """Stages that stay without a session, for the next session with an equal graph."""

    @property
    def client_connections(self) -> int:
        """Connections of one client to the tensor port."""
        return max(4, self.connections // 16)

    @property
    def client_lanes(self) -> int:
        """Lanes remembered for one client.

        The next lane replaces the oldest closed lane of the client.
        """
        return max(1, self.connections // 4)

    @property
    def rpc_connections(self) -> int:
        """Connections to the gRPC port. The next connection is closed."""
        return max(1, self.connections // 4)

    @property
    def client_waiting_calls(self) -> int:
        """Waiting calls at once of one connection."""
        return max(1, self.waiting_calls // 4)

    @property
    def client_sessions(self) -> int:
        """Open sessions of clients elsewhere from one connection."""
        return max(1, self.sessions // 16)

    @property
    def stage_sessions(self) -> int:
        """Sessions with stages. The next session ends the oldest session without a connection."""
        return 4 * self.sessions

    def __post_init__(self) -> None:
        """Checks the value of each field."""
        for row in self.rows():
            value = getattr(self, row.name)
            # Python takes True for 1, but as a limit True is a mistake.
            whole = isinstance(value, int) and not isinstance(value, bool)
            if (
                not (whole or (row.kind is float and isinstance(value, float)))
                or not 0 < value <= row.most
            ):
                kind = "a number" if row.kind is float else "a whole number"
                above = "" if math.isinf(row.most) else f" and at most {row.most:g}"
                raise InvalidArgumentError(
                    f"the limit {row.name} is {value!r}, not {kind} above 0{above}"
                )

    @classmethod
    def rows(cls) -> list[LimitRow]:
        """Returns the descriptions of all fields."""
        return [
            LimitRow(found.name, float if found.type == "float" else int, **found.metadata)
            for found in dataclasses.fields(cls)
        ]

    @classmethod
    def from_text(cls, text: str, source: str = VARIABLE) -> Limits:
        """Returns the limits in a text. Limits that the text does not name have their defaults.

        Args:
            text: Names and values, such as ``connections=100,hello_secs=5``.
            source: Origin of the text, for errors.

        Raises:
            InvalidArgumentError: A name is no limit, or a value is no valid number for the limit.

        Examples:
            >>> Limits.from_text("connections=100,hello_secs=5").hello_secs
            5.0
        """
        kinds = {row.name: row.kind for row in cls.rows()}
        values: dict[str, int | float] = {}
        for entry in filter(None, map(str.strip, text.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            if gone := retired.explain_name(f"Limits({name}=)"):
                raise InvalidArgumentError(f"{source}: {gone}")
            if name not in kinds:
                raise InvalidArgumentError(
                    f"{source}: there is no limit {name!r}; there are {', '.join(kinds)}"
                )
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise InvalidArgumentError(f"{source}: {entry!r} gives no number") from None
        return cls(**values)  # type: ignore[arg-type]  # each is of its field's kind

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Limits:
        """Returns the limits in ``BELLWETHER_LIMITS``, or the defaults.

        Raises:
            InvalidArgumentError: The variable names an unknown limit or has an invalid value.
        """
        return cls.from_text(environ.get(VARIABLE, ""))

    def within(self, descriptors: int) -> Limits:
        """Returns a copy with connections for a limit on open files.

        Args:
            descriptors: Most open files of the process, as ``ulimit -n`` prints.

        Examples:
            >>> Limits().within(1024).connections
            640
        """
        return dataclasses.replace(
            self, connections=max(1, min(self.connections, int(descriptors * _TENSORS_SHARE)))
        )

    def exceeded(self, name: str, what: str, task: str = "") -> ResourceExhaustedError:
        """Returns the error of a request over a limit.

        Args:
            name: Name of a field, constant or property of this class.
            what: Request, or present use, in words.
            task: Name of the task with the limit.
        """
        # Only fields can be changed by the user.
        change = f" (--limit_{name}, Server(limits=), {VARIABLE})" if name in self.__dict__ else ""
        error = ResourceExhaustedError(
            f"{what}: the limit {name} is {getattr(self, name)}{change}", task=task
        )
        error.limit = name
        return error


# A retired argument raises an error that explains the retirement. The dataclass makes __init__, so
# it is wrapped here.
Limits.__init__ = retired.explains_arguments(Limits.__init__)  # type: ignore[method-assign]
