"""The sessions of clients in other processes, each with a lease.

A client owns its session. Every call of the client renews the lease. Between steps the client makes
a call every few seconds for the renewal alone. A client without a call for ``LEASE_SECS`` counts as
dead, and its session is closed. A call may end early, by its time limit, a closed channel or the
client's death. Then only the step ends, and the session continues.
"""

import functools
import itertools
from collections import OrderedDict

from absl import logging

from runtime import concurrency, timeouts
from runtime.errors import AbortedError, NotFoundError
from runtime.limits import Limits
from runtime.master.dropped import later
from runtime.master.master import MasterSession
from runtime.master.prepared import PreparedPlan
from runtime.rpc.rpc import caller, peer


class RemoteSession:
    """A session and its plans. Belongs to the client of the present call. Thread safe.

    Args:
        session: The session.
        plans: Most plans to keep. The client keeps fewer, so that all its plans are here.

    Attributes:
        session: The session.
        client: Connection by which the session was opened.
        owner: Identity of the client that has opened the session.
        heard_at: Time of the client's last call, ``time.monotonic()``.
    """

    def __init__(self, session: MasterSession, plans: int) -> None:
        self.session = session
        self.client = peer()
        self.owner = caller()
        self._most = plans
        self.heard_at = concurrency.monotonic()
        self._lock = concurrency.Lock()
        self._numbers = itertools.count(1)
        self._plans: OrderedDict[int, PreparedPlan] = OrderedDict()

    def is_of_caller(self) -> bool:
        """Returns True if the present call may come from the owner, as far as certificates show."""
        return not self.owner.names or self.owner.is_as(caller())

    def add(self, prepared: PreparedPlan) -> int:
        """Keeps a plan and returns its number. The least recently used plan may be dropped."""
        with self._lock:
            number = next(self._numbers)
            self._plans[number] = prepared
            while len(self._plans) > self._most:
                self._plans.popitem(last=False)
            return number

    def plan(self, number: int) -> PreparedPlan:
        """Returns the plan of a number.

        Args:
            number: Number of the plan, from ``add``.

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
        limits: Limits on the sessions, and on the plans of each session; the default limits by
            default.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = concurrency.RLock()
        self._sessions: dict[int, RemoteSession] = {}
        self._watch: concurrency.PeriodicCall | None = None

    def __len__(self) -> int:
        """Returns the number of sessions."""
        return len(self._sessions)

    def check_room(self) -> None:
        """Checks that the client of the present call may open another session.

        Raises:
            ResourceExhaustedError: Too many sessions of this connection or of all connections are
                open.
        """
        limits, client = self._limits, peer()
        with self._lock:
            its = sum(s.client == client for s in self._sessions.values())
            if its >= limits.client_sessions:
                raise limits.exceeded(
                    "client_sessions", f"{its} sessions are open here by this connection"
                )
            if len(self) >= limits.sessions:
                raise limits.exceeded(
                    "sessions", f"{len(self)} sessions of clients elsewhere are open here"
                )

    def add(self, session: MasterSession) -> None:
        """Keeps a newly opened session for the client of the present call.

        Args:
            session: The session.

        Raises:
            ResourceExhaustedError: Too many sessions are open, because other calls opened sessions
                meanwhile.
        """
        with self._lock:
            self.check_room()
            assert session.id not in self._sessions
            self._sessions[session.id] = RemoteSession(session, self._limits.session_plans)
            # A master without remote sessions needs no timer.
            if self._watch is None:
                self._watch = concurrency.every(timeouts.LEASE_LOOK_SECS, self._close_expired)
            assert not self._watch.stopped, "no timer looks at the leases"

    def renewed(self, number: int) -> RemoteSession:
        """Renews the lease of a session, and returns the session.

        Args:
            number: Id of the session.

        Raises:
            AbortedError: The session has ended, was never here, or belongs to another client.
        """
        with self._lock:
            found = self._sessions.get(number)
            if found is not None and found.is_of_caller():
                found.heard_at = concurrency.monotonic()
                return found
        # Another client's session gets the same error, which does not show that the session exists.
        raise AbortedError(
            f"session {number:x} is not found here: the server restarted or was reset, or did not "
            "hear of this client "
            f"for {timeouts.LEASE_SECS:g} s"
        )

    def end(self, number: int) -> None:
        """Closes a session of the client of the present call.

        Does nothing without a session of this id.
        """
        with self._lock:
            found = self._sessions.get(number)
            if found is not None and not found.is_of_caller():
                return
            self._sessions.pop(number, None)
        # To close a session may take as long as a step, so it happens without the lock.
        if found is not None:
            found.session.close()

    def end_all(self) -> None:
        """Closes all sessions."""
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for found in sessions:
            found.session.close()

    def _close_expired(self) -> None:
        """Closes the sessions with an expired lease; ends the watch when no session is left."""
        with self._lock:
            latest = concurrency.monotonic() - timeouts.LEASE_SECS
            silent = [
                number for number, found in self._sessions.items() if found.heard_at <= latest
            ]
            expired = [self._sessions.pop(number) for number in silent]
            if not self._sessions and self._watch is not None:
                self._watch.stop()
                self._watch = None
        for found in expired:
            logging.warning(
                "A session is closed: its client was not heard of for %g s and did not close it",
                timeouts.LEASE_SECS,
            )
            # To close a session may take as long as a step, and the timer must not wait.
            close = functools.partial(_close_expired, found.session)
            try:
                concurrency.in_thread(close, "close of an expired session")
            except RuntimeError as error:
                logging.error("No thread to close a session, which has to wait: %s", error)
                later(close)


def _close_expired(session: MasterSession) -> None:
    try:
        session.close()
    except Exception:
        logging.exception("An expired session could not be closed")
