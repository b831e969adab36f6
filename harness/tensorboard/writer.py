"""FileWriter: summaries, graphs, run metadata and session logs in event files for TensorBoard."""

import errno
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsInt

from absl import logging
from google.protobuf.message import Message
from tensorboardX.proto import event_pb2, summary_pb2

import runtime as rt
from harness.tensorboard import times
from harness.tensorboard.event_file import EventFile
from harness.tensorboard.graph_def import graph_def
from harness.tensorboard.plugin_messages import Layout, custom_scalars_summary, hparams_summary
from runtime import concurrency

_NO_PLACE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""Errors of a directory that stays unusable until a person helps."""


class FileWriter:
    """A writer of event files into a directory, with a thread of its own. Thread safe.

    ``close`` ends the file and the thread. The next event opens a new file in the same directory.

    Several processes may write into one directory, each with its own ``filename_suffix``;
    TensorBoard shows a directory as one run, so series that several processes write under one tag
    belong in directories of their own.

    An error of the disk is logged and not raised. Events that are added meanwhile wait in memory,
    up to 16 MiB, and are written when there is room. Further events are lost and counted
    (``events_lost_total``).

    Args:
        logdir: the directory, which is made if missing.
        graph: a graph to write at once.
        flush_secs: seconds between two flushes to disk; the first flush is at once. By default
            every 2 s, and every 120 s in a cloud store, where a flush writes the whole file again.
        filename_suffix: end of the file names.

    Raises:
        PermissionDeniedError: The directory cannot be made or written to; the error says what to
            do.
        OSError: The file cannot be made for another reason than a full disk.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        graph: rt.Graph | None = None,
        *,
        flush_secs: float | None = None,
        filename_suffix: str | None = None,
    ) -> None:
        self._logdir = os.fspath(logdir)
        if flush_secs is None:
            flush_secs = times.FLUSH_STORE_SECS if "://" in self._logdir else times.FLUSH_SECS
        self._options = (flush_secs, filename_suffix or "")
        self._lock = concurrency.Lock()
        self._file: EventFile | None = None
        self.on_scalars: Callable[[Mapping[str, float], int | None], object] | None = None
        """A function that receives the numbers of each event, by tag, and the step or None.

        Errors are logged.
        """
        self._open_file()
        if graph is not None:
            self.add_graph(graph)

    def _open_file(self) -> EventFile:
        assert self._file is None, "nothing would close the open file"
        try:
            if "://" not in self._logdir:
                os.makedirs(self._logdir, exist_ok=True)
            file = EventFile(self._logdir, *self._options)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            raise rt.PermissionDeniedError(
                f"nothing can be written to the logdir {self._logdir} ({error.strerror}): give a "
                "directory that this task's user may write to"
            ) from None
        self._file = file
        # A program that ends without closing loses nothing.
        self._finalizer = weakref.finalize(self, EventFile.close, file)
        return file

    def get_logdir(self) -> str:
        """Returns the directory.

        Programs of TensorFlow ask the writers of a Supervisor or a FileWriterCache, too.
        """
        return self._logdir

    @property
    def path(self) -> str | None:
        """The present event file; None while closed."""
        file = self._file
        return None if file is None else file.path

    # -- adding ------------------------------------------------------------------------------------

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
        self._add_event(event_pb2.Event(summary=message), global_step)
        numbers = {
            value.tag: value.simple_value
            for value in message.value
            if value.HasField("simple_value")
        }
        if self.on_scalars is not None and numbers:
            try:
                self.on_scalars(numbers, None if global_step is None else int(global_step))
            except Exception as error:
                # A library or a server of the user may fail, and no training depends on either.
                logging.log_every_n_seconds(
                    logging.WARNING, "on_scalars: %s: %s", 60, type(error).__name__, error
                )

    def add_scalars(
        self, values: Mapping[str, float], global_step: SupportsInt | None = None
    ) -> None:
        """Adds one number for each tag."""
        points = (
            summary_pb2.Summary.Value(tag=tag, simple_value=float(v)) for tag, v in values.items()
        )
        self.add_summary(summary_pb2.Summary(value=points), global_step)

    def add_hparams(self, values: Mapping[str, object], metrics: Sequence[str] = ()) -> None:
        """Gives the run its row in TensorBoard's table of hyperparameters.

        Args:
            values: name -> bool, number or string. Other values are shown as text, and None is left
                out.
            metrics: tags of scalars in the row, such as "accuracy".
        """
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
        # By its field, as the class of a GraphDef may be of another package.
        if not hasattr(message, "node"):
            raise TypeError(f"add_graph takes a Graph or a GraphDef, not {type(graph).__name__}")
        self._add_event(event_pb2.Event(graph_def=message.SerializeToString()), global_step)

    def add_run_metadata(
        self, run_metadata: Message, tag: str, global_step: SupportsInt | None = None
    ) -> None:
        """Adds the compute times and bytes of a traced step, for the graph page.

        Args:
            run_metadata: a ``runtime.RunMetadata`` or a message of that shape.
            tag: name of the step in TensorBoard, such as "step 100".
            global_step: the step.
        """
        tagged = event_pb2.TaggedRunMetadata(tag=tag, run_metadata=run_metadata.SerializeToString())
        self._add_event(event_pb2.Event(tagged_run_metadata=tagged), global_step)

    def add_session_log(
        self,
        session_log: str | event_pb2.SessionLog,
        global_step: SupportsInt | None = None,
        checkpoint_path: str = "",
        msg: str = "",
    ) -> None:
        """Adds a mark of the run's life.

        START at a step makes TensorBoard's slow loader drop the later points of a crashed run.

        Args:
            session_log: "START", "STOP" or "CHECKPOINT", or a SessionLog message.
            global_step: its step.
            checkpoint_path: of a CHECKPOINT.
            msg: anything.
        """
        if isinstance(session_log, str):
            status = event_pb2.SessionLog.SessionStatus.Value(session_log)
            session_log = event_pb2.SessionLog(
                status=status, checkpoint_path=checkpoint_path, msg=msg
            )
        self._add_event(event_pb2.Event(session_log=session_log), global_step)

    def add_event(self, event: event_pb2.Event) -> None:
        """Adds an Event message as it is."""
        self.reopen().put(event)

    def _add_event(self, event: event_pb2.Event, global_step: SupportsInt | None) -> None:
        event.wall_time = concurrency.wall_time()
        if global_step is not None:
            event.step = int(global_step)
        self.add_event(event)

    # -- life --------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Tries to write all events; returns True if they are on disk. Lost events are logged."""
        file = self._file
        return file is None or file.flush()

    def close(self) -> None:
        """Flushes and closes the file; the next event opens a new file.

        A second call does nothing.
        """
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            self._finalizer.detach()
            file.close()

    def reopen(self) -> EventFile:
        """Returns the open file, or a new file in the same directory after ``close``."""
        with self._lock:
            return self._file or self._open_file()

    def __enter__(self) -> "FileWriter":
        """Returns the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the writer."""
        self.close()


class FileWriterCache:
    """One FileWriter for each directory of this process."""

    _lock = concurrency.Lock()
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
