"""Global steps per second of synchronous training, ours beside TensorFlow's in one run.

    python -m benchmarks.sync --ps=1 --workers=2 --systems=ours,collective,tf --json

Every worker trains the same 784-H-10 sigmoid MLP on batches of 100 in float32 with SGD and fetches loss and global step
in every step; each global step applies the mean of one gradient of each worker. All processes are on this machine. The
systems are started together and take turns; the figure of a system is the median of its rounds.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

from benchmarks.common import PEERS_PYTHON, ROOT
from harness.launch.ports import free_ports

SYSTEMS = ("ours", "tcp", "collective", "tf")

_PS = flags.DEFINE_integer("ps", 1, "Parameter servers, for the systems that have any.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 100, "Width of the hidden layer, in units.", lower_bound=1)
_SYSTEMS = flags.DEFINE_list(
    "systems", ["ours", "collective"], "Of: ours (ps mode), tcp (ours without the Unix socket), collective, tf."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns that each system takes.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 600, "Length of a turn, in global steps.", lower_bound=1)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object, system -> global steps/s, instead of a table.")


class Running:
    """The processes of one system, warm and waiting for their turn."""

    def __init__(self, name: str, ps: int, workers: int, hidden: int) -> None:
        self.name = name
        self.rates: list[float] = []
        self._all: list[subprocess.Popen[str]] = []
        ports = [f"127.0.0.1:{p}" for p in free_ports(ps + workers)]
        cluster = json.dumps({"ps": ports[:ps], "worker": ports[ps:]})
        if name == "tf":
            program = [str(PEERS_PYTHON), str(ROOT / "benchmarks/systems/sync_tf.py")]
        else:
            program = [sys.executable, "-m", "benchmarks.systems.sync_ours"]
        mode = "collective" if name == "collective" else "ps"
        for i in range(0 if mode == "collective" else ps):
            self._start([*program, "ps", str(i), cluster, str(hidden), mode])
        self._workers = [self._start([*program, "worker", str(i), cluster, str(hidden), mode]) for i in range(workers)]

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if self.name == "tcp":
            environment["BELLWETHER_FAST_PATH"] = "0"
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._all.append(process)
        return process

    def wait_ready(self) -> None:
        """Waits until every worker is warm."""
        for worker in self._workers:
            assert worker.stdout is not None
            for line in worker.stdout:
                if line.strip() == "READY":
                    break
            else:
                raise RuntimeError(f"{self.name}: a worker ended before it was ready (BENCH_STDERR=1 shows why)")

    def turn(self, steps: int) -> None:
        """Lets the workers do some global steps together and notes their rate as the first worker saw it."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{steps}\n")
            worker.stdin.flush()
        answers = []
        for worker in self._workers:
            assert worker.stdout is not None
            line = next((text for text in worker.stdout if text.startswith("{")), None)
            if line is None:
                raise RuntimeError(f"{self.name}: a worker ended in its turn (BENCH_STDERR=1 shows why)")
            answers.append(json.loads(line))
        self.rates.append(answers[0]["steps"] / answers[0]["seconds"])

    def stop(self) -> None:
        """Ends all processes."""
        for process in self._all:
            process.send_signal(signal.SIGKILL)
        for process in self._all:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def measure(systems: Sequence[str], ps: int, workers: int, hidden: int, rounds: int, steps: int) -> dict[str, float]:
    """Global steps/s of each system: the median of its turns."""
    for name in systems:
        if name not in SYSTEMS:
            raise SystemExit(f"--systems: there is no {name!r}; there are {', '.join(SYSTEMS)}")
        if name == "tf" and not PEERS_PYTHON.exists():
            raise SystemExit("--systems: 'tf' needs the peers' environment: make bench-setup")
    running: list[Running] = []
    try:
        for name in systems:
            running.append(Running(name, ps, workers, hidden))
            running[-1].wait_ready()
        for _ in range(rounds):
            for system in running:
                system.turn(steps)
    finally:
        for system in running:
            system.stop()
    return {system.name: statistics.median(system.rates) for system in running}


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    rates = measure(_SYSTEMS.value, _PS.value, _WORKERS.value, _HIDDEN.value, _ROUNDS.value, _STEPS.value)
    if _JSON.value:
        print(json.dumps({name: round(rate, 1) for name, rate in rates.items()}))
        return
    print(f"{_PS.value} ps, {_WORKERS.value} workers, hidden {_HIDDEN.value}")
    for name, rate in rates.items():
        print(f"  {name:10} {rate:9.0f} global steps/s")


if __name__ == "__main__":
    app.run(main)
