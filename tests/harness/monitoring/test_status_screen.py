"""`harness.status` on a terminal: colours, a live table and lines that fit."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping

import pytest

import runtime as rt
from runtime.server.local_cluster import InProcessCluster
from tests.kit.processes import ROOT
from tests.kit.waits import TIMEOUT_SECS

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`python -m harness.status` on a terminal of its own."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 240,
        lines: int = 40,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.status", "--interval=0.05", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**environment, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu", **(env or {})},
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, pattern: str, times: int = 1) -> None:
        """Reads until what was written matches so often, or to the end with an empty pattern."""
        deadline = time.monotonic() + TIMEOUT_SECS
        while not pattern or len(re.findall(pattern, self.text)) < times:
            assert time.monotonic() < deadline, self.text
            if not select.select([self._ours], [], [], 1)[0]:
                continue
            try:
                self.text += os.read(self._ours, 65536).decode()
            except OSError:  # EIO: the other side is closed
                assert not pattern, self.text
                return

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with rt.local_cluster(ps=1, workers=2) as made:
        yield made


def argument(cluster: InProcessCluster) -> str:
    jobs = {job: ",".join(cluster.cluster.job_tasks(job)) for job in cluster.cluster.jobs}
    return "--cluster=" + ";".join(f"{job}={hosts}" for job, hosts in jobs.items())


@pytest.mark.cluster
def test_terminal_adds_only_colours(cluster: InProcessCluster) -> None:
    """A terminal shows what a pipe shows, with colours."""
    with Terminal(argument(cluster)) as terminal:
        terminal.read_until("")
        assert terminal.process.wait(TIMEOUT_SECS) == 0
    assert terminal.text.count("\x1b[32m/job:") == 3
    shown = ESCAPE.sub("", terminal.text).splitlines()
    piped = subprocess.run(
        [sys.executable, "-m", "harness.status", "--interval=0.05", argument(cluster)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
        check=True,
    ).stdout
    assert "\x1b" not in piped
    assert shown[0].split() == piped.splitlines()[0].split()
    assert [line.split()[:2] for line in shown[1:4]] == [
        line.split()[:2] for line in piped.splitlines()[1:4]
    ]


@pytest.mark.cluster
def test_watch_redraws_in_place(
    cluster: InProcessCluster,
) -> None:
    """A watched cluster is redrawn in place, with a lost task in red."""
    lonely = argument(cluster) + ",127.0.0.1:1"  # a worker that is not there
    with Terminal(lonely, "--watch") as terminal:
        terminal.read_until("not whole: /job:worker/task:2", times=3)
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("")
        assert terminal.process.wait(TIMEOUT_SECS) == 0
    assert "\x1b[2J" not in terminal.text  # nothing is wiped, so nothing flickers
    assert re.search(r"\x1b\[\d*A", terminal.text)  # but the cursor goes up
    assert re.search(r"\x1b\[31m/job:worker/task:2 .*down: nobody listens", terminal.text)


@pytest.mark.cluster
def test_narrow_terminal_keeps_task_lines(cluster: InProcessCluster) -> None:
    """A narrow terminal has one line for each task."""
    with Terminal(argument(cluster), columns=80) as terminal:
        terminal.read_until("")
        assert terminal.process.wait(TIMEOUT_SECS) == 0
    lines = ESCAPE.sub("", terminal.text).splitlines()
    # Below the table there may be an error that a test before has logged in this process.
    assert [line.split()[0] for line in lines[1:4]] == [
        str(task) for task in cluster.cluster.tasks()
    ]
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:5] == ["TASK", "STATE", "STEP", "STEPS/S", "STEP"]


@pytest.mark.cluster
def test_dumb_terminal_has_plain_table(cluster: InProcessCluster) -> None:
    """A dumb terminal has the plain table."""
    with Terminal(argument(cluster), env={"TERM": "dumb"}) as terminal:
        terminal.read_until("")
        assert terminal.process.wait(TIMEOUT_SECS) == 0
    assert "\x1b" not in terminal.text and terminal.text.startswith("TASK")
