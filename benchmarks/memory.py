"""What a ps needs in memory, measured beside the formula of docs/memory.md: real processes, a large model, a save.

    python -m benchmarks.memory --mb=1024 --optimizers=sgd,momentum      # writes benchmarks/results/memory.json

1 ps and 2 workers on this machine; each step trains every variable. The peaks are the kernel's own (VmHWM), reset
before each phase: once the variables are there, while both workers train, and while they train and a save is written.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.common import ROOT
from harness.launch.ports import free_ports

FLAGS = flags.FLAGS
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Arrays of an optimizer for each parameter."""


@dataclass(frozen=True)
class Needs:
    """The formula: bytes in the units of what is given (see docs/memory.md).

    Attributes:
        idle: variables and slots are there, nobody trains.
        training: the most while workers train.
        saving: the most while workers train and a save is written.
    """

    idle: float
    training: float
    saving: float


def needs(base: float, parameters: float, slots: float, workers: int) -> Needs:
    """What one ps needs.

    Args:
        base: the process: the same ps with variables of next to no size, trained and saved.
        parameters: trained variables on this ps.
        slots: those of the optimizer.
        workers: that pull and push all parameters in each step.
    """
    idle = base + parameters + slots
    training = idle + workers * parameters + parameters
    return Needs(idle, training, training + parameters + slots)


class Process:
    """One task of the cluster."""

    def __init__(self, job: str, index: int, cluster: str, options: str) -> None:
        self.job = job
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.systems.memory_ours", job, str(index), cluster, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self._at = Path(f"/proc/{self._process.pid}")

    def read(self) -> str:
        """The next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"a {self.job} has ended")
        return line

    def tell(self, command: str) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def reset_peak(self) -> None:
        """The peak counts from now on."""
        (self._at / "clear_refs").write_text("5")

    def _status(self, name: str) -> float:
        lines = (self._at / "status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def peak_mb(self) -> float:
        """The most that was resident since ``reset_peak``, MiB."""
        return self._status("VmHWM:")

    def resident_mb(self) -> float:
        """What is resident, MiB."""
        return self._status("VmRSS:")

    def stop(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def compare(optimizer: str, mb: int, array_mb: int, workers: int, secs: float) -> dict[str, Any]:
    """Formula and measurement for one optimizer, MiB."""
    arrays = mb // array_mb
    small = measure(optimizer, arrays, 1 << 10, workers, 3.0)
    found = measure(optimizer, arrays, array_mb << 20, workers, secs)
    base = max(small["measured"].values())
    formula = asdict(needs(base, mb, SLOTS[optimizer] * mb, workers))
    ratios = {name: found["measured"][name] / formula[name] for name in formula}
    about = {"optimizer": optimizer, "parameters_mb": mb, "array_mb": array_mb, "workers": workers, "base": base}
    return about | found | {"formula": formula, "ratio": ratios}


def measure(optimizer: str, arrays: int, array_bytes: int, workers: int, secs: float) -> dict[str, Any]:
    """What a ps needs at the most in each phase, MiB."""
    ports = free_ports(1 + workers)
    cluster = json.dumps({"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{p}" for p in ports[1:]]})
    options = json.dumps({"optimizer": optimizer, "arrays": arrays, "array_bytes": array_bytes})
    found: dict[str, Any] = {}
    started: list[Process] = []
    try:
        with tempfile.TemporaryDirectory() as directory:
            ps = Process("ps", 0, cluster, options)
            started.append(ps)
            trainers = [Process("worker", i, cluster, options) for i in range(workers)]
            started.extend(trainers)
            for worker in trainers:
                assert worker.read() == "READY"
            measured = {"idle": ps.resident_mb()}
            ps.reset_peak()
            for worker in trainers:
                worker.tell("go")
            time.sleep(secs)
            measured["training"] = ps.peak_mb()
            found["worker_training"] = max(worker.peak_mb() for worker in trainers)
            ps.reset_peak()
            trainers[0].tell(f"save {directory}/model")
            found |= json.loads(trainers[0].read())
            measured["saving"] = ps.peak_mb()
            ps.reset_peak()
            time.sleep(secs)
            found["training_after_save"] = ps.peak_mb()
            steps = 0
            for worker in trainers:
                worker.tell("stop")
                steps += json.loads(worker.read())["steps"]
    finally:
        for process in started:
            process.stop()
    return found | {"steps": steps, "measured": measured}


def main(argv: list[str]) -> None:
    """Measures, prints and writes."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    found = [compare(o, FLAGS.mb, FLAGS.array_mb, FLAGS.workers, FLAGS.seconds) for o in FLAGS.optimizers]
    for row in found:
        print(f"{row['optimizer']}, {row['parameters_mb']} MiB of parameters, {row['workers']} workers:")
        for name, formula in row["formula"].items():
            measured = row["measured"][name]
            print(f"  {name:10} {measured:7.0f} MiB, formula {formula:7.0f} MiB, ratio {measured / formula:.2f}")
        rest = {k: round(v, 1) for k, v in row.items() if isinstance(v, float)}
        print(f"  {rest}, {row['steps']} steps")
    if FLAGS.write:
        path = ROOT / "benchmarks" / "results" / "memory.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_integer("mb", 1024, "Size of the trained parameters in MiB.", lower_bound=8)
    flags.DEFINE_integer("array_mb", 8, "Size of each variable in MiB.", lower_bound=1)
    flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=1)
    flags.DEFINE_list("optimizers", ["sgd", "momentum"], f"Of: {', '.join(SLOTS)}.")
    flags.DEFINE_float("seconds", 15.0, "How long the workers train in each phase, in seconds.", lower_bound=1.0)
    flags.DEFINE_bool("write", True, "Write benchmarks/results/memory.json.")
    app.run(main)
