"""Start-up of the MNIST example: seconds from the launch to the first training step, and where they go.

    python -m benchmarks.startup        # prints a table, writes benchmarks/results/startup.json

Starts clusters with `harness.launch`: cold (a fresh log directory), warm (a fresh one that holds
the compiled programs of the cold run) and as a restart (the log directory of the cold run: compiled
programs and a checkpoint). A launch ends when the slowest worker has done its first step; of
several launches the one with the median time is told. Its budget is that of the slowest worker:
what its main thread does, part by part, from the launcher's first instruction on; what no part
names is "the rest". Loading the data is told apart and not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.common import ROOT
from benchmarks.startup_task import DIRECTORY_VARIABLE, FIRST_STEP

RESULTS = ROOT / "benchmarks" / "results" / "startup.json"
MODES = ("cold", "warm", "restart")
BARS = {"cold": 8.0, "warm": 4.0, "restart": 4.0}
"""Seconds within which the first step must be done, data apart."""
LIMIT_SECS = 60.0
STEPS = 1_000_000
"""More than are ever done: the same in all launches, for the learning rate is compiled in."""
PARTS = {
    "launcher": "launcher: interpreter, imports, start of the process",
    "interpreter": "interpreter of the task",
    "imports": "imports",
    "devices": "devices found (XLA's client)",
    "server": "server: ports, gRPC, tensor channel",
    "graph": "graph, initial values",
    "supervisor": "supervisor, events file",
    "open session": "session",
    "cluster ready": "meeting the other tasks",
    "plan": "plan: prune, place, trace, cut",
    "export": "plan: programs made",
    "register on the ps": "stages registered and compiled on the ps",
    "compile": "stages compiled on the worker",
    "run": "steps run: initial values, first step",
    "sessions, waiting for values": "calls of sessions",
}

_RUNS = flags.DEFINE_integer("runs", 3, "Launches of each kind.", lower_bound=1)
_WORKERS = flags.DEFINE_list("workers", ["1", "2"], "Numbers of workers.")
_WRITE = flags.DEFINE_bool("write", True, "Write the results.")


@dataclass(frozen=True)
class Start:
    """One launch.

    Attributes:
        workers: how many.
        mode: one of `MODES`.
        total_ms: from the launch to the end of the slowest worker's first step, without `data_ms`.
        data_ms: loading the data, on that worker.
        budget_ms: by part, where the total went; ends with "the rest".
        ps_ms: from the launch to the ps's serving, and its parts.
        compiled: on all tasks: programs taken from the cache and programs compiled.
    """

    workers: int
    mode: str
    total_ms: float
    data_ms: float
    budget_ms: Mapping[str, float]
    ps_ms: Mapping[str, float]
    compiled: Mapping[str, int]


def start(workers: int, mode: str, logdir: str, cache: str) -> Start:
    """Launches 1 ps and some workers for two steps each.

    Raises:
        RuntimeError: a task failed or did not come to its first step.
    """
    with tempfile.TemporaryDirectory() as told:
        command = [
            sys.executable,
            "-m",
            "harness.launch",
            "--ps=1",
            f"--workers={workers}",
            "--max_restarts=0",
            "--",
        ]
        command += [
            sys.executable,
            "-m",
            "benchmarks.startup_task",
            f"--train_steps={STEPS}",
            f"--logdir={logdir}",
        ]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": cache,
            DIRECTORY_VARIABLE: told,
        }
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        _until_all_train(command, environment, workers)
        found = {path.stem: json.loads(path.read_text()) for path in Path(told).iterdir()}
    missing = {"ps-0", *(f"worker-{i}" for i in range(workers))} - set(found)
    if missing:
        raise RuntimeError(f"{', '.join(sorted(missing))}: no first step")
    slowest = max((v for k, v in found.items() if k != "ps-0"), key=lambda v: float(v["end"]))
    data_ms = 1e3 * slowest["parts"].pop("data", 0.0)
    total_ms = 1e3 * (slowest["end"] - began) - data_ms
    compiled = {
        what: sum(task["compiled"].get(event, 0) for task in found.values())
        for what, event in (("taken", "cache_hits"), ("compiled", "cache_misses"))
    }
    ps = budget(found["ps-0"], began, 1e3 * (found["ps-0"]["end"] - began))
    return Start(workers, mode, total_ms, data_ms, budget(slowest, began, total_ms), ps, compiled)


def _until_all_train(command: list[str], environment: dict[str, str], workers: int) -> None:
    """Runs the launcher until every worker has reported its first step. Stops it then."""
    launcher = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None
    too_late = threading.Timer(LIMIT_SECS, launcher.terminate)
    too_late.start()
    said, training = [], 0
    for line in launcher.stdout:
        said.append(line)
        training += FIRST_STEP in line
        if training == workers:
            launcher.terminate()
            break
    said += launcher.stdout
    launcher.wait()
    too_late.cancel()
    if training < workers:
        raise RuntimeError(
            f"{training} of {workers} workers came to a first step: {''.join(said)[-4000:]}"
        )


def budget(task: Mapping[str, Any], began: float, total_ms: float) -> dict[str, float]:
    """Returns the parts of a task's time in ms, which add up to ``total_ms``."""
    found = {
        "launcher": 1e3 * (task["started"] - began),
        "interpreter": 1e3 * (task["first_line"] - task["started"]),
        **{name: 1e3 * secs for name, secs in task["parts"].items() if ":" not in name},
    }
    found["the rest"] = total_ms - sum(found.values())
    return found


def launches(workers: int, runs: int) -> list[Start]:
    """Returns the median launch of each kind."""
    found: dict[str, list[Start]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as top:
        for run in range(runs):
            cold, warm, cache = (
                os.path.join(top, f"{run}-{name}") for name in ("cold", "warm", "cache")
            )
            found["cold"].append(start(workers, "cold", cold, cache))
            found["warm"].append(start(workers, "warm", warm, cache))
            found["restart"].append(start(workers, "restart", cold, cache))
            for directory in (cold, warm, cache):
                shutil.rmtree(directory)
    return [
        sorted(of_mode, key=lambda s: s.total_ms)[len(of_mode) // 2] for of_mode in found.values()
    ]


def table(starts: list[Start]) -> str:
    """Returns the budgets side by side, in Markdown."""
    lines = [
        f"| ms | {' | '.join(f'1 ps, {s.workers} workers, {s.mode}' for s in starts)} |",
        "|---|" + "---:|" * len(starts),
    ]
    names = [name for name in [*PARTS, "the rest"] if any(name in s.budget_ms for s in starts)]
    names[-1:-1] = sorted({name for s in starts for name in s.budget_ms} - set(names))
    for name in names:
        cells = " | ".join(f"{s.budget_ms.get(name, 0.0):.0f}" for s in starts)
        lines.append(f"| {PARTS.get(name, name)} | {cells} |")
    lines.append(
        f"| **launch to first step** | {' | '.join(f'**{s.total_ms:.0f}**' for s in starts)} |"
    )
    lines.append(f"| data, not counted | {' | '.join(f'{s.data_ms:.0f}' for s in starts)} |")
    lines.append(
        f"| programs compiled | {' | '.join(str(s.compiled['compiled']) for s in starts)} |"
    )
    lines.append(
        f"| programs taken from the cache | {' | '.join(str(s.compiled['taken']) for s in starts)} "
        "|"
    )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measures, prints, writes."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    starts = [s for workers in _WORKERS.value for s in launches(int(workers), _RUNS.value)]
    print(table(starts))
    late = [s for s in starts if s.total_ms > 1e3 * BARS[s.mode]]
    for s in late:
        print(
            f"LATE: {s.workers} workers, {s.mode}: {s.total_ms / 1e3:.1f} s, the bar is "
            f"{BARS[s.mode]:g} s"
        )
    if _WRITE.value:
        rounded = [
            replace(
                s,
                total_ms=round(s.total_ms),
                data_ms=round(s.data_ms),
                budget_ms={k: round(v) for k, v in s.budget_ms.items()},
                ps_ms={k: round(v) for k, v in s.ps_ms.items()},
            )
            for s in starts
        ]
        document = {"date": time.strftime("%Y-%m-%d"), "cores": len(os.sched_getaffinity(0))}
        RESULTS.write_text(
            json.dumps({**document, "starts": [asdict(s) for s in rounded]}, indent=1) + "\n"
        )
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    app.run(main)
