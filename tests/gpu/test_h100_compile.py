"""The programs of models, examples and tutorials compile for an H100, and need little of its memory.

``make test-h100-compile`` makes the environment with the CUDA plugin, and runs this file. No card is
needed.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from tests.kit.processes import ROOT
from tests.models.recommender.made_films import write_films

needed = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None,
    reason="needs the CUDA plugin: make test-h100-compile",
)
pytestmark = [pytest.mark.nightly, needed]

LAUNCHER = ("harness.launch", "--ps=1", "--workers=1", "--", sys.executable, "-m")
MIB = 1 << 20
MODELS = {
    "models.mnist.minimal": (("--train_steps=20",), 48 * MIB),
    "models.mnist.trainer": (("--train_steps=20", "--logdir="), 48 * MIB),
    "models.cartpole.trainer": (("--train_steps=20",), 48 * MIB),
}
"""Arguments, and the most memory of the device that a program of the model may need."""
NOTEBOOKS = sorted(
    path for room in ("notebooks", "tutorials") for path in (ROOT / "docs" / room).glob("*.ipynb")
)
NOTEBOOK_BYTES = 48 * MIB


def measure(report: pathlib.Path, *command: str) -> list[dict[str, float]]:
    """Runs a command; returns the figures of each program that was compiled for an H100."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # A notebook about clusters may compile nothing: what is small is evaluated.
    lines = report.read_text().splitlines() if report.exists() else []
    figures = [json.loads(line) for line in lines]
    largest = max((figure["bytes"] for figure in figures), default=0)
    secs = sum(figure["secs"] for figure in figures)
    print(f"{len(figures)} programs, {largest / MIB:.1f} MiB at the most, compiled in {secs:.1f} s")
    return figures


@pytest.mark.parametrize("model", MODELS)
def test_model_compiles_for_h100(model: str, tmp_path: pathlib.Path) -> None:
    """The programs of a model's worker compile for an H100 and stay below a size."""
    report = tmp_path / "report"
    arguments, most = MODELS[model]
    figures = measure(report, *LAUNCHER, "tests.gpu.h100", str(report), model, *arguments)
    assert max(figure["bytes"] for figure in figures) < most


def test_recommender_compiles_for_h100(tmp_path: pathlib.Path) -> None:
    """The program of a worker with tables compiles for an H100 and stays below a size."""
    write_films(tmp_path)
    flags = (f"--data_dir={tmp_path}", "--train_steps=20", "--nocompare")
    report = tmp_path / "report"
    program = ("tests.gpu.h100", str(report), "models.recommender.trainer", *flags)
    figures = measure(report, *LAUNCHER, *program)
    assert max(figure["bytes"] for figure in figures) < 48 * MIB


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_notebook_compiles_for_h100(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The programs of a notebook compile for an H100 and stay below a size."""
    report = tmp_path / "report"
    figures = measure(report, "tests.gpu.h100", str(report), str(path))
    assert all(figure["bytes"] < NOTEBOOK_BYTES for figure in figures)
