"""Milliseconds of single operations on a ps in another process: push + assign_add, pull + reduce.

    python -m benchmarks.operations --systems=ours,tcp,tf --json

The row `grpc` is an empty Python gRPC call to the same ps, in the same run.
"""

import json
import os
import signal
import subprocess
import sys

from absl import app, flags

from benchmarks.common import PEERS_PYTHON, ROOT
from harness.launch.ports import free_ports

FLAGS = flags.FLAGS

Figures = dict[str, dict[str, dict[str, float]]]


def measure(systems: list[str], sizes: list[int], seconds: float) -> Figures:
    """System -> size -> {push, pull, grpc} in milliseconds; the systems take turns, size by size."""
    commands = {
        "ours": [sys.executable, "-m", "benchmarks.systems.operations_ours"],
        "tcp": [sys.executable, "-m", "benchmarks.systems.operations_ours"],
        "tf": [str(PEERS_PYTHON), str(ROOT / "benchmarks/systems/operations_tf.py")],
    }
    processes: list[subprocess.Popen[str]] = []
    workers: dict[str, subprocess.Popen[str]] = {}
    found: Figures = {name: {} for name in systems}
    try:
        for name in systems:
            ports = free_ports(2)
            cluster = json.dumps({"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]})
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "BELLWETHER_FAST_PATH": "0" if name == "tcp" else "1"}
            for job in ("ps", "worker"):
                process = subprocess.Popen(
                    [*commands[name], job, cluster, json.dumps(sizes), str(seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
                    text=True,
                    cwd=ROOT,
                    env=environment,
                )
                processes.append(process)
            workers[name] = process
            assert process.stdout is not None
            if not any(line.strip() == "READY" for line in process.stdout):
                raise RuntimeError(f"{name}: the worker ended before it was ready (BENCH_STDERR=1 shows why)")
        for size in sizes:
            for name, worker in workers.items():
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(f"{size}\n")
                worker.stdin.flush()
                found[name][str(size)] = json.loads(worker.stdout.readline())
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()
    return found


def define_flags() -> None:
    """Defines what `main` reads; `benchmarks.table` has flags of its own."""
    flags.DEFINE_list("systems", ["ours", "tcp"], "Of: ours, tcp (ours without the Unix socket), tf.")
    flags.DEFINE_list("sizes", ["4", "318000", "4194304", "67108864"], "Bytes of the variable.")
    flags.DEFINE_float("seconds", 1.0, "Time for each figure, in seconds.", lower_bound=0.05)
    flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    found = measure(FLAGS.systems, [int(s) for s in FLAGS.sizes], FLAGS.seconds)
    if FLAGS.json:
        print(json.dumps(found))
        return
    for what in ("push", "pull", "grpc"):
        for size in FLAGS.sizes if what != "grpc" else FLAGS.sizes[:1]:
            row = "  ".join(
                f"{name} {figures[size][what]:8.3f} ms" for name, figures in found.items() if what in figures[size]
            )
            print(f"{what} {int(size):>9} bytes  {row}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
