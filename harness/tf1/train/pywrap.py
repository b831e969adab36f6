"""``tensorflow.python.pywrap_tensorflow``: the C++ classes of TensorFlow that programs use."""

from __future__ import annotations

import socket

from google.protobuf.message import Message
from tensorboardX.proto.event_pb2 import Event

from harness.tf1 import train
from harness.tf1.inputs.records import TFRecordWriter
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import add_names
from runtime import concurrency


class EventsWriter:
    """Writes events to a file for TensorBoard; ``tf.summary.FileWriter`` does it beside training.

    Args:
        file_prefix: what the path of the file begins with; its directory is there.
    """

    def __init__(self, file_prefix: str | bytes) -> None:
        prefix = file_prefix.decode() if isinstance(file_prefix, bytes) else file_prefix
        now = concurrency.wall_time()
        self._path = f"{prefix}.out.tfevents.{int(now):010d}.{socket.gethostname()}"
        self._file = TFRecordWriter(self._path)
        self.WriteEvent(Event(wall_time=now, file_version="brain.Event:2"))

    def FileName(self) -> bytes:  # noqa: N802 - TensorFlow's names
        """Returns the path of the file."""
        return self._path.encode()

    def WriteEvent(self, event: Message) -> None:  # noqa: N802
        """Adds an event. Raises FailedPreconditionError after ``Close``."""
        self._file.write(event.SerializeToString())

    def Flush(self) -> bool:  # noqa: N802
        """Hands what was written to the operating system."""
        self._file.flush()
        return True

    def Close(self) -> bool:  # noqa: N802
        """Ends the file."""
        self._file.close()
        return True


_FULL = "tf.python.pywrap_tensorflow"
add_names(_FULL, {"EventsWriter": EventsWriter, "NewCheckpointReader": train.NewCheckpointReader})

__getattr__, __dir__ = namespace(_FULL)
