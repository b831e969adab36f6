"""The memory of each lane on a server, so that repeated calls run once.

The calls of a lane are numbered. For each lane the server keeps the newest connection, the number
of the newest call, and the reply of the last call with an effect. The reply stays until the next
call shows that it arrived.
"""

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from runtime import concurrency
from runtime.errors import FailedPreconditionError, PermissionDeniedError
from runtime.limits import Limits
from runtime.trust.roles import ANYBODY, Identity
from runtime.wire import times


class LaneOwner(Protocol):
    """A connection that speaks for a lane."""

    gone: bool
    """True once the client has hung up."""
    heard_at: float
    """The `time.monotonic()` of the client's last sign of life: the connection itself, or a ping."""


Kept = TypeVar("Kept")


class CallSuperseded(Exception):
    """The end of a connection without an answer.

    No client waits for the answer any more.
    """


class LaneRecord(Generic[Kept]):
    """The memory of one lane. The owner's thread calls `begin` and `finish` around each call."""

    __slots__ = (
        "_changed",
        "_kept",
        "_running",
        "_waiting",
        "attempt",
        "closed_at",
        "lock",
        "memory",
        "owner",
        "seq",
    )

    def __init__(self) -> None:
        """Makes the memory of a lane without calls."""
        self.lock = concurrency.Lock()
        # Notified when a call ends or the owner changes. `_waiting` counts the threads in `begin`
        # that wait for it.
        self._changed = concurrency.Condition(self.lock)
        self._waiting = 0
        self.seq = 0
        """Number of the newest call."""
        self._running = False
        # The reply of call `seq`, if the call must not run again. None while `_running`.
        self._kept: Kept | None = None
        self.memory: dict[str, Any] = {}
        """Notes of the handler on the newest call, for the run after one that was cut off."""
        self.attempt = -1
        self.owner: LaneOwner | None = None
        # When the last connection closed; of no meaning while there is an `owner`.
        self.closed_at = 0.0

    def inherit(self, seq: int, kept: Kept, now: float) -> None:
        """Takes over the memory of an earlier process of the server."""
        with self.lock:
            self.seq, self._kept, self.closed_at = seq, kept, now

    def begin(self, owner: LaneOwner, seq: int) -> Kept | None:
        """Starts a call, or returns the reply of an earlier run.

        Waits while the call still runs for an earlier connection of the lane.

        Args:
            owner: Connection that received the call.
            seq: Number of the call.

        Returns:
            The reply to send again. None if the caller must run the call, then `finish` it.

        Raises:
            CallSuperseded: A newer connection speaks for the lane, or the client has hung up.
            FailedPreconditionError: The lane has reached a later call already.
        """
        with self.lock:
            while self._running and self.owner is owner and not owner.gone:
                self._waiting += 1
                self._changed.wait(times.EARLIER_RUN_SECS)
                self._waiting -= 1
            if self.owner is not owner or owner.gone:
                raise CallSuperseded
            if seq == self.seq and self._kept is not None:
                return self._kept
            if seq < self.seq:
                raise FailedPreconditionError(f"call {seq} of this lane came after call {self.seq}")
            # A later call shows that the reply arrived, so its tensors can be freed.
            self._kept = None
            if self.memory and seq != self.seq:
                self.memory = {}
            self.seq = seq
            self._running = True
            return None

    def finish(self, kept: Kept | None) -> None:
        """Ends the running call.

        Args:
            kept: Reply of the call if the call must not run again, else None.
        """
        with self.lock:
            assert self._running, "a call ends that has not begun"
            self._running = False
            self._kept = kept
            if self._waiting:
                self._changed.notify_all()

    def take_over(self, owner: LaneOwner | None, attempt: int, now: float) -> LaneOwner | None:
        """Changes or removes the owner, and returns the owner before."""
        with self.lock:
            before, self.owner = self.owner, owner
            self.attempt = attempt
            self.closed_at = now
            self._changed.notify_all()
            return before

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self.lock:
            assert self.owner is None or self.attempt >= 0
            assert not (self._running and self._kept is not None), "a call runs whose reply is kept"
            assert self._kept is None or self.seq > 0
            assert self._waiting >= 0


class LaneTable(Generic[Kept]):
    """The memories of all lanes of a server, by client id and lane number.

    Args:
        limits: Limits on the connections and lanes of a client; the defaults if None.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        """Makes an empty table."""
        self._limits = limits or Limits()
        self._lock = concurrency.Lock()
        # A client has an entry only with at least one lane, and an identity only with an entry.
        self._clients: dict[int, dict[int, LaneRecord[Kept]]] = {}
        # The clients that have shown a certificate.
        self._who: dict[int, Identity] = {}
        # The clients that the last `give_up` found without a connection.
        self._given_up: set[int] = set()
        self._left: dict[int, float] = {}
        """The times of goodbyes, by client, until `expire` forgets them."""
        # Before this time an unknown lane is welcomed as known; see `inherit`.
        self._welcome_until = 0.0
        # The last turn of the listener's thread, and the first turn after this process did not run.
        self._turned_at = self._awake_since = concurrency.monotonic()

    def inherit(
        self, kept: Mapping[tuple[int, int], tuple[int, Kept]], now: float, until: float
    ) -> None:
        """Takes over the memory of an earlier process of the server.

        A lane without an entry has had no effect that lasts, so it is welcomed as known. After
        ``until`` it is not: by then this process may have forgotten a lane of its own, whose call
        has run.

        Args:
            kept: Number and reply of the last call with an effect, by client and lane.
            now: `time.monotonic()`.
            until: `time.monotonic()` at which `expire` may drop a lane for the first time.
        """
        with self._lock:
            self._welcome_until = until
            for (client, lane), (seq, reply) in kept.items():
                record: LaneRecord[Kept] = LaneRecord()
                record.inherit(seq, reply, now)
                self._clients.setdefault(client, {})[lane] = record

    def __len__(self) -> int:
        """Returns the number of remembered lanes."""
        with self._lock:
            return sum(map(len, self._clients.values()))

    def attach(
        self,
        client: int,
        lane: int,
        attempt: int,
        owner: LaneOwner,
        now: float,
        who: Identity = ANYBODY,
    ) -> tuple[LaneRecord[Kept], bool, LaneOwner | None]:
        """Makes a connection the owner of a lane.

        Args:
            client: Id of the client.
            lane: Number of the lane.
            attempt: Count of the lane's connections.
            owner: Connection to attach.
            now: `time.monotonic()`.
            who: Identity that the client has shown.

        Returns:
            The memory of the lane, True if the lane was known, and the owner before.

        Raises:
            CallSuperseded: A connection with a later attempt has attached before.
            PermissionDeniedError: The id belongs to another client.
            ResourceExhaustedError: The client has too many connections.
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
                raise CallSuperseded
            if who.names:
                self._who[client] = who
            return record, known, record.take_over(owner, attempt, now)

    def check_client(self, client: int, who: Identity) -> None:
        """Checks that ``who`` may use the id of a client.

        Raises:
            PermissionDeniedError: The id belongs to another client.
        """
        with self._lock:
            self._check_client(client, who)

    def _check_client(self, client: int, who: Identity) -> None:
        known = self._who.get(client)
        if known is not None and not known.is_as(who):
            raise PermissionDeniedError(f"this session is that of {known}, and the client is {who}")

    def _make_room(self, lanes: dict[int, LaneRecord[Kept]]) -> None:
        """Makes room for one more lane of a client.

        At the limit of lanes, drops the lane that closed first.

        Raises:
            ResourceExhaustedError: The client has too many connections.
        """
        limits = self._limits
        closed = [lane for lane, record in lanes.items() if record.owner is None]
        if (connected := len(lanes) - len(closed)) >= limits.client_connections:
            raise limits.exceeded(
                "client_connections", f"this client has {connected} connections here"
            )
        if len(lanes) >= limits.client_lanes and closed:
            del lanes[min(closed, key=lambda lane: lanes[lane].closed_at)]

    def detach(
        self, client: int, lane: int, record: LaneRecord[Kept], owner: LaneOwner, now: float
    ) -> None:
        """Notes that a connection has closed. The memory stays until `expire`.

        An exception is a lane without calls whose client has said goodbye: its hello was on the way
        when the client left. Its memory goes at once.

        Args:
            client: Id of the client.
            lane: Number of the lane.
            record: Memory of the lane.
            owner: Connection that has closed.
            now: `time.monotonic()`.
        """
        with self._lock:
            if record.owner is not owner:
                return
            record.take_over(None, record.attempt, now)
            # The client may be back, with a memory of its own.
            is_known = self._clients.get(client, {}).get(lane) is record
            if is_known and client in self._left and not record.seq:
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
            client: Id of the client.
            lane: Number of the lane; None for a client that leaves.
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
        """Returns the clients without a connection since ``before``.

        Returns each client once, and again only after another connection.

        Args:
            before: `time.monotonic()` before which the last connection closed.
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
        """Returns the `time.monotonic()` of a client's last sign of life.

        Returns None for an unknown client.
        """
        with self._lock:
            records = self._clients.get(client, {}).values()
            return max(
                (r.closed_at if r.owner is None else r.owner.heard_at for r in records),
                default=None,
            )

    def note_turn(self, now: float) -> None:
        """Notes a turn of the listener's thread.

        Args:
            now: `time.monotonic()`.
        """
        # This process did not run, so it could not hear its clients: their silence counts from now.
        if now - self._turned_at > times.ASLEEP_SECS:
            self._awake_since = now
        self._turned_at = now

    def silent_secs(self, client: int) -> float | None:
        """Returns the seconds since a client's last sign of life.

        A sign of life is a connection or a ping. Returns None for an unknown client. Time in which
        this process did not run (frozen, or starved) does not count.
        """
        heard = self.heard_at(client)
        if heard is None:
            return None
        now = concurrency.monotonic()
        return (
            0.0
            if now - self._turned_at > times.ASLEEP_SECS
            else max(0.0, now - max(heard, self._awake_since))
        )

    def connected(self, client: int) -> bool:
        """Returns True if a client has a connection now."""
        with self._lock:
            return any(
                record.owner is not None for record in self._clients.get(client, {}).values()
            )

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._lock:
            assert all(self._clients.values()), "a client without lanes is known"
            assert self._who.keys() <= self._clients.keys()
            records = [record for lanes in self._clients.values() for record in lanes.values()]
            owners = [id(record.owner) for record in records if record.owner is not None]
            assert len(owners) == len(set(owners)), "a connection speaks for two lanes"
            for record in records:
                record.validate()
            for client in self._given_up & self._clients.keys():
                assert all(record.owner is None for record in self._clients[client].values())

    def expire(self, before: float) -> None:
        """Drops the lanes whose last connection closed before ``before``."""
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
