"""The connection under a lane, which is made again after each break.

A lane has calls, and its link has the socket. The link knows the way to the task, how often the
connection broke, and when the task counts as gone. `Lane` gives the link the call that a new
connection must repeat.
"""

import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from absl import logging

from runtime import concurrency, timeouts
from runtime.cluster.endpoint import Endpoint
from runtime.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    OpError,
    TaskLeftError,
    UnavailableError,
)
from runtime.wire import frames, sockets, times
from runtime.wire.codec import Segments
from runtime.wire.dial import TaskDialer

_MAX_BREAKS = 32
"""Most breaks in a row during one call. With one more, the call gives up."""


@dataclass(slots=True, eq=False)
class LaneWait:
    """The wait of a lane, for a connection or for the answer to a call.

    Attributes:
        deadline: `time.monotonic()` at which the wait ends; None for no deadline.
        held_back: True if the task may hold the call back for other calls.
        since: Start of the wait; 0.0 before the first tick.
        log_at: `time.monotonic()` of the next log line.
    """

    deadline: float | None = None
    held_back: bool = False
    since: float = 0.0
    log_at: float = 0.0

    def log(self, now: float, since: float, of: str, what: str) -> float:
        """Returns the seconds waited so far, and logs a long wait.

        Args:
            now: `time.monotonic()`.
            since: Start of the wait; used by the first call of a wait only.
            of: Name of the task.
            what: Event that the call waits for, such as "be reached".
        """
        if not self.since:
            self.since, self.log_at = since, since + timeouts.LOG_EVERY_SECS
        waited = now - self.since
        if now >= self.log_at:
            self.log_at = now + timeouts.LOG_EVERY_SECS
            logging.warning("Waiting for %s to %s, for %.0f s now", of, what, waited)
        return waited

    def last_attempt(self, repeats: bool) -> float:
        """Returns the `time.monotonic()` at which no further attempt to connect is made.

        Args:
            repeats: True if the connection is to repeat a call.
        """
        # The answer to a wait may have been lost with the connection, and be kept for a repeated
        # call. So a wait connects for a little longer than its deadline.
        late = timeouts.LAST_WORD_SECS if self.held_back and repeats else 0.0
        return math.inf if self.deadline is None else self.deadline + late


class TaskLink:
    """The connection of one lane to its task.

    One thread at a time uses a link. Other threads may only call `cancel`, `interrupt` and
    `has_left`.

    Attributes:
        task: Name of the peer, such as "/job:ps/task:0".
        endpoint: Endpoint of the task; None before the first question.
        incarnation: Incarnation of the server, chosen by the first `connect`; 0 before. Later
            connections to another incarnation raise AbortedError.
        connected_at: `time.monotonic()` of the newest connection.
        sock: The socket; None without a connection.
        sendmsg: Method of the socket. Raises ConnectionResetError without a connection.
        recvmsg_into: Method of the socket, as `sendmsg`.
        tick_secs: Time limit of the socket's calls, in seconds.
        fault: Trouble with the connection, which `connect` mends; None while the connection works.
        breaks: Number of breaks in a row during the call under way.
        had_goodbye: True once the server has said that it leaves.
        cancelled: Event set by `cancel`.
    """

    def __init__(self, dialer: TaskDialer, number: int) -> None:
        """Makes a link without a connection; arguments as of `Lane`."""
        self.task = dialer.task
        self.endpoint: Endpoint | None = None
        self.incarnation = 0
        self.connected_at = 0.0
        self.sock: socket.socket | None = None
        self.sendmsg: Callable[[Segments], int] = _not_connected
        self.recvmsg_into: Callable[[Sequence[Any]], Any] = _not_connected
        self.tick_secs = times.TICK_SECS
        self.fault: Exception | None = None
        self.breaks = 0
        self.had_goodbye = False
        self.cancelled = concurrency.Event()
        self._dialer = dialer
        self._number = number
        self._attempt = 0
        # Guards `sock` against an interrupt after a close, when the descriptor may belong to
        # another socket.
        self._lock = concurrency.Lock()

    @property
    def name(self) -> str:
        """The task and its last known endpoint, for messages."""
        return self._dialer.name

    def connect(self, wait: LaneWait, send: Callable[[], None] | None) -> None:
        """Connects until an attempt succeeds or the task is surely gone.

        Args:
            wait: Wait of the lane, with the deadline.
            send: Function that repeats the call under way on the new connection; None without a
                call.

        Raises:
            UnavailableError: The task is gone, or silent for `reconnect_secs`.
            AbortedError: The task has restarted.
            TaskLeftError: The task has left for good.
            DeadlineExceededError: The deadline has passed.
            CancelledError: `cancel` was called.
            OpError: The task has refused this client.
        """
        started = concurrency.monotonic()
        limit = started + self._dialer.options.reconnect_secs
        backoff = min(
            timeouts.LAST_BACKOFF_SECS, timeouts.FIRST_BACKOFF_SECS * 2 ** min(self.breaks, 10)
        )
        if send is not None:
            self._count_break(started)
        reason: Exception | None = self.fault
        # True after a refused connection: the task may have moved, so its endpoint is asked for
        # again.
        stale = False
        # The first attempt after a break comes at once. After more breaks each attempt waits, so as
        # not to spin.
        pause = self.breaks > 1
        last_attempt = wait.last_attempt(send is not None)
        while True:
            self.drop()
            now = concurrency.monotonic()
            self._check_given_up(now, started, limit, last_attempt, reason)
            wait.log(now, started, self.name, f"be reached ({reason})")
            if pause:
                if self.cancelled.wait(min(backoff, limit - now)):
                    continue
                backoff = min(timeouts.LAST_BACKOFF_SECS, backoff * 2)
            pause = True
            timeout = max(min(timeouts.ATTEMPT_SECS, limit - now, last_attempt - now), 0.001)
            try:
                if self.endpoint is None or stale:
                    self.endpoint = self._dialer.endpoint(self.endpoint, timeout)
                if self._dial(self.endpoint, timeout):
                    if send is not None:
                        send()
                    return
            except DeadlineExceededError as error:
                # Nobody has told the endpoint in time: the task is silent, and not known to be
                # gone.
                reason = error
            except OpError:
                raise
            except OSError as error:
                reason = error
                stale = isinstance(error, ConnectionRefusedError)

    def _count_break(self, now: float) -> None:
        """Counts a break during a call; raises where the link does not connect again."""
        # Only those of short-lived connections in a row count.
        if self.incarnation:
            self.breaks = 1 if now - self.connected_at >= times.STEADY_SECS else self.breaks + 1
        if self.breaks > _MAX_BREAKS:
            raise UnavailableError(
                f"the connection broke {self.breaks} times in a row during one call", task=self.task
            )
        if self.has_left():
            raise self.farewell()

    def _dial(self, endpoint: Endpoint, timeout: float) -> bool:
        """Makes one attempt; returns False if the task restarted after its endpoint was asked for."""
        self._attempt += 1
        sock, incarnation, resumed = self._dialer.dial(
            endpoint, self._number, self._attempt, timeout, self._adopt
        )
        if self.incarnation:
            if incarnation != self.incarnation:
                raise AbortedError(
                    "restarted during the session, its state is gone", task=self.task
                )
            if not resumed:
                raise AbortedError(
                    "forgot this lane, so the call cannot be known to run once", task=self.task
                )
        elif incarnation != endpoint.incarnation:
            self.endpoint = self._dialer.endpoint(endpoint, timeout)
            return False
        # The new socket has no tick yet, so `set_tick` must set one.
        self.tick_secs = 0.0
        self.set_tick(times.TICK_SECS)
        self.incarnation = incarnation
        self.connected_at = concurrency.monotonic()
        self.fault = None
        if isinstance(sock, ssl.SSLSocket):
            # TLS has neither sendmsg nor recvmsg_into: `send_rest` sends all, and the header
            # arrives alone.
            self.sendmsg = _nothing_sent
            self.recvmsg_into = lambda buffers: (sock.recv_into(buffers[0]),)
        else:
            self.sendmsg = sock.sendmsg
            self.recvmsg_into = sock.recvmsg_into
        return True

    def _check_given_up(
        self,
        now: float,
        started: float,
        limit: float,
        last_attempt: float,
        reason: Exception | None,
    ) -> None:
        if self.cancelled.is_set():
            raise CancelledError("the call was cancelled", task=self.task)
        if now >= last_attempt:
            raise DeadlineExceededError(
                f"no contact before the deadline ({reason})", task=self.task
            )
        if now >= limit:
            at = f" at {self.endpoint}" if self.endpoint else ""
            patience = self._dialer.options.reconnect_secs
            text = (
                f"no contact{at} for {now - started:.1f} s (reconnect_secs={patience:g}): {reason}"
            )
            raise UnavailableError(text, task=self.task)

    def _adopt(self, sock: socket.socket) -> None:
        with self._lock:
            self.sock = sock
            if self.cancelled.is_set():
                raise CancelledError("the call was cancelled", task=self.task)

    def forget(self) -> None:
        """Forgets the task's endpoint and incarnation, so that `connect` finds the present ones."""
        self.endpoint, self.incarnation, self.breaks = None, 0, 0

    def has_left(self) -> bool:
        """Returns True if the server's goodbye is the last frame received.

        Reads and drops the bytes that have arrived. So no answer may be expected on the connection.
        """
        with self._lock:
            if self.sock is None:
                return False
            return self.had_goodbye or sockets.ends_with(self.sock, frames.LEAVES)

    def farewell(self) -> TaskLeftError:
        """Returns the error of a call to a task that has left."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return TaskLeftError(
            f"it has left{at}: training is over, and nothing more is taken", task=self.task
        )

    def cancel(self, *, listens: Callable[[], bool]) -> None:
        """Makes each attempt to connect fail, from any thread.

        Args:
            listens: Returns True to close only the sending side, because an answer may still come.
        """
        self.cancelled.set()
        with self._lock:
            if self.sock is not None:
                # The lane's thread may have sent its call just now, so the lane is asked last.
                (sockets.half_close if listens() else sockets.interrupt)(self.sock)

    def interrupt(self) -> None:
        """Cuts the connection, from any thread."""
        with self._lock:
            if self.sock is not None:
                sockets.interrupt(self.sock)

    def close_sending_side(self) -> None:
        """Says goodbye and sends nothing more; an answer may still come."""
        with self._lock:
            if self.sock is not None:
                # A server without the goodbye forgets the lane by itself, later.
                with contextlib.suppress(OSError):
                    self.sock.send(frames.LEAVES)
                sockets.half_close(self.sock)

    def say_goodbye(self, frame: bytes) -> bool:
        """Sends a goodbye; returns False if that did not work."""
        if self.sock is None or self.cancelled.is_set():
            return False
        # A server without the goodbye forgets the lane by itself, later.
        with contextlib.suppress(OSError):
            return self.sock.send(frame) > 0
        return False

    def drop(self) -> None:
        """Closes the socket."""
        with self._lock:
            sock, self.sock = self.sock, None
            if sock is not None:
                sock.close()
        self.sendmsg = self.recvmsg_into = _not_connected

    def set_tick(self, seconds: float) -> None:
        """Sets the time limit of the socket's calls."""
        sock = self.sock
        if seconds != self.tick_secs and sock is not None:
            sockets.set_tick(sock, seconds)
            self.tick_secs = seconds


def _not_connected(_: object) -> Any:
    raise ConnectionResetError("not connected")


def _nothing_sent(_: object) -> int:
    # TLS has no sendmsg: `send_rest` sends everything.
    return 0
