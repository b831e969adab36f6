"""The lines in which a training session tells its progress, in a program whose log shows warnings only."""

import pathlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from absl import logging

import harness
import runtime as rt

_RATE = r"step \d+, [\d,]+\.\d steps/s"
_OFTEN = 1e-9
"""So few seconds between two lines that each step has its line."""


def _managed(directory: str | None, log_secs: float) -> AbstractContextManager[Any]:
    supervisor = harness.Supervisor(logdir=directory)
    return supervisor.managed_session(config=rt.SessionConfig(log_secs=log_secs))


def _monitored(directory: str | None, log_secs: float) -> AbstractContextManager[Any]:
    return harness.MonitoredTrainingSession(
        checkpoint_dir=directory, config=rt.SessionConfig(log_secs=log_secs)
    )


def _train(opens: Callable[..., AbstractContextManager[Any]], *options: Any) -> None:
    with rt.Graph().as_default():
        count = harness.get_or_create_global_step().assign_add(1)
        loss = rt.call(lambda step: 0.25 * step.astype(np.float32), count, name="loss")
        with opens(*options) as session:
            for _ in range(3):
                session.run([loss, count])


@pytest.fixture(params=[_managed, _monitored])
def opens(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_session_tells_its_progress(
    opens: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A session tells step, rate and loss, and at the end where the checkpoints are."""
    assert not logging.level_info()
    _train(opens, str(tmp_path), _OFTEN)
    *lines, end = capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(rf"{_RATE}(, loss 0\.\d+)?", line) for line in lines)
    assert lines[-1].startswith("step 3, ") and lines[-1].endswith(", loss 0.75")
    assert re.fullmatch(rf"training is over: {_RATE}; its checkpoints are in {tmp_path}", end)


def test_short_run_tells_its_end(opens: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By default a run of less than ten seconds has the line of its end alone."""
    _train(opens, None, rt.SessionConfig().log_secs)
    assert re.fullmatch(rf"training is over: {_RATE}\n", capsys.readouterr().err)


def test_one_argument_ends_the_lines(
    opens: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With log_secs=0 a session tells nothing."""
    _train(opens, str(tmp_path), 0)
    assert capsys.readouterr().err == ""


def test_log_has_the_lines(opens: Any, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    """A program whose log shows INFO has the lines in its log alone."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    try:
        _train(opens, None, _OFTEN)
    finally:
        logging.set_verbosity(verbosity)
    assert re.search(_RATE, caplog.text) and "training is over" in caplog.text
    assert not re.search(f"^{_RATE}", capsys.readouterr().err, re.MULTILINE)
