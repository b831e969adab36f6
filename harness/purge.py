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
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 12  # the length and its checksum
_FOOTER_BYTES = 4  # checksum of the data


def read_events(path: str) -> Iterator[Any]:
    """The Event messages of a file, up to where it ends or was cut off by a crash. Checksums are not looked at."""
    with open(path, "rb") as file:
        while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(header)
            data = file.read(length + _FOOTER_BYTES)
            if len(data) < length + _FOOTER_BYTES:
                return
            yield event_pb2.Event.FromString(data[:length])


def points_to_repeat(logdir: str, step: int, *, suffix: str = "", but: str = "") -> list[Any]:
    """Events that repeat the last point before ``step`` of every tag that has points at ``step`` or later.

    Args:
        logdir: where the event files are.
        step: the step that the run starts again from.
        suffix: only of files whose names end so.
        but: path of a file to leave out.
    """
    good: dict[str, tuple[float, int, Any]] = {}
    went_too_far: set[str] = set()
    described: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(logdir), f"events.out.tfevents.*{glob.escape(suffix)}"))):
        if path == but:
            continue
        for event in read_events(path):
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
                    good[value.tag] = (event.wall_time, event.step, value)
    repeated = []
    for tag in sorted(went_too_far & good.keys()):
        when, at, value = good[tag]
        if tag in described:
            value.metadata.CopyFrom(described[tag])
        repeated.append(event_pb2.Event(wall_time=when, step=at, summary=summary_pb2.Summary(value=[value])))
    return repeated
