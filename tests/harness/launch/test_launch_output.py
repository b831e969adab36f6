"""The launcher's own output: whatever happens to it, the cluster goes on, or ends in order."""

import errno
import io
import os
import pathlib
import select
import subprocess
import sys
from typing import Any

import pytest

from harness.launch.output import LinePrinter
from tests.kit.waits import until

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
TASK = """
import sys
for number in range(3000):
    print("line", number, "x" * 100, flush=True)
open(sys.argv[1], "w").write("trained to the end")
"""


def command(tmp_path: pathlib.Path) -> list[str]:
    task = tmp_path / "task.py"
    task.write_text(TASK)
    launch = [sys.executable, "-m", "harness.launch", "--ps=0", "--workers=1", "--max_restarts=0"]
    return [*launch, "--", "python", str(task), str(tmp_path / "done")]


@pytest.mark.parametrize("one_stream", [False, True])
def test_last_lines_are_not_repeated(tmp_path: pathlib.Path, one_stream: bool) -> None:
    """The last lines of a failed task are repeated only where stderr goes elsewhere than stdout."""
    program = tmp_path / "wrong.py"
    program.write_text("for number in range(3): print('line', number)\nraise SystemExit(2)")
    launch = [
        sys.executable,
        "-m",
        "harness.launch",
        "--ps=0",
        "--workers=1",
        "--",
        "python",
        str(program),
    ]
    errors = subprocess.STDOUT if one_stream else subprocess.PIPE
    run = subprocess.run(launch, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert run.returncode == 2
    lines = [f"worker/0 | line {number}" for number in range(3)]
    assert [line for line in run.stdout.splitlines() if "| line" in line] == lines
    assert [line for line in (run.stderr or "").splitlines() if "| line" in line] == (
        [] if one_stream else lines
    )


@pytest.mark.parametrize("both", [False, True])
def test_full_disk_costs_lines_only(tmp_path: pathlib.Path, both: bool) -> None:
    """A full disk below the output costs lines, and the tasks train to the end."""
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            command(tmp_path),
            cwd=ROOT,
            stdout=full,
            stderr=full if both else subprocess.PIPE,
            timeout=60,
        )
    assert run.returncode == 0
    assert (tmp_path / "done").read_text() == "trained to the end"
    if not both:
        how_to_watch, line = run.stderr.decode().splitlines()
        assert "what the tasks do: " in how_to_watch
        assert (
            line.startswith("launch   | the tasks' output cannot be written: ")
            and "the tasks go on" in line
        )


def test_nonblocking_output_is_waited_for(tmp_path: pathlib.Path) -> None:
    """An output that does not block is waited for, and no line is lost."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with (
        open(writing, "wb", buffering=0) as ours,
        subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=ours, stderr=subprocess.PIPE) as run,
        open(reading, "rb") as stream,
    ):
        # How many bytes fill a pipe depends on how they were written: a page too full for a write
        # stays as it is.
        until(
            lambda: not select.select([], [ours], [], 0)[1] or run.poll() is not None,
            "the pipe is full",
        )
        assert run.returncode is None
        ours.close()
        lines = stream.read().decode().splitlines()
        _, messages = run.communicate(timeout=60)
    assert run.returncode == 0
    assert b"what the tasks do: " in messages and len(messages.splitlines()) == 1
    assert [line.split()[3] for line in lines] == [str(number) for number in range(3000)]


class _Stream(io.RawIOBase):
    """A file on a disk with a certain room."""

    def __init__(self) -> None:
        self.room = 1 << 40
        self.data = b""

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        self.data += taken
        return len(taken)


def test_lines_return_with_room() -> None:
    """The printer writes again, from the next whole line, as soon as there is room."""
    stream = _Stream()
    printer = LinePrinter(stream, ["worker/0"], colour=False)
    printer.write("worker/0", ["one", "two"])
    assert printer.failure == ""
    stream.room = 4
    printer.write("worker/0", ["three", "four"])
    printer.write("worker/0", ["five"])
    assert "No space left" in printer.failure
    stream.room = 1 << 40
    printer.write("worker/0", ["six"])
    assert printer.failure == ""
    assert stream.data.decode().splitlines() == [
        "worker/0 | one",
        "worker/0 | two",
        "work",
        "worker/0 | six",
    ]


def test_absent_reader_is_an_error() -> None:
    """Writing to a reader that has left raises BrokenPipeError."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as stream, pytest.raises(BrokenPipeError):
        LinePrinter(stream, ["worker/0"], colour=False).write("worker/0", ["one"])
