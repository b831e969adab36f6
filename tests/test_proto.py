"""The generated protocol modules are what `make proto` makes of the .proto files."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _generated(root: pathlib.Path) -> dict[str, str]:
    folders = [root / "runtime" / "proto", root / "harness" / "tf1" / "inputs"]
    found = [
        path
        for folder in folders
        for path in folder.iterdir()
        if "_pb2" in path.name and path.is_file()
    ]
    return {str(path.relative_to(root)): path.read_text() for path in found}


def test_protocol_modules_are_current(tmp_path: pathlib.Path) -> None:
    """The checked-in protocol modules are what `make proto` makes."""
    subprocess.run(
        [sys.executable, "protos/generate.py", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    fresh, checked_in = _generated(tmp_path), _generated(ROOT)
    assert fresh
    assert sorted(checked_in) == sorted(fresh), "run `make proto`"
    assert [name for name in fresh if fresh[name] != checked_in[name]] == [], "run `make proto`"
