"""The pulse of a peer: pings on a connection of its own, and what is done when nothing comes back.

A frozen process or a cut cable closes no connection, so a call would wait for ever. The heartbeat notices, and
cuts the connections of the lanes: their calls connect again, and give up if the peer stays silent.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from absl import logging

from runtime.errors import AbortedError, OpError, TaskLeftError
from runtime.wire.channel import Lane
from runtime.wire.dial import Dialer

_POLL_SECS: Final = 0.5


class Heartbeat:
    """Pings one peer until its owner is closed or the peer is found to have restarted.

    Attributes:
        silent_since: `time.monotonic()` of the last answer if the peer is given up, else None.
        goodbye_sent: whether it said goodbye for the whole client at its end.
        left: whether the peer said goodbye, and will not answer any more.
    """

    def __init__(
        self,
        dialer: Dialer,
        number: int,
        *,
        lanes: Callable[[], list[Lane]],
        bind: Callable[[int], None],
        closed: threading.Event,
    ) -> None:
        """Prepares it; `run` is for a thread of its own.

        Args:
            dialer: opens the connection.
            number: lane number of the heartbeat, always the same: one lane of the client is remembered for it.
            lanes: gives the lanes to cut when the peer is silent.
            bind: told the incarnation of every new connection; raises AbortedError if the peer has restarted.
            closed: set when it is time to end.
        """
        self.silent_since: float | None = None
        self.goodbye_sent = False
        self.left = False
        self._dialer = dialer
        self._options = dialer.options
        self._lanes = lanes
        self._bind = bind
        self._closed = closed
        self._lock = threading.Lock()
        self._lane = Lane(dialer, number)
        self._busy = False

    def run(self) -> None:
        """Beats until closed, then says goodbye for the whole client."""
        answered = time.monotonic()
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                marks = {lane: lane.progress for lane in self._lanes()}
                try:
                    self._beat(began + self._options.heartbeat_timeout_secs)
                except TaskLeftError:
                    self.left = True
                    return
                except AbortedError:
                    return  # `bind` has told everybody
                except OpError as error:
                    self._missed(answered, marks, error)
                else:
                    answered = time.monotonic()
                    if self.silent_since is not None:
                        logging.info("%s answers again after %.1f s", self._dialer.name, answered - self.silent_since)
                        self.silent_since = None
                self._closed.wait(max(0.0, began + self._options.heartbeat_secs - time.monotonic()))
            with self._lock:
                self.goodbye_sent = self._lane.close(goodbye=True, whole_client=True)
        finally:
            self._lane.close()

    def goodbye_received(self) -> bool:
        """Whether the peer has left for good, also when that has not been read yet."""
        until = time.monotonic() + _POLL_SECS
        while not self.left and time.monotonic() < until:
            with self._lock:
                if not self._busy:  # else it is being read just now
                    self.left = self._lane.has_left()
                    break
            time.sleep(_POLL_SECS / 50)
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
                self._bind(self._lane.incarnation)
            self._lane.ping(deadline)
        finally:
            with self._lock:
                self._busy = False

    def _missed(self, answered: float, marks: dict[Lane, int], error: Exception) -> None:
        timeout = self._options.heartbeat_timeout_secs
        now = time.monotonic()
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
            # A lane that connected lately, or whose bytes still move, knows better than we do.
            if lane.progress == progress and lane.connected_at < now - timeout:
                lane.interrupt()
