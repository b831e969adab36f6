"""What a server remembers of each lane, so that a call that is sent twice runs once.

A lane's calls are numbered. For each lane the server keeps which connection speaks for it (the newest), which call
is running, and the reply of the last call that had an effect, until the next call shows that it arrived.
"""

import threading
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from runtime.errors import FailedPreconditionError, PermissionDeniedError
from runtime.limits import Limits
from runtime.trust.roles import ANYBODY, Identity

_WAIT_SECS = 1.0


class Owner(Protocol):
    """A connection that speaks for a lane."""

    gone: bool
    """True if its client has hung up."""
    heard_at: float
    """`time.monotonic()` of its client's last sign of life: the connection itself, or a ping."""


Kept = TypeVar("Kept")


class Superseded(Exception):
    """Nobody waits for this connection's answer any more; its thread must end without answering."""


class LaneRecord(Generic[Kept]):
    """The memory of one lane. The thread of its owner calls `begin` and `finish` around each call."""

    __slots__ = ("_changed", "_kept", "_running", "_waiting", "attempt", "closed_at", "lock", "memory", "owner", "seq")

    def __init__(self) -> None:
        """A lane of which nothing has happened yet."""
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiting = 0
        self.seq = 0
        """Number of the newest call."""
        self._running = False
        self._kept: Kept | None = None
        self.memory: dict[str, Any] = {}
        """What the handler has noted of the newest call, for the run that takes the place of one that was cut off."""
        self.attempt = -1
        self.owner: Owner | None = None
        self.closed_at = 0.0

    def inherit(self, seq: int, kept: Kept, now: float) -> None:
        """Takes over what an earlier process of the server remembered of the lane."""
        with self.lock:
            self.seq, self._kept, self.closed_at = seq, kept, now

    def begin(self, owner: Owner, seq: int) -> Kept | None:
        """Starts a call, or gives its reply if it has been run already.

        Waits while a call still runs for an earlier connection of the lane.

        Args:
            owner: the connection that asks.
            seq: number of the call.

        Returns:
            The reply to send again, or None: run the call, then `finish` it.

        Raises:
            Superseded: a newer connection speaks for the lane, or the client of this one is gone.
            FailedPreconditionError: the lane has already got to a later call.
        """
        with self.lock:
            while self._running and self.owner is owner and not owner.gone:
                self._waiting += 1
                self._changed.wait(_WAIT_SECS)
                self._waiting -= 1
            if self.owner is not owner or owner.gone:
                raise Superseded
            if seq == self.seq and self._kept is not None:
                return self._kept
            if seq < self.seq:
                raise FailedPreconditionError(f"call {seq} of this lane came after call {self.seq}")
            self._kept = None  # a later call shows that the reply arrived; what it references is free now
            if self.memory and seq != self.seq:
                self.memory = {}
            self.seq = seq
            self._running = True
            return None

    def finish(self, kept: Kept | None) -> None:
        """Ends the running call.

        Args:
            kept: its reply if it must not run again, None if it may.
        """
        with self.lock:
            self._running = False
            self._kept = kept
            if self._waiting:
                self._changed.notify_all()

    def take_over(self, owner: Owner | None, attempt: int, now: float) -> Owner | None:
        """Makes another connection, or none, the owner, and gives the one before."""
        with self.lock:
            before, self.owner = self.owner, owner
            self.attempt = attempt
            self.closed_at = now
            self._changed.notify_all()
            return before


class LaneTable(Generic[Kept]):
    """The memories of all lanes of a server, by client id and lane number.

    Args:
        limits: how many connections and lanes a client may have.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        """Starts empty."""
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._clients: dict[int, dict[int, LaneRecord[Kept]]] = {}
        self._who: dict[int, Identity] = {}  # of the clients that have shown a certificate
        self._given_up: set[int] = set()
        self._left: dict[int, float] = {}
        """When clients have said goodbye that have not been forgotten yet."""
        self._welcome_until = 0.0

    def inherit(self, kept: Mapping[tuple[int, int], tuple[int, Kept]], now: float, until: float) -> None:
        """Goes on from what an earlier process of the server remembered.

        A lane that is not in it has had no effect that is left: it is welcomed as if it were known. But only for as
        long as this life cannot have forgotten a lane of its own, whose call may have run.

        Args:
            kept: by (client, lane), the number of its last call with an effect, and the reply.
            now: `time.monotonic()`.
            until: when `expire` may drop a lane for the first time, by the same clock.
        """
        with self._lock:
            self._welcome_until = until
            for (client, lane), (seq, reply) in kept.items():
                record: LaneRecord[Kept] = LaneRecord()
                record.inherit(seq, reply, now)
                self._clients.setdefault(client, {})[lane] = record

    def __len__(self) -> int:
        """Number of lanes remembered."""
        with self._lock:
            return sum(map(len, self._clients.values()))

    def attach(
        self, client: int, lane: int, attempt: int, owner: Owner, now: float, who: Identity = ANYBODY
    ) -> tuple[LaneRecord[Kept], bool, Owner | None]:
        """Makes a connection the one that speaks for a lane.

        Args:
            client: id of the client.
            lane: number of the lane.
            attempt: grows with every connection of the lane.
            owner: the connection.
            now: `time.monotonic()`.
            who: the client has shown itself to be.

        Returns:
            The lane's memory, whether it was there before, and the connection that it replaces.

        Raises:
            Superseded: a later attempt was here before.
            PermissionDeniedError: the id is that of another client.
            ResourceExhaustedError: the client has too many connections.
        """
        with self._lock:
            self._check_client(client, who)
            self._given_up.discard(client)
            lanes = self._clients.get(client, {})
            record = lanes.get(lane)
            known = record is not None or now < self._welcome_until
            if record is None:
                self._make_room(lanes)
                self._clients[client] = lanes
                record = lanes[lane] = LaneRecord()
            elif attempt <= record.attempt:
                raise Superseded
            if who.names:
                self._who[client] = who
            return record, known, record.take_over(owner, attempt, now)

    def check_client(self, client: int, who: Identity) -> None:
        """Raises PermissionDeniedError when a client's id is known as that of another than ``who``."""
        with self._lock:
            self._check_client(client, who)

    def _check_client(self, client: int, who: Identity) -> None:
        known = self._who.get(client)
        if known is not None and not known.is_as(who):
            raise PermissionDeniedError(f"this session is that of {known}, and the client is {who}")

    def _make_room(self, lanes: dict[int, LaneRecord[Kept]]) -> None:
        """Before a client gets one more lane."""
        limits = self._limits
        closed = [lane for lane, record in lanes.items() if record.owner is None]
        if (connected := len(lanes) - len(closed)) >= limits.client_connections:
            raise limits.exceeded("client_connections", f"this client has {connected} connections here")
        if len(lanes) >= limits.client_lanes and closed:
            del lanes[min(closed, key=lambda lane: lanes[lane].closed_at)]

    def detach(self, client: int, lane: int, record: LaneRecord[Kept], owner: Owner, now: float) -> None:
        """Notes that a connection has closed; the memory stays until `expire`.

        Not that of a lane without calls whose client has said goodbye: its hello was on its way when the client left.

        Args:
            client: id of the client.
            lane: number of the lane.
            record: its memory.
            owner: the connection.
            now: `time.monotonic()`.
        """
        with self._lock:
            if record.owner is not owner:
                return
            record.take_over(None, record.attempt, now)
            if client in self._left and not record.seq:
                self._drop(client, lane)

    def _drop(self, client: int, lane: int) -> None:
        lanes = self._clients.get(client, {})
        lanes.pop(lane, None)
        if not lanes:
            self._clients.pop(client, None)
            self._who.pop(client, None)

    def forget(self, client: int, lane: int | None, now: float) -> None:
        """Drops the memory of one lane, or of all lanes of a client.

        Args:
            client: its id.
            lane: the lane; None for a client that leaves.
            now: `time.monotonic()`.
        """
        with self._lock:
            if lane is not None:
                self._drop(client, lane)
                return
            self._left[client] = now
            self._who.pop(client, None)
            self._clients.pop(client, None)

    def give_up(self, before: float) -> list[int]:
        """The clients without any connection, the last of which closed before that time.

        A client is given once, and again only if it was connected in between.
        """
        with self._lock:
            silent = {
                client
                for client, lanes in self._clients.items()
                if not any(r.owner is not None or r.closed_at >= before for r in lanes.values())
            }
            new = silent - self._given_up
            self._given_up = silent
            return sorted(new)

    def heard_at(self, client: int) -> float | None:
        """`time.monotonic()` of a client's last sign of life; None when nothing of it is remembered."""
        with self._lock:
            records = self._clients.get(client, {}).values()
            return max((r.closed_at if r.owner is None else r.owner.heard_at for r in records), default=None)

    def connected(self, client: int) -> bool:
        """Whether a client has a connection at this moment."""
        with self._lock:
            return any(record.owner is not None for record in self._clients.get(client, {}).values())

    def expire(self, before: float) -> None:
        """Drops the lanes whose last connection closed before that time."""
        with self._lock:
            old = [
                (client, lane)
                for client, lanes in self._clients.items()
                for lane, record in lanes.items()
                if record.owner is None and record.closed_at < before
            ]
            for client, lane in old:
                self._drop(client, lane)
            for client in [client for client, at in self._left.items() if at < before]:
                del self._left[client]
