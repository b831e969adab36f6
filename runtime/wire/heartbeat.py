"""The pulse of a peer: pings on a connection of its own, and what is done when nothing comes back.

A frozen process or a cut cable closes no connection, so a call would wait for ever. The heartbeat notices, and
cuts the connections of the lanes: their calls connect again, and give up if the peer stays silent.
"""

import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from absl import logging

from runtime.errors import AbortedError, OpError
from runtime.wire import frames, sockets
from runtime.wire.channel import Lane
from runtime.wire.dial import ChannelOptions, Dialer

_POLL_SECS: Final = 0.5
_PING: Final = frames.pack_header(frames.MAGIC, frames.PING, 0, 0, 0, 0, 0)


class Heartbeat:
    """Pings one peer until its owner is closed or the peer is found to have restarted.

    Attributes:
        silent_since: `time.monotonic()` of the last answer if the peer is given up, else None.
        said_goodbye: whether it said goodbye for the whole client at its end.
        left: whether the peer said goodbye, and will not answer any more.
    """

    def __init__(
        self,
        dialer: Dialer,
        number: int,
        options: ChannelOptions,
        *,
        lanes: Callable[[], list[Lane]],
        bind: Callable[[int], None],
        closed: threading.Event,
    ) -> None:
        """Prepares it; `run` is for a thread of its own.

        Args:
            dialer: opens the connection.
            number: lane number of the heartbeat's connection.
            options: period and time limit.
            lanes: gives the lanes to cut when the peer is silent.
            bind: told the incarnation of every new connection; raises AbortedError if the peer has restarted.
            closed: set when it is time to end.
        """
        self.silent_since: float | None = None
        self.goodbye_sent = False
        self.left = False
        self._dialer = dialer
        self._number = number
        self._options = options
        self._lanes = lanes
        self._bind = bind
        self._closed = closed
        self._attempt = 0
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._connected = False
        self._busy = False

    def run(self) -> None:
        """Beats until closed, then says goodbye for the whole client."""
        answered = time.monotonic()
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                marks = {lane: lane.progress for lane in self._lanes()}
                try:
                    self._beat()
                except AbortedError:
                    return  # `bind` has told everybody
                except (OSError, OpError) as error:
                    if self._has_come_goodbye():  # between the look for it and the ping that broke
                        self.left = True
                        return
                    self._drop()
                    self._missed(answered, marks, error)
                else:
                    answered = time.monotonic()
                    if self.left:
                        return
                    if self.silent_since is not None:
                        logging.info("%s answers again after %.1f s", self._dialer.name, answered - self.silent_since)
                        self.silent_since = None
                self._closed.wait(max(0.0, began + self._options.heartbeat_secs - time.monotonic()))
            self._send_goodbye()
        finally:
            self._drop()

    def goodbye_received(self) -> bool:
        """Whether the peer has left for good, also when that has not been read yet."""
        until = time.monotonic() + _POLL_SECS
        while not self.left and time.monotonic() < until:
            with self._lock:
                if not self._busy:  # else it is being read just now
                    self.left = self._has_come_goodbye()
                    break
            time.sleep(_POLL_SECS / 50)
        return self.left

    def wake(self) -> None:
        """Ends a wait for an answer at once, from any thread."""
        with self._lock:
            if self._busy and self._sock is not None:
                sockets.interrupt(self._sock)

    def _beat(self) -> None:
        timeout = self._options.heartbeat_timeout_secs
        deadline = time.monotonic() + timeout
        with self._lock:
            self._busy = True
        try:
            if self.left or self._has_come_goodbye():
                self.left = True  # it came while nobody looked
                return
            if not self._connected:
                self._attempt += 1
                endpoint = self._dialer.endpoint(None, timeout)
                welcome = self._dialer.dial(endpoint, self._number, self._attempt, timeout, self._adopt)
                self._bind(welcome.incarnation)
                self._connected = True
            sock = self._sock
            assert sock is not None
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.sendall(_PING)
            answer = sock.recv(frames.HEADER_BYTES)
            if answer == frames.LEAVES:
                self.left = True
                return
            if len(answer) != frames.HEADER_BYTES or frames.unpack_header(answer)[1] != frames.PONG:
                raise ConnectionResetError("the heartbeat's connection was closed")
        finally:
            with self._lock:
                self._busy = False

    def _has_come_goodbye(self) -> bool:
        return self._connected and self._sock is not None and sockets.ends_with(self._sock, frames.LEAVES)

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

    def _send_goodbye(self) -> None:
        if self._connected and self._sock is not None:
            try:
                self.goodbye_sent = self._sock.send(frames.CLIENT_LEAVES) == len(frames.CLIENT_LEAVES)
            except OSError as error:
                logging.debug("%s missed our goodbye and will forget us later: %s", self._dialer.task, error)

    def _adopt(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = sock
            if self._closed.is_set():
                raise ConnectionAbortedError("closed")

    def _drop(self) -> None:
        with self._lock:
            self._connected = False
            sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()
