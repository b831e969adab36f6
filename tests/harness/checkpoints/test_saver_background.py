"""Saves in the background of a training loop: what is skipped, what fails, what is told, and how it ends."""

import itertools
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.checkpoints import save_job
from harness.checkpoints.manifest import CheckpointManifest, read_manifest
from tests.kit.losses import loss_of

pytestmark = pytest.mark.disk

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as graph:
        yield graph


def _model(size: int = 1000) -> tuple[rt.Variable, rt.Operation]:
    v = rt.Variable(np.zeros(size, np.float32), name="v")
    step = harness.get_or_create_global_step()
    return step, rt.group(v.assign_add(np.ones(size, np.float32)).op, step.assign_add(1).op)


class _Held:
    """Saves do not begin to write before they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        begin = save_job.SaveJob.begin

        def held(job: save_job.SaveJob, sequence: int) -> CheckpointManifest:
            self.begun.set()
            assert self.go.wait(60)
            return begin(job, sequence)

        monkeypatch.setattr(save_job.SaveJob, "begin", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> _Held:
    return _Held(monkeypatch)


def _steps(logdir: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (logdir / "model.ckpt").glob("[0-9]*") if p.name.isdigit())


@pytest.mark.parametrize("monitored", [False, True])
def test_recovery_costs_one_checkpoint(
    tmp_path: pathlib.Path, monitored: bool, held: _Held
) -> None:
    """A recovery during a save costs that checkpoint only."""
    server = rt.Server.create_local_server()
    _, train = _model()
    saver = harness.Saver()
    if monitored:
        hook = harness.CheckpointSaverHook(str(tmp_path), save_secs=0.05, saver=saver)
        creator = harness.ChiefSessionCreator(master=server.target)
        opened: Any = harness.MonitoredSession(creator, [hook])
    else:
        sv = harness.Supervisor(
            logdir=str(tmp_path), saver=saver, save_model_secs=0.05, summary_op=None
        )
        opened = sv.managed_session(server.target)
    with opened as sess:
        assert held.begun.wait(60)  # step 0
        managed = sess.managed if monitored else sess
        managed.recover(managed.raw, loss_of(managed))  # closes the session that is saved in
        held.go.set()
        done = 0
        while not any(_steps(tmp_path)):  # of a step after 0
            sess.run(train)
            done += 1
            assert done < 100_000
    assert saver.failed == 1
    assert _steps(tmp_path)[-1] == done
    server.stop()


def test_hook_skips_saves_due_meanwhile(tmp_path: pathlib.Path, held: _Held) -> None:
    """A hook saves while training continues, and skips the saves that are due meanwhile."""
    step, train = _model()
    saver = harness.Saver()
    hook = harness.CheckpointSaverHook(str(tmp_path), save_steps=10, saver=saver)
    with harness.MonitoredSession(
        harness.ChiefSessionCreator(checkpoint_dir=str(tmp_path)), [hook]
    ) as sess:
        assert held.begun.wait(60)  # step 0
        for _ in range(35):
            sess.run(train)
        assert saver.skipped == 3  # 10, 20, 30
        held.go.set()
        saver.wait()
        for _ in range(5):
            sess.run(train)
        saver.wait()
        sess.run(train)
    assert _steps(tmp_path) == [0, 40, 41]


def test_skipped_last_save_is_made_up(tmp_path: pathlib.Path, held: _Held) -> None:
    """A hook whose last save was skipped saves at the end."""
    step, train = _model()
    saver = harness.Saver()
    hook = harness.CheckpointSaverHook(str(tmp_path), save_steps=10, saver=saver)
    with harness.MonitoredSession(
        harness.ChiefSessionCreator(checkpoint_dir=str(tmp_path)), [hook]
    ) as sess:
        for _ in range(10):
            sess.run(train)
        assert saver.skipped == 1
        held.go.set()
    assert _steps(tmp_path) == [0, 10]


def test_loop_error_ends_saves(tmp_path: pathlib.Path, held: _Held) -> None:
    """An error in the loop lets the save under way end and begins no other."""
    step, train = _model()
    saver = harness.Saver()
    hook = harness.CheckpointSaverHook(str(tmp_path), save_steps=1000, saver=saver)
    with pytest.raises(ZeroDivisionError):
        with harness.MonitoredSession(
            harness.ChiefSessionCreator(checkpoint_dir=str(tmp_path)), [hook]
        ) as sess:
            sess.run(train)
            threading.Timer(0.2, held.go.set).start()
            raise ZeroDivisionError
    assert _steps(tmp_path) == [0]


@pytest.mark.parametrize("interruption", [SystemExit, KeyboardInterrupt])
def test_interrupted_session_saves_its_step(
    tmp_path: pathlib.Path, interruption: type[BaseException]
) -> None:
    """A monitored session that is interrupted saves the step that was reached."""
    step, train = _model()
    with pytest.raises(interruption):
        with harness.MonitoredTrainingSession(
            "", checkpoint_dir=str(tmp_path), save_checkpoint_secs=3600
        ) as sess:
            for _ in range(7):
                sess.run(train)
            raise interruption
    assert _steps(tmp_path)[-1] == 7


@pytest.fixture
def second_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save fails in the background."""
    begun = itertools.count(1)
    begin = save_job.SaveJob.begin

    def failing(job: save_job.SaveJob, sequence: int) -> CheckpointManifest:
        if next(begun) == 2:
            raise rt.InternalError("the controller of the disk is on fire")
        return begin(job, sequence)

    monkeypatch.setattr(save_job.SaveJob, "begin", failing)


@pytest.mark.parametrize("kind", ["supervisor", "monitored"])
def test_background_failure_ends_training(
    tmp_path: pathlib.Path, kind: str, second_fails: None
) -> None:
    """A failure of a save in the background ends the training loop with its error."""
    step, train = _model()
    saver = harness.Saver()
    if kind == "supervisor":
        supervisor = harness.Supervisor(
            logdir=str(tmp_path),
            global_step=step,
            saver=saver,
            save_model_secs=0.05,
            summary_op=None,
        )
        session = supervisor.managed_session("")
    else:
        session = harness.MonitoredTrainingSession(
            "",
            checkpoint_dir=str(tmp_path),
            scaffold=harness.Scaffold(saver=saver),
            save_checkpoint_steps=5,
        )
    with pytest.raises(rt.InternalError, match="the disk is on fire"):
        with session as sess:
            deadline = time.monotonic() + 240
            while not (supervisor.should_stop() if kind == "supervisor" else sess.should_stop()):
                sess.run(train)
                assert time.monotonic() < deadline
    assert saver.failed == 1 and len(_steps(tmp_path)) == 1


def test_supervisor_skips_saves_due_meanwhile(tmp_path: pathlib.Path, held: _Held) -> None:
    """A Supervisor skips and counts the saves that are due during a save."""
    step, train = _model()
    saver = harness.Saver()
    supervisor = harness.Supervisor(
        logdir=str(tmp_path), global_step=step, saver=saver, save_model_secs=0.05, summary_op=None
    )
    with supervisor.managed_session("") as sess:
        assert held.begun.wait(60)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            sess.run(train)
        held.go.set()
        saver.wait()
        deadline = time.monotonic() + 60
        while not saver.skipped:
            sess.run(train)
            assert time.monotonic() < deadline
        assert saver.skipped >= 5


def test_failing_state_costs_itself_only(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state whose function fails is left out with a log line, and the other states are saved."""
    rt.Variable(1.0, name="v")
    harness.checkpointable("good", lambda: 17, lambda value: None)
    harness.checkpointable("bad", lambda: 1 // 0, lambda value: None)
    try:
        with rt.Session("") as sess:
            sess.run(rt.global_variables_initializer())
            path = harness.Saver().save(sess, tmp_path / "m", 1)
            manifest = read_manifest(path)
            assert manifest is not None and manifest.states == {sess.task: {"good": 17}}
        assert "the state 'bad'" in caplog.text and "ZeroDivisionError" in caplog.text
    finally:
        harness.forget_checkpointable("good")
        harness.forget_checkpointable("bad")


# -- a disk that is really full ------------------------------------------------------------------------------------


def _full_disk(kind: str, end: str, directory: pathlib.Path) -> str:
    """Runs the program of this test on a small file system of its own; skips where none can be mounted."""
    mount = f"mount -t tmpfs -o size=8m tmpfs {directory}"
    try:
        if subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount], capture_output=True, timeout=30
        ).returncode:
            pytest.skip("needs the right to mount a small file system")
    except OSError:
        pytest.skip("needs unshare")
    program = (
        f"{mount} && exec {sys.executable} -m tests.harness.checkpoints.full_disk_program {kind} "
        f"{end} {directory}"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "end", "how"),
    [
        pytest.param("supervisor", "room", "ENDED WELL", marks=pytest.mark.chaos),
        pytest.param("monitored", "room", "ENDED WELL", marks=pytest.mark.nightly),
        pytest.param(
            "supervisor",
            "none",
            r"ENDED WITH DiskFullError: .* is full.*; step \d+ is not saved, the newest check",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            "supervisor",
            "SIGTERM",
            f"ENDED BY {exit_codes.PREEMPTED.plain}",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_full_disk_costs_checkpoints_only(
    tmp_path: pathlib.Path, kind: str, end: str, how: str
) -> None:
    """A full disk costs checkpoints and not the training, and the last save waits for room."""
    told = _full_disk(kind, end, tmp_path)
    assert "is full" in told and "training goes on, without this checkpoint: make room" in told
    for line in ("TRAINED ON", "KEPT", "SAVED AGAIN", "WAITED", "EVENTS GO ON"):
        assert line in told, told[-3000:]
    assert re.search(how, told), told[-3000:]
    # and not once more for each try to save
    assert told.count("HOOK ENDED") == (kind == "monitored")


def test_save_phases_keep_their_order(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phases of a save come in order, and the checkpoint is visible only after the last."""
    came: list[tuple[str, list[int]]] = []

    def note(name: str) -> None:
        phase = getattr(save_job.SaveJob, name)

        def noted(job: save_job.SaveJob, *arguments: Any) -> Any:
            came.append((name, _steps(tmp_path)))
            return phase(job, *arguments)

        monkeypatch.setattr(save_job.SaveJob, name, noted)

    for name in ("confirm", "complete", "merge", "write", "begin", "start", "take"):
        note(name)
    rt.Variable(1.0, name="v")
    with rt.Session("") as sess:
        sess.run(rt.global_variables_initializer())
        harness.Saver().save(sess, tmp_path / "model.ckpt", 1)
    order = ["take", "start", "begin", "write", "merge", "complete", "confirm"]
    assert came == [(name, []) for name in order]  # and nobody sees the checkpoint before the last
    assert _steps(tmp_path) == [1]
