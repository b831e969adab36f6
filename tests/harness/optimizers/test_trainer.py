"""The example in its synchronous mode, as anybody starts it: the launcher, real data, a checkpoint at the end."""

import os
import pathlib
import subprocess
import sys

import pytest

from harness.checkpoints.layout import latest_checkpoint
from tests.kit import real_mnist
from tests.kit.processes import ROOT

pytestmark = pytest.mark.chaos

GOAL = 60


@real_mnist.needed
def test_trainer_stops_at_exact_step(tmp_path: pathlib.Path) -> None:
    """The global step moves by one for each aggregate and ends at the step that was asked for."""
    told = [f"--data_dir={real_mnist.DIRECTORY}", f"--logdir={tmp_path}"]
    trainer = [sys.executable, "-m", "models.mnist.trainer", *told]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "harness.launch",
            "--ps=2",
            "--workers=2",
            "--",
            *trainer,
            f"--train_steps={GOAL}",
        ]
        + ["--sync"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    newest = latest_checkpoint(str(tmp_path))
    assert newest is not None
    assert int(pathlib.Path(newest).name) == GOAL
