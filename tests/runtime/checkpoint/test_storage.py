"""Arrays on disk: strings in bytes, blocks of one array, checksums of files."""

import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from runtime.checkpoint import durability, pacing, storage, string_arrays, times
from runtime.checkpoint.array_slice import ArraySlice
from runtime.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnavailableError,
)


def _strings(items: list[bytes]) -> np.ndarray:
    array = np.empty((len(items),), object)
    array[:] = items
    return array


@hypothesis.given(st.lists(st.binary(max_size=20), max_size=12))
def test_strings_survive_their_encoding(items: list[bytes]) -> None:
    """Encoded strings decode to the strings that were given."""
    assert (
        string_arrays.decode_strings(
            string_arrays.encode_strings(_strings(items)), (len(items),)
        ).tolist()
        == items
    )


@hypothesis.given(st.lists(st.binary(max_size=5), min_size=1, max_size=4), st.integers(0, 1000))
def test_truncated_strings_are_data_loss(items: list[bytes], cut: int) -> None:
    """Encoded strings that are cut off raise DataLossError."""
    data = string_arrays.encode_strings(_strings(items))
    with pytest.raises(DataLossError):
        string_arrays.decode_strings(data[: cut % data.size], (len(items),))


def test_blocks_are_read_across_boundaries(
    tmp_path: pathlib.Path,
) -> None:
    """An array that was written in blocks is read in any slice."""
    whole = np.arange(60, dtype=np.int32).reshape(12, 5)
    blocks = [
        (
            ArraySlice("x", (4, 5), whole.dtype, whole.shape, (first, 0), (2, 5)),
            whole[first : first + 4],
        )
        for first in (0, 4, 8)
    ]
    storage.write_store(str(tmp_path / "store"), iter(blocks), group_bytes=80)
    wanted = ArraySlice("x", (5, 2), whole.dtype, whole.shape, (3, 1), ())
    found = list(storage.read_each(storage.Source(str(tmp_path / "store")), [wanted]))[0]
    assert np.array_equal(found, whole[3:8, 1:3])


def test_large_array_is_written_in_groups(tmp_path: pathlib.Path) -> None:
    """A large array is written in groups, so that the write can rest and be cancelled."""
    whole = np.arange(2100, dtype=np.int32).reshape(21, 100)
    parts = [(0, 8), (8, 21)]
    arrays = [
        (ArraySlice("x", (b - a, 100), whole.dtype, whole.shape, (a, 0), (2, 100)), whole[a:b])
        for a, b in parts
    ]
    groups: list[None] = []
    storage.write_store(
        str(tmp_path / "store"),
        arrays,
        cancelled=lambda: bool(groups.append(None)),
        group_bytes=1700,
    )
    assert len(groups) == 6
    wanted = ArraySlice("x", whole.shape, whole.dtype, whole.shape, (0, 0), ())
    assert np.array_equal(
        list(storage.read_each(storage.Source(str(tmp_path / "store")), [wanted]))[0], whole
    )


def test_missing_or_different_array_is_refused(tmp_path: pathlib.Path) -> None:
    """An array that is missing or of another shape or dtype is refused."""
    store = str(tmp_path / "store")
    array = np.zeros(3, np.float32)
    storage.write_store(store, [(ArraySlice("x", (3,), array.dtype, (3,), (0,), (3,)), array)])
    cases: list[tuple[ArraySlice, type[OpError]]] = [
        (ArraySlice("y", (3,), array.dtype, (3,), (0,), ()), NotFoundError),
        (ArraySlice("x", (4,), array.dtype, (4,), (0,), ()), InvalidArgumentError),
        (ArraySlice("x", (3,), np.dtype(np.int32), (3,), (0,), ()), InvalidArgumentError),
    ]
    for placed, error in cases:
        with pytest.raises(error):
            list(storage.read_each(storage.Source(store), [placed]))


def test_cancelled_writing_stops(tmp_path: pathlib.Path) -> None:
    """A cancelled write stops after its present group."""
    array = np.zeros(3, np.float32)
    items = [(ArraySlice(f"x{i}", (3,), array.dtype, (3,), (0,), (3,)), array) for i in range(9)]
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(len(asked) == 3)
        return asked[-1]

    store = str(tmp_path / "store")
    storage.write_store(store, items, cancelled=cancelled, group_bytes=1)
    assert len(storage.lacking(store, [placed for placed, _ in items])) == 6


def test_nothing_is_written_after_error(tmp_path: pathlib.Path) -> None:
    """No file comes into a store after its write has failed."""
    rows = np.zeros((1, 1 << 20), np.float32)

    def arrays() -> Iterator[tuple[ArraySlice, np.ndarray]]:
        for i in range(4):
            yield (
                ArraySlice("x", rows.shape, rows.dtype, (8, rows.shape[1]), (i, 0), rows.shape),
                rows,
            )
        raise UnavailableError("gone", task="/job:ps/task:1")

    for attempt in range(4):
        store = tmp_path / str(attempt)
        with pytest.raises(UnavailableError, match="gone"):
            storage.write_store(str(store), arrays(), group_bytes=rows.nbytes)
        shutil.rmtree(store)  # raises when a file comes meanwhile
    assert os.listdir(tmp_path) == []


def test_writing_rests_while_others_train(tmp_path: pathlib.Path) -> None:
    """A write rests after each group in which steps were made."""
    arrays = {f"x{i}": np.arange(i, i + 3, dtype=np.float32) for i in range(5)}
    placed = [ArraySlice(k, a.shape, a.dtype, a.shape, (0,), a.shape) for k, a in arrays.items()]
    store = str(tmp_path / "store")
    rested_after: list[int] = []
    # when the save begins, and after each group but the last: none came in the third
    steps = iter([0, 1, 2, 2, 3])
    pace = pacing.Pace(
        lambda: next(steps),
        lambda secs: rested_after.append(5 - len(storage.lacking(store, placed))),
        cores=2,
    )
    storage.write_store(store, zip(placed, arrays.values(), strict=True), group_bytes=1, pace=pace)
    assert rested_after == [1, 2, 4]
    assert [a.tolist() for a in list(storage.read_each(storage.Source(store), placed))] == [
        a.tolist() for a in arrays.values()
    ]


def test_checksums_see_every_change(tmp_path: pathlib.Path) -> None:
    """The checksum of a file changes with one byte of the file."""
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1000)
    before = durability.checksum(str(path))
    assert before[0] == 3000
    path.write_bytes(b"abc" * 999 + b"abd")
    assert durability.checksum(str(path)) != before
    assert durability.files_below(str(tmp_path)) == ["file"]


def test_read_arrays_are_aligned(tmp_path: pathlib.Path) -> None:
    """An array that was read is aligned for XLA."""
    store = str(tmp_path / "store")
    arrays = {f"x{i}": np.arange(5 + i, dtype=np.float32) for i in range(9)}
    placed = [ArraySlice(n, a.shape, a.dtype, a.shape, (0,), a.shape) for n, a in arrays.items()]
    storage.write_store(store, zip(placed, arrays.values(), strict=True))
    found = list(storage.read_each(storage.Source(store), placed))
    assert all(a.ctypes.data % storage.ALIGNMENT == 0 for a in found)
    assert [a.tolist() for a in found] == [a.tolist() for a in arrays.values()]


def test_claimed_plain_index_is_verified(
    tmp_path: pathlib.Path,
) -> None:
    """An index that says that it is plain is read as plain only if every part of it is."""
    directory = tmp_path / "store"
    arrays = {f"x{i}": np.arange(500, dtype=np.float32) for i in range(9)}
    placed = [ArraySlice(n, a.shape, a.dtype, a.shape, (0,), a.shape) for n, a in arrays.items()]
    storage.write_store(str(directory), zip(placed, arrays.values(), strict=True), group_bytes=4000)
    manifest = directory / "manifest.ocdbt"
    whole = manifest.read_bytes()
    assert storage.is_plain(str(directory))
    for end in range(100):
        manifest.write_bytes(whole[:end])
        assert not storage.is_plain(str(directory))
    manifest.write_bytes(whole[:40] + b"\xff" * (1 << 20))  # numbers without an end
    assert not storage.is_plain(str(directory))
    manifest.write_bytes(whole)
    root = storage.plain_root(whole)
    assert root is not None
    path, offset = root
    node = bytearray((directory / path).read_bytes())
    assert node[offset + 13] == 0
    node[offset + 13] = 1  # the manifest says nothing of it
    (directory / path).write_bytes(node)
    assert not storage.is_plain(str(directory))


def test_background_work_has_low_priority() -> None:
    """Work in the background has low priority, and its errors reach the caller."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert pacing.in_background(niceness, "test") == (
        before if sys.platform != "linux" else pacing.NICENESS
    )
    assert niceness() == before
    with pytest.raises(ZeroDivisionError):
        pacing.in_background(lambda: 1 / 0, "test")


def test_work_rests_where_cores_are_few() -> None:
    """Work rests only on machines with few cores, and at most for REST_SECS."""
    rests: list[float] = []
    few, many = (pacing.Pace(iter(range(9)).__next__, rests.append, cores=n) for n in (2, 8))
    assert few.others_work() and not many.others_work()
    few.rest(0.125)
    few.rest(60.0)
    assert rests == [0.375, times.REST_SECS]


# its file is dropped, not closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_at_open_is_no_damage(tmp_path: pathlib.Path) -> None:
    """A signal while a file is opened leaks no descriptor and is no damage of the file."""
    path = tmp_path / "file"
    path.write_text("text")

    def signalled(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_return" and argument is open:
            raise SystemExit

    files = os.listdir("/proc/self/fd")
    sys.setprofile(signalled)
    try:
        with pytest.raises(SystemExit):
            durability.small_text(str(path))
    finally:
        sys.setprofile(None)
    assert os.listdir("/proc/self/fd") == files
    assert durability.small_text(str(path)) == "text"
