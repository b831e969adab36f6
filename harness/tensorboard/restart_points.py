"""What a restarted run must say again, so that TensorBoard does not show the points of the run that crashed.

TensorBoard's slow loader drops later points when it reads a session log START with a step. Its fast loader, the
default, does not look at session logs: it drops the points of a tag from step p on when a new point of that tag comes
with step p. So after a restart the last good point of every tag that went too far is written once more.
"""

from __future__ import annotations

import glob
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from absl import logging
from google.protobuf.message import DecodeError
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_FOOTER_BYTES = _CHECKSUM.size


@dataclass(frozen=True)
class EventRecord:
    """One record of an event file.

    Attributes:
        data: a serialized Event.
        checksum: what stands behind it, the masked CRC-32C that the data should have.
    """

    data: bytes
    checksum: int

    def whole(self) -> bool:
        """Whether the data is as it was written. Slow (5 MB/s): for the few records that something depends on."""
        return bool(masked_crc32c(self.data) == self.checksum)


def read_records(path: str) -> Iterator[EventRecord]:
    """The records of a file, up to where it ends or was cut off by a crash.

    A length that is not the one that was written (its checksum tells) makes the rest unreadable, as does an error of
    the disk: that is logged.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
                (length,) = _LENGTH.unpack_from(header)
                if masked_crc32c(header[: _LENGTH.size]) != _CHECKSUM.unpack_from(header, _LENGTH.size)[0]:
                    at = file.tell() - _HEADER_BYTES
                    if any(header) or any(file.read()):  # zeros are what a power cut leaves of what was not written
                        logging.warning("event file %s is damaged at byte %d: the rest of it is skipped", path, at)
                    return
                if length + _FOOTER_BYTES > size - file.tell():
                    return
                data = file.read(length)
                yield EventRecord(data, *_CHECKSUM.unpack(file.read(_FOOTER_BYTES)))
    except (OSError, struct.error) as error:  # the latter: somebody has made the file shorter meanwhile
        logging.warning("event file %s cannot be read: %s; the rest of it is skipped", path, error)


def _parsed(path: str) -> Iterator[tuple[EventRecord, Any]]:
    bad = 0
    for record in read_records(path):
        try:
            yield record, event_pb2.Event.FromString(record.data)
        except DecodeError:
            bad += 1
    if bad:
        logging.warning(
            "event file %s is damaged: %d record%s of it skipped", path, bad, " is" if bad == 1 else "s are"
        )


def read_events(path: str) -> Iterator[Any]:
    """The Event messages of a file, up to where it ends or was cut off by a crash; damaged ones are left out.

    Of the checksums only those of the lengths are looked at: a damaged event that is a message still is not noticed.
    """
    for _, event in _parsed(path):
        yield event


def points_to_repeat(logdir: str, step: int, *, suffix: str = "", but: str = "") -> list[Any]:
    """Events that repeat the last point before ``step`` of every tag that has points at ``step`` or later.

    Damaged files cost what is damaged: no point is repeated that was not written so.

    Args:
        logdir: where the event files are.
        step: the step that the run starts again from.
        suffix: only of files whose names end so.
        but: path of a file to leave out.
    """
    good: dict[str, tuple[float, int, Any, EventRecord]] = {}
    went_too_far: set[str] = set()
    described: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(logdir), f"events.out.tfevents.*{glob.escape(suffix)}"))):
        if path == but:
            continue
        for record, event in _parsed(path):
            if event.WhichOneof("what") == "session_log" and event.session_log.status == event_pb2.SessionLog.START:
                # An earlier restart: what lay behind it then is gone, and what was repeated then follows.
                if event.step <= step:
                    went_too_far.clear()
                good = {tag: point for tag, point in good.items() if point[1] < event.step}
                continue
            for value in event.summary.value:
                if value.HasField("metadata"):
                    described.setdefault(value.tag, value.metadata)
                if event.step >= step:
                    went_too_far.add(value.tag)
                else:
                    good[value.tag] = (event.wall_time, event.step, value, record)
    repeated = []
    for tag in sorted(went_too_far & good.keys()):
        when, at, value, record = good[tag]
        if not record.whole():
            logging.warning(
                "the event of %s at step %d is damaged: TensorBoard may show what was lost after it", tag, at
            )
            continue
        if tag in described:
            value.metadata.CopyFrom(described[tag])
        repeated.append(event_pb2.Event(wall_time=when, step=at, summary=summary_pb2.Summary(value=[value])))
    return repeated
