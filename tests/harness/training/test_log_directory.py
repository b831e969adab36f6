"""Two jobs do not write into one log directory: they would restore and delete each other's checkpoints."""

import contextlib
import json
import logging
import pathlib
import signal
import subprocess
import sys

import pytest

import harness
import runtime as rt
from harness.training import log_directory
from harness.training.log_directory import hold, release

pytestmark = pytest.mark.cluster

HOLDS = """
import sys
from harness.training.log_directory import hold, release
hold(sys.argv[1], sys.argv[2:])
print("held", flush=True)
sys.stdin.readline()
release(sys.argv[1])
print("released", flush=True)
sys.stdin.readline()
"""
TRAINS = """
import numpy as np, optax, harness, runtime as rt
from harness.training import log_directory
log_directory.PATIENCE_SECS = 0.5
with harness.join_cluster() as me:
    with me.device():
        global_step = harness.get_or_create_global_step()
        w = rt.Variable(np.zeros(4, np.float32), name="w")
        step = rt.group(w.assign_add(np.ones(4, np.float32)), global_step.assign_add(1))
    supervisor = harness.Supervisor(is_chief=me.is_chief, logdir={logdir!r}, global_step=global_step, summary_op=None)
    with supervisor.managed_session(me.target) as session:
        print("trains", flush=True)
        while not supervisor.should_stop():
            session.run(step)
"""


class Other:
    """Another process that holds the lock."""

    def __init__(self, directory: pathlib.Path, *tasks: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(directory), *tasks],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "held\n"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_chief_of_another_job_is_refused_until_it_is_gone(tmp_path: pathlib.Path) -> None:
    with Other(tmp_path, "ps0:1", "ps1:1") as other:
        with pytest.raises(rt.InvalidArgumentError, match=rf"{tmp_path}: the chief of the job at ps0:1, ps1:1, process {other.process.pid} "):  # fmt: skip # noqa: E501
            hold(str(tmp_path), ["ps0:2"], patience_secs=0.3)
        other.process.send_signal(signal.SIGKILL)
        other.process.wait()
        assert not hold(str(tmp_path), ["ps0:2"], patience_secs=0.3)
    assert json.loads((tmp_path / log_directory.NAME).read_text())["tasks"] == ["ps0:2"]
    release(str(tmp_path))


def test_a_chief_that_has_been_replaced_does_not_keep_its_successor_out(tmp_path: pathlib.Path) -> None:
    with Other(tmp_path, "ps0:1", "ps1:1"):
        assert not hold(str(tmp_path), ["ps1:1"], patience_secs=1e9)


def test_a_job_that_is_just_ending_is_waited_for(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for its end" in record.getMessage():
                other.go_on()

    with Other(tmp_path, "ps0:1") as other:
        handler = Ends()
        logging.getLogger("absl").addHandler(handler)
        assert hold(str(tmp_path), ["ps0:2"], patience_secs=1e9)
        with pytest.raises(subprocess.TimeoutExpired):
            other.process.wait(0.1)  # it lives on, and has released
    release(str(tmp_path))


def test_who_is_alone_is_warned_only(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with Other(tmp_path, "ps0:1") as other, caplog.at_level(logging.WARNING):
        assert not hold(str(tmp_path), (), patience_secs=1e9)
    assert f"process {other.process.pid} on " in caplog.text and "do not save there" in caplog.text


def test_it_is_the_lock_of_the_directory_and_not_of_its_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with Other(tmp_path / "link", "ps0:1"):
        with pytest.raises(rt.InvalidArgumentError):
            hold(str(tmp_path), ["ps0:2"], patience_secs=0.0)


def test_nothing_is_held_where_there_is_no_directory() -> None:
    assert not hold("", ["ps0:1"])
    assert not hold("gs://bucket/run", ["ps0:1"])
    release(None)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_session_gives_the_lock_back(tmp_path: pathlib.Path, fails: bool) -> None:
    def init(session: rt.Session) -> None:
        assert str(tmp_path) in log_directory._held
        if fails:
            raise ZeroDivisionError

    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        supervisor = harness.Supervisor(logdir=str(tmp_path), global_step=step, summary_op=None, init_fn=init)
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            with supervisor.prepare_or_wait_for_session() as session:
                session.run(step)
    with Other(tmp_path, "ps0:1"):
        pass
    assert str(tmp_path) not in log_directory._held


def test_the_second_job_says_who_trains_there_and_the_first_loses_nothing(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINS.format(logdir=str(tmp_path / "run")))
    launch = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=1", "--max_restarts=0", "--"]
    first = subprocess.Popen(
        [*launch, sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if "trains" in line:
                break
        second = subprocess.run([*launch, sys.executable, str(program)], capture_output=True, text=True, timeout=200)
        assert second.returncode != 0 and "trains" not in second.stdout
        assert (
            "another job writes into" in second.stdout and "give this job a log directory of its own" in second.stdout
        )
        first.send_signal(signal.SIGINT)
        story, _ = first.communicate(timeout=200)
    finally:
        first.kill()
        first.wait()
    assert "is saved in" in story
