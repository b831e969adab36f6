"""The wait log: the reason of a client's wait while a master in another process works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from absl import logging

from runtime import timeouts


@dataclass(eq=False)
class _Wait:
    what: str
    since: float
    log_at: float


class WaitLog:
    """The log, every 10 s, of what calls under way wait for. A thread writes it, as gRPC's calls block.

    Args:
        peers: the tasks that they wait for.
    """

    def __init__(self, peers: str) -> None:
        self._peers = peers
        self._waits: list[_Wait] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Logs the waits of a call within the block.

        Args:
            what: what the other side is waited for to do.
        """
        now = time.monotonic()
        wait = _Wait(what, now, now + timeouts.LOG_EVERY_SECS)
        with self._lock:
            self._waits.append(wait)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name=f"waiting for {self._peers}", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(wait)

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        if thread is not None and thread.is_alive():  # a signal may have come into its start, and brought us here
            thread.join()

    def _run(self) -> None:
        pause = timeouts.LOG_EVERY_SECS
        while not self._closed.wait(pause):
            now = time.monotonic()
            with self._lock:
                due = [wait for wait in self._waits if wait.log_at <= now]
                for wait in due:
                    wait.log_at = now + timeouts.LOG_EVERY_SECS
                pause = min((wait.log_at - now for wait in self._waits), default=timeouts.LOG_EVERY_SECS)
            for wait in due:
                logging.warning("Waiting for %s to %s, for %.0f s now", self._peers, wait.what, now - wait.since)
