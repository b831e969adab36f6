"""Event files, as TensorBoard's own loader reads them."""

from collections.abc import Iterator

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboardX.proto import event_pb2


def read_events(path: str) -> Iterator[event_pb2.Event]:
    """Yields the Event messages of a file up to its end, or to a record that is not whole yet."""
    yield from map(event_pb2.Event.FromString, RawEventFileLoader(path).Load())
