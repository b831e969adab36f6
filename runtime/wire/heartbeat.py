"""The pulse of a peer: pings on their own connection.

A frozen process or a cut cable closes no connection, so a call would wait for ever. The heartbeat
notices the silence and cuts the connections of the lanes. Their calls connect again, and give up if
the peer stays silent.
"""

from collections.abc import Callable

from absl import logging

from runtime import concurrency
from runtime.errors import AbortedError, OpError, TaskLeftError
from runtime.wire import times
from runtime.wire.channel import Lane
from runtime.wire.dial import TaskDialer


class Heartbeat:
    """A loop of pings to one peer.

    The loop ends when its owner is closed, or when the peer has left or restarted.

    Attributes:
        silent_since: `time.monotonic()` of the last answer while the peer is silent, else None.
        goodbye_sent: True once the heartbeat has said goodbye for the whole client.
        left: True once the peer has said goodbye and will not answer any more.
    """

    def __init__(
        self,
        dialer: TaskDialer,
        number: int,
        *,
        lanes: Callable[[], list[Lane]],
        bind: Callable[[int], None],
        closed: concurrency.Event,
    ) -> None:
        """Prepares the heartbeat; `run` needs a thread of its own.

        Args:
            dialer: Dialer that opens the connection.
            number: Lane number of the heartbeat, always the same: the server remembers one lane for
                it.
            lanes: Function that returns the lanes to cut when the peer is silent.
            bind: Function called with the incarnation of every new connection. Raises AbortedError
                if the peer has restarted.
            closed: Event that ends the heartbeat.
        """
        self.silent_since: float | None = None
        self.goodbye_sent = False
        self.left = False
        self._dialer = dialer
        self._options = dialer.options
        self._lanes = lanes
        self._bind = bind
        self._closed = closed
        # `_lock` guards `_busy`, which is True during a beat. Meanwhile other threads may only
        # cancel `_lane`.
        self._lock = concurrency.Lock()
        self._lane = Lane(dialer, number)
        self._busy = False

    def run(self) -> None:
        """Sends pings until closed, then says goodbye for the whole client."""
        answered = concurrency.monotonic()
        try:
            while not self._closed.is_set():
                began = concurrency.monotonic()
                marks = {lane: lane.progress for lane in self._lanes()}
                try:
                    self._beat(began + self._options.heartbeat_timeout_secs)
                except TaskLeftError:
                    self.left = True
                    return
                except AbortedError:
                    # `bind` has interrupted all lanes already.
                    return
                except OpError as error:
                    self._missed(answered, marks, error)
                else:
                    answered = concurrency.monotonic()
                    if self.silent_since is not None:
                        logging.info(
                            "%s answers again after %.1f s",
                            self._dialer.name,
                            answered - self.silent_since,
                        )
                        self.silent_since = None
                self._closed.wait(
                    max(0.0, began + self._options.heartbeat_secs - concurrency.monotonic())
                )
            with self._lock:
                self.goodbye_sent = self._lane.close(goodbye=True, whole_client=True)
        finally:
            self._lane.close()

    def goodbye_received(self) -> bool:
        """Returns True if the peer has left for good.

        Also finds a goodbye that has arrived and was not read yet.
        """
        until = concurrency.monotonic() + times.GOODBYE_READ_SECS
        while not self.left and concurrency.monotonic() < until:
            with self._lock:
                # During a beat the thread of the heartbeat reads the goodbye: wait for its end.
                if not self._busy:
                    self.left = self._lane.link.has_left()
                    break
            concurrency.sleep(times.GOODBYE_READ_SECS / 50)
        return self.left

    def wake(self) -> None:
        """Ends a wait for an answer at once, from any thread."""
        with self._lock:
            if self._busy:
                self._lane.cancel()

    def _beat(self, deadline: float) -> None:
        with self._lock:
            if self._closed.is_set() or self.left:
                return
            self._busy = True
        try:
            if self._lane.fileno() < 0:
                self._lane.open(deadline)
                self._bind(self._lane.link.incarnation)
            self._lane.ping(deadline)
        finally:
            with self._lock:
                self._busy = False

    def _missed(self, answered: float, marks: dict[Lane, int], error: Exception) -> None:
        timeout = self._options.heartbeat_timeout_secs
        now = concurrency.monotonic()
        if now - answered < timeout or self._closed.is_set():
            return
        if self.silent_since is None:
            self.silent_since = answered
            logging.warning(
                "No answer from %s for %.1f s (%s); its connections are cut and made again",
                self._dialer.name,
                now - answered,
                error,
            )
        for lane, progress in marks.items():
            # A lane that connected lately, or whose bytes still move, has better news of the peer
            # than the pings.
            if lane.progress == progress and lane.link.connected_at < now - timeout:
                lane.link.interrupt()
