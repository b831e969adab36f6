"""Power loss: in which order a save syncs and renames, as the operating system saw it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.chaos

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import numpy as np
import harness
import runtime as rt

with rt.Graph().as_default() as graph:
    rt.Variable(np.ones((300, 300), np.float32), name="w")
    rt.Variable(np.float32(1), name="small")
    with rt.Session("", graph) as sess:
        sess.run(rt.global_variables_initializer())
        saver = harness.Saver(max_to_keep=1)
        for step in sys.argv[2:]:
            saver.save(sess, sys.argv[1], int(step))
"""
_SYNC = re.compile(r"(?:fsync|fdatasync)\(\d+<([^>]*)>\)\s+= 0")
_RENAME = re.compile(r'rename\w*\(.*?"([^"]+)".*?"([^"]+)".*\)\s+= 0')
_DELETE = re.compile(r'(?:unlink|unlinkat|rmdir)\((?:\d+<([^>]*)>, |AT_FDCWD<[^>]*>, )?"([^"]*)"')
_WRITE = re.compile(r"p?writev?(?:64)?\(\d+<([^>]*)>")


def _traced(trace: pathlib.Path, *command: str) -> int:
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2,write,writev,pwrite64,pwritev,unlink,unlinkat,rmdir"
    tracer = [
        "strace",
        "-f",
        "-y",
        "-q",
        "-s",
        "0",
        "-e",
        calls,
        "-e",
        "signal=none",
        "-o",
        str(trace),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*tracer, *command], env=environment, capture_output=True, timeout=150
    ).returncode


@pytest.mark.timeout(200)
def test_files_are_synced_before_naming(
    tmp_path: pathlib.Path,
) -> None:
    """Every file of a step is synced before the step has its name, and the parent directory after."""
    if shutil.which("strace") is None or _traced(tmp_path / "probe", "true") != 0:
        pytest.skip("strace is not here or may not trace: the order of system calls cannot be seen")
    series = tmp_path / "m"
    trace = tmp_path / "trace"
    assert _traced(trace, sys.executable, "-c", PROGRAM, str(series), "7") == 0
    synced: dict[str, int] = {}
    written: dict[str, int] = {}
    aliases: dict[str, str] = {}  # of files: a rename moves what was synced
    named = -1
    for at, line in enumerate(_whole_lines(trace.read_text())):
        if found := _SYNC.search(line):
            synced[found[1]] = at
        elif found := _WRITE.search(line):
            written[found[1]] = at
        elif (found := _RENAME.search(line)) and found[2] == str(series / "7"):
            named, aliases["temporary"] = at, found[1]
    assert named >= 0, "the step was never given its name"
    before = aliases["temporary"]
    for path in [series / "7", *(series / "7").rglob("*")]:
        temporary = before + str(path).removeprefix(str(series / "7"))
        assert synced.get(temporary, named) < named, (
            f"{path} was not synced before the step got its name"
        )
        assert written.get(temporary, -1) < synced[temporary], (
            f"{path} was written after it was synced"
        )
    assert synced.get(str(series), -1) > named, "the directory of the step was not synced after it"


@pytest.mark.timeout(200)
def test_name_vanishes_before_files(
    tmp_path: pathlib.Path,
) -> None:
    """A step's name is gone for good before its files are deleted."""
    if shutil.which("strace") is None or _traced(tmp_path / "probe", "true") != 0:
        pytest.skip("strace is not here or may not trace: the order of system calls cannot be seen")
    series = tmp_path / "m"
    trace = tmp_path / "trace"
    assert _traced(trace, sys.executable, "-c", PROGRAM, str(series), "7", "8", "8") == 0
    assert sorted(p.name for p in series.iterdir()) == ["8"]
    moved: dict[str, int] = {}  # directory that a step was moved into, and when
    synced: dict[str, int] = {}
    emptied: set[str] = set()
    for at, line in enumerate(_whole_lines(trace.read_text())):
        if found := _SYNC.search(line):
            synced[found[1]] = at
        elif (found := _RENAME.search(line)) and found[1] in (str(series / "7"), str(series / "8")):
            moved[str(pathlib.Path(found[2]).parent)] = at
        elif found := _DELETE.search(line):
            path = os.path.join(found[1] or "/", found[2])
            for aside, when in moved.items():
                if path.startswith(aside + "/"):
                    emptied.add(aside)
                    assert synced.get(aside, -1) > when, f"{path} went before {aside} was synced"
                    assert synced.get(str(series), -1) > when, (
                        f"{path} went before the name of its step was gone"
                    )
    assert emptied == {str(series / "removed"), str(series / "replaced")}


def _whole_lines(text: str) -> list[str]:
    """The lines of a trace; calls during which another thread ran are put together, at the place where they ended."""
    begun: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        thread, _, call = line.partition(" ")
        if call.rstrip().endswith("<unfinished ...>"):
            begun[thread] = call.rpartition("<unfinished ...>")[0].strip()
        elif "resumed>" in call:
            lines.append(begun.pop(thread, "") + call.partition("resumed>")[2])
        else:
            lines.append(call)
    return lines
