"""Checkpoints of a model that has diverged: they are told of, and do not push out the last one before."""

import json
import logging
import os
import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints import inspection
from harness.checkpoints.manifest import read_manifest
from runtime.checkpoint import storage
from tests.harness.checkpoints import checkpoint_kit as ckit

pytestmark = pytest.mark.disk


@pytest.fixture
def sess() -> Iterator[rt.Session]:
    with rt.Graph().as_default() as graph, rt.Session("", graph) as made:
        yield made


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        *((dtype, np.nan) for dtype in (np.float16, np.float32, np.float64, np.complex64)),
        *((dtype, np.nan) for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)),
        *((dtype, None) for dtype in (np.int32, np.bool_, ml_dtypes.int4, np.uint8)),
    ],
    ids=str,
)
def test_nan_is_found_in_all_types(dtype: type, bad: float | None) -> None:
    """A NaN is found in arrays of all types, and infinity is not a NaN."""
    array = np.zeros((3, 2), dtype)
    assert not storage.has_nan(array)
    if bad is not None:
        array[2, 1] = bad
        assert storage.has_nan(array)
        array[2, 1] = 0
    if np.dtype(dtype).kind == "f":
        array[0, 0] = np.inf  # the first "best loss so far" is
        assert not storage.has_nan(array)


def test_last_finite_checkpoint_is_kept(
    sess: rt.Session,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last checkpoint without NaN is kept until there is another."""
    w = rt.Variable(np.zeros(3, np.float32), name="w")
    rt.Variable(np.float32(np.inf), name="best")
    rt.Variable(np.array([b"nan"], object), name="words")
    sess.run(rt.global_variables_initializer())

    def save(value: list[float], *steps: int) -> list[str]:
        sess.run(w.assign(np.array(value, np.float32)))
        for step in steps:  # each by a new Saver, as after a restart
            harness.Saver(max_to_keep=2).save(sess, tmp_path / "m", step)
        return sorted(os.listdir(tmp_path / "m"), key=int)

    assert save([1, 2, 3], 1, 2, 3) == ["2", "3"]
    assert caplog.text == ""
    assert save([1, np.nan, 3], 4) == ["3", "4"]
    assert (
        "training has diverged: in the checkpoint of step 4 there are NaN in w; that of step 3 has "
        "none, "
        "and is kept" in caplog.text
    )
    assert save([1, np.nan, 3], 5, 6, 7) == ["3", "6", "7"]
    manifest = read_manifest(str(tmp_path / "m" / "7"))
    assert manifest is not None and manifest.with_nan == ("w",)
    assert inspection.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("NaN in w") == 2
    assert inspection.main([str(tmp_path), "--json"]) == 0
    assert [s["with_nan"] for s in json.loads(capsys.readouterr().out)["steps"]] == ["", "w", "w"]
    harness.Saver().restore(sess, str(tmp_path / "m" / "3"))
    assert sess.run(w).tolist() == [1, 2, 3]
    assert save([4, 5, 6], 8, 9) == ["8", "9"]


def test_divergence_is_logged_once(
    sess: rt.Session, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Saver warns once of each divergence."""
    v = rt.Variable(np.full(2, np.nan, np.float32), name="v")
    sess.run(rt.global_variables_initializer())
    saver = harness.Saver()
    for step, value in enumerate((np.nan, np.nan, 1, np.nan)):
        sess.run(v.assign(np.full(2, value, np.float32)))
        saver.save(sess, tmp_path / "m", step)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["step 0" in told[0], "there is none without" in told[0]] == [True, True]
    assert ["step 3" in told[1], "that of step 2 has none" in told[1], len(told)] == [True, True, 2]


@pytest.mark.cluster
@pytest.mark.parametrize("transfer", ["shared", "stream"])
def test_each_task_finds_its_nan(tmp_path: pathlib.Path, transfer: str) -> None:
    """Each task finds the NaN in its own variables, with both transfers."""
    with (
        ckit.cluster(2) as (server, _),
        rt.Graph().as_default() as graph,
        ckit.session(server, graph) as sess,
    ):
        for index in range(2):
            with rt.device(f"/job:ps/task:{index}"):
                rt.Variable(np.full(4, np.nan if index else 1, np.float32), name=f"v{index}")
        sess.run(rt.global_variables_initializer())
        path = harness.Saver(transfer=transfer).save(sess, tmp_path / "m", 1)
    manifest = read_manifest(path)
    assert manifest is not None and manifest.with_nan == ("v1",)
