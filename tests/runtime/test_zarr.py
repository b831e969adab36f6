"""Arrays on disk: strings in bytes, blocks of one array, checksums of files."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from runtime.errors import DataLossError, InvalidArgumentError, NotFoundError, OpError
from runtime.execution import zarr


def _strings(items: list[bytes]) -> np.ndarray:
    array = np.empty((len(items),), object)
    array[:] = items
    return array


@hypothesis.given(st.lists(st.binary(max_size=20), max_size=12))
def test_strings_come_back(items: list[bytes]) -> None:
    assert zarr.decode_strings(zarr.encode_strings(_strings(items)), (len(items),)).tolist() == items


@hypothesis.given(st.lists(st.binary(max_size=5), min_size=1, max_size=4), st.integers(0, 1000))
def test_cut_off_strings_are_told(items: list[bytes], cut: int) -> None:
    data = zarr.encode_strings(_strings(items))
    with pytest.raises(DataLossError):
        zarr.decode_strings(data[: cut % data.size], (len(items),))


def test_blocks_of_one_array_are_written_one_after_the_other_and_read_alone(tmp_path: pathlib.Path) -> None:
    whole = np.arange(60, dtype=np.int32).reshape(12, 5)
    blocks = [
        (zarr.Placed("x", (4, 5), whole.dtype, whole.shape, (first, 0), (2, 5)), whole[first : first + 4])
        for first in (0, 4, 8)
    ]
    wrote: list[int] = []
    zarr.write_arrays(str(tmp_path / "store"), iter(blocks), wrote=wrote.append, group_bytes=80)
    assert sum(wrote) == whole.nbytes and len(wrote) == 3
    wanted = zarr.Placed("x", (5, 2), whole.dtype, whole.shape, (3, 1), ())
    found = zarr.read_arrays(str(tmp_path / "store"), [wanted], ocdbt=True, zarr3=False)[0]
    assert np.array_equal(found, whole[3:8, 1:3])


def test_what_is_not_there_or_not_as_told(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "store")
    array = np.zeros(3, np.float32)
    zarr.write_arrays(store, [(zarr.Placed("x", (3,), array.dtype, (3,), (0,), (3,)), array)])
    cases: list[tuple[zarr.Placed, type[OpError]]] = [
        (zarr.Placed("y", (3,), array.dtype, (3,), (0,), ()), NotFoundError),
        (zarr.Placed("x", (4,), array.dtype, (4,), (0,), ()), InvalidArgumentError),
        (zarr.Placed("x", (3,), np.dtype(np.int32), (3,), (0,), ()), InvalidArgumentError),
    ]
    for placed, error in cases:
        with pytest.raises(error):
            zarr.read_arrays(store, [placed], ocdbt=True, zarr3=False)


def test_cancelled_writing_stops(tmp_path: pathlib.Path) -> None:
    array = np.zeros(3, np.float32)
    items = [(zarr.Placed(f"x{i}", (3,), array.dtype, (3,), (0,), (3,)), array) for i in range(9)]
    wrote: list[int] = []
    zarr.write_arrays(
        str(tmp_path / "store"), items, cancelled=lambda: len(wrote) > 0, wrote=wrote.append, group_bytes=1
    )
    assert 0 < len(wrote) < 9


def test_checksums_see_every_change(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1000)
    before = zarr.checksum(str(path))
    assert before[0] == 3000
    path.write_bytes(b"abc" * 999 + b"abd")
    assert zarr.checksum(str(path)) != before
    assert zarr.files_below(str(tmp_path)) == ["file"]
