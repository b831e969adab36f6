"""The decision which connection of a full server gives way to a new connection."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from runtime.errors import ResourceExhaustedError
from runtime.limits import Limits
from runtime.wire import times
from runtime.wire.connection import Connection, ConnectionState


class ConnectionRoom(NamedTuple):
    """The room for one more connection: at most one of the three is set.

    Attributes:
        newcomer: Connection before its hello that gives way; None for none.
        idle: Idle connection that gives way; None for none.
        refusal: Error for the new connection if all connections work; None while there is room.
    """

    newcomer: Connection | None = None
    idle: Connection | None = None
    refusal: ResourceExhaustedError | None = None


def find_room(connections: Iterable[Connection], limits: Limits, now: float) -> ConnectionRoom:
    """Decides which connection gives way if one more would be too many.

    Args:
        connections: All connections, the oldest first.
        limits: Limits on connections and handshakes.
        now: Present ``monotonic()``.
    """
    living = [connection for connection in connections if not connection.gone]
    # Newcomers give way first: the silent before those in their greeting, and the oldest first.
    newcomers = [connection for connection in living if connection.state < ConnectionState.SERVED]
    is_full = len(living) >= limits.connections
    if newcomers and (is_full or len(newcomers) >= limits.handshakes):
        return ConnectionRoom(newcomer=min(newcomers, key=lambda newcomer: newcomer.state))
    if not is_full:
        return ConnectionRoom()
    assert all(connection.state is ConnectionState.SERVED for connection in living)
    # Then the connection that was idle for longest, of the client with the most connections.
    having = Counter(connection.client for connection in living)
    since = now - times.WORKS_SECS
    idle = [c for c in living if not c.busy and c.idle_since <= since]
    if not idle:
        what = f"the tensor port has {len(living)} connections that work"
        return ConnectionRoom(refusal=limits.exceeded("connections", what))
    return ConnectionRoom(idle=max(idle, key=lambda c: (having[c.client], -c.idle_since)))
