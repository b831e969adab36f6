"""The example in its synchronous modes, as anybody starts it: the launcher, real data, a checkpoint at the end."""

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
@pytest.mark.parametrize(
    ("ps", "mode", "over"),
    [(2, ["--sync"], 0), (1, ["--sync", "--replicas_to_aggregate=1"], 1)],
    ids=["ps", "backup"],
)
def test_trains_to_the_very_step(tmp_path: pathlib.Path, ps: int, mode: list[str], over: int) -> None:
    """The global step moves by one for each aggregate, up to the one that was asked for; a backup may be under way."""
    told = [f"--data_dir={real_mnist.DIRECTORY}", f"--logdir={tmp_path}"]
    trainer = [sys.executable, "-m", "models.mnist.trainer", *told]
    done = subprocess.run(
        [sys.executable, "-m", "harness.launch", f"--ps={ps}", "--workers=2", "--", *trainer, f"--train_steps={GOAL}"]
        + mode,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    newest = latest_checkpoint(str(tmp_path))
    assert newest is not None
    assert GOAL <= int(pathlib.Path(newest).name) <= GOAL + over
