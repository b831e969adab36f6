"""Damaged checkpoint directories: an error that names them, or what they hold; no more.

Each is read by a process of its own that reads one after the other; if it ends, or takes memory,
the damage is named.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np

import harness
import runtime as rt
from tests.kit.processes import ROOT

MEMORY: Final = 1 << 30
SMALL: Final = 1 << 20
"""Bytes; all files are smaller before they are damaged."""
SECS: Final = 300.0
"""For one of them, on a machine that does much else."""


def damage(path: Path, chance: random.Random) -> str:
    """Changes one file below a directory, or the file itself; says how."""
    below = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    # what is a hole already is not for us to read
    files = [p for p in below if p.stat().st_size <= SMALL]
    file = chance.choice(files)
    data = bytearray(file.read_bytes())
    match chance.randrange(8):
        case 0:
            file.unlink()
            return f"{file.name} removed"
        case 1:
            cut = chance.randrange(len(data) + 1)
            file.write_bytes(data[:cut])
            return f"{file.name} cut at {cut}"
        case 2:
            file.unlink()
            with file.open("wb") as made:
                made.truncate(1 << chance.choice((20, 31, 36)))
            return f"{file.name} is a hole"
        case 3:
            other = chance.choice(files).read_bytes()
            file.write_bytes(other)
            return f"{file.name} is another file"
        case 4:
            file.unlink()
            file.symlink_to(chance.choice(("/dev/zero", "/dev/null", file.name, "/")))
            return f"{file.name} is a link"
    changes = chance.choice((1, 2, 8))
    for _ in range(changes if data else 0):
        at = chance.randrange(len(data))
        data[at] = chance.choice(
            (data[at] ^ (1 << chance.randrange(8)), 0, 255, chance.randrange(256))
        )
    file.write_bytes(data)
    return f"{changes} bytes of {file.name} changed"


def saved(directory: Path) -> Path:
    """A good checkpoint of several variables."""
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        _variables()
        sess.run(rt.global_variables_initializer())
        return Path(harness.Saver().save(sess, str(directory / "m"), 1))


def _variables() -> None:
    rt.Variable(np.arange(500, dtype=np.float32), name="v")
    rt.Variable(np.arange(6, dtype=np.int32).reshape(2, 3), name="w")
    rt.Variable(np.array([b"one", b"two"], object), name="s")


def _child(first: int, last: int, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
    graph = rt.Graph()
    with tempfile.TemporaryDirectory() as place, graph.as_default(), rt.Session("", graph) as sess:
        good = saved(Path(place))
        _variables()
        saver = harness.Saver()
        saver.restore(sess, str(good))
        before = _peak()
        for number in range(first, last):
            chance = random.Random(f"checkpoints:{seed}:{number}")
            hostile = Path(shutil.copytree(good, Path(place) / "hostile" / "1"))
            how = "; ".join(damage(hostile, chance) for _ in range(chance.choice((1, 1, 2))))
            print(f"at {number} {how}", flush=True)
            try:
                saver.restore(sess, str(hostile))
                print("read", flush=True)
            except (rt.OpError, ValueError, OSError) as error:
                print(type(error).__name__, flush=True)
            taken = _peak() - before
            assert taken < MEMORY, f"it took {taken >> 20} MiB"
            shutil.rmtree(hostile)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz_checkpoints(count: int, seed: int) -> str:
    """Restores from so many damaged directories."""
    command = [sys.executable, "-m", "tests.fuzz.files", "0", str(count), str(seed)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECS + 5.0 * count,
        errors="replace",
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert done.returncode == 0, (
        f"{lines[-1] if lines else 'nothing'} ended it: {done.stderr[-3000:]}"
    )
    counts = Counter(line for line in lines if not line.startswith("at "))
    assert counts.total() == count
    return f"{count:,} checkpoints: {dict(counts.most_common())}"


if __name__ == "__main__":
    _child(*map(int, sys.argv[1:]))
