"""Log lines, the profile of some steps, and the flags."""

import gzip
import json
import logging
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from absl import flags
from absl import logging as absl_logging
from absl.testing import flagsaver
from jax.profiler import ProfileData

from harness import monitoring
from harness.monitoring.program import JsonFormatter, StepProfiler, TaskFormatter
from tests.harness.monitoring.trace_format import problems
from tests.kit.changes import SetVariables
from tests.kit.processes import ROOT


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


def test_log_line_names_the_task() -> None:
    """A log line names the task and is one line, and an exception keeps its traceback."""
    line = TaskFormatter("worker/1").format(record("two\nlines"))
    assert line.startswith("W") and line.endswith(" worker/1 file.py:12] two lines")
    assert "ValueError: broken" in TaskFormatter("").format(record("x", error=True))


def test_json_line_is_one_object() -> None:
    """A JSON log line is one object with level, task, source, message, time and exception."""
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
    monitoring.configure_logging("worker/0", flags.FLAGS.log_json)
    with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server, monitoring.watched(server):
        logging.info("it runs")
app.run(main)
"""


@pytest.mark.cluster
def test_log_json_covers_a_program() -> None:
    """With --log_json every line of a program is JSON."""
    command = [sys.executable, "-c", PROGRAM, "--log_json", "--metrics_port=0"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert {line["task"] for line in lines} == {"worker/0"}
    assert "computes on" in lines[0]["message"] and lines[-1]["message"] == "it runs"
    for words in ("serves at", "figures for Prometheus at port"):
        assert any(words in line["message"] for line in lines)


def profiled_steps(trace: pathlib.Path) -> list[str]:
    """The numbers of the steps in a trace."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["args"]["step_num"] for event in events if event.get("name") == "train"]


def test_profile_covers_the_given_steps(tmp_path: pathlib.Path) -> None:
    """A profile covers the given steps and is written when they are over."""
    with (
        flagsaver.flagsaver(profile_steps="2:4"),
        StepProfiler.from_flags(str(tmp_path)) as profiler,
    ):
        for step in range(6):
            profiler.step(step)
            assert bool(list(tmp_path.rglob("*.xplane.pb"))) == (step >= 4)
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    assert profiled_steps(trace) == ["2", "3"]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    events = [event for event in events if event]  # the profiler ends its list with an empty one
    own = re.compile("has no name|overlaps")  # what JAX's profiler may do, and Perfetto takes
    assert [p for p in problems(json.dumps({"traceEvents": events})) if not own.search(p)] == []
    (planes,) = tmp_path.rglob("*.xplane.pb")
    assert "/host:CPU" in {plane.name for plane in ProfileData.from_file(str(planes)).planes}


def test_profile_counts_own_steps(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A profile covers the given number of this task's own steps."""
    caplog.set_level(logging.INFO)
    with StepProfiler(100, 103, str(tmp_path)) as profiler:
        for step in (0, 99, 316, 322, 328, 334, 340):
            profiler.step(step)
            assert bool(list(tmp_path.rglob("*.xplane.pb"))) == (step >= 334)
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    assert profiled_steps(trace) == ["316", "322", "328"]
    assert "profiling 3 steps of this task from global step 316 on" in caplog.messages


def test_past_steps_are_not_profiled(tmp_path: pathlib.Path) -> None:
    """A run that is past the given steps is not profiled."""
    with StepProfiler(2, 4, str(tmp_path)) as profiler:
        for step in (4, 5, 6):
            profiler.step(step)
    assert not list(tmp_path.iterdir())


def test_launcher_lines_omit_the_task(set_variables: SetVariables) -> None:
    """Under the launcher a log line leaves the task out, and a JSON line does not."""
    handler = absl_logging.get_absl_handler()
    old = handler.formatter
    try:
        for launched, expected in ((True, "] x"), (False, "worker/1 file.py:12] x")):
            set_variables(BELLWETHER_ATTEMPT="0" if launched else None)
            monitoring.configure_logging("worker/1")
            assert handler.format(record("x")).endswith(expected)
            assert ("worker/1" in handler.format(record("x"))) is not launched
            monitoring.configure_logging("worker/1", as_json=True)
            assert json.loads(handler.format(record("x")))["task"] == "worker/1"
    finally:
        handler.setFormatter(old)


@pytest.mark.parametrize("spec", ["5", "5:5", "7:5", "a:b"])
def test_wrong_profile_span_is_refused(spec: str) -> None:
    """A wrong span of --profile_steps is refused."""
    with flagsaver.flagsaver(profile_steps=spec), pytest.raises(ValueError, match="steps"):
        StepProfiler.from_flags("dir")


def test_no_flag_means_no_profile(tmp_path: pathlib.Path) -> None:
    """Without --profile_steps no step is profiled."""
    with (
        flagsaver.flagsaver(profile_steps=None),
        StepProfiler.from_flags(str(tmp_path)) as profiler,
    ):
        profiler.step(1)
    assert not list(tmp_path.iterdir())
    assert flags.FLAGS.metrics_port is None
