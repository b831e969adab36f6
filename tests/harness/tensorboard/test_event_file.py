"""Event files on disks that fail: telemetry never ends training."""

import errno
import os
import pathlib
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboardX import record_writer
from tensorboardX.record_writer import masked_crc32c

import runtime as rt
from harness import FileWriter
from harness.tensorboard import event_file
from tests.kit.events import read_events

_pwrite = os.pwrite


class Disk:
    """A disk with a certain room; what a write asks beyond it is not written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 40
        self.refused = threading.Event()
        monkeypatch.setattr(event_file.os, "pwrite", self.pwrite)

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        fits = min(len(data), self.room - offset)
        if fits <= 0:
            self.refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _pwrite(file, bytes(data[:fits]), offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)
    monkeypatch.undo()


def events_file(logdir: pathlib.Path) -> pathlib.Path:
    (path,) = logdir.glob("events.out.tfevents.*")
    return path


def steps(path: pathlib.Path) -> list[int]:
    return [event.step for event in read_events(str(path)) if event.HasField("summary")]


def test_full_disk_delays_events(
    tmp_path: pathlib.Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk delays events, and the file stays readable all the time."""
    with FileWriter(tmp_path) as writer:
        for step in range(3):
            writer.add_scalars({"a": step}, step)
        assert writer.flush()
        path = events_file(tmp_path)
        disk.room = path.stat().st_size + 17  # in the middle of a record
        reader = EventFileLoader(str(path))
        assert [event.step for event in reader.Load()][1:] == [0, 1, 2]
        for step in range(3, 6):
            writer.add_scalars({"a": step}, step)
        assert not writer.flush()
        assert not writer.flush()
        assert path.stat().st_size == disk.room  # a torn record, as a real disk leaves it
        assert steps(path) == [0, 1, 2]
        assert list(reader.Load()) == []  # TensorBoard waits for the rest
        assert caplog.text.count("training goes on") == 1
        disk.room = 1 << 40
        writer.add_scalars({"a": 6.0}, 6)
        assert writer.flush()
        assert [event.step for event in reader.Load()] == [3, 4, 5, 6]
        assert "are written again" in caplog.text
    assert steps(path) == list(range(7))


def test_lost_events_are_counted(
    tmp_path: pathlib.Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Events beyond the kept bytes are lost and counted, and later events are whole."""
    monkeypatch.setattr(event_file, "KEEP_BYTES", 200)
    before = rt.lowlevel.metrics.read().get("events_lost_total", 0.0)
    with FileWriter(tmp_path) as writer:
        writer.flush()
        path = events_file(tmp_path)
        disk.room = path.stat().st_size
        for step in range(100):  # more than the queue holds: nobody blocks
            writer.add_scalars({"a": step}, step)
            assert not writer.flush()
        disk.room = 1 << 40
        writer.flush()
        writer.add_scalars({"a": 100.0}, 100)
    found = steps(path)
    assert found[-1] == 100 and found[:-1] == list(range(len(found) - 1)) and 0 < len(found) < 50
    lost = 101 - len(found)
    assert rt.lowlevel.metrics.read()["events_lost_total"] - before == lost
    assert f"; {lost} events were lost" in caplog.text


def test_cloud_store_writes_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many events for a cloud store are written before the flush period ends."""

    class Store:
        def open(self, path: str) -> "Store":
            return self

        def write(self, data: bytes) -> None:
            pass

        flush = close = lambda self: None

    monkeypatch.setitem(record_writer.REGISTERED_FACTORIES, "store", Store())
    monkeypatch.setattr(event_file, "KEEP_BYTES", 1000)
    with FileWriter("store://bucket/run", flush_secs=600) as writer:
        assert writer.flush()
        adding = threading.Thread(
            target=lambda: [writer.add_scalars({"a": n}, n) for n in range(200)], daemon=True
        )
        adding.start()
        adding.join(30)
        waits = adding.is_alive()
        while adding.is_alive():
            writer.flush()
    assert not waits


def test_full_disk_costs_events_only(
    tmp_path: pathlib.Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that stays full costs events and raises no error."""
    writer = FileWriter(tmp_path)
    writer.add_scalars({"a": 0.0}, 0)
    assert writer.flush()
    disk.room = 0
    writer.add_scalars({"a": 1.0}, 1)
    assert not writer.flush()
    writer.close()
    assert "1 event was lost" in caplog.text
    writer.reopen()
    writer.add_scalars({"a": 2.0}, 2)
    assert not writer.flush()
    writer.close()


def test_missing_inode_is_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events wait for a disk on which no file can be made."""
    real, full = os.open, True

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if full and "tfevents" in str(path):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(event_file.os, "open", refuse)
    with FileWriter(tmp_path) as writer:
        writer.add_scalars({"a": 1.0}, 1)
        assert not writer.flush()
        full = False
        assert writer.flush()
    assert steps(events_file(tmp_path)) == [1]


def test_failed_sync_repeats_the_bytes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync the same bytes are written again."""
    broken = True

    def fsync(file: int) -> None:
        if broken:
            os.ftruncate(file, size)  # what a kernel may do with pages that it could not write
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with FileWriter(tmp_path) as writer:
        assert writer.flush()
        size = events_file(tmp_path).stat().st_size
        monkeypatch.setattr(event_file.os, "fsync", fsync)
        writer.add_scalars({"a": 1.0}, 1)
        assert not writer.flush()
        broken = False
        assert writer.flush()
    assert steps(events_file(tmp_path)) == [1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_is_prefix_of_stream(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """After any failures of the disk the file is a prefix of the stream of records."""
    path = tmp_path_factory.mktemp("records") / "file"
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        records = event_file.RecordFile(str(path))
        stream = b""
        for _ in range(data.draw(st.integers(1, 12))):
            payload = data.draw(st.binary(max_size=40))
            header = struct.pack("<Q", len(payload))
            stream += header + struct.pack("<I", masked_crc32c(header))
            stream += payload + struct.pack("<I", masked_crc32c(payload))
            records.write(payload)
            disk.room = data.draw(st.one_of(st.just(1 << 40), st.integers(0, len(stream))))
            try:
                records.flush()
            except OSError:
                on_disk = path.read_bytes()
                assert stream.startswith(on_disk) and len(on_disk) < len(stream)
            else:
                assert path.read_bytes() == stream
        disk.room = 1 << 40
        records.flush()
        records.close()
    assert path.read_bytes() == stream
