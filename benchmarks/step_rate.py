"""Steps per second of asynchronous training, ours beside others in one run.

    python -m benchmarks.step_rate --ps=1 --workers=1 --hidden=100 --systems=ours,plain --json

`benchmarks.table` runs it for every row of the table of `make bench`.

Every system trains the same 784-H-10 sigmoid MLP on batches of 100 in float32 with SGD, fetching
loss and global step in every step, all processes on this machine. The systems are started together
and take turns, so that a machine whose speed drifts drifts for all of them; the figure of a system
is the median of its rounds. Beside it stands the processor time that all processes of the system
together take for a step: it depends less on what else the machine does.
"""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil
from absl import app, flags

from benchmarks.common import PEERS_PYTHON, ROOT
from tests.kit.ports import free_ports

FLAGS = flags.FLAGS


@dataclass(frozen=True)
class System:
    """The commands of a system's processes."""

    program: tuple[str, ...]
    distributed: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    options: str = "{}"
    checkout: pathlib.Path = ROOT


def _systems() -> dict[str, System]:
    ours = (sys.executable, "-m", "benchmarks.systems.ours")
    peers = str(PEERS_PYTHON)
    return {
        "ours": System(ours),
        "tcp": System(ours, environment=(("BELLWETHER_FAST_PATH", "0"),)),
        "backup": System(ours, environment=(("BENCH_BACKUPS", '{"ps_backups": 1}'),)),
        "backup-sync": System(
            ours, environment=(("BENCH_BACKUPS", '{"ps_backups": 1, "ps_backups_lag": 0}'),)
        ),
        "pipelined": System(ours, options='{"prefetch": 1}'),
        "pipelined2": System(ours, options='{"prefetch": 2}'),
        "bfloat16": System(ours, environment=(("BENCH_BFLOAT16", "1"),)),
        "pipelined-bfloat16": System(
            ours, environment=(("BENCH_BFLOAT16", "1"),), options='{"prefetch": 1}'
        ),
        "pipelined2-bfloat16": System(
            ours, environment=(("BENCH_BFLOAT16", "1"),), options='{"prefetch": 2}'
        ),
        "plain": System((sys.executable, "-m", "benchmarks.systems.plain"), distributed=False),
        "tf": System((peers, str(ROOT / "benchmarks/systems/tensorflow1.py"))),
        "torch": System((peers, str(ROOT / "benchmarks/systems/torch_rpc.py"))),
    }


@dataclass(frozen=True)
class Figures:
    """Medians over the turns of one system.

    Attributes:
        steps_per_s: of all workers together.
        cpu_us: processor time of all processes per step, microseconds.
    """

    steps_per_s: float
    cpu_us: float


class Running:
    """The processes of one system, warm and waiting for their turn."""

    def __init__(
        self,
        name: str,
        system: System,
        ps: int,
        workers: int,
        hidden: int,
        platform: str,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        far: tuple[str, ...] = (),
    ) -> None:
        """Starts the processes; ``far`` is the command that puts a worker on its host, the second of ``hosts``."""
        self.name = name
        self._platform = platform
        self.rates: list[float] = []
        self.cpu_us: list[float] = []
        self._all: list[subprocess.Popen[str]] = []
        if system.distributed:
            ports = free_ports(ps + workers)
            cluster = json.dumps(
                {
                    "ps": [f"{hosts[0]}:{p}" for p in ports[:ps]],
                    "worker": [f"{hosts[1]}:{p}" for p in ports[ps:]],
                }
            )
            tail = (cluster, str(hidden), system.options)
            for i in range(ps):
                self._start(system, ("ps", str(i), *tail))
            self._workers = [
                self._start(system, ("worker", str(i), *tail), far) for i in range(workers)
            ]
        else:
            self._workers = [self._start(system, (str(hidden),))]

    def _start(
        self, system: System, arguments: Sequence[str], far: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*far, *system.program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
            text=True,
            cwd=system.checkout,
            env={
                **os.environ,
                "PYTHONPATH": str(system.checkout),
                "JAX_PLATFORMS": self._platform,
                # the workers share what accelerators there are
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                **dict(system.environment),
            },
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
                raise RuntimeError(
                    f"{self.name}: a worker ended before it was ready (BENCH_STDERR=1 shows why)"
                )

    def turn(self, seconds: float) -> None:
        """Trains on all workers for some seconds. Records their steps/s together."""
        before = self._cpu_secs()
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{seconds}\n")
            worker.stdin.flush()
        rate, steps = 0.0, 0
        for worker in self._workers:
            assert worker.stdout is not None
            answer = json.loads(worker.stdout.readline())
            rate += answer["steps"] / answer["seconds"]
            steps += answer["steps"]
        self.rates.append(rate)
        self.cpu_us.append((self._cpu_secs() - before) / steps * 1e6)

    def _cpu_secs(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in self._all]
        return sum(t.user + t.system for t in times)

    def stop(self) -> None:
        """Ends all processes."""
        for process in self._all:
            process.send_signal(signal.SIGKILL)
        for process in self._all:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def measure(
    systems: Sequence[str],
    ps: int,
    workers: int,
    hidden: int,
    rounds: int,
    seconds: float,
    platform: str = "cpu",
) -> dict[str, Figures]:
    """The figures of each system; ``platform`` is JAX's, of the processes that compute."""
    known = _systems()
    for name in systems:
        if name not in known:
            raise SystemExit(f"--systems: there is no {name!r}; there are {', '.join(known)}")
        if name in ("tf", "torch") and not PEERS_PYTHON.exists():
            raise SystemExit(f"--systems: {name!r} needs the peers' environment: make bench-setup")
    running: list[Running] = []
    try:
        for name in systems:
            running.append(Running(name, known[name], ps, workers, hidden, platform))
            running[-1].wait_ready()
        for _ in range(rounds):
            for system in running:
                system.turn(seconds)
    finally:
        for system in running:
            system.stop()
    return {
        s.name: Figures(statistics.median(s.rates), statistics.median(s.cpu_us)) for s in running
    }


def define_flags() -> None:
    """Defines what `main` reads; `benchmarks.table` has flags of its own."""
    flags.DEFINE_integer("ps", 1, "Parameter servers.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Workers.", lower_bound=1)
    flags.DEFINE_integer("hidden", 100, "Width of the hidden layer, in units.", lower_bound=1)
    flags.DEFINE_list(
        "systems",
        ["ours", "plain"],
        "Of: ours, tcp (ours without the Unix socket), backup and backup-sync (ours with "
        "--ps_backups), pipelined, "
        "plain, tf, torch.",
    )
    flags.DEFINE_integer("rounds", 3, "Turns that each system takes.", lower_bound=1)
    flags.DEFINE_float("seconds", 3.0, "Length of a turn, in seconds.", lower_bound=0.1)
    flags.DEFINE_string(
        "platform",
        "cpu",
        "Where workers and plain JAX compute, as JAX_PLATFORMS: such as cuda,cpu.",
    )
    flags.DEFINE_bool(
        "json", False, "Print one JSON object, system -> steps/s and CPU us, instead of a table."
    )


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    found = measure(
        FLAGS.systems,
        FLAGS.ps,
        FLAGS.workers,
        FLAGS.hidden,
        FLAGS.rounds,
        FLAGS.seconds,
        FLAGS.platform,
    )
    if FLAGS.json:
        print(json.dumps({name: asdict(figures) for name, figures in found.items()}))
        return
    print(f"{FLAGS.ps} ps, {FLAGS.workers} workers, hidden {FLAGS.hidden}")
    for name, figures in found.items():
        print(
            f"  {name:10} {figures.steps_per_s:9.0f} steps/s {figures.cpu_us:9.0f} us of processor "
            "time a step"
        )


if __name__ == "__main__":
    define_flags()
    app.run(main)
