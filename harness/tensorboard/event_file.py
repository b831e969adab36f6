"""An event file and its writer thread: an added event costs the step loop an append to a list.

An error of the disk never reaches the training loop. The error is logged once, and events wait in
memory for room. Events beyond the room in memory are lost and counted (``events_lost_total``). The
file only grows, by whole records in order, so a reader such as TensorBoard finds at worst an
unfinished last record.
"""

import contextlib
import errno
import os
import socket
import struct

from absl import logging
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter, masked_crc32c

import runtime as rt
from harness.tensorboard import times
from runtime import concurrency

KEEP_BYTES = 16 << 20
"""Most bytes of events that wait in memory for a disk with an error; later events are lost."""
_FLUSH_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class RecordFile:
    """Records in TensorFlow's format in a local file; records are kept until they are safely on disk.

    Args:
        path: the file, which the first flush makes.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._synced = 0
        self._kept = bytearray()

    def write(self, data: bytes) -> None:
        """Adds a record for the next flush."""
        # The format of TensorFlow: length, its checksum, data, its checksum.
        length = struct.pack("<Q", len(data))
        self._kept += length + struct.pack("<I", masked_crc32c(length))
        self._kept += data
        self._kept += struct.pack("<I", masked_crc32c(data))

    def flush(self) -> None:
        """Writes all records to disk.

        Raises:
            OSError: The disk has failed; the next flush writes the same bytes to the same place.
        """
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            data, written = memoryview(bytes(self._kept)), 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._synced + written)
            os.fsync(self._file)
        except OSError:
            # A network file system that comes back may need the file to be opened again.
            self.close()
            raise
        self._synced += written
        self._kept.clear()

    def close(self) -> None:
        """Closes the file, and drops records that were not flushed."""
        if self._file is not None:
            # All records that count are synced.
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


class EventFile:
    """A new event file in ``logdir`` and its writer thread.

    Args:
        logdir: an existing directory, or a place that tensorboardX can write to (gs://, s3://).
        flush_secs: seconds between two flushes to disk.
        suffix: end of the file's name.

    Attributes:
        path: the file.
        lost: number of events that were lost.

    Raises:
        OSError: The file cannot be made, for another reason than a full disk.
    """

    def __init__(self, logdir: str, flush_secs: float, suffix: str) -> None:
        self.path = _new_path(logdir, suffix)
        self.lost = 0
        self._flush_secs = flush_secs
        self._local = "://" not in self.path
        self._records = RecordFile(self.path) if self._local else RecordWriter(self.path)
        self._logged_lost = 0
        self._failure = ""
        # The thread is informed of events and orders, and informs those who wait for room or for a
        # flush.
        self._changed = concurrency.Condition()
        self._new = [
            event_pb2.Event(
                wall_time=concurrency.wall_time(), file_version="brain.Event:2"
            ).SerializeToString()
        ]
        # Events that are not on disk, and their bytes.
        self._waiting = 1
        self._waiting_bytes = len(self._new[0])
        # The first event is flushed at once, so that TensorBoard shows the run.
        self._due = 0.0
        self._flushes_ordered = self._flushes_done = 0
        self._closing = False
        self._threads = concurrency.ThreadGroup(self.path)
        self._thread = self._threads.start(
            self._write_events, name=f"events {os.path.basename(self.path)}"
        )

    def put(self, event: event_pb2.Event) -> None:
        """Adds an event; blocks while 16 MiB of events wait for a slow disk."""
        data = event.SerializeToString()
        with self._changed:
            # A slow disk holds the step loop up. A disk that has failed does not.
            self._changed.wait_for(
                lambda: self._failure or self._is_over() or self._waiting_bytes <= KEEP_BYTES
            )
            if self._failure and self._waiting_bytes + len(data) > KEEP_BYTES:
                self._lose_events(1)
            elif not self._is_over():
                self._new.append(data)
                self._waiting += 1
                self._waiting_bytes += len(data)
                self._changed.notify_all()

    def flush(self) -> bool:
        """Tries to write all events; returns True if every event so far is on disk, or lost."""
        with self._changed:
            # The number of an order tells a flush of these events from an earlier one.
            self._flushes_ordered += 1
            mine = self._flushes_ordered
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushes_done >= mine or self._is_over())
            return not self._failure

    def close(self) -> None:
        """Flushes, ends the thread and closes the file; events that the disk does not take now are lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._threads.close()
        if self._failure:
            self._lose_events(self._waiting)
            logging.error(
                "%s lost: %s cannot be written: %s",
                _count_text(self.lost),
                self.path,
                self._failure,
            )
            if not self._local:
                # The `close` of the records would try to write them once more.
                return
        self._records.close()

    def _is_over(self) -> bool:
        """Returns True if no event will be written any more: a forked child has no writer thread."""
        return self._closing or not self._thread.is_alive()

    def _lose_events(self, count: int) -> None:
        self.lost += count
        rt.lowlevel.metrics.add("events_lost_total", count)

    def _secs_to_flush(self) -> float | None:
        """Returns the seconds until the next flush; None while no event waits."""
        # A store is written whole at each flush; but the step loop waits where no more events may
        # wait.
        most = _FLUSH_BYTES if self._local else KEEP_BYTES
        much = not self._failure and self._waiting_bytes >= most
        if much or self._closing or self._flushes_ordered > self._flushes_done:
            return 0.0
        return max(0.0, self._due - concurrency.monotonic()) if self._waiting else None

    def _write_events(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                while (secs := self._secs_to_flush()) != 0.0:
                    self._changed.wait(secs)
                new, self._new = self._new, []
                written, closing, ordered = (
                    self._waiting_bytes,
                    self._closing,
                    self._flushes_ordered,
                )
            for data in new:
                self._records.write(data)
            failure = self._flush_records()
            with self._changed:
                if not failure:
                    self._waiting = len(self._new)
                    self._waiting_bytes -= written
                self._failure = failure
                self._flushes_done = ordered
                assert self._waiting >= len(self._new), "an event that waits is not counted"
                assert self._waiting_bytes >= 0 and ordered <= self._flushes_ordered
                self._due = concurrency.monotonic() + (
                    times.RETRY_SECS if failure else self._flush_secs
                )
                self._changed.notify_all()

    def _flush_records(self) -> str:
        """Writes the waiting events; returns the failure, which is logged, as no training depends on events."""
        try:
            self._records.flush()
        except Exception as error:
            if not self._failure:
                logging.error(
                    "events cannot be written to %s: %s; training goes on, and the next %d MB of "
                    "them wait in memory",
                    self.path,
                    error,
                    KEEP_BYTES >> 20,
                )
            return str(error) or type(error).__name__
        if self._failure:
            missing, self._logged_lost = self.lost - self._logged_lost, self.lost
            logging.warning(
                "events are written again to %s; %s lost", self.path, _count_text(missing)
            )
        return ""


def _count_text(count: int) -> str:
    return "1 event was" if count == 1 else f"{count or 'no'} events were"


def _new_path(logdir: str, suffix: str) -> str:
    """Returns a file name that no writer has, as a file that is opened again within a second must be a new file."""
    second = int(concurrency.wall_time())
    while True:
        path = (
            f"{logdir.rstrip('/')}/events.out.tfevents.{second:010d}.{socket.gethostname()}{suffix}"
        )
        if "://" in path:
            return path
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return path
        except FileExistsError:
            second += 1
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            # The first flush with room on the disk makes the file.
            return path
