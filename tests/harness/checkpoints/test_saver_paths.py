"""Directories of checkpoints of every name: what is saved there can be restored, and a save looks before it says so."""

import os
import pathlib

import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints import inspection
from runtime.lowlevel import storage
from tests.harness.checkpoints import checkpoint_kit as ckit

pytestmark = pytest.mark.disk

ODD = [
    "layers=[100,50]",
    "a*b?c",
    "[!a]",
    "sp ace",
    "per%20cent",
    "ünï#c",
    "q'uo\"te{}",
    "tilde~",
    "-dash",
    "new\nline",
]


def _variables() -> tuple[rt.Graph, dict[str, rt.Variable]]:
    words = np.array([b"x", b"yy"], object)
    values = {"a": np.arange(6.0), "b": np.float32(3), "words": words, "none": np.zeros((0, 2))}
    return ckit.make_graph(values, {"b": 1, "words": 1})


@pytest.mark.parametrize("transfer", ["shared", "stream"])
def test_directory_may_have_any_name(tmp_path: pathlib.Path, transfer: str) -> None:
    """Checkpoints in directories of odd names are saved, found, restored and inspected."""
    graph, v = _variables()
    with ckit.cluster(2) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        names = ODD if transfer == "shared" else ODD[:2]
        for name in names:
            saver = harness.Saver(transfer=transfer)
            ckit.initialize(sess, list(v.values()))
            path = saver.save(sess, tmp_path / name / "model.ckpt", 1)
            saver.save(sess, tmp_path / name / "model.ckpt", 2)
            sess.run(
                [v["a"].assign(np.zeros(6)).op, v["words"].assign(np.array([b"", b""], object)).op]
            )
            assert harness.latest_checkpoint(str(tmp_path / name)) == str(
                tmp_path / name / "model.ckpt" / "2"
            )
            saver.restore(sess, path)
            assert sess.run(v["a"]).tolist() == [0, 1, 2, 3, 4, 5] and sess.run(
                v["words"]
            ).tolist() == [b"x", b"yy"]
            assert harness.load_variable(path, "b") == 3
            assert inspection.main([str(tmp_path / name)]) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    for name in ODD[:2]:
        step, arrays = ckit.plain_orbax(tmp_path / name / "model.ckpt")
        assert step == 2 and arrays["a"].tolist() == [0, 1, 2, 3, 4, 5]


def test_backslash_is_refused(tmp_path: pathlib.Path) -> None:
    """A directory with a backslash is refused before a file is written."""
    with rt.Graph().as_default(), rt.Session() as sess:
        rt.Variable(np.float32(1), name="a")
        sess.run(rt.global_variables_initializer())
        with pytest.raises(ValueError, match="has a backslash"):
            harness.Saver().save(sess, tmp_path / "back\\slash" / "m", 1)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["sub/model.ckpt", "..", ".", "replaced", "", "a/"])
def test_useless_basename_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    """A basename under which no checkpoint would be found again is refused."""
    with rt.Graph().as_default():
        harness.get_or_create_global_step()
        with pytest.raises(ValueError, match="checkpoint_basename is the first part"):
            harness.Supervisor(logdir=str(tmp_path), checkpoint_basename=name)
        with pytest.raises(ValueError, match="checkpoint_basename is the first part"):
            harness.CheckpointSaverHook(str(tmp_path), save_steps=1, checkpoint_basename=name)


def test_run_continues_in_bracketed_directory(tmp_path: pathlib.Path) -> None:
    """A run continues in a directory whose name has brackets."""
    logdir = str(tmp_path / "lr=[0.1]")
    for expected in (0, 5):
        graph = rt.Graph()
        with graph.as_default():
            step = harness.get_or_create_global_step()
            op = step.assign_add(1)
            supervisor = harness.Supervisor(
                logdir=logdir, global_step=step, save_model_secs=3600, summary_op=None
            )
            with supervisor.managed_session() as sess:
                assert sess.run(step) == expected
                for _ in range(5):
                    sess.run(op)
    assert {"5", "10"} <= set(os.listdir(f"{logdir}/model.ckpt"))


def test_unreadable_save_stays_invisible(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that cannot be read again fails, and its step stays invisible."""
    graph, v = _variables()
    with ckit.cluster(2) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver()
        saver.save(sess, tmp_path / "m", 1)
        merge = storage.merge
        # b is left out
        monkeypatch.setattr(
            storage, "merge", lambda directory, parts: merge(directory, list(parts)[:1])
        )
        with pytest.raises(
            rt.DataLossError, match="step 2 cannot be read again: 'b' cannot be opened"
        ):
            saver.save(sess, tmp_path / "m", 2)
        monkeypatch.setattr(storage, "merge", lambda directory, parts: None)
        with pytest.raises(rt.DataLossError, match="step 3 cannot be read again"):
            saver.save(sess, tmp_path / "m", 3)
        monkeypatch.undo()
        assert os.listdir(tmp_path / "m") == ["1"]
        saver.save(sess, tmp_path / "m", 4)
        assert sorted(os.listdir(tmp_path / "m")) == ["1", "4"]


def test_lacking_arrays_are_named(tmp_path: pathlib.Path) -> None:
    """Arrays and chunks that a store lacks are named."""
    half = rt.lowlevel.ArraySlice("half", (2,), np.dtype(np.float32), (4,), (0,), (2,))
    whole = rt.lowlevel.ArraySlice("whole", (2,), np.dtype(np.float32), (2,), (0,), (2,))
    storage.write_store(
        str(tmp_path / "s"), [(half, np.ones(2, np.float32)), (whole, np.ones(2, np.float32))]
    )
    wanted = rt.lowlevel.ArraySlice.whole("half", (4,), np.dtype(np.float32))
    assert storage.lacking(str(tmp_path / "s"), [whole, wanted]) == [
        "'half' has 1 chunks instead of 2"
    ]
    other = rt.lowlevel.ArraySlice.whole("whole", (2,), np.dtype(np.int32))
    assert storage.lacking(str(tmp_path / "s"), [other]) == [
        "'whole' is float32[2] instead of int32[2]"
    ]
    assert storage.lacking(str(tmp_path / "s"), [whole]) == []
