"""The client side of one task: a pool of lanes, and a heartbeat.

The heartbeat notices a task that falls silent.
"""

import itertools
from collections.abc import Callable

from runtime import concurrency
from runtime.cluster.endpoint import Endpoint
from runtime.errors import AbortedError, CancelledError, TaskLeftError, UnavailableError
from runtime.state.forks import HomeProcess
from runtime.trust.certificates import Certificates
from runtime.trust.security import FindToken
from runtime.wire import times
from runtime.wire.channel import Lane
from runtime.wire.dial import ChannelOptions, TaskDialer
from runtime.wire.heartbeat import Heartbeat

# Unique in the process: two peers with one client id must not take over each other's lanes.
_lane_numbers = itertools.count(1)


class Peer:
    """A task as its clients see it. Any number of threads may use a peer.

    The peer is bound to the incarnation of its first contact. After a restart of the task every
    later call raises AbortedError; a new Peer reaches the new process.

    Attributes:
        task: Name of the task, such as "/job:ps/task:0".
        options: Limits in force.
        incarnation: Incarnation of the server at first contact; None before.
        lost: True if the task was found to have restarted. Every later call raises AbortedError.
    """

    def __init__(
        self,
        task: str,
        resolve: Callable[[float], Endpoint],
        client_id: int,
        find_token: FindToken,
        *,
        options: ChannelOptions | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """Remembers the way to the task; touches no network and starts no thread.

        Args:
            task: Name of the task, for messages.
            resolve: Function that asks the task for its tensor port, within the seconds given.
                Raises UnavailableError if the task is surely gone (connection refused),
                DeadlineExceededError if the task does not answer.
            client_id: Random u64 of this process or session.
            find_token: Function that returns the token of the task, called for each connection.
            options: Time limits and sizes; the defaults if None.
            certificates: Certificates of this process, or None. With certificates, TCP connections
                are TLS, and the server's certificate must be that of the task. Unix sockets stay
                plain.
        """
        self.task = task
        self._home = HomeProcess("the connection")
        self.options = options or ChannelOptions()
        self._dialer = TaskDialer(task, resolve, client_id, find_token, self.options, certificates)
        # `_lanes` holds all lanes that are not dropped, the idle ones among them, and needs
        # `_lock`. `_idle` needs none: append, pop and remove of a list are atomic.
        self._idle: list[Lane] = []
        self._lanes: set[Lane] = set()
        self._lock = concurrency.Lock()
        # Both change once.
        self.incarnation: int | None = None
        self.lost = False
        self._closed = concurrency.Event()
        self._threads = concurrency.ThreadGroup(f"connections to {task}")
        self._heart_thread: concurrency.Thread | None = None
        self._heart = Heartbeat(
            self._dialer,
            next(_lane_numbers),
            lanes=self.lanes,
            bind=self._bind,
            closed=self._closed,
        )

    @property
    def left(self) -> bool:
        """True if the task has said goodbye for good."""
        return self._heart.goodbye_received()

    @property
    def silent_since(self) -> float | None:
        """The `time.monotonic()` of the last sign of life while the peer is silent, else None."""
        return self._heart.silent_since

    def acquire(self, *, deadline: float | None = None) -> Lane:
        """Returns a connected lane for the calling thread.

        The thread gives the lane back by `release`.

        Args:
            deadline: `time.monotonic()` at which connecting gives up; None for no deadline.

        Raises:
            UnavailableError: The task is gone, or silent for `reconnect_secs`.
            AbortedError: The task has restarted since the first contact.
            TaskLeftError: The task has left for good.
            UnauthenticatedError: The task refused our token, or did not show that it has the token.
            DeadlineExceededError: The deadline has passed.
            CancelledError: This peer is closed.
            FailedPreconditionError: This process is a forked child of the process that made the
                peer.
        """
        self._home.check()
        while not self.lost:
            try:
                lane = self._idle.pop()
            except IndexError:
                # A closed peer raises its error here.
                return self._open(deadline)
            if lane.usable:
                return lane
            self._discard(lane)
        if self._closed.is_set():
            raise CancelledError("the connections were closed", task=self.task)
        raise self._lost_error()

    def release(self, lane: Lane) -> None:
        """Takes a lane back. A lane that is broken or has a call under way is closed."""
        if lane.usable and not self.lost:
            self._idle.append(lane)
            if not self._closed.is_set():
                return
            try:
                # `close` ran before or at this moment, and may or may not have seen the lane. The
                # thread that removes it from the list closes it.
                self._idle.remove(lane)
            except ValueError:
                return
        self._discard(lane)

    def cancel_calls(self) -> None:
        """Makes all calls under way raise CancelledError, from any thread.

        Later calls use new connections.
        """
        for lane in self.lanes():
            lane.cancel()

    def close(self) -> None:
        """Ends the heartbeat, cancels the calls under way and says goodbye.

        A second call does nothing. A thread that holds a lane still releases it, which closes its
        socket.
        """
        if self._home.was_left:
            return
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        idle = []
        while self._idle:
            idle.append(self._idle.pop())
        for lane in self.lanes():
            if lane not in idle:
                lane.cancel()
        self._heart.wake()
        self._threads.close(times.JOIN_SECS)
        for lane in idle:
            # The heartbeat says goodbye for all lanes, unless it was waiting for an answer or never
            # got to connect.
            self._discard(
                lane, goodbye=True, whole_client=lane is idle[-1] and not self._heart.goodbye_sent
            )

    def _open(self, deadline: float | None) -> Lane:
        lane = Lane(self._dialer, next(_lane_numbers))
        with self._lock:
            if self._closed.is_set():
                raise CancelledError("the connections were closed", task=self.task)
            self._lanes.add(lane)
        try:
            lane.open(deadline)
            self._bind(lane.link.incarnation)
            if self._heart_thread is None:
                self._start_heart()
        except BaseException as error:
            self._discard(lane)
            if isinstance(error, UnavailableError) and self.left:
                raise TaskLeftError("it has left: training is over", task=self.task) from error
            raise
        return lane

    def _bind(self, incarnation: int) -> None:
        with self._lock:
            if self.incarnation is None:
                self.incarnation = incarnation
            if self.incarnation == incarnation:
                return
            self.lost = True
        # The calls of the lanes find out as they connect again.
        for lane in self.lanes():
            lane.link.interrupt()
        raise self._lost_error()

    def lanes(self) -> list[Lane]:
        """Returns the open lanes, those with a call under way among them."""
        with self._lock:
            return list(self._lanes)

    def _lost_error(self) -> AbortedError:
        return AbortedError("restarted since the first contact, its state is gone", task=self.task)

    def _discard(self, lane: Lane, *, goodbye: bool = False, whole_client: bool = False) -> None:
        lane.close(goodbye=goodbye, whole_client=whole_client)
        with self._lock:
            self._lanes.discard(lane)

    def _start_heart(self) -> None:
        with self._lock:
            if self._heart_thread is not None or self._closed.is_set():
                return
            self._heart_thread = self._threads.start(self._heart.run, name=f"heartbeat {self.task}")
