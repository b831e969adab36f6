"""``make bench-gpu`` on a machine without a GPU: one line, or a run with a stand-in."""

import json
import subprocess
import sys

import pytest

from tests.kit.processes import ROOT

pytestmark = pytest.mark.nightly


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_benchmark_needs_gpu() -> None:
    """The benchmark ends with one line where there is no GPU."""
    done = run()
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("no GPU here: JAX computes on the CPU")


def test_benchmark_runs_on_stand_in() -> None:
    """The benchmark with a CPU device in place of a GPU has figures of copies and of steps."""
    done = run("--fake")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({row["probe"] for row in rows if "probe" in row}) == 5
    assert [row["prefetch"] for row in rows if "variables" in row] == [0, 1]
