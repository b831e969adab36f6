"""Rows that one ps serves in a second, ours beside TensorFlow's in one run.

    python -m benchmarks.tables --systems=ours,tf --json

A table of 1,000,000 x 32 in float32, one worker, 100,000 ids a step by Zipf's law with exponent
1.2. A pull brings a row for each id to the worker; a push takes a gradient for each id and updates
the rows, by row-wise Adagrad here and by Adagrad in TensorFlow. The systems take turns; a figure is
the median of its turns. Rows count as often as their ids come; unique rows travel.
"""

import json
import statistics
import sys

import numpy as np
from absl import app, flags

from benchmarks.common import PEERS_PYTHON, ROOT
from benchmarks.step_rate import Running, System
from benchmarks.systems.protocol import DIM, IDS, id_batches

FLAGS = flags.FLAGS
PROGRAMS = {
    "ours": (sys.executable, "-m", "benchmarks.systems.ours_tables"),
    "tf": (str(PEERS_PYTHON), str(ROOT / "benchmarks/systems/tensorflow_tables.py")),
}


def measure(systems: list[str], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """The rows per second of each system, pulled and pushed, and the processor time of both processes a step."""
    running: dict[tuple[str, str], Running] = {}
    try:
        for name in systems:
            for kind in ("pull", "push"):
                system = System(PROGRAMS[name], options=json.dumps({"kind": kind}))
                running[name, kind] = Running(name, system, 1, 1, DIM, "cpu")
                running[name, kind].wait_ready()
        for _ in range(rounds):
            for turn in running.values():
                turn.turn(seconds)
    finally:
        for turn in running.values():
            turn.stop()
    found: dict[str, dict[str, float]] = {name: {} for name in systems}
    for (name, kind), turn in running.items():
        found[name][kind] = statistics.median(turn.rates) * IDS
        # Depends less on what else the machine does.
        found[name][f"{kind}_cpu_us"] = statistics.median(turn.cpu_us)
    return found


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1 or not set(FLAGS.systems) <= PROGRAMS.keys():
        raise app.UsageError(f"--systems takes {', '.join(PROGRAMS)}, and there are no arguments")
    if "tf" in FLAGS.systems and not PEERS_PYTHON.exists():
        raise SystemExit("--systems: 'tf' needs the peers' environment: make bench-setup")
    found = measure(FLAGS.systems, FLAGS.rounds, FLAGS.seconds)
    unique = int(np.mean([len(np.unique(ids)) for ids, _ in id_batches()]))
    if FLAGS.json:
        print(json.dumps({"unique_rows": unique, **found}))
        return
    print(f"{IDS:,} ids a step, {unique:,} unique")
    for name, figures in found.items():
        for kind in ("pull", "push"):
            rate, cpu = figures[kind] / 1e6, figures[f"{kind}_cpu_us"]
            print(f"  {name:5} {kind} {rate:6.2f} M rows/s, {cpu:7.0f} us of processor time a step")


if __name__ == "__main__":
    flags.DEFINE_list("systems", ["ours"], "Of: ours, tf.")
    flags.DEFINE_integer("rounds", 3, "Turns that each system takes.", lower_bound=1)
    flags.DEFINE_float("seconds", 3.0, "Length of a turn, in seconds.", lower_bound=0.1)
    flags.DEFINE_bool("json", False, "Print one JSON object of rows per second instead.")
    app.run(main)
