"""The pages on TensorFlow 1 list what is there and what is different, and the notebooks of docs/tutorials run."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import harness.tf1 as tf
from harness.tf1.names.missing import INSTEAD
from harness.tf1.names.table import HEADINGS, TABLE
from harness.tf1.tools import listing
from tests.harness.tf1.oracle import differences
from tests.kit import real_mnist

# its sentences are those of the locked versions of JAX: not for other ones
pytestmark = pytest.mark.cluster

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
PAGE, DIFFERENT, NAMES = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("tf1", "tf1_differences", "tf1_names")
)
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LONG = ("04_work_on_several_devices", "06_mnist")


def test_page_lists_all_names() -> None:
    """The page of names is current."""
    generated = NAMES.partition(listing.BEGIN)[2].partition(listing.END)[0].strip()
    assert generated == listing.page().strip(), (
        "run: python -m harness.tf1.tools.listing docs/tf1_names.md"
    )


def test_page_lists_all_differences() -> None:
    """The page of differences is current."""
    generated = DIFFERENT.partition(differences.BEGIN)[2].partition(differences.END)[0].strip()
    wanted = "run: python -m tests.harness.tf1.oracle.differences docs/tf1_differences.md"
    assert generated == differences.page().strip(), wanted


def test_tf1_names_are_documented() -> None:
    """Every public function of harness.tf1 has a docstring."""
    everything = [(f"tf.{name}", TABLE["tf"][name]) for name in HEADINGS]
    for namespace, module in listing.namespaces():
        everything += listing.members(namespace, module)
    undocumented = [
        name
        for name, value in everything
        if callable(value)
        and not hasattr(value, "DESCRIPTOR")
        and not (value.__doc__ or "").strip()
    ]
    assert len(everything) > 400
    assert undocumented == []


def test_named_functions_exist() -> None:
    """The names in the text of the pages exist."""
    named = set(re.findall(r"`(tf\.[a-zA-Z0-9_.]*[a-zA-Z0-9_])", PAGE + DIFFERENT)) - set(INSTEAD)
    assert len(named) > 30 and "tf.cond" in DIFFERENT
    for name in named:
        value = tf
        for part in name.split(".")[1:]:
            value = getattr(value, part)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.nightly if path.stem in LONG else pytest.mark.chaos)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_tutorial_notebook_runs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A tutorial notebook runs."""
    if "mnist" in path.stem and real_mnist.NONE_HERE:
        pytest.skip(real_mnist.NONE_HERE)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MNIST_DIR": real_mnist.DIRECTORY,
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "run_notebook.py"), str(path)],
        env={**env, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path: pathlib.Path) -> None:
    """A tutorial notebook is kept without outputs."""
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4 and notebook["cells"][0]["cell_type"] == "markdown"
    for cell in notebook["cells"]:
        assert cell["id"] and (
            cell["cell_type"] == "markdown"
            or (cell["outputs"], cell["execution_count"]) == ([], None)
        )


@pytest.mark.cluster
def test_failing_cell_fails_the_run(tmp_path: pathlib.Path) -> None:
    """A failing cell fails the run of a notebook."""
    cells = [{"cell_type": "code", "source": [line]} for line in ("x = 6 * 7", "x", "x / 0")]
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    runner = HERE / "run_notebook.py"
    done = subprocess.run(
        [sys.executable, str(runner), str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout.startswith("42\ncell 3 failed:")
