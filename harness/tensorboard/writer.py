"""FileWriter: summaries, graphs, run metadata and session logs in event files for TensorBoard."""

from __future__ import annotations

import errno
import glob
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import SupportsInt

from absl import logging
from google.protobuf.message import DecodeError, Message
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

import runtime as rt
from harness.tensorboard.event_file import EventFile
from harness.tensorboard.graph_def import graph_def
from harness.tensorboard.plugin_messages import Layout, custom_scalars_summary, hparams_summary

_NO_PLACE = {
    *(errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR),
    *(errno.EPERM, errno.EROFS),
}
"""Errors of a directory that stays unusable until a person helps."""
_FLUSH_SECS = 2.0
_FLUSH_STORE_SECS = 120.0
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_FOOTER_BYTES = _CHECKSUM.size
_BLOCK_BYTES = 1 << 20
MOST_RECORD_BYTES = 16 << 20
"""Most bytes of a record that is read: as messages, the parts may take thirty times as much memory."""
MOST_TAGS = 1 << 16
MOST_KEPT_BYTES = 256 << 20
"""Most bytes of last points in memory. Beyond these bytes, or ``MOST_TAGS``, no point is repeated."""


class FileWriter:
    """A writer of event files into a directory, with a thread of its own. Thread safe.

    Several processes may write into one directory, each with its own ``filename_suffix``; TensorBoard shows a directory
    as one run, so series that several processes write under one tag belong in directories of their own.

    An error of the disk is logged and not raised. Events that are added meanwhile wait in memory, up to 16 MiB, and are
    written when there is room. Further events are lost and counted (``events_lost_total``).

    Args:
        logdir: the directory, which is made if missing.
        graph: a graph to write at once.
        max_queue: events that may wait for the thread before an added event blocks.
        flush_secs: seconds between two flushes to disk; the first flush is at once. By default every 2 s,
            and every 120 s in a cloud store, where a flush writes the whole file again.
        filename_suffix: end of the file names.

    Raises:
        PermissionDeniedError: The directory cannot be made or written to; the error says what to do.
        OSError: The file cannot be made for another reason than a full disk.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        graph: rt.Graph | None = None,
        max_queue: int = 10,
        flush_secs: float | None = None,
        filename_suffix: str | None = None,
    ) -> None:
        self._logdir = os.fspath(logdir)
        if flush_secs is None:
            flush_secs = _FLUSH_STORE_SECS if "://" in self._logdir else _FLUSH_SECS
        self._options = (max_queue, flush_secs, filename_suffix or "")
        self._lock = threading.Lock()
        self._metadata_tags: set[str] = set()
        self._described: set[str] = set()
        self._described_at_loss = 0
        self._warned = False
        self._rests = False
        self._file: EventFile | None = None
        self.on_scalars: Callable[[Mapping[str, float], int | None], object] | None = None
        """A function that receives the numbers of each event, by tag, and the step or None. Errors are logged."""
        self._open()
        if graph is not None:
            self.add_graph(graph)

    def _open(self) -> None:
        try:
            if "://" not in self._logdir:
                os.makedirs(self._logdir, exist_ok=True)
            file = EventFile(self._logdir, *self._options)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            raise rt.PermissionDeniedError(
                f"nothing can be written to the logdir {self._logdir} ({error.strerror}): give a directory that this "
                "task's user may write to"
            ) from None
        self._file = file
        # A program that ends without closing loses nothing.
        self._finalizer = weakref.finalize(self, EventFile.close, file)
        self._described.clear()
        self._described_at_loss = 0
        self._warned = False

    def get_logdir(self) -> str:
        """Returns the directory."""
        return self._logdir

    @property
    def path(self) -> str | None:
        """The present event file; None while closed."""
        file = self._file
        return None if file is None else file.path

    # -- adding ------------------------------------------------------------------------------------------------

    def add_summary(self, summary: bytes | Message, global_step: SupportsInt | None = None) -> None:
        """Adds a summary.

        Args:
            summary: the value of a summary (bytes), or a Summary message.
            global_step: the step of the summary.

        Raises:
            TypeError: The summary is neither.
        """
        if isinstance(summary, bytes):
            message = summary_pb2.Summary.FromString(summary)
        elif isinstance(summary, Message):
            # Another package may have made the class of the same message.
            message = summary_pb2.Summary.FromString(summary.SerializeToString())
        else:
            raise TypeError(f"add_summary takes bytes or a Summary, not {type(summary).__name__}")
        self._describe_once(message)
        self._add_summary(message, global_step)

    def _add_summary(self, message: summary_pb2.Summary, global_step: SupportsInt | None) -> None:
        self._add(event_pb2.Event(summary=message), global_step)
        if self.on_scalars is not None:
            numbers = {value.tag: value.simple_value for value in message.value if value.HasField("simple_value")}
            if numbers:
                try:
                    self.on_scalars(numbers, None if global_step is None else int(global_step))
                except Exception as error:
                    # A library or a server of the user may fail, and no training depends on either.
                    logging.log_every_n_seconds(logging.WARNING, "on_scalars: %s: %s", 60, type(error).__name__, error)

    def _describe_once(self, message: summary_pb2.Summary) -> None:
        """Removes repeated metadata: readers keep the metadata of the first value of a tag."""
        with self._lock:
            lost = 0 if self._file is None else self._file.lost
            if lost != self._described_at_loss:
                # The lost events may be the values with the metadata.
                self._described.clear()
                self._described_at_loss = lost
            for value in message.value:
                if value.HasField("metadata"):
                    if value.tag in self._described:
                        value.ClearField("metadata")
                    self._described.add(value.tag)

    def add_scalars(self, values: Mapping[str, float], global_step: SupportsInt | None = None) -> None:
        """Adds one number for each tag."""
        message = summary_pb2.Summary(
            value=[summary_pb2.Summary.Value(tag=tag, simple_value=float(v)) for tag, v in values.items()]
        )
        self._add_summary(message, global_step)

    def add_hparams(self, values: Mapping[str, object], metrics: Sequence[str] = ()) -> None:
        """Gives the run its row in TensorBoard's table of hyperparameters; see ``summary.hparams``."""
        self.add_summary(hparams_summary(values, metrics))

    def add_layout(self, layout: Layout) -> None:
        """Groups scalars into charts of TensorBoard's custom-scalars page: category -> chart -> patterns of tags."""
        self.add_summary(custom_scalars_summary(layout))

    def add_graph(self, graph: rt.Graph | Message, global_step: SupportsInt | None = None) -> None:
        """Adds a graph, for TensorBoard's graph page.

        Raises:
            TypeError: The graph is neither a Graph nor a GraphDef message.
        """
        message = graph_def(graph) if isinstance(graph, rt.Graph) else graph
        if not hasattr(message, "node"):
            raise TypeError(f"add_graph takes a Graph or a GraphDef, not {type(graph).__name__}")
        self._add(event_pb2.Event(graph_def=message.SerializeToString()), global_step)

    def add_run_metadata(self, run_metadata: Message, tag: str, global_step: SupportsInt | None = None) -> None:
        """Adds the compute times and bytes of a traced step, for the graph page.

        Args:
            run_metadata: a ``runtime.RunMetadata`` or a message of that shape.
            tag: name of the step in TensorBoard, such as "step 100".
            global_step: the step.

        Raises:
            ValueError: The tag was used before.
        """
        with self._lock:
            if tag in self._metadata_tags:
                raise ValueError(f"The provided tag {tag!r} was already used for this event type")
            self._metadata_tags.add(tag)
        tagged = event_pb2.TaggedRunMetadata(tag=tag, run_metadata=run_metadata.SerializeToString())
        self._add(event_pb2.Event(tagged_run_metadata=tagged), global_step)

    def add_session_log(
        self,
        session_log: str | event_pb2.SessionLog,
        global_step: SupportsInt | None = None,
        checkpoint_path: str = "",
        msg: str = "",
    ) -> None:
        """Adds a mark of the run's life.

        START at a step makes TensorBoard forget the later points that a crashed run left in the directory (in files
        with this writer's suffix); see ``points_to_repeat``.

        Args:
            session_log: "START", "STOP" or "CHECKPOINT", or a SessionLog message.
            global_step: its step.
            checkpoint_path: of a CHECKPOINT.
            msg: anything.
        """
        if isinstance(session_log, str):
            status = event_pb2.SessionLog.SessionStatus.Value(session_log)
            session_log = event_pb2.SessionLog(status=status, checkpoint_path=checkpoint_path, msg=msg)
        self._add(event_pb2.Event(session_log=session_log), global_step)
        path = self.path
        if session_log.status == event_pb2.SessionLog.START and global_step and path and "://" not in path:
            for event in points_to_repeat(self._logdir, int(global_step), suffix=self._options[2], but=path):
                self.add_event(event)

    def add_event(self, event: event_pb2.Event) -> None:
        """Adds an Event message as it is."""
        if self._rests:
            self.reopen()
        file = self._file
        if file is None:
            if not self._warned:
                self._warned = True
                logging.warning("Attempting to use a closed FileWriter (%s): events are dropped", self._logdir)
            return
        file.put(event)

    def _add(self, event: event_pb2.Event, global_step: SupportsInt | None) -> None:
        event.wall_time = time.time()
        if global_step is not None:
            event.step = int(global_step)
        self.add_event(event)

    # -- life --------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Tries to write all events; returns True if they are on disk. Lost events are logged."""
        file = self._file
        return file is None or file.flush()

    def close(self) -> None:
        """Flushes and closes the file; later events are dropped with a warning. A second call does nothing."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            self._finalizer.detach()
            file.close()

    def rest(self) -> None:
        """Closes the file and ends its thread until the next event, which opens a new file as ``reopen`` does."""
        if self._file is not None:
            self.close()
            self._rests = True

    def reopen(self) -> None:
        """Opens a new file in the same directory after ``close``; does nothing while a file is open."""
        with self._lock:
            self._rests = False
            if self._file is None:
                self._open()

    def __enter__(self) -> FileWriter:
        """Returns the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the writer."""
        self.close()


class FileWriterCache:
    """One FileWriter for each directory of this process."""

    _lock = threading.Lock()
    _writers: dict[str, FileWriter] = {}

    @classmethod
    def get(cls, logdir: str | os.PathLike[str]) -> FileWriter:
        """The writer for ``logdir``, made when it is first asked for."""
        key = os.fspath(logdir)
        with cls._lock:
            if key not in cls._writers:
                cls._writers[key] = FileWriter(key, graph=rt.get_default_graph())
            return cls._writers[key]

    @classmethod
    def clear(cls) -> None:
        """Closes all of them."""
        with cls._lock:
            writers, cls._writers = list(cls._writers.values()), {}
        for writer in writers:
            writer.close()


def _records(path: str) -> Iterator[tuple[event_pb2.Event, bytes, int]]:
    """Yields the events of a file, each with its bytes and the masked CRC-32C that was written for the bytes.

    The events end with the file, or where a crash has cut off the file. A length with a wrong checksum, or an error of
    the disk, ends them too, and is logged. Records that are no events are skipped, and their number is logged.
    """
    bad = 0
    try:
        # O_NONBLOCK: the opening of a pipe would wait for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            size = about.st_size
            while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
                (length,) = _LENGTH.unpack_from(header)
                if masked_crc32c(header[: _LENGTH.size]) != _CHECKSUM.unpack_from(header, _LENGTH.size)[0]:
                    at = file.tell() - _HEADER_BYTES
                    # A power cut leaves zeros, which are no damage.
                    if any(header) or any(file.read(_BLOCK_BYTES)):
                        logging.warning("event file %s is damaged at byte %d: the rest of it is skipped", path, at)
                    break
                if length + _FOOTER_BYTES > size - file.tell():
                    break
                if length > MOST_RECORD_BYTES:
                    logging.warning("event file %s: a record of %d bytes is skipped", path, length)
                    file.seek(length + _FOOTER_BYTES, os.SEEK_CUR)
                    continue
                data = file.read(length)
                (checksum,) = _CHECKSUM.unpack(file.read(_FOOTER_BYTES))
                try:
                    event = event_pb2.Event.FromString(data)
                except DecodeError:
                    bad += 1
                else:
                    yield event, data, checksum
    except (OSError, struct.error) as error:
        # A file that another process has made shorter meanwhile is a struct.error.
        logging.warning("event file %s cannot be read: %s; the rest of it is skipped", path, error)
    if bad:
        logging.warning(
            "event file %s is damaged: %d record%s of it skipped", path, bad, " is" if bad == 1 else "s are"
        )


def read_events(path: str) -> Iterator[event_pb2.Event]:
    """Yields the Event messages of a file up to its end, or a cut by a crash, without damaged records.

    Only the checksums of lengths are checked: a damaged event that is still a message is not noticed.
    """
    for event, _, _ in _records(path):
        yield event


def points_to_repeat(logdir: str, step: int, *, suffix: str = "", but: str = "") -> list[event_pb2.Event]:
    """Returns events that repeat the last point before ``step`` of each tag with points from ``step`` on.

    TensorBoard's slow loader drops later points when it reads a session log START with a step. Its fast loader, the
    default, does not look at session logs: it drops the points of a tag from step p on when a new point of that tag
    comes with step p. So after a restart the last good point of every tag that went too far is written once more.

    Damaged records are left out: only points that were written so are repeated.

    Args:
        logdir: directory of the event files.
        step: the step from which the run starts again.
        suffix: end of the names of the files to read.
        but: path of a file to leave out.
    """
    points = _LastPoints(step)
    for path in sorted(glob.glob(os.path.join(glob.escape(logdir), f"events.out.tfevents.*{glob.escape(suffix)}"))):
        if path == but:
            continue
        for record in _records(path):
            points.note(*record)
            if points.are_too_many:
                logging.warning("event file %s has too many tags, or too large events: no point is repeated", path)
                return []
    return points.repeated()


class _LastPoints:
    """The last point of each tag before a step, and the tags that have later points."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._good: dict[str, tuple[event_pb2.Event, summary_pb2.Summary.Value, bytes, int]] = {}
        self._went_too_far: set[str] = set()
        self._described: dict[str, summary_pb2.SummaryMetadata] = {}
        self._kept = 0  # bytes of the good points

    @property
    def are_too_many(self) -> bool:
        tags = max(len(self._good), len(self._went_too_far), len(self._described))
        return self._kept > MOST_KEPT_BYTES or tags > MOST_TAGS

    def note(self, event: event_pb2.Event, data: bytes, checksum: int) -> None:
        """Notes the next event of the run, with its bytes and their checksum."""
        if event.WhichOneof("what") == "session_log" and event.session_log.status == event_pb2.SessionLog.START:
            # An earlier restart: what lay behind its step is gone, and what was repeated then follows.
            if event.step <= self._step:
                self._went_too_far.clear()
            self._good = {tag: point for tag, point in self._good.items() if point[0].step < event.step}
            self._kept = sum(len(point[2]) for point in self._good.values())
            return
        for value in event.summary.value:
            if value.HasField("metadata"):
                self._described.setdefault(value.tag, value.metadata)
            if event.step >= self._step:
                self._went_too_far.add(value.tag)
            else:
                before = self._good.get(value.tag)
                self._kept += len(data) - (len(before[2]) if before else 0)
                self._good[value.tag] = (event, value, data, checksum)

    def repeated(self) -> list[event_pb2.Event]:
        """Returns events that repeat the last good point of each tag that went too far."""
        repeated = []
        for tag in sorted(self._went_too_far & self._good.keys()):
            event, value, data, checksum = self._good[tag]
            # Checksums are computed for these points only: 5 MB of them take a second.
            if masked_crc32c(data) != checksum:
                text = "the event of %s at step %d is damaged: TensorBoard may show what was lost after it"
                logging.warning(text, tag, event.step)
                continue
            if tag in self._described:
                value.metadata.CopyFrom(self._described[tag])
            summary = summary_pb2.Summary(value=[value])
            repeated.append(event_pb2.Event(wall_time=event.wall_time, step=event.step, summary=summary))
        return repeated
