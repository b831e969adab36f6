"""Runs a notebook of docs/notebooks and keeps what its cells print: ``python -m tests.docs.notebooks FILE...``.

It runs in a directory of its own, as a kernel would run it: all cells in one namespace, one after
the other.
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(path: pathlib.Path) -> list[str]:
    """Runs the code cells of a notebook in the current directory; gives what each has printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(json.loads(path.read_text(encoding="utf-8"))), 1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
        printed.append(output.getvalue())
    return printed


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kept(cell: dict[str, Any]) -> str:
    """What a cell has printed when its notebook was kept."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def keep(path: pathlib.Path) -> None:
    """Runs a notebook and writes what its cells print into it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = run(path)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if text else []}
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in sys.argv[1:]:
        keep(pathlib.Path(name).resolve())
