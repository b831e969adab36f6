"""The sessions of clients in other processes, and the leases by which the sessions live.

A client owns its session. Every call renews the session, and so does a call every few seconds that does nothing else. A
client without a call for ``LEASE_SECS`` is dead, and its session is closed. A call that ends early (by its time limit,
a closed channel or the client's death) ends its step, and not the session.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict

from absl import logging

from runtime import timeouts
from runtime.errors import AbortedError, NotFoundError
from runtime.limits import Limits
from runtime.master.master import MasterSession
from runtime.master.prepared import PreparedPlan
from runtime.rpc.rpc import caller, peer


class RemoteSession:
    """A session of the client of the present call, and its plans. Thread safe.

    Args:
        session: the session.
        plans: Number of plans that are kept; the client keeps fewer, so that plans in use are here.
    """

    def __init__(self, session: MasterSession, plans: int) -> None:
        self.session = session
        self.client = peer()
        """The connection by which the session was opened."""
        self.owner = caller()
        """The identity in the certificate of the client that opened the session."""
        self._most = plans
        self.heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._plans: OrderedDict[int, PreparedPlan] = OrderedDict()

    def is_of_caller(self) -> bool:
        """Returns True if the client of the present call may be the owner, as far as certificates show."""
        return not self.owner.names or self.owner.is_as(caller())

    def add(self, prepared: PreparedPlan) -> int:
        """Keeps a plan and returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._plans[number] = prepared
            while len(self._plans) > self._most:
                self._plans.popitem(last=False)
            return number

    def plan(self, number: int) -> PreparedPlan:
        """Returns the plan of a number.

        Raises:
            NotFoundError: The plan was dropped, or was never there.
        """
        with self._lock:
            found = self._plans.get(number)
            if found is None:
                raise NotFoundError(f"no plan has the number {number} in this session")
            self._plans.move_to_end(number)
            return found


class RemoteSessions:
    """The sessions of a master's clients in other processes, by id. Thread safe.

    Args:
        limits: Limits on the number of sessions, and on the plans of each session.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._changed = threading.Condition()
        self._sessions: dict[int, RemoteSession] = {}
        self._watching = False

    def __len__(self) -> int:
        """Returns the number of sessions."""
        return len(self._sessions)

    def check_room(self) -> None:
        """Checks that the client of the present call may open another session.

        Raises:
            ResourceExhaustedError: there are too many of this connection, or of all.
        """
        limits, client = self._limits, peer()
        with self._changed:
            its = sum(s.client == client for s in self._sessions.values())
            if its >= limits.client_sessions:
                raise limits.exceeded("client_sessions", f"{its} sessions are open here by this connection")
            if len(self) >= limits.sessions:
                raise limits.exceeded("sessions", f"{len(self)} sessions of clients elsewhere are open here")

    def add(self, session: MasterSession) -> None:
        """Keeps a session that has just been opened.

        Args:
            session: the session, which belongs to the client of the present call.

        Raises:
            ResourceExhaustedError: others were opened meanwhile, and now there are too many.
        """
        with self._changed:
            self.check_room()
            self._sessions[session.id] = RemoteSession(session, self._limits.session_plans)
            if not self._watching:
                threading.Thread(target=self._watch, name="remote sessions", daemon=True).start()
                self._watching = True

    def renewed(self, number: int) -> RemoteSession:
        """Returns the session of an id and notes a sign of life of its client.

        Args:
            number: the id.

        Raises:
            AbortedError: it is not there (any more), or is another client's.
        """
        with self._changed:
            found = self._sessions.get(number)
            if found is not None and found.is_of_caller():
                found.heard_at = time.monotonic()
                return found
        raise AbortedError(
            f"session {number:x} is not found here: the server restarted or was reset, or did not hear of this client "
            f"for {timeouts.LEASE_SECS:g} s"
        )

    def end(self, number: int) -> None:
        """Closes a session, if there is one of this id that is not another client's."""
        with self._changed:
            found = self._sessions.get(number)
            if found is not None and not found.is_of_caller():
                return
            self._sessions.pop(number, None)
            self._changed.notify()
        if found is not None:
            found.session.close()

    def end_all(self) -> None:
        """Closes all sessions."""
        with self._changed:
            sessions = list(self._sessions.values())
            self._sessions.clear()
            self._changed.notify()
        for found in sessions:
            found.session.close()

    def _watch(self) -> None:
        """Closes the sessions of clients without a sign of life; ends when there is no session."""
        while True:
            with self._changed:
                if not self._sessions:
                    self._watching = False
                    return
                silent, heard_at = min(((n, s.heard_at) for n, s in self._sessions.items()), key=lambda pair: pair[1])
                left = heard_at + timeouts.LEASE_SECS - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
            logging.warning(
                "A session is closed: its client was not heard of for %g s and did not close it", timeouts.LEASE_SECS
            )
            self.end(silent)
