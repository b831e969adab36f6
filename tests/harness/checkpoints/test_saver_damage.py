"""Damaged checkpoints: whatever of one is lost, it is named and the one before is used; nothing is begun anew."""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Callable

import numpy as np
import pytest

import harness
import runtime as rt
from harness import tf1
from harness.checkpoints import layout, orbax
from harness.checkpoints.manifest import FILE_NAME, CheckpointManifest, read_manifest

pytestmark = pytest.mark.disk

SIZE = 5000


def _model() -> tuple[rt.Variable, rt.Variable]:
    return rt.Variable(np.zeros(SIZE, np.float32), name="v"), harness.get_or_create_global_step()


def _train_to(logdir: pathlib.Path, kind: str, last: int) -> int:
    """Trains to a step in a managed session; gives the step it went on from."""
    with rt.Graph().as_default():
        v, step = _model()
        train = rt.group(v.assign_add(np.ones(SIZE, np.float32)).op, step.assign_add(1).op)
        if kind == "supervisor":
            supervisor = harness.Supervisor(
                logdir=str(logdir), global_step=step, save_model_secs=3600, summary_op=None
            )
            session = supervisor.managed_session("")
        else:
            session = harness.MonitoredTrainingSession(
                "", checkpoint_dir=str(logdir), save_checkpoint_secs=3600
            )
        with session as sess:
            first = now = int(sess.run(step))
            while now < last:
                sess.run(train)
                now += 1
            assert sess.run(v).tolist() == [float(now)] * SIZE
    return first


def _only_the_newest(logdir: pathlib.Path) -> pathlib.Path:
    newest = harness.latest_checkpoint(str(logdir))
    assert newest is not None
    for other in pathlib.Path(newest).parent.iterdir():
        if str(other) != newest:
            shutil.rmtree(other)
    return pathlib.Path(newest)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 1 and 2, in which ``v`` is full of the step."""
    logdir = tmp_path_factory.mktemp("saved")
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        v, step = _model()
        sess.run(rt.global_variables_initializer())
        saver = harness.Saver()
        for number in (1, 2):
            sess.run([v.assign(np.full(SIZE, number, np.float32)).op, step.assign(number).op])
            saver.save(sess, logdir / "m", step)
    return logdir


def _parts(step: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(step)) for p in step.rglob("*") if ".orbax" not in p.name)


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["lost", "emptied"])
def test_missing_part_restores_nothing_wrong(
    saved: pathlib.Path, tmp_path: pathlib.Path, how: str
) -> None:
    """Whatever part of a checkpoint is lost or emptied, no wrong value is restored and no run
    begins anew.
    """
    parts = _parts(saved / "m" / "2")
    assert {"default", "bellwether.json", "_CHECKPOINT_METADATA"} <= set(parts) and len(parts) > 8
    stepped_back = 0
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        v, step = _model()
        sess.run(rt.global_variables_initializer())
        saver = harness.Saver()
        for number, part in enumerate(parts):
            for alone in (False, True):
                logdir = tmp_path / f"{number}-{alone}"
                shutil.copytree(saved, logdir)
                gone = logdir / "m" / "2" / part
                if gone.is_dir():
                    shutil.rmtree(gone)
                elif how == "lost":
                    gone.unlink()
                else:
                    gone.write_bytes(b"")
                if alone:
                    shutil.rmtree(logdir / "m" / "1")
                sess.run([v.assign(np.zeros(SIZE, np.float32)).op, step.assign(0).op])
                assert harness.latest_checkpoint(str(logdir)) is not None, part
                try:
                    path = saver.restore_latest(sess, str(logdir))
                except rt.DataLossError as error:
                    assert alone and f"{logdir}/m/2" in error.message, part
                    assert sess.run([step, v])[0] == 0, part
                    stepped_back += 1
                else:
                    assert path is not None, f"{part}: the checkpoint was overlooked"
                    number_restored = int(os.path.basename(path))
                    assert sess.run(step) == number_restored, part
                    assert np.unique(sess.run(v)).tolist() == [number_restored], part
    assert stepped_back > 5


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["supervisor", "monitored"])
def test_damaged_checkpoints_prevent_initialization(tmp_path: pathlib.Path, kind: str) -> None:
    """A managed session does not initialize where only damaged checkpoints are left."""
    assert _train_to(tmp_path, kind, 3) == 0
    newest = _only_the_newest(tmp_path)
    shard = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    shard.unlink()
    with pytest.raises(rt.DataLossError, match="model.ckpt/3"):
        _train_to(tmp_path, kind, 5)
    # which says that it is damaged, when restored
    assert harness.latest_checkpoint(str(tmp_path)) == str(newest)
    shutil.rmtree(newest)
    assert _train_to(tmp_path, kind, 5) == 0  # told to start afresh


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["supervisor", "monitored"])
def test_half_replaced_step_is_found(tmp_path: pathlib.Path, kind: str) -> None:
    """A step whose chief died while replacing the step is found."""
    assert _train_to(tmp_path, kind, 3) == 0
    newest = _only_the_newest(tmp_path)
    aside = newest.parent / layout.REPLACED / newest.name
    aside.parent.mkdir()
    newest.rename(aside)
    state = tf1.train.get_checkpoint_state(str(tmp_path))
    assert state is not None and state.model_checkpoint_path == str(aside)
    assert tf1.train.checkpoint_exists(str(newest))
    orbax._directories.clear()  # as in another process: the next chief's
    assert _train_to(tmp_path, kind, 5) == 3
    left = {p.name for p in newest.parent.iterdir()}
    # a Supervisor saves at its start, too, and may be at 4 by then
    assert {"3", "5"} <= left <= {"3", "4", "5"}


def test_evaluator_receives_whole_checkpoints_only(
    saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """An evaluator receives whole checkpoints only."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in ("1", "2"):
        (tmp_path / "m" / step / "bellwether.json").unlink()
    assert list(tf1.train.checkpoints_iterator(str(tmp_path), timeout=0.01)) == []
    with pytest.raises(rt.DataLossError, match="its manifest is missing"):
        harness.load_checkpoint(str(tmp_path))


def _rewrite_manifest(
    step: pathlib.Path, change: Callable[[CheckpointManifest], CheckpointManifest]
) -> None:
    manifest = read_manifest(str(step))
    assert manifest is not None
    (step / FILE_NAME).write_text(change(manifest).to_json())


@pytest.mark.parametrize("name", ["../../outside", "/dev/zero", "default/../../../outside", ""])
@pytest.mark.parametrize("transfer", ["shared", "stream"])
def test_manifest_naming_outside_is_refused(
    saved: pathlib.Path, tmp_path: pathlib.Path, name: str, transfer: str
) -> None:
    """A manifest that names files outside its checkpoint is refused by name."""
    shutil.copytree(saved, tmp_path / "copy")
    newest = tmp_path / "copy" / "m" / "2"
    (tmp_path / "copy" / "outside").write_bytes(b"")
    outside = rt.lowlevel.CheckpointFile(name, 0, 0)
    _rewrite_manifest(newest, lambda m: dataclasses.replace(m, files=[*m.files, outside]))
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        v, _ = _model()
        saver = harness.Saver(transfer=transfer)
        with pytest.raises(rt.DataLossError, match=re.escape(repr(name))):
            saver.restore(sess, str(newest))
        saver.restore_latest(sess, str(tmp_path / "copy"))
        assert sess.run(v).tolist() == [1.0] * SIZE  # the one before


@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("transfer", ["shared", "stream"])
def test_device_in_checkpoint_is_named(
    saved: pathlib.Path, tmp_path: pathlib.Path, kind: str, transfer: str
) -> None:
    """A device or pipe among the files of a checkpoint is named and not read."""
    shutil.copytree(saved, tmp_path / "copy")
    newest = tmp_path / "copy" / "m" / "2"
    if kind == "device":
        (newest / "default" / "thing").symlink_to("/dev/zero")
    else:
        os.mkfifo(newest / "default" / "thing")
    thing = rt.lowlevel.CheckpointFile("default/thing", 0, 0)
    _rewrite_manifest(newest, lambda m: dataclasses.replace(m, files=[*m.files, thing]))
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        _model()
        with pytest.raises(rt.DataLossError, match="default/thing: is not a regular file"):
            harness.Saver(transfer=transfer).restore(sess, str(newest))
