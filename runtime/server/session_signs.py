"""The signs of life of the sessions that use a task."""

from dataclasses import dataclass

from runtime.master import tasks
from runtime.timeouts import HEARTBEAT_TIMEOUT_SECS
from runtime.wire.connection import Reply
from runtime.wire.reply_cache import LaneTable


@dataclass(frozen=True)
class SessionSigns:
    """The signs of life of sessions. A session of this process always lives.

    Attributes:
        lanes: Lanes of the task's tensor channel, by which sessions of other processes are known.
    """

    lanes: LaneTable[Reply]

    def is_connected(self, session: int) -> bool:
        """Returns True if a session has a connection to the task now."""
        return tasks.is_local_session(session) or self.lanes.connected(session)

    def silent_secs(self, session: int) -> float | None:
        """Returns the seconds since a session's last sign of life; None for an unknown session."""
        return 0.0 if tasks.is_local_session(session) else self.lanes.silent_secs(session)

    def is_alive(self, session: int) -> bool:
        """Returns True if a session is connected here and the session's process shows life."""
        # A frozen process keeps its connection, so a connection alone is no sign of life.
        silent = self.silent_secs(session)
        return self.is_connected(session) and (silent is None or silent < HEARTBEAT_TIMEOUT_SECS)
