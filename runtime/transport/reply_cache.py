"""What a server remembers of each lane, so that a call that is sent twice runs once.

A lane's calls are numbered. For each lane the server keeps which connection speaks for it (the newest), which call
is running, and the reply of the last call that had an effect, until the next call shows that it arrived.
"""

import threading
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from runtime.errors import FailedPreconditionError, PermissionDeniedError
from runtime.transport.roles import ANYBODY, Identity

_WAIT_SECS = 1.0


class Owner(Protocol):
    """A connection that speaks for a lane."""

    @property
    def gone(self) -> bool:
        """Whether its client has hung up."""
        ...

    @property
    def heard_at(self) -> float:
        """`time.monotonic()` of its client's last sign of life: the connection itself, or a ping."""
        ...


Kept = TypeVar("Kept")


class Superseded(Exception):
    """Nobody waits for this connection's answer any more; its thread must end without answering."""


class LaneRecord(Generic[Kept]):
    """The memory of one lane. The thread of its owner calls `begin` and `finish` around each call."""

    __slots__ = ("_changed", "_kept", "_running", "_seq", "_waiting", "attempt", "closed_at", "lock", "memory", "owner")

    def __init__(self) -> None:
        """A lane of which nothing has happened yet."""
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiting = 0
        self._seq = 0
        self._running = False
        self._kept: Kept | None = None
        self.memory: dict[str, Any] = {}
        """What the handler has noted of the newest call, for the run that takes the place of one that was cut off."""
        self.attempt = -1
        self.owner: Owner | None = None
        self.closed_at = 0.0

    @property
    def seq(self) -> int:
        """Number of the newest call."""
        return self._seq

    def inherit(self, seq: int, kept: Kept, now: float) -> None:
        """Takes over what an earlier process of the server remembered of the lane."""
        with self.lock:
            self._seq, self._kept, self.closed_at = seq, kept, now

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
            if seq == self._seq and self._kept is not None:
                return self._kept
            if seq < self._seq:
                raise FailedPreconditionError(f"call {seq} of this lane came after call {self._seq}")
            self._kept = None  # a later call shows that the reply arrived; what it references is free now
            if self.memory and seq != self._seq:
                self.memory = {}
            self._seq = seq
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
    """The memories of all lanes of a server, by client id and lane number."""

    def __init__(self) -> None:
        """Starts empty."""
        self._lock = threading.Lock()
        self._records: dict[tuple[int, int], LaneRecord[Kept]] = {}
        self._clients: dict[int, Identity] = {}  # of those that have shown a certificate
        self._given_up: set[int] = set()
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
            for key, (seq, reply) in kept.items():
                record: LaneRecord[Kept] = LaneRecord()
                record.inherit(seq, reply, now)
                self._records[key] = record

    def __len__(self) -> int:
        """Number of lanes remembered."""
        return len(self._records)

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
        """
        with self._lock:
            self._check_client(client, who)
            if who.names:
                self._clients[client] = who
            self._given_up.discard(client)
            record = self._records.get((client, lane))
            known = record is not None or now < self._welcome_until
            if record is None:
                record = self._records[client, lane] = LaneRecord()
            elif attempt <= record.attempt:
                raise Superseded
            return record, known, record.take_over(owner, attempt, now)

    def check_client(self, client: int, who: Identity) -> None:
        """Raises PermissionDeniedError when a client's id is known as that of another than ``who``."""
        with self._lock:
            self._check_client(client, who)

    def _check_client(self, client: int, who: Identity) -> None:
        known = self._clients.get(client)
        if known is not None and not known.is_as(who):
            raise PermissionDeniedError(f"this session is that of {known}, and the client is {who}")

    def _drop_strangers(self) -> None:
        """Forgets who the clients were of which no lane is left."""
        left = {client for client, _ in self._records}
        for client in self._clients.keys() - left:
            del self._clients[client]

    def detach(self, record: LaneRecord[Kept], owner: Owner, now: float) -> None:
        """Notes that a connection has closed; the memory stays until `expire`."""
        with self._lock:
            if record.owner is owner:
                record.take_over(None, record.attempt, now)

    def forget(self, client: int, lane: int | None = None) -> None:
        """Drops the memory of one lane, or of all lanes of a client."""
        with self._lock:
            if lane is not None:
                self._records.pop((client, lane), None)
                return
            for key in [key for key in self._records if key[0] == client]:
                del self._records[key]
            self._clients.pop(client, None)

    def give_up(self, before: float) -> list[int]:
        """The clients without any connection, the last of which closed before that time.

        A client is given once, and again only if it was connected in between.
        """
        with self._lock:
            alive = {c for (c, _), r in self._records.items() if r.owner is not None or r.closed_at >= before}
            silent = {c for c, _ in self._records} - alive
            new = silent - self._given_up
            self._given_up = silent
            return sorted(new)

    def heard_at(self, client: int) -> float | None:
        """`time.monotonic()` of a client's last sign of life; None when nothing of it is remembered."""
        with self._lock:
            records = [record for (of, _), record in self._records.items() if of == client]
            return max((r.closed_at if r.owner is None else r.owner.heard_at for r in records), default=None)

    def connected(self, client: int) -> bool:
        """Whether a client has a connection at this moment."""
        with self._lock:
            return any(of == client and record.owner is not None for (of, _), record in self._records.items())

    def expire(self, before: float) -> None:
        """Drops the lanes whose last connection closed before that time."""
        with self._lock:
            old = [key for key, record in self._records.items() if record.owner is None and record.closed_at < before]
            for key in old:
                del self._records[key]
            if old and self._clients:
                self._drop_strangers()

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._records.clear()
