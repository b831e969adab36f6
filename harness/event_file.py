"""One event file, and the thread that writes to it: adding an event costs the step loop a put into a queue."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from typing import Any

from absl import logging
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

_LOOK_SECS = 0.5


class EventFile:
    """A new event file in ``logdir`` and its writer thread.

    Args:
        logdir: an existing directory, or a place that tensorboardX can write to (gs://, s3://).
        max_queue: how many events may wait to be written before ``put`` blocks.
        flush_secs: how often what was written is flushed to disk.
        suffix: end of the file's name.
    """

    def __init__(self, logdir: str, max_queue: int, flush_secs: float, suffix: str) -> None:
        self.path = _new_path(logdir, suffix)
        self.failure: Exception | None = None
        self._flush_secs = flush_secs
        self._records = RecordWriter(self.path)
        self._queue: queue.Queue[Any] = queue.Queue(max(1, max_queue))
        self._thread = threading.Thread(target=self._run, name=f"events {os.path.basename(self.path)}", daemon=True)
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._thread.start()

    def put(self, event: Any) -> None:
        """Queues an event; blocks while the queue is full.

        Raises:
            Exception: what made writing fail before.
        """
        self.check()
        while True:
            try:
                self._queue.put(event, timeout=_LOOK_SECS)
                return
            except queue.Full:
                if not self._thread.is_alive():  # closed by another thread at this moment
                    return

    def check(self) -> None:
        """Raises what made writing fail, if something did."""
        if self.failure is not None:
            raise self.failure

    def flush(self) -> None:
        """Returns when every event that was put is on disk.

        Raises:
            Exception: what made writing fail.
        """
        self.check()
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(_LOOK_SECS):
            if not self._thread.is_alive():
                break
        self.check()

    def close(self) -> None:
        """Flushes, ends the thread and closes the file.

        Raises:
            Exception: what made writing fail.
        """
        self._queue.put(None)
        self._thread.join()
        try:
            self._records.close()
        finally:
            self.check()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def _run(self) -> None:
        next_flush = 0.0  # the first event is flushed at once
        dirty = True
        while True:
            try:
                wait = next_flush - time.monotonic() if dirty else None
                item = self._queue.get(timeout=None if wait is None else max(wait, 0.0))
            except queue.Empty:
                item = _NOTHING
            if self.failure is None:
                try:
                    if isinstance(item, event_pb2.Event):
                        self._write(item)
                        dirty = True
                    if dirty and (item is None or isinstance(item, threading.Event) or time.monotonic() >= next_flush):
                        self._records.flush()
                        dirty = False
                        next_flush = time.monotonic() + self._flush_secs
                except Exception as error:  # goes on taking events, so that nobody blocks; the next call raises it
                    self.failure = error
                    dirty = False
                    logging.error("events can no longer be written to %s: %s", self.path, error)
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()


_NOTHING = object()


def _new_path(logdir: str, suffix: str) -> str:
    """A file name that no writer has: reopening within a second must not write over what is there."""
    second = int(time.time())
    while True:
        path = f"{logdir.rstrip('/')}/events.out.tfevents.{second:010d}.{socket.gethostname()}{suffix}"
        if "://" in path:
            return path
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return path
        second += 1
