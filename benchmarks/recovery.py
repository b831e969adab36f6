"""How fast what dies is noticed and made good: one row for each fault that docs/guarantees.md speaks of.

    python -m benchmarks.recovery [--json] [--rounds=3] [--system=NAME] [--only=FAULT] [--skip_tensorflow] [--save]

Two ps and two workers train MNIST with a checkpoint every second or two. Each round starts a cluster of its own and
does one thing to it. Columns, seconds, medians over the rounds:

    detect   from the fault until a worker (for a dead worker: nobody) says that the task is lost or silent
    listen   from the fault until the restarted process serves; what Python, JAX and the restart itself take
    resume   from then (or from the end of a freeze or cut) until the first step that is done afterwards
    lost     global steps that were done before the fault and not kept

The rows of TensorFlow are its MonitoredTrainingSession with the same number of tasks and the same checkpoints, where
.venv-bench has it. --save puts the measured rows into benchmarks/results/recovery.json, in the place of the same rows
measured before, so that the table can be measured in parts.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos_ledger import Entry
from benchmarks.common import PEERS_PYTHON, ROOT
from harness.command_line import Parser
from harness.monitoring.rates import table
from harness.testing import PRELOAD, LocalCluster

RESULTS = ROOT / "benchmarks" / "results"
START_SECS = 180.0
SAVE_SECS = 2.0
DOWN_SECS = 1.0
"""How long a killed task stays away."""
SILENT_SECS = 4.0
"""How long a freeze or a cut lasts."""
WARM_STEPS = 600


@dataclass(frozen=True)
class Result:
    """What one fault cost; seconds and steps, None where there is no such thing."""

    detect: float | None
    listen: float | None
    resume: float | None
    lost: int | None


@dataclass(frozen=True)
class System:
    """One of the systems that are measured."""

    name: str
    command: Callable[[Path], list[str]]
    preload: tuple[str, ...]
    notices: str
    """What a worker logs when it notices."""
    links: bool
    faults: str = ""
    """Only faults whose name contains this."""


OURS = System(
    "bellwether",
    lambda directory: [
        *("python", "-m", "benchmarks.chaos_task"),
        *(f"--chaos_dir={directory}", f"--save_secs={SAVE_SECS:g}"),
    ],
    PRELOAD,
    r"recovering:|No answer from",
    True,
)
MIRRORED, MIRRORED_SYNC = (
    System(
        f"bellwether, {name}",
        lambda directory, lag=lag: [*OURS.command(directory), f"--ps_backups_lag={lag}"],  # type: ignore[misc]
        PRELOAD,
        r"recovering:|No answer from|goes on from its backup",
        True,
        "global step",
    )
    for name, lag in (("--ps_backups=1", 100), ("--ps_backups_sync", 0))
)
TENSORFLOW = System(
    "tensorflow MonitoredTrainingSession",
    lambda directory: [
        *(str(PEERS_PYTHON), str(ROOT / "benchmarks/systems/tensorflow_recovery.py")),
        *(f"--directory={directory}", f"--save_secs={SAVE_SECS:g}"),
    ],
    (),
    r"preemption or error|An error was raised",
    False,
)
FAULTS = {
    "a worker is killed": ("kill", ["worker:1"]),
    "the chief is killed": ("kill", ["worker:0"]),
    "a ps is killed (without the global step)": ("kill", ["ps:1"]),
    "the ps with the global step is killed": ("kill", ["ps:0"]),
    "a ps and the chief are killed": ("kill", ["ps:1", "worker:0"]),
    "all tasks are killed": ("kill", ["ps:0", "ps:1", "worker:0", "worker:1"]),
    "a ps is frozen for 4 s": ("freeze", ["ps:1"]),
    "worker 1 is cut off from a ps for 4 s": ("cut", ["worker:1", "ps:1"]),
}


def main() -> int:
    """Measures; prints a table, or JSON."""
    parser = Parser("benchmarks.recovery", __doc__ or "")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each fault (3)")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--system", default="", help="only systems whose name contains this")
    parser.add_argument("--skip_tensorflow", action="store_true", help="measure ours alone")
    parser.add_argument("--save", action="store_true", help="put the rows into benchmarks/results/recovery.json")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    systems = [OURS, MIRRORED, MIRRORED_SYNC]
    if not options.skip_tensorflow and _has_tensorflow():
        systems.append(TENSORFLOW)
    rows = []
    for system in (s for s in systems if options.system in s.name):
        for name, (what, tasks) in FAULTS.items():
            if options.only not in name or system.faults not in name or (what == "cut" and not system.links):
                continue
            found: list[Result] = []
            problems: list[str] = []
            for _ in range(options.rounds):
                try:
                    found.append(_measure(system, what, tasks))
                except (TimeoutError, RuntimeError) as error:
                    problems.append(str(error).splitlines()[0])
            rows.append(_row(system.name, name, found, problems))
            print(f"{rows[-1]}", file=sys.stderr, flush=True)
            if options.save:
                _save(rows[-1])
    if options.json:
        print(json.dumps(rows))
        return 0
    heading = ["SYSTEM", "FAULT", "DETECT", "LISTEN", "RESUME", "LOST", "ROUNDS", "PROBLEMS"]
    keys = ["system", "fault", "detect_secs", "listen_secs", "resume_secs", "steps_lost", "rounds", "problems"]
    print(table([heading, *[["" if r[key] is None else str(r[key]) for key in keys] for r in rows]]))
    return 0


def _save(row: dict[str, object]) -> None:
    """Puts one row into the results, at once: a measurement takes minutes, and what was found survives its end."""
    path = RESULTS / "recovery.json"
    RESULTS.mkdir(exist_ok=True)
    kept = {_key(old): old for old in json.loads(path.read_text())["rows"]} if path.exists() else {}
    kept[_key(row)] = row
    order = [(s.name, fault) for s in (OURS, MIRRORED, MIRRORED_SYNC, TENSORFLOW) for fault in FAULTS]
    rows = [kept[key] for key in order if key in kept]
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def _key(row: dict[str, object]) -> tuple[object, object]:
    return row["system"], row["fault"]


def _measure(system: System, what: str, tasks: Sequence[str]) -> Result:
    with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
        directory = Path(temporary)
        links = what == "cut"
        with LocalCluster(system.command(directory), ps=2, workers=2, links=links, preload=system.preload) as c:
            _until(lambda: max(_steps(directory), default=(0, 0))[0] >= WARM_STEPS, START_SECS, "the first steps")
            saved = time.monotonic()
            _until(lambda: time.monotonic() >= saved + 2 * SAVE_SECS, START_SECS, "a checkpoint")
            return _hit(c, system, directory, what, tasks)


def _hit(c: LocalCluster, system: System, directory: Path, what: str, tasks: Sequence[str]) -> Result:
    fault = time.monotonic()
    dead = set(tasks) if what == "kill" else set()
    for task in tasks if what != "cut" else ():
        (c.kill if what == "kill" else c.freeze)(task)
    if what == "cut":
        c.cut(*tasks)
    last = max((step for step, at in _steps(directory) if at <= fault), default=0)
    down = DOWN_SECS if what == "kill" else SILENT_SECS
    _until(lambda: time.monotonic() >= fault + down, 60, "the fault's end")
    healed = time.monotonic()
    for task in tasks if what != "cut" else ():
        (c.start if what == "kill" else c.thaw)(task)
    if what == "cut":
        c.heal(*tasks)
    listen = None
    back = healed
    if dead:
        serving = [task for task in dead if task.startswith("ps")] or list(dead)
        _until(lambda: all(_listening(c, task) for task in serving), START_SECS, "the restarted task")
        listen = time.monotonic() - fault
        back = time.monotonic()
    whose = {1: {"worker:1"}, 0: {"worker:0"}}.get(int(tasks[0][-1]), set()) if dead and _workers(tasks) else set()
    if what == "cut":
        whose = {tasks[0]}
    # A worker that was killed has its first step when its own file has one; for a ps, all workers must go on.
    who = whose or {"worker:0", "worker:1"}
    _until(lambda: all(_first(directory, task, back) is not None for task in who), START_SECS, "a step afterwards")
    firsts = [first for task in who if (first := _first(directory, task, back)) is not None]
    resume = max(at for _, at in firsts) - back
    lost = max(0, last + 1 - min(step for step, _ in firsts)) if not _workers(tasks) or len(tasks) > 1 else 0
    if _workers(tasks) and len(tasks) == 1:  # were the others rolled back?
        others = [step for step, at in _steps(directory) if at > back]
        lost = max(0, last + 1 - min(others, default=last + 1))
    noticed = [
        line.at - fault
        for task in ("worker:0", "worker:1")
        for line in c.lines(task, system.notices)
        if line.at >= fault and task not in dead
    ]
    return Result(min(noticed, default=None), listen, resume, lost)


def _workers(tasks: Sequence[str]) -> bool:
    return all(task.startswith("worker") for task in tasks)


def _until(done: Callable[[], bool], secs: float, what: str) -> None:
    deadline = time.monotonic() + secs
    while not done():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not come within {secs:g} s")
        time.sleep(0.01)  # another process's file: nobody tells


def _listening(c: LocalCluster, task: str) -> bool:
    import socket

    host, _, port = c.addresses[task].rpartition(":")
    try:
        socket.create_connection((host, int(port)), 0.5).close()
    except OSError:
        return False
    return True


def _entries(directory: Path, task: str) -> list[tuple[int, float]]:
    found = []
    for path in directory.glob(f"{task.replace(':', '-')}-*.ledger"):
        entries = map(Entry.parse, path.read_text(errors="replace").splitlines())
        found += [(e.step, e.at) for e in entries if e is not None and e.what == "done"]
    return found


def _steps(directory: Path) -> list[tuple[int, float]]:
    return _entries(directory, "worker:0") + _entries(directory, "worker:1")


def _first(directory: Path, task: str, after: float) -> tuple[int, float] | None:
    return min(((s, at) for s, at in _entries(directory, task) if at > after), key=lambda item: item[1], default=None)


def _row(system: str, fault: str, found: Sequence[Result], problems: Sequence[str]) -> dict[str, object]:
    def middle(name: str) -> float | None:
        values = [v for r in found if (v := getattr(r, name)) is not None]
        return round(statistics.median(values), 2) if values else None

    return {
        "system": system,
        "fault": fault,
        "measured": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "detect_secs": middle("detect"),
        "listen_secs": middle("listen"),
        "resume_secs": middle("resume"),
        "steps_lost": middle("lost"),
        "rounds": len(found),
        "problems": "; ".join(sorted(set(problems))),
    }


def _has_tensorflow() -> bool:
    if not PEERS_PYTHON.exists():
        return False
    return subprocess.run([PEERS_PYTHON, "-c", "import tensorflow"], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
