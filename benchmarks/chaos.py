"""Chaos: MNIST under random kills, freezes and cuts of every role, and whether everything adds up at the end.

    python -m benchmarks.chaos --secs=300 --faults=100

Two ps and three workers, whose worker 0 is the chief. After the last fault training goes on for
--tail_steps. It adds up when the accuracy is that of an undisturbed run, every step is kept or told
to be lost, every process ends with code 0, and nothing is left. The last line is the verdict; the
exit code is 0 only if it is good. A run is repeated with its seed: the same faults at the same
times, though not the same moments of the program.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import harness
from benchmarks import chaos_ledger
from harness.command_line import ToolParser
from tests.faults import PRELOAD, FaultPlan, Injected, Kind, LocalCluster, no_leaks

ACCURACY = 0.97
ENOUGH_STEPS = 9000
"""After so many steps an undisturbed run has that accuracy for sure."""
SAVE_SECS = 5.0
END_SECS = 240.0
START_SECS = 180.0


def main() -> int:
    """Runs the chaos. Returns the exit code."""
    options = _parser().parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    faults = options.faults if options.faults is not None else max(1, round(options.secs / 3))
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    try:
        with no_leaks(secs=10):
            problems, summary = _chaos(options, faults, directory)
    except (AssertionError, TimeoutError, RuntimeError) as error:
        problems, summary = [str(error)], "stopped"
    took = time.monotonic() - began
    if problems:
        print(f"chaos: what the tasks wrote is in {directory}", flush=True)
        for problem in problems:
            print(f"chaos: {problem}", flush=True)
        print(
            f"FAILED after {took:.0f} s, {len(problems)} things do not add up: "
            f"{problems[0].splitlines()[0]}",
            flush=True,
        )
        return 1
    if not options.keep:
        shutil.rmtree(directory)
    print(f"OK after {took:.0f} s: {summary}", flush=True)
    return 0


def _chaos(options: argparse.Namespace, faults: int, directory: Path) -> tuple[list[str], str]:
    logs = {}

    def write(task: str, line: str) -> None:
        if task not in logs:
            logs[task] = open(directory / f"{task.replace(':', '-')}.log", "w", buffering=1)  # noqa: SIM115 - closed below
        logs[task].write(f"{time.monotonic():.3f} {line}\n")

    command = [
        "python",
        "-m",
        "benchmarks.chaos_task",
        f"--chaos_dir={directory}",
        f"--save_secs={SAVE_SECS:g}",
    ]
    problems: list[str] = []
    try:
        with LocalCluster(
            command, ps=options.ps, workers=options.workers, links=True, preload=PRELOAD, echo=write
        ) as c:
            plan = FaultPlan.random(c.tasks, faults, options.secs, seed=options.seed)
            c.wait_step(100, START_SECS)
            ended_by_themselves: list[str] = []
            injected = _run(c, plan, ended_by_themselves)
            problems += ended_by_themselves
            missed = sum(bool(item.skipped) for item in injected)
            if missed:
                problems.append(f"{missed} of {faults} faults could not be injected")
            end = max(ENOUGH_STEPS, (c.step() or 0) + options.tail_steps)
            (directory / "end_step.tmp").write_text(str(end))
            os.replace(directory / "end_step.tmp", directory / "end_step")
            for task in [t for t in c.tasks if t.startswith("worker")]:
                if code := c.wait(task, END_SECS):
                    problems.append(f"{task} ended with code {code}")
            for task in [t for t in c.tasks if t.startswith("ps")]:
                c.stop(task)
                if code := c.wait(task, END_SECS):
                    problems.append(f"{task} ended with code {code}")
            accuracy = _accuracy(c)
    finally:
        for file in logs.values():
            file.close()
    final_step, counts = _final(directory / "run")
    books = chaos_ledger.add_up(_ledgers(directory), final_step)
    problems += books.wrong
    torn = max(abs(count - final_step) for count in counts)
    if torn > books.unknown:
        problems.append(
            f"updates of a variable and global step differ by {torn}, with {books.unknown} unknown "
            "ends"
        )
    if accuracy < ACCURACY:
        problems.append(f"accuracy {accuracy:.4f} is below {ACCURACY}")
    if final_step < end:
        problems.append(
            f"the last checkpoint is of step {final_step}, training was to end at {end}"
        )
    return (
        problems,
        f"{_counted(injected)}; {books}; {books.recoveries} recoveries; accuracy {accuracy:.4f}",
    )


def _run(c: LocalCluster, plan: FaultPlan, problems: list[str]) -> list[Injected]:
    """Injects the plan. A task that has ended by itself is a problem, and stays away."""
    killed: Counter[str] = Counter()

    def say(text: str) -> None:
        print(text, flush=True)

    injected = c.run(plan, say=say)
    for item in injected:
        if item.fault.kind is Kind.KILL and not item.skipped:
            killed[item.fault.task] += 1
    for task in c.tasks:
        ended = [life for life in c.lives(task) if life.code is not None]
        if len(ended) > killed[task]:
            codes = ", ".join(str(life.code) for life in ended)
            problems.append(
                f"{task} ended {len(ended)} times, and was killed {killed[task]} times (codes "
                f"{codes})"
            )
            if not c.running(task):
                c.start(task)
    return injected


def _accuracy(c: LocalCluster) -> float:
    found = [re.search(r"Test-Accuracy: ([\d.]+)", line.text) for line in c.lines("worker:0")]
    return max((float(match[1]) for match in found if match), default=0.0)


def _final(logdir: Path) -> tuple[int, list[int]]:
    """Returns the global step of the last checkpoint, and the updates of each of its variables."""
    path = harness.latest_checkpoint(str(logdir))
    if path is None:
        raise RuntimeError("there is no checkpoint at the end")
    reader = harness.load_checkpoint(path)
    names = [name for name in reader.get_variable_to_shape_map() if name.endswith("/adam/count")]
    return int(reader.get_tensor("global_step")), [
        int(np.asarray(reader.get_tensor(name))) for name in names
    ]


def _ledgers(directory: Path) -> list[list[chaos_ledger.Entry]]:
    found = []
    for path in sorted(directory.glob("*.ledger")):
        entries = map(chaos_ledger.Entry.parse, path.read_text(errors="replace").splitlines())
        found.append([entry for entry in entries if entry is not None])
    return found


def _counted(injected: list[Injected]) -> str:
    kinds: Counter[str] = Counter()
    for item in injected:
        role = "chief" if item.fault.task == "worker:0" else item.fault.task.partition(":")[0]
        kinds[f"{item.fault.kind.value} {role}"] += not item.skipped
    return (
        f"{kinds.total()} faults ({', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))})"
    )


def _parser() -> ToolParser:
    parser = ToolParser("benchmarks.chaos", __doc__ or "")
    secs = float(os.environ.get("CHAOS_SECS", "300"))
    parser.add_argument(
        "--secs",
        type=float,
        default=secs,
        help="how long faults come, seconds ($CHAOS_SECS, or 300)",
    )
    parser.add_argument(
        "--faults", type=int, default=None, help="how many; one in three seconds by default"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the faults; a random one by default"
    )
    parser.add_argument("--ps", type=int, default=2, help="ps tasks (2)")
    parser.add_argument("--workers", type=int, default=3, help="workers (3)")
    parser.add_argument(
        "--tail_steps", type=int, default=2000, help="steps after the last fault (2000)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory of a good run too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
