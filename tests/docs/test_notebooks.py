"""The notebooks of docs/notebooks run, and what they show is what their cells print."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.docs.notebooks import ROOT, code_cells, kept

pytestmark = pytest.mark.chaos

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_prints_what_it_shows(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The cells of a notebook print what the notebook shows."""
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    command = [sys.executable, "-m", "tests.docs.notebooks", str(copy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    shown, printed = (
        [kept(cell) for cell in code_cells(json.loads(p.read_text()))] for p in (path, copy)
    )
    assert any(shown) and shown == printed, f"run: python -m tests.docs.notebooks {path}"


def test_notebooks_are_run_in_order() -> None:
    """The three notebooks begin with text, and their cells were run in order."""
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        assert notebook["nbformat"] == 4 and notebook["cells"][0]["cell_type"] == "markdown"
        assert [cell["execution_count"] for cell in code_cells(notebook)] == list(
            range(1, len(code_cells(notebook)) + 1)
        )
