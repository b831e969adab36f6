"""The flags by which the example chooses how its workers train together."""

import subprocess
import sys
from collections.abc import Callable

import optax
import pytest
from absl import flags
from absl.testing import flagsaver

import harness
from models.mnist import trainer
from models.mnist.config import RunConfig

pytestmark = pytest.mark.chaos


def test_unknown_mode_is_refused(parsed: Callable[..., RunConfig]) -> None:
    """An unknown value of --sync is refused."""
    with pytest.raises(flags.IllegalFlagValueError, match="sync"):
        parsed("--sync=never")


def test_each_mode_has_its_optimizer(parsed: Callable[..., RunConfig]) -> None:
    """Each mode has its optimizer and its batches in a step."""
    optimizer = harness.Optimizer(optax.sgd(0.1))
    three = ("--worker_hosts=a:1,b:1,c:1", "--job_name=worker")
    for arguments, kind, batches in [
        (["--sync"], harness.SyncReplicas, 3),
        (["--max_staleness=2"], harness.StaleSynchronous, 1),
        ([], harness.Optimizer, 1),
    ]:
        with flagsaver.flagsaver():
            config = parsed(*three, *arguments)
        assert type(trainer.wrap_optimizer(optimizer, config)) is kind
        assert config.batches_per_step == batches


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--sync", "--max_staleness=1"], "--max_staleness"),
        (
            ["--ps_backups=1", "--ps_hosts=a:1", "--worker_hosts=b:1", "--job_name=worker"],
            "there are 1",
        ),
        (["--worker_hosts=b:1,c:1", "--job_name=worker"], "--ps_hosts is empty"),
        (["--ps_hosts=b:1"], "--ps_hosts given without --job_name"),
        (
            ["--ps_hosts=b:1", "--worker_hosts=c:1", "--job_name=worker", "--task_index=1"],
            "No task with index 1",
        ),
        (["--elastic", "--prefetch=1"], "leave --prefetch out"),
        (["--profile_steps=5:7", "--logdir="], "--profile_steps needs a --logdir"),
        (
            ["--profile_steps=7"],
            "--profile_steps=7: give the first step and the end, as in 100:105",
        ),
    ],
)
def test_conflicting_mode_flags_are_named(arguments: list[str], names: str) -> None:
    """Flags that do not fit together give one line."""
    command = [sys.executable, "-m", "models.mnist.trainer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert names in lines[-1]
    assert "Traceback" not in done.stderr
