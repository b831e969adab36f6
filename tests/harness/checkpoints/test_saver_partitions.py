"""Partitioned variables: whatever the slices, the checkpoint holds one array, and other slices restore from it."""

import pathlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import harness
import runtime as rt
from tests.examples import costly
from tests.harness.checkpoints import checkpoint_kit as ckit

pytestmark = pytest.mark.disk

DTYPES = ["float32", "float64", "int64", "int8", "bool", "bfloat16"]


@st.composite
def _arrays(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int]]:
    """An array of 1 to 4 dimensions and two ways to cut its first one."""
    import ml_dtypes

    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    rows = draw(st.integers(1, 12))
    name = draw(st.sampled_from(DTYPES))
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = (np.arange(rows * int(np.prod(shape))) % 100).reshape(rows, *shape).astype(dtype)
    cuts = [
        sorted(draw(st.sets(st.integers(1, rows - 1), max_size=4))) if rows > 1 else []
        for _ in range(2)
    ]
    return array, cuts[0], cuts[1]


def _slices(name: str, array: np.ndarray, cuts: list[int], ps: int) -> list[rt.Variable]:
    made = []
    for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(array)], strict=True)):
        with rt.device(f"/job:ps/task:{i % ps}"):
            part = rt.Variable(
                array[start:end], dtype=array.dtype, name=f"{name}/part_{i}", trainable=False
            )
        offset = (start, *(0 for _ in array.shape[1:]))
        part.save_slice_info = rt.lowlevel.ArraySlice(
            name, part.shape, part.dtype, array.shape, offset
        )
        made.append(part)
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with ckit.cluster(2) as (server, _):
        yield server


@costly(10)
@hypothesis.given(drawn=st.lists(_arrays(), min_size=1, max_size=3))
def test_any_slices_restore_from_any_other(
    server: Any,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[np.ndarray, list[int], list[int]]],
) -> None:
    """Any slices of a variable restore from any other slices."""
    directory = tmp_path_factory.mktemp("partitions")
    path = None
    for saving in (True, False):
        with rt.Graph().as_default() as graph, ckit.session(server, graph) as sess:
            made = {}
            for i, (array, one, other) in enumerate(drawn):
                initial = array if saving else np.zeros_like(array)
                made[f"v{i}"] = _slices(f"v{i}", initial, one if saving else other, 2)
            ckit.initialize(sess, [part for parts in made.values() for part in parts])
            saver = harness.Saver()
            if saving:
                path = saver.save(sess, directory / "m", 1)
            else:
                saver.restore(sess, path)
                for i, (array, _, _) in enumerate(drawn):
                    found = np.concatenate(sess.run(made[f"v{i}"]))
                    assert found.dtype == array.dtype and found.tobytes() == array.tobytes()
                    assert harness.load_variable(path, f"v{i}").tobytes() == array.tobytes()


def test_large_sliced_variable_comes_back(tmp_path: pathlib.Path, server: Any) -> None:
    """A variable of several chunks in slices comes back as it was."""
    # 96 MiB: more than one chunk and one group
    table = np.arange(24 << 20, dtype=np.float32).reshape(-1, 1024)
    with rt.Graph().as_default() as graph, ckit.session(server, graph) as sess:
        parts = _slices("table", table, [8 << 10, 20 << 10], 2)
        ckit.initialize(sess, parts)
        saver = harness.Saver()
        path = saver.save(sess, tmp_path / "m", 1)
        sess.run([part.assign(np.zeros(part.shape, np.float32)).op for part in parts])
        saver.restore(sess, path)
        assert np.array_equal(np.concatenate(sess.run(parts)), table)
    assert np.array_equal(harness.load_variable(path, "table"), table)
