"""Damaged checkpoint directories and event files: an error that names them, or what they hold; no more.

Each is read by a process of its own that reads one after the other; if it ends, or takes memory, the damage is named.
"""

from __future__ import annotations

import contextlib
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
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

import harness
import runtime as rt
from harness.tensorboard.writer import points_to_repeat, read_events
from tests.kit.processes import ROOT

MEMORY: Final = 1 << 30
SMALL: Final = 1 << 20
"""Bytes; all files are smaller before they are damaged."""
SECS: Final = 300.0
"""For one of them, on a machine that does much else."""


def damage(path: Path, chance: random.Random) -> str:
    """Changes one file below a directory, or the file itself; says how."""
    below = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [p for p in below if p.stat().st_size <= SMALL]  # what is a hole already is not for us to read
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
        data[at] = chance.choice((data[at] ^ (1 << chance.randrange(8)), 0, 255, chance.randrange(256)))
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


def event_file(path: Path, chance: random.Random) -> Path:
    """An event file with some points, whose lengths may be damaged and right by their checksums."""
    with path.open("wb") as file:
        for step in range(20):
            value = summary_pb2.Summary.Value(tag=f"t{step % 3}", simple_value=float(step))
            data = event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[value])).SerializeToString()
            length = (
                len(data) if chance.random() < 0.95 else chance.choice((0, 1 << 20, 1 << 40, (1 << 64) - 1))
            ).to_bytes(8, "little")
            checks = (masked_crc32c(length).to_bytes(4, "little"), masked_crc32c(data).to_bytes(4, "little"))
            file.write(length + checks[0] + data + checks[1])
    return path


def _child(kind: str, first: int, last: int, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        good = saved(Path(place)) if kind == "checkpoints" else Path(place)
        if kind == "checkpoints":
            graph = stack.enter_context(rt.Graph().as_default())
            sess = stack.enter_context(rt.Session("", graph))
            _variables()
            saver = harness.Saver()
            saver.restore(sess, str(good))
        before = _peak()
        for number in range(first, last):
            chance = random.Random(f"{kind}:{seed}:{number}")
            if kind == "checkpoints":
                hostile = Path(shutil.copytree(good, Path(place) / "hostile" / "1"))
                how = "; ".join(damage(hostile, chance) for _ in range(chance.choice((1, 1, 2))))
            else:
                hostile = Path(place) / "logs"
                hostile.mkdir()
                file = event_file(hostile / "events.out.tfevents.1.host", chance)
                how = damage(file, chance)
            print(f"at {number} {how}", flush=True)
            try:
                if kind == "checkpoints":
                    saver.restore(sess, str(hostile))
                else:
                    points_to_repeat(str(hostile), 15)
                    for path in hostile.iterdir():
                        if path.is_file():
                            list(read_events(str(path)))
                print("read", flush=True)
            except (rt.OpError, ValueError, OSError) as error:
                print(type(error).__name__, flush=True)
            taken = _peak() - before
            assert taken < MEMORY, f"it took {taken >> 20} MiB"
            shutil.rmtree(hostile)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _fuzz(kind: str, count: int, seed: int) -> str:
    command = [sys.executable, "-m", "tests.fuzz.files", kind, "0", str(count), str(seed)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECS + 5.0 * count, errors="replace"
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert done.returncode == 0, f"{lines[-1] if lines else 'nothing'} ended it: {done.stderr[-3000:]}"
    counts = Counter(line for line in lines if not line.startswith("at "))
    assert counts.total() == count
    return f"{count:,} {kind}: {dict(counts.most_common())}"


def fuzz_checkpoints(count: int, seed: int) -> str:
    """Restores from so many damaged directories."""
    return _fuzz("checkpoints", count, seed)


def fuzz_events(count: int, seed: int) -> str:
    """Reads so many damaged event files."""
    return _fuzz("events", count, seed)


if __name__ == "__main__":
    _child(sys.argv[1], *map(int, sys.argv[2:]))
