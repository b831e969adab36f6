"""The tiers hold: a unit test that starts a process fails and is told what to do, and a test has one tier."""

import pathlib
import subprocess
import sys

import pytest

from tests.tiers import TIERS

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).resolve().parent.parent
WAYS = {
    "subprocess.Popen": "subprocess.run([sys.executable, '-c', ''])",
    "os.fork": "os._exit(0) if os.fork() == 0 else os.wait()",
    "os.posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "os.system": "os.system('true')",
    "os.exec": "os.execv('/bin/true', ['true'])",
    "multiprocessing": "multiprocessing.get_context('forkserver').Process(target=print).start()",
    "in a fixture": "pass",
    "hidden": "hidden()",
}
PROGRAM = """
import multiprocessing, os, subprocess, sys
import pytest

@pytest.fixture
def started():
    subprocess.run(["true"])

def hidden():
    try:
        subprocess.run(["true"])
    except Exception:
        pass
"""


def run(path: pathlib.Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.tiers",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-v",
    ]
    return subprocess.run(
        [*command, *flags, path], cwd=ROOT, capture_output=True, text=True, timeout=200
    )


@pytest.mark.chaos
def test_unit_test_starting_process_fails(tmp_path: pathlib.Path) -> None:
    """A unit test that starts a process in any way fails with advice."""
    path = tmp_path / "test_ways.py"
    tests = [
        f"def test_{number}({'started' if way == 'in a fixture' else ''}):\n    {code}\n"
        for number, (way, code) in enumerate(WAYS.items())
    ]
    allowed = "@pytest.mark.cluster\ndef test_allowed(started):\n    hidden()\n"
    path.write_text("\n\n".join([PROGRAM, *tests, allowed]))
    done = run(path)
    assert "1 passed" in done.stdout, done.stdout
    for number, way in enumerate(WAYS):
        event = way if way not in ("in a fixture", "hidden") else "subprocess.Popen"
        assert f"test_{number} is a unit test and starts a process ({event} " in done.stdout, (
            done.stdout
        )
    assert "mark it with another tier, as in `pytestmark = pytest.mark.cluster`" in done.stdout
    assert "test_allowed PASSED" in done.stdout


@pytest.mark.chaos
def test_test_has_one_tier(tmp_path: pathlib.Path) -> None:
    """A test has one tier, which is unit without a mark."""
    path = tmp_path / "test_marks.py"
    path.write_text(
        "import pytest\n\ndef test_plain():\n    pass\n\n@pytest.mark.disk\ndef test_disk():\n    "
        "pass\n"
    )
    assert "test_plain" in run(path, "-m", "unit").stdout
    assert "test_disk" not in run(path, "-m", "unit").stdout
    path.write_text(
        "import pytest\npytestmark = pytest.mark.disk\n\n@pytest.mark.chaos\ndef test_other():\n   "
        " pass\n"
    )
    assert "test_other PASSED" in run(path, "-m", "chaos and not disk").stdout
    path.write_text(
        "import pytest\n\n@pytest.mark.disk\n@pytest.mark.chaos\ndef test_two():\n    pass\n"
    )
    assert "test_two has the tiers chaos and disk: a test has one" in run(path).stderr


def test_guide_lists_the_tiers() -> None:
    """The guide lists all tiers."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert [tier for tier in TIERS if f"| `{tier}` |" not in guide] == []
