"""The flags by which the example chooses how its workers train together."""

import subprocess
import sys
from typing import Any

import optax
import pytest
from absl import flags

import harness
from models.mnist import modes

pytestmark = pytest.mark.chaos


@pytest.fixture
def parsed() -> Any:
    saved = flags.FLAGS.flag_values_dict()

    def parse(*arguments: str) -> None:
        flags.FLAGS(["trainer", *arguments])

    yield parse
    for name in ("sync", "replicas_to_aggregate", "sync_timeout_secs", "max_staleness"):
        if name in saved:
            flags.FLAGS[name].value = saved[name]


@pytest.mark.parametrize(
    ("argument", "mode"),
    [
        ("--sync", "ps"),
        ("--sync=ps", "ps"),
        ("--nosync", "async"),
        ("--sync=async", "async"),
        ("--sync=collective", "collective"),
    ],
)
def test_sync_with_and_without_a_value(parsed: Any, argument: str, mode: str) -> None:
    parsed(argument)
    assert flags.FLAGS.sync == mode


def test_an_unknown_mode_is_refused(parsed: Any) -> None:
    with pytest.raises(flags.IllegalFlagValueError, match="sync"):
        parsed("--sync=never")


def test_each_mode_has_its_optimizer(parsed: Any) -> None:
    optimizer = harness.Optimizer(optax.sgd(0.1))
    parsed("--sync", "--replicas_to_aggregate=2")
    assert isinstance(modes.together(optimizer, 3), harness.SyncReplicas)
    assert modes.batches_per_step(3) == 2
    parsed("--sync=collective")
    assert isinstance(modes.together(optimizer, 3), harness.CollectiveReplicas)
    assert modes.batches_per_step(3) == 3
    parsed("--sync=async", "--max_staleness=2")
    assert isinstance(modes.together(optimizer, 3), harness.StaleSynchronous)
    assert modes.batches_per_step(3) == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--sync=collective", "--ps_hosts=a:1", "--worker_hosts=b:1"], "--ps_hosts"),
        (["--sync", "--max_staleness=1"], "--max_staleness"),
        (["--sync_timeout_secs=1"], "--sync_timeout_secs"),
        (["--profile_steps=5:7", "--logdir="], "--profile_steps needs a --logdir"),
        (["--profile_steps=7"], "--profile_steps=7: give the first step and the end, as in 100:105"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(arguments: list[str], names: str) -> None:
    command = [sys.executable, "-m", "models.mnist.trainer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert names in lines[-1]
    assert "Traceback" not in done.stderr
