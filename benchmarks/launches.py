"""Two checkouts of this project beside each other: seconds from a launch, and from a kill, to a line of progress.

    git worktree add --detach ../before HEAD~10
    python -m benchmarks.launches ../before . [--rounds=5] [--workers=1]

Both launch the MNIST example in turns, so that a busy machine slows both alike: cold (nothing is
kept), warm (compiled programs are kept) and, in the warm launch, worker 0 is killed. A launch
counts until every worker has shown its progress, a restart from the death of the worker until the
worker's next progress, without the launcher's pause. Reading the data counts.
"""

import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import IO

import psutil
from absl import app, flags

from harness.launch.policy import LaunchOptions

KINDS = ("cold", "warm", "restart")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each checkout.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 1, "Workers.", lower_bound=1)
_NICE = flags.DEFINE_integer("nice", 0, "Niceness of the launches, beside other programs.")


def launch(checkout: pathlib.Path, directory: str, kind: str) -> dict[str, float]:
    """Launches the example once. Returns the seconds by kind; a warm launch has a restart too."""
    trainer = ["models.mnist.trainer", "--train_steps=1000000", "--log_every_steps=1"]
    options = ["--ps=1", f"--workers={_WORKERS.value}", "--", sys.executable, "-m", *trainer]
    began = time.monotonic()
    launcher = subprocess.Popen(
        ["nice", f"-n{_NICE.value}", sys.executable, "-m", "harness.launch", *options]
        + [f"--logdir={directory}/{kind}"],
        cwd=checkout,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": directory},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None
    try:
        training: set[str] = set()
        while len(training) < _WORKERS.value:
            training.add(_read_until(launcher.stdout, r"(worker/\d+) *\| .*step \d"))
        found = {kind: time.monotonic() - began}
        if kind == "warm":
            _find_worker(launcher.pid).kill()
            _read_until(launcher.stdout, r"launch *\| (worker/0) was killed by SIGKILL; restart")
            began = time.monotonic() + LaunchOptions.backoff_secs
            _read_until(launcher.stdout, r"(worker/0) *\| .*step \d")
            found["restart"] = time.monotonic() - began
        return found
    finally:
        launcher.terminate()
        launcher.communicate()


def _read_until(lines: IO[str], pattern: str) -> str:
    """Returns the first group of a pattern in the next line that begins with the pattern."""
    for line in lines:
        if found := re.match(pattern, line):
            return found[1]
    raise RuntimeError(f"the launcher ended before a line with {pattern}")


def _find_worker(launcher: int) -> psutil.Process:
    """Returns the process of worker 0, which is below its guard."""
    for process in psutil.Process(launcher).children(recursive=True):
        words = process.cmdline()
        if {"--job_name=worker", "--task_index=0"} <= {*words} and "guard.py" not in " ".join(
            words
        ):
            return process
    raise RuntimeError("worker 0 has no process")


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) != 3:
        raise app.UsageError("two checkouts are compared: BEFORE AFTER")
    before, after = (pathlib.Path(name).resolve() for name in argv[1:])
    found: dict[pathlib.Path, list[dict[str, float]]] = {before: [], after: []}
    for number in range(_ROUNDS.value):
        order = (before, after) if number % 2 == 0 else (after, before)
        with tempfile.TemporaryDirectory() as top:
            turns = {checkout: str(pathlib.Path(top, str(n))) for n, checkout in enumerate(order)}
            colds = {checkout: launch(checkout, turns[checkout], "cold") for checkout in order}
            for checkout in order:
                found[checkout].append(colds[checkout] | launch(checkout, turns[checkout], "warm"))
    for kind in KINDS:
        times = [[turn[kind] for turn in turns] for turns in found.values()]
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        medians = ", ".join(f"{statistics.median(t):.2f} s (least {min(t):.2f})" for t in times)
        print(f"{kind:8} {medians}: {ratio:.2f} x in the median turn")


if __name__ == "__main__":
    app.run(main)
