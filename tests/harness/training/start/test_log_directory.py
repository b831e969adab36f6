"""Two jobs do not write into one log directory: they would restore and delete each other's checkpoints."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import harness
import runtime as rt
from harness import exit_codes, timeouts
from harness.checkpoints.layout import RUN_FILE
from harness.training.start.log_directory import DirectoryLock
from runtime.lowlevel import RunRecords
from tests.kit.changes import SetTimes
from tests.kit.processes import Program
from tests.kit.waits import TIMEOUT_SECS

pytestmark = pytest.mark.cluster

HOLDS = """
import sys
from harness.training.start.log_directory import DirectoryLock
lock = DirectoryLock()
print(lock.take(sys.argv[1], sys.argv[2:]) or "held", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""
FORKS = """
import os, sys
from harness.training.start.log_directory import DirectoryLock
lock = DirectoryLock()
said = lock.take(sys.argv[1], sys.argv[2:]) or "held"
if os.fork():
    print(said, flush=True)
os.read(0, 1)
"""
TRAINS = """
import shutil, sys
import numpy as np, harness, runtime as rt
with harness.join_cluster() as me:
    with me.device():
        global_step = harness.get_or_create_global_step()
        w = rt.Variable(np.zeros(4, np.float32), name="w")
        step = rt.group(w.assign_add(np.ones(4, np.float32)), global_step.assign_add(1))
    supervisor = harness.Supervisor(is_chief=me.is_chief, logdir={logdir!r}, global_step=global_step, summary_op=None)
    with supervisor.managed_session(me.target) as session:
        shutil.copytree({logdir!r}, {logdir!r} + "-copy", dirs_exist_ok=True)  # opens and closes each file there
        print("trains from step", session.run(global_step), flush=True)
        while not supervisor.should_stop():
            session.run(step)
"""


class Other(Program):
    """Another process that asks for the lock, and says whether it holds it."""

    def __init__(self, directory: pathlib.Path, *tasks: str) -> None:
        super().__init__("python", "-c", HOLDS, str(directory), *tasks)
        self.said = self.expect(".+")[0]


@pytest.fixture
def lock() -> Iterator[DirectoryLock]:
    made = DirectoryLock()
    yield made
    made.release()


def test_chief_of_another_job_is_named(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """The chief of another job in the directory is named until its end."""
    with Other(tmp_path, "ps0:1", "ps1:1") as other:
        reason = lock.take(str(tmp_path), ["ps0:2"])
        assert (
            f"{tmp_path}: the chief of the job at ps0:1, ps1:1, process {other.pid} on " in reason
        )
        other.kill()
        assert not lock.take(str(tmp_path), ["ps0:2"], "net")
    record = json.loads((tmp_path / RUN_FILE).read_text())
    assert (record["tasks"], record["series"], record["pid"]) == (["ps0:2"], ["net"], os.getpid())


def test_replaced_chief_holds_no_lock(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """A replaced chief of the same job does not keep its successor out."""
    with Other(tmp_path, "ps0:1", "ps1:1"):
        assert not lock.take(str(tmp_path), ["ps1:1"])


def test_opening_the_file_loses_no_lock(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """A copy of the directory in the chief's own process does not lose the lock."""
    assert not lock.take(str(tmp_path / "run"), ["ps0:1"])
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run" / RUN_FILE).read_text()
    with Other(tmp_path / "run", "ps0:2") as other:
        assert other.said.startswith("another job writes into")
    with Other(tmp_path / "copy", "ps0:2") as other:
        assert other.said == "held"


def test_forked_child_keeps_no_lock(tmp_path: pathlib.Path) -> None:
    """A child of the chief that outlives its parent does not hold the lock."""
    command = [sys.executable, "-c", FORKS, str(tmp_path), "ps0:1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"held\n"
        parent.kill()
        parent.wait()
        with Other(tmp_path, "ps0:2") as other:
            assert other.said == "held"


def test_removed_directory_is_locked_again(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """A directory that was removed is locked again."""
    assert not lock.take(str(tmp_path / "run"), ["ps0:1"])
    shutil.rmtree(tmp_path / "run")
    assert not lock.take(str(tmp_path / "run"), ["ps0:1"])
    with Other(tmp_path / "run", "ps0:2") as other:
        assert other.said.startswith("another job writes into")


def test_lone_process_is_warned_only(
    tmp_path: pathlib.Path, lock: DirectoryLock, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without a cluster is only warned of the other job."""
    with Other(tmp_path, "ps0:1") as other:
        assert not lock.take(str(tmp_path), ())
    assert f"process {other.pid} on " in caplog.text and "do not save there" in caplog.text


def test_second_session_is_warned(
    tmp_path: pathlib.Path, lock: DirectoryLock, caplog: pytest.LogCaptureFixture
) -> None:
    """A second session of a process is warned, and a recovery is not."""
    assert not lock.take(str(tmp_path), ["ps0:1"])
    assert not lock.take(str(tmp_path), ["ps0:1"]) and not caplog.text  # a recovery
    second = DirectoryLock()
    assert not second.take(str(tmp_path), ["ps0:2"])
    assert f"another session of this process, process {os.getpid()} on" in caplog.text


def test_last_session_releases_the_lock(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """The last session of a process releases the lock."""
    second = DirectoryLock()
    assert not lock.take(str(tmp_path), ["ps0:1"]) and not second.take(str(tmp_path), ["ps0:2"])
    lock.release()
    with Other(tmp_path, "ps0:3") as other:
        assert "the chief of the job at ps0:1, ps0:2, process" in other.said
    second.release()
    with Other(tmp_path, "ps0:3") as other:
        assert other.said == "held"


def test_full_disk_costs_the_record_only(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs the record of the run only."""
    (tmp_path / RUN_FILE).symlink_to("/dev/full")
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        supervisor = harness.Supervisor(logdir=str(tmp_path), global_step=step, summary_op=None)
        with supervisor.managed_session() as session:
            session.run(step)
    assert f"the record of the run cannot be written into {tmp_path / RUN_FILE}: " in caplog.text


def test_lock_without_record_is_named(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """A lock whose record is unreadable is named."""
    with Other(tmp_path, "ps0:1"):
        (tmp_path / RUN_FILE).write_text("")
        assert (
            f"{tmp_path / RUN_FILE}, and the record in that file is empty or unreadable"
            in lock.take(str(tmp_path), ["ps0:2"])
        )


def test_link_shares_the_lock(tmp_path: pathlib.Path, lock: DirectoryLock) -> None:
    """A link to a directory leads to the same lock."""
    (tmp_path / "link").symlink_to(tmp_path)
    with Other(tmp_path / "link", "ps0:1"):
        assert lock.take(str(tmp_path), ["ps0:2"])


def test_no_directory_means_no_lock(lock: DirectoryLock) -> None:
    """Without a directory no lock is taken."""
    assert not lock.take("", ["ps0:1"])
    lock.release()


class Said(logging.Handler):
    """A listener to the log that lets a test wait for lines with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._came = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._came.release()

    def wait(self) -> None:
        assert self._came.acquire(timeout=TIMEOUT_SECS), self._text

    def __enter__(self) -> "Said":
        logging.getLogger("absl").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("absl").removeHandler(self)


def open_session(target: str, logdir: pathlib.Path, **options: float) -> None:
    """Opens a chief's session and closes it."""
    with rt.Graph().as_default(), rt.device("/job:ps/task:0"):
        step = harness.get_or_create_global_step()
        sv = harness.Supervisor(
            logdir=str(logdir), global_step=step, summary_op=None, save_model_secs=0
        )
        with sv.managed_session(target, **options):
            pass


def test_other_job_is_waited_for(tmp_path: pathlib.Path, set_times: SetTimes) -> None:
    """A chief waits for the end of another job, logs the wait, and holds up no other session."""
    set_times(timeouts, LOG_EVERY_SECS=0.1)
    with contextlib.ExitStack() as stack:
        cluster, beside = (stack.enter_context(rt.local_cluster(ps=1, workers=1)) for _ in range(2))
        other, said = (
            stack.enter_context(Other(tmp_path, "ps0:1")),
            stack.enter_context(Said("another job")),
        )
        waiting = threading.Thread(target=open_session, args=(cluster.target, tmp_path))
        waiting.start()
        try:
            for _ in range(3):
                said.wait()
            open_session(beside.target, tmp_path / "other")
            assert waiting.is_alive()
        finally:
            other.enter("")
            waiting.join(TIMEOUT_SECS)
        # that process lives on, and has released
        assert not waiting.is_alive() and other.code is None


def test_wait_for_job_has_limit(tmp_path: pathlib.Path) -> None:
    """The wait for another job ends at its limit with an error that may be retried."""
    with rt.local_cluster(ps=1, workers=1) as cluster, Other(tmp_path, "ps0:1") as other:
        with pytest.raises(rt.DeadlineExceededError, match=f"process {other.pid} on") as raised:
            open_session(cluster.target, tmp_path, max_wait_secs=1.0)
    assert exit_codes.of_error(raised.value) is exit_codes.LOST


@pytest.mark.parametrize("fails", [False, True])
def test_session_end_releases_the_lock(tmp_path: pathlib.Path, fails: bool) -> None:
    """The end of a session releases the lock, with an error too."""

    def init(session: rt.Session) -> None:
        assert json.loads((tmp_path / RUN_FILE).read_text())["pid"] == os.getpid()
        if fails:
            raise ZeroDivisionError

    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        supervisor = harness.Supervisor(
            logdir=str(tmp_path), global_step=step, summary_op=None, init_fn=init
        )
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            with supervisor.prepare_or_wait_for_session() as session:
                session.run(step)
    with Other(tmp_path, "ps0:1") as other:
        assert json.loads((tmp_path / RUN_FILE).read_text())["pid"] == other.pid


def test_manager_session_releases_the_lock(tmp_path: pathlib.Path) -> None:
    """The close of a SessionManager's session releases the lock."""
    with rt.local_cluster(ps=1, workers=1) as cluster, rt.Graph().as_default():
        with rt.device("/job:ps/task:0"):
            variable = rt.Variable(0.0, name="v")
        manager = harness.SessionManager()
        session = manager.prepare_session(
            cluster.target, variable.initializer, harness.Saver(), checkpoint_dir=str(tmp_path)
        )
        with Other(tmp_path, "ps0:1") as other:
            assert other.said.startswith("another job writes into")
        session.close()
        with Other(tmp_path, "ps0:1") as other:
            assert other.said == "held"


def test_failed_session_keeps_no_lock(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that fails before its caller has it keeps no lock."""

    def refuse(records: RunRecords, session: int, *, again: bool) -> None:
        raise rt.PermissionDeniedError("not a task of this run")

    monkeypatch.setattr(RunRecords, "join", refuse)
    with rt.local_cluster(ps=1, workers=1) as cluster:
        with pytest.raises(rt.PermissionDeniedError, match="not a task of this run"):
            open_session(cluster.target, tmp_path)
        with Other(tmp_path, "ps0:1") as other:
            assert other.said == "held"


def test_second_job_continues_the_first(tmp_path: pathlib.Path) -> None:
    """A second job waits for the first and trains from its checkpoint."""
    program = tmp_path / "train.py"
    program.write_text(TRAINS.format(logdir=str(tmp_path / "run")))
    launch = [
        sys.executable,
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=1",
        "--max_restarts=0",
        "--",
    ]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*launch, sys.executable, str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read(job: "subprocess.Popen[str]", text: str) -> str:
        assert job.stdout is not None
        return next(line for line in job.stdout if text in line)

    first = start()
    try:
        assert read(first, "trains from step").endswith("step 0\n")
        second = start()
        try:
            assert "another job writes into" in read(second, "another job writes into")
            first.send_signal(signal.SIGINT)
            assert "is saved in" in first.communicate(timeout=200)[0]
            assert int(read(second, "trains from step").split()[-1]) > 0
        finally:
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=200)
    finally:
        first.kill()
        first.wait()
