"""How long anybody waits when workers come and go: ``python -m benchmarks.elastic [--ps=1] [--rounds=3]``.

A run of light steps grows from 2 workers to 4, one of which is killed by ``kill -9`` and two are told to leave, so that
the chief is alone: asynchronous and synchronous. Printed is the longest time between two steps of the workers that
stay, in each part of that story, in seconds.
"""

import json
import signal
import statistics
import sys
import threading
import time
from typing import Any

from absl import app, flags

from benchmarks.systems.elastic_worker import Run

FLAGS = flags.FLAGS
PARTS = ("two workers", "two more join", "four workers", "one is killed", "two leave", "alone")


def longest_gaps(ps: int, sync: bool, secs: float) -> dict[str, float]:
    """The longest time between two steps in each part of one round, over the workers that are there in all of it."""
    with Run(ps, sync) as run:
        marks: list[float] = []

        def part(workers: list[Any], seconds: float) -> None:
            for worker in workers:
                worker.goes_on()
            marks.append(time.monotonic())
            threading.Event().wait(seconds)

        stay = [run.worker(0), run.worker(1)]
        part(stay, secs)
        marks.append(time.monotonic())
        come = [run.worker(2), run.worker(3)]
        part([*stay, *come], secs)
        marks.append(time.monotonic())
        come[1].signal(signal.SIGKILL)
        threading.Event().wait(secs)
        marks.append(time.monotonic())
        for worker in (stay[1], come[0]):
            worker.signal(signal.SIGTERM)
        for worker in (stay[1], come[0]):
            worker.wait()
        part(stay[:1], secs)
        marks.append(time.monotonic())
        gaps = {}
        for name, start, end in zip(PARTS, marks, marks[1:], strict=False):
            there = stay if marks.index(end) < 5 else stay[:1]
            gaps[name] = max(worker.longest_gap(start, end) for worker in there)
        return gaps


def main(argv: list[str]) -> None:
    """Prints a table, or JSON."""
    found: dict[str, dict[str, float]] = {}
    for sync in (False, True):
        rounds = [longest_gaps(FLAGS.ps, sync, FLAGS.secs) for _ in range(FLAGS.rounds)]
        parts = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        found["sync" if sync else "async"] = parts | {"worst": max(max(r.values()) for r in rounds)}
    if FLAGS.json:
        json.dump(found, sys.stdout)
        return
    print(f"{'longest time between two steps, s':36}{'async':>8}{'sync':>8}")
    for name in found["async"]:
        print(f"{name:36}{found['async'][name]:8.3f}{found['sync'][name]:8.3f}")


if __name__ == "__main__":
    flags.DEFINE_integer("ps", 1, "ps tasks", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "rounds; parts are medians of them", lower_bound=1)
    flags.DEFINE_float("secs", 4.0, "seconds of each part", lower_bound=0.5)
    flags.DEFINE_bool("json", False, "print JSON")
    app.run(main)
