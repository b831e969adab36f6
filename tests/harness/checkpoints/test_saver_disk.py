"""A disk that is away, or that may not be read, is not a disk without checkpoints, nor one with damaged ones."""

import errno
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from harness import tf1
from harness.checkpoints import layout
from tests.kit.processes import Program

pytestmark = pytest.mark.disk


def _run(logdir: pathlib.Path, steps: int, **options: Any) -> list[int]:
    """Trains so many steps as a chief of its own; gives the steps at the beginning and at the end."""
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        op = step.assign_add(1)
        supervisor = harness.Supervisor(
            logdir=str(logdir), global_step=step, summary_op=None, summary_writer=None
        )
        with supervisor.managed_session(**options) as sess:
            first = int(sess.run(step))
            for _ in range(steps):
                sess.run(op)
            return [first, int(sess.run(step))]


class Disk:
    """Makes the operating system refuse some calls with an error, as often as is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0
        self._left = 0
        self._wanted: Callable[[str], bool] = lambda path: False
        self._errno = 0
        for name in ("listdir", "stat"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))

    def refuse(self, number: int, times: int, wanted: Callable[[str], bool]) -> None:
        self.refused, self._left, self._errno, self._wanted = 0, times, number, wanted

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any = ".", *args: Any, **options: Any) -> Any:
            if self._left and isinstance(path, str | os.PathLike) and self._wanted(os.fspath(path)):
                self._left -= 1
                self.refused += 1
                raise OSError(self._errno, os.strerror(self._errno), os.fspath(path))
            return call(path, *args, **options)

        return checked


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("where", ["", "model.ckpt", "model.ckpt/5/bellwether.json"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_chief_waits_for_absent_disk(
    tmp_path: pathlib.Path, disk: Disk, number: int, where: str
) -> None:
    """A chief waits for a disk that is away, then restores."""
    assert _run(tmp_path, 5) == [0, 5]
    path = os.path.join(tmp_path, where).rstrip("/")
    if path.endswith("json"):
        # what tells that it is one at all
        path = os.path.join(tmp_path, "model.ckpt/5", layout.ORBAX_STEP_FILE)
    disk.refuse(number, 3, lambda asked: asked == path)
    assert _run(tmp_path, 5) == [5, 10]
    assert disk.refused == 3
    assert {"5", "10"} <= set(os.listdir(tmp_path / "model.ckpt"))


def test_unreadable_directory_stops_a_chief(tmp_path: pathlib.Path, disk: Disk) -> None:
    """A chief that may not read its directory fails and initializes no variable."""
    _run(tmp_path, 5)
    before = sorted(os.listdir(tmp_path / "model.ckpt"))
    disk.refuse(errno.EACCES, 1000, lambda asked: asked == str(tmp_path / "model.ckpt"))
    with pytest.raises(
        rt.PermissionDeniedError, match=f"{tmp_path}/model.ckpt cannot be read by the user"
    ):
        _run(tmp_path, 5)
    disk.refuse(0, 0, lambda asked: False)
    assert sorted(os.listdir(tmp_path / "model.ckpt")) == before
    assert _run(tmp_path, 0) == [5, 5]


@pytest.mark.chaos
def test_unreadable_directory_is_explained(tmp_path: pathlib.Path) -> None:
    """latest_checkpoint of a directory that the user may not read raises PermissionDeniedError."""
    _run(tmp_path, 1)
    (tmp_path / "model.ckpt").chmod(0 if os.geteuid() else 0o700)
    code = """
import os, sys
import harness, runtime as rt
from harness.checkpoints import layout
if not os.geteuid():
    os.seteuid(65534)
try:
    print("found", harness.latest_checkpoint(sys.argv[1]))
except rt.PermissionDeniedError as error:
    print("refused", error)
"""
    try:
        with Program("python", "-c", code, str(tmp_path)) as program:
            output = program.result()
    finally:
        (tmp_path / "model.ckpt").chmod(0o700)
    assert "refused" in output and "cannot be read by the user" in output


def test_system_directories_are_passed_by(tmp_path: pathlib.Path, disk: Disk) -> None:
    """Unreadable directories of the system beside the checkpoints are passed by."""
    _run(tmp_path, 1)
    (tmp_path / "model.ckpt").rename(tmp_path / "other")  # so that all directories are looked into
    for name in ("lost+found", ".snapshot"):
        (tmp_path / name).mkdir()
    disk.refuse(errno.EACCES, 1000, lambda asked: asked.endswith(("lost+found", ".snapshot")))
    assert harness.latest_checkpoint(str(tmp_path)) == str(tmp_path / "other" / "1")
    assert disk.refused


def test_unreachable_newest_is_not_skipped(tmp_path: pathlib.Path, disk: Disk) -> None:
    """A newest checkpoint that cannot be read now raises an error in place of an older restore."""
    with rt.Graph().as_default(), rt.Session() as sess:
        v = rt.Variable(np.float32(1), name="v")
        sess.run(rt.global_variables_initializer())
        saver = harness.Saver()
        for step in (1, 2):
            saver.save(sess, tmp_path / "m", step)
            sess.run(v.assign_add(1).op)
        newest = str(tmp_path / "m" / "2" / "default" / layout.ORBAX_TREE_FILE)
        disk.refuse(errno.ESTALE, 2, lambda asked: asked == newest)
        with pytest.raises(rt.UnavailableError, match="cannot be read now"):
            saver.restore_latest(sess, str(tmp_path))
        with pytest.raises(rt.UnavailableError, match="cannot be read now"):
            harness.latest_checkpoint(str(tmp_path))
        assert saver.restore_latest(sess, str(tmp_path)) == str(tmp_path / "m" / "2")
        assert sess.run(v) == 2


def test_iterator_waits_for_the_disk(tmp_path: pathlib.Path, disk: Disk) -> None:
    """checkpoints_iterator waits for a disk that is away."""
    _run(tmp_path, 1)
    disk.refuse(errno.ESTALE, 2, lambda asked: asked == str(tmp_path / "model.ckpt"))
    found = tf1.train.checkpoints_iterator(str(tmp_path), timeout=60)
    assert next(found) == str(tmp_path / "model.ckpt" / "1")
    assert disk.refused == 2


def test_absent_disk_costs_one_checkpoint(tmp_path: pathlib.Path, disk: Disk) -> None:
    """A disk that is away during a save costs that checkpoint, without a recovery."""
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        op = step.assign_add(1)
        saver = harness.Saver()
        supervisor = harness.Supervisor(
            logdir=str(tmp_path),
            global_step=step,
            saver=saver,
            save_model_secs=0.05,
            summary_op=None,
        )
        with supervisor.managed_session() as sess:
            disk.refuse(errno.ESTALE, 3, lambda asked: asked == str(tmp_path / "model.ckpt"))
            while saver.failed < 1 or disk.refused < 3:
                sess.run(op)
            raw = sess.raw
            failed = saver.failed
            sess.run(op)
        assert sess.raw is raw and sess.recoveries == 0 and failed
    last = harness.latest_checkpoint(str(tmp_path))
    assert last is not None and _run(tmp_path, 0)[0] == int(os.path.basename(last))


def test_failing_summary_spares_last_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    """A last summary that fails does not cost the last checkpoint."""
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        v = rt.Variable(np.ones(3, np.float32), name="v")
        op = step.assign_add(1)
        harness.summary.histogram("v", v)
        spoil = v.assign(np.array([1, np.nan, np.inf], np.float32)).op
        supervisor = harness.Supervisor(
            logdir=str(tmp_path), global_step=step, save_model_secs=3600
        )
        with pytest.raises(rt.InvalidArgumentError), supervisor.managed_session() as sess:
            for _ in range(5):
                sess.run(op)
            sess.run(spoil)
    assert harness.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt" / "5")
