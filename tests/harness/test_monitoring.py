"""Log lines, the profile of some steps, and the flags."""

import json
import logging
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from absl import flags
from absl.testing import flagsaver

from harness import monitoring
from harness.monitoring import JsonFormatter, StepProfiler, TaskFormatter
from tests.runtime.kit import ROOT


@pytest.fixture(autouse=True)
def parsed_flags() -> Iterator[None]:
    """Flags can be read, as in a program, and are as they were afterwards."""
    with flagsaver.flagsaver():
        flags.FLAGS(["test"])
        yield
    flags.FLAGS.unparse_flags()


def record(message: str, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("broken")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("absl", logging.WARNING, "dir/file.py", 12, message, (), info)


def test_a_log_line_names_the_task_and_is_one_line() -> None:
    line = TaskFormatter("worker/1").format(record("two\nlines"))
    assert line.startswith("W") and line.endswith(" worker/1 file.py:12] two lines")
    assert "ValueError: broken" in TaskFormatter("").format(record("x", error=True))


def test_a_json_line_is_one_object() -> None:
    line = JsonFormatter("ps/0").format(record("two\nlines", error=True))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["task"], found["source"], found["message"]) == (
        "warning",
        "ps/0",
        "file.py:12",
        "two\nlines",
    )
    assert found["time"].endswith("+00:00") and "broken" in found["exception"]


PROGRAM = """
import sys
from absl import app, flags, logging
import runtime as rt
from harness import monitoring
def main(argv):
    logging.set_verbosity(logging.INFO)
    with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server, monitoring.watched(server):
        logging.info("it runs")
app.run(main)
"""


def test_log_json_of_a_program() -> None:
    command = [sys.executable, "-c", PROGRAM, "--log_json", "--metrics_port=0"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith("{")]
    assert [line["message"] for line in lines if line["task"] == "worker/0"][-1] == "it runs"
    assert any("figures for Prometheus at port" in line["message"] for line in lines)


def test_profile_of_some_steps(tmp_path: pathlib.Path) -> None:
    with flagsaver.flagsaver(profile_steps="2:4"), StepProfiler.from_flags(str(tmp_path)) as profiler:
        for step in range(6):
            profiler.step(step)
            assert bool(list(tmp_path.rglob("*.xplane.pb"))) == (step >= 4)
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))


@pytest.mark.parametrize("spec", ["5", "5:5", "7:5", "a:b"])
def test_a_wrong_span_is_refused(spec: str) -> None:
    with flagsaver.flagsaver(profile_steps=spec), pytest.raises(ValueError, match="steps"):
        StepProfiler.from_flags("dir")


def test_without_the_flag_nothing_is_profiled(tmp_path: pathlib.Path) -> None:
    with flagsaver.flagsaver(profile_steps=None), StepProfiler.from_flags(str(tmp_path)) as profiler:
        profiler.step(1)
    assert not list(tmp_path.iterdir())
    assert monitoring.FLAGS.metrics_port is None
