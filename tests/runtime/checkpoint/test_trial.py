"""The trial of arrays that others have written: its process can read them, and do nothing else."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest
import tensorstore as ts

from runtime.checkpoint import trial
from tests.kit.processes import ROOT
from tests.kit.waits import until
from tests.runtime.kit import in_thread

pytestmark = pytest.mark.cluster

VALUES = np.arange(50_000, dtype=np.float32)
READ = """
import json, sys
import numpy as np, tensorstore as ts
from runtime.checkpoint.trial_program import confine

specs = json.loads(sys.argv[1])
assert confine() == ""
for spec in specs:
    print(ts.open(spec, open=True, read=True).result().read().result().astype(np.float64).sum())
"""


def zarr(path: pathlib.Path, compressor: dict[str, Any] | None) -> dict[str, Any]:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    about = {"shape": [50_000], "chunks": [1000], "dtype": "<f4", "compressor": compressor}
    ts.open({**spec, "metadata": about}, create=True).result().write(VALUES).result()
    return spec


def ocdbt(path: pathlib.Path) -> dict[str, Any]:
    """As Orbax writes it: a store with a packed index, and packed chunks in it."""
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "path": "v"}
    grid = {"name": "regular", "configuration": {"chunk_shape": [1000]}}
    codecs = [{"name": "bytes"}, {"name": "zstd"}]
    about = {"shape": [50_000], "chunk_grid": grid, "data_type": "float32", "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": store}
    ts.open({**spec, "metadata": about}, create=True).result().write(VALUES).result()
    return spec


def test_in_the_sandbox_all_kinds_of_arrays_are_read(tmp_path: pathlib.Path) -> None:
    """A trial that could read nothing would refuse nothing, and nobody would see it."""
    packed: list[dict[str, Any] | None] = [
        None,
        {"id": "zlib", "level": 9},
        {"id": "zstd", "level": 3},
        {"id": "bz2", "level": 1},
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    ]
    specs = [zarr(tmp_path / f"z{n}", one) for n, one in enumerate(packed)] + [ocdbt(tmp_path / "o")]
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(specs)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert [float(line) for line in done.stdout.split()] == [VALUES.astype(np.float64).sum()] * len(specs), done.stderr
    trial.read_apart(specs, VALUES.nbytes, "there", values=True)


def test_all_threads_of_its_process_are_in_the_sandbox(tmp_path: pathlib.Path) -> None:
    """Seen while it waits: one chunk is a pipe that nobody writes."""
    spec = zarr(tmp_path / "v", None)
    (tmp_path / "v" / "7").unlink()
    os.mkfifo(tmp_path / "v" / "7")
    thread, heard = in_thread(lambda: trial.read_apart([spec], VALUES.nbytes, "there", values=True))

    def confined() -> bool:
        for child in psutil.Process().children():
            found = [path.read_text() for path in pathlib.Path(f"/proc/{child.pid}/task").glob("*/status")]
            if "trial_program.py" in " ".join(child.cmdline()) and found:
                return all("Seccomp:\t2\n" in one and "NoNewPrivs:\t1\n" in one for one in found)
        return False

    try:
        until(confined)
    finally:
        with open(tmp_path / "v" / "7", "wb"):  # it reads on
            thread.join(60)
    assert heard == [None]
