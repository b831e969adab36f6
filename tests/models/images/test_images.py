"""The convolutional network with BatchNorm learns digits, workers in step."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flax")
from models.images import trainer  # noqa: E402

IMAGES = np.random.default_rng(0).random((16, 784), np.float32)
LABELS = np.arange(16) % 10


def test_the_running_means_follow_the_batches() -> None:
    """By a tenth in each step of training, and not at all in a test."""
    _, params, means = trainer.split_net()
    _, after = trainer.jax.jit(trainer.loss_fn)(params, means, IMAGES, LABELS)
    kernel = params["conv1"]["kernel"]
    seen = trainer.jax.lax.conv_general_dilated(
        IMAGES.reshape(-1, 28, 28, 1), kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(after["norm1"]["mean"], 0.1 * seen.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    assert trainer.jax.tree.structure(after) == trainer.jax.tree.structure(means)
    few = trainer.jax.jit(trainer.accuracy_fn)(params, means, IMAGES[:1], LABELS[:1])
    assert few in (0, 1)  # one image alone, which has no statistics of its own


@pytest.mark.nightly  # a whole training
def test_it_learns(tmp_path: pathlib.Path) -> None:
    launcher = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", "--"]
    program = [sys.executable, "-m", "models.images.trainer", f"--logdir={tmp_path}"]
    done = subprocess.run([*launcher, *program], capture_output=True, text=True, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (accuracy,) = re.findall(r"Test-Accuracy: ([\d.]+)", done.stdout)
    assert float(accuracy) > 0.95
