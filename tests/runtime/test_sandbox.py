"""The sandbox of those that read what strangers have made: a child tries all that it must not do, and cannot."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.kit.processes import ROOT

pytestmark = pytest.mark.cluster

SECS = 100


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory with what the child tries to reach."""
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        unix.bind(str(tmp_path / "unix"))
        tcp.bind(("127.0.0.1", 0))
        for listener in (unix, tcp):
            listener.listen()
        (tmp_path / "port").write_text(str(tcp.getsockname()[1]))
        (tmp_path / "here").write_text("here")
        yield tmp_path


def tried(kind: str, place: pathlib.Path) -> dict[str, str]:
    """What a child in a sandbox has told of its attempts; it ends itself by a signal of its own."""
    command = [sys.executable, "-m", "tests.runtime.sandboxed", kind, str(place)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=SECS
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    assert told.pop("problem") == "" and told.pop("a new thread") == 1  # type: ignore[comparison-overlap]
    return told


def test_without_a_sandbox_all_of_it_can_be_done(place: pathlib.Path) -> None:
    told = tried("none", place)
    del told["again"]
    assert set(told.values()) <= {"done", "ENOENT", "EEXIST"} and "EPERM" not in told.values()
    assert told["kill another process"] == told["connect by TCP"] == told["fork"] == "done"


@pytest.mark.parametrize("kind", ["files"])
def test_in_the_sandbox_nothing_of_it_can_be_done_but_reading_where_that_is_its_task(
    kind: str, place: pathlib.Path
) -> None:
    told = tried(kind, place)
    assert told.pop("again") == "the kernel takes no filter"  # from within a sandbox
    can = {name for name, outcome in told.items() if outcome != "EPERM"}
    reads = {name for name in told if "look: " in name}
    assert reads and can == (reads if kind == "files" else set()), {name: told[name] for name in can ^ reads}
    assert {told[name] for name in can} <= {"done"}
    assert (place / "here").read_text() == "here" and not (place / "new").exists()
