"""The probe and the steps of a GPU in one file: ``make bench-gpu`` writes benchmarks/results/gpu.json.

``python -m benchmarks.gpu --fake`` takes a CPU device for the GPU, and small models. It shows that
the benchmark runs, and writes no file.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

from absl import app, flags

from benchmarks.common import ROOT

RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
STEPS = ((8, 64, 0), (80, 64, 0), (12, 1448, 0), (12, 1448, 1), (6, 4096, 0), (6, 4096, 1))
"""Layers, width and prefetch: few and many small variables, 100 MB, 400 MB."""
FAKE_STEPS = ((2, 8, 0), (2, 8, 1))

_FAKE = flags.DEFINE_bool("fake", False, "Take a CPU device in place of a GPU, and small models.")


def run(*command: str) -> list[dict[str, Any]]:
    """Runs a program of the benchmark; returns its lines of JSON."""
    environment = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if _FAKE.value else {})}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line[line.find("{") :] for line in done.stdout.splitlines() if '{"' in line]
    return [json.loads(line) for line in lines]


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the result of a real GPU."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    probes = run("benchmarks.gpu.probe", *["--fake"] * _FAKE.value)
    if not _FAKE.value and probes[0]["platform"] == "cpu":
        sys.exit(
            "no GPU here: JAX computes on the CPU (docs/gpu.md); --fake shows that the benchmark runs"
        )
    steps = []
    for layers, width, prefetch in FAKE_STEPS if _FAKE.value else STEPS:
        options = (f"--layers={layers}", f"--width={width}", f"--prefetch={prefetch}")
        launcher = ("harness.launch", "--ps=2", "--workers=1", "--", sys.executable, "-m")
        steps += run(*launcher, "benchmarks.gpu.step", *options)
    for row in [*probes, *steps]:
        print(json.dumps(row))
    if not _FAKE.value:
        found = {"date": time.strftime("%Y-%m-%d"), "probes": probes, "steps": steps}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
