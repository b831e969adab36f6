"""Cost at scale: measured on this machine as far as it goes, and a model for beyond it.

    python -m benchmarks.scaling                       # measures, fits, writes benchmarks/results/scaling.json and .png
    python -m benchmarks.scaling --refit               # fits what was measured before
    python -m benchmarks.scaling --plan --model_mb=400 --workers=64 --step_ms=120 --network_gbit=25

The measured clusters share this machine's cores, so the limit is processor time: `benchmarks.scaling_model` gets the
processor time of a step as measured (of one ps and one worker, and what each further one adds) and says the
steps/s of every point. A second measurement, over TCP and with models of other sizes, gives what a ps and a worker pay
for each call and each byte; `--plan` puts that into the model of a cluster whose processes have hosts of their own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil
from absl import app, flags
from numpy.typing import NDArray
from scipy.optimize import nnls

import runtime as rt
from benchmarks import step_rate
from benchmarks.common import PEERS_PYTHON, ROOT
from benchmarks.scaling_model import NETWORK_EFFICIENCY, Costs, Forecast, Job, SharedHost, forecast, ps_needed
from benchmarks.systems.protocol import CLASSES, INPUTS

RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
PICTURE = ROOT / "docs" / "images" / "scaling.png"
SHAPES = {1: (1, 2, 4, 8, 16), 2: (1, 2, 4, 8), 4: (1, 2, 4, 8), 8: (1, 2, 4, 8)}
"""By number of ps, how many workers are measured."""
VARIABLES = 5
"""Of the measured model: two weights, two biases and the count of steps, dealt out to the ps."""
SIZES = (100, 1024, 4096)
"""Widths of the models whose calls and bytes are priced."""

_PLAN = flags.DEFINE_bool("plan", False, "Say how many ps a job needs instead of measuring.")
_MODEL_MB = flags.DEFINE_float("model_mb", 100.0, "--plan: size of the variables, in 10^6 bytes.", lower_bound=0.0)
_WORKERS = flags.DEFINE_integer("workers", 16, "--plan: workers.", lower_bound=1)
_STEP_MS = flags.DEFINE_float("step_ms", 100.0, "--plan: a worker's computation in a step, in ms.", lower_bound=0.0)
_NETWORK = flags.DEFINE_float("network_gbit", 10.0, "--plan: every host's network, in Gbit/s.", lower_bound=0.001)
_PS_CORES = flags.DEFINE_integer("ps_cores", 1, "--plan: cores that a ps uses for different workers.", lower_bound=1)
_EFFICIENCY = flags.DEFINE_float(
    "efficiency", 0.9, "--plan: part of its time that a worker must not wait for others.", 0.01, 0.999
)
_REFIT = flags.DEFINE_bool("refit", False, "Measure nothing: fit and draw what the results file holds.")
_HIDDEN = flags.DEFINE_integer("hidden", 100, "Width of the model of the clusters, in units.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each cluster.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 1.5, "Length of a turn, in seconds.", lower_bound=0.1)


@dataclass(frozen=True)
class Point:
    """What one cluster did: medians of its turns.

    Attributes:
        ps: parameter servers.
        workers: workers.
        hidden: width of the model.
        steps_per_s: of all workers together.
        ps_cpu_us: processor time of all ps together for a step.
        worker_cpu_us: processor time of the worker for a step.
        ps_bytes: bytes that a ps moved for a step, both ways; the mean over the ps.
        busy_cores: of the machine, by these processes.
        other_cores: of the machine, by all other processes.
    """

    ps: int
    workers: int
    hidden: int
    steps_per_s: float
    ps_cpu_us: float
    worker_cpu_us: float
    ps_bytes: float
    busy_cores: float
    other_cores: float

    @property
    def cpu_us(self) -> float:
        """Processor time of all processes for a step."""
        return self.ps_cpu_us + self.worker_cpu_us


class Cluster(step_rate.Running):
    """A cluster of `benchmarks.systems.ours`, of whose workers some train and the others wait."""

    def __init__(self, ps: int, workers: int, hidden: int, tcp: bool = False) -> None:
        self.ps, self.workers, self.hidden = ps, workers, hidden
        self._addresses: list[str] = []
        self._turns: dict[int, list[Point]] = {}
        program = (sys.executable, "-m", "benchmarks.systems.ours")
        system = step_rate.System(program, environment=(("BELLWETHER_FAST_PATH", "0"),) if tcp else ())
        super().__init__(f"{ps}x{workers}", system, ps, workers, hidden, "cpu")
        self._everybody = self._workers

    def _start(self, system: step_rate.System, arguments: Sequence[str]) -> subprocess.Popen[str]:
        self._addresses = json.loads(arguments[2])["ps"]
        return super()._start(system, arguments)

    def let_train(self, workers: int, seconds: float) -> None:
        """Lets the first ``workers`` workers train and notes what everybody did."""
        self._workers = self._everybody[:workers]
        moved, cpu, everything = self._moved(), self._cpu_by_job(), _machine_busy_secs()
        began = time.monotonic()
        self.turn(seconds)
        took = time.monotonic() - began
        ps_cpu, worker_cpu = (after - before for after, before in zip(self._cpu_by_job(), cpu, strict=True))
        busy = _machine_busy_secs() - everything
        steps = (ps_cpu + worker_cpu) / (self.cpu_us[-1] * 1e-6)
        self._turns.setdefault(workers, []).append(
            Point(
                self.ps,
                workers,
                self.hidden,
                self.rates[-1],
                ps_cpu / steps * 1e6,
                worker_cpu / steps * 1e6,
                (self._moved() - moved) / self.ps / steps,
                (ps_cpu + worker_cpu) / took,
                max(0.0, busy - ps_cpu - worker_cpu) / took,
            )
        )

    def points(self) -> list[Point]:
        """For each number of workers, the medians of its turns."""
        found = []
        for turns in ([asdict(turn) for turn in of_workers] for of_workers in self._turns.values()):
            middle = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
            shape = {name: turns[0][name] for name in ("ps", "workers", "hidden")}  # the median of two 4 is 4.0
            found.append(Point(**middle | shape))
        return found

    def _cpu_by_job(self) -> tuple[float, float]:
        times = [psutil.Process(process.pid).cpu_times() for process in self._all]
        secs = [t.user + t.system for t in times]
        return sum(secs[: self.ps]), sum(secs[self.ps :])

    def _moved(self) -> float:
        """Bytes on the tensor channels of all ps since they started."""
        reports = [rt.probe(address) for address in self._addresses]
        return sum(r.values["bytes_received_total"] + r.values["bytes_sent_total"] for r in reports)


def _machine_busy_secs() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def measure(shapes: Mapping[int, Sequence[int]], hidden: int, tcp: bool = False) -> list[Point]:
    """The points: by number of ps, numbers of workers. All take turns, so that a machine that drifts drifts for all."""
    clusters: list[Cluster] = []
    try:
        for ps, workers in shapes.items():
            clusters.append(Cluster(ps, max(workers), hidden, tcp))
        for cluster in clusters:
            cluster.wait_ready()
        for _ in range(_ROUNDS.value):
            for cluster in clusters:
                for training in shapes[cluster.ps]:
                    cluster.let_train(training, _SECONDS.value)
    finally:
        for cluster in clusters:
            cluster.stop()
    points = [point for cluster in clusters for point in cluster.points()]
    print("\n".join(map(line, points)), flush=True)
    return points


def line(p: Point) -> str:
    """A point in words."""
    return (
        f"{p.ps} ps {p.workers:2} workers, hidden {p.hidden}: {p.steps_per_s:7.0f} steps/s, {p.ps_cpu_us:6.0f} us of"
        f" processor on the ps and {p.worker_cpu_us:6.0f} on the worker, {p.ps_bytes / 1e3:7.0f} KB for a ps,"
        f" {p.busy_cores:.2f} cores busy, {p.other_cores:.2f} by others"
    )


def price(hidden: int) -> dict[str, Any]:
    """One worker and one ps over TCP, and plain JAX beside them: what the calls and the bytes of a model cost."""
    point = measure({1: (1,)}, hidden, tcp=True)[0]
    plain = step_rate.measure(["plain"], 1, 1, hidden, _ROUNDS.value, _SECONDS.value)["plain"]
    return {**asdict(point), "plain_cpu_us": plain.cpu_us}


def model_bytes(hidden: int) -> int:
    """Of the 784-H-10 MLP's variables."""
    return 4 * (INPUTS * hidden + hidden + hidden * CLASSES + CLASSES)


def measured() -> dict[str, Any]:
    """Everything that is measured, as it goes into the results file."""
    cores = len(os.sched_getaffinity(0))
    os.environ["PJRT_NPROC"] = "1"  # a worker has one XLA thread however many train beside it
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "cores": cores, "hidden": _HIDDEN.value}
    document["prices"] = [price(hidden) for hidden in SIZES]
    document["points"] = [asdict(point) for point in measure(SHAPES, _HIDDEN.value)]
    return document


def priced(prices: Sequence[Mapping[str, Any]]) -> Costs:
    """What a call and a byte cost: lines through the processor times of models of several sizes."""
    sizes = np.array([model_bytes(p["hidden"]) for p in prices])
    ps = np.array([p["ps_cpu_us"] for p in prices]) * 1e-6
    # Plain JAX does what a worker's program does; the rest of the worker's time is the runtime's.
    worker = np.array([max(p["worker_cpu_us"] - p["plain_cpu_us"], 1.0) for p in prices]) * 1e-6
    ps_step, ps_byte = _relative_fit(np.stack([np.ones(len(sizes)), sizes], axis=1), ps)
    worker_step, worker_byte = _relative_fit(np.stack([np.ones(len(sizes)), sizes], axis=1), worker)
    return Costs(ps_step, ps_byte, worker_step, worker_byte)


def _relative_fit(features: NDArray[Any], wanted: NDArray[Any]) -> list[float]:
    """Least squares of the relative errors; no weight is below 0."""
    solution, _ = nnls(features / wanted[:, None], np.ones(len(wanted)))
    return [float(weight) for weight in solution]


def fitted(points: Sequence[Point]) -> SharedHost:
    """The model of this machine, from processor times alone: it has not seen the rates that it has to say."""
    blank = SharedHost(0.0, 0.0, 0.0, 1.0, 1.0, VARIABLES)
    features = np.array([[1.0, blank.further_ps(p.ps), p.workers - 1] for p in points])
    step, more_ps, more_workers = _relative_fit(features, np.array([p.cpu_us * 1e-6 for p in points]))
    lone = statistics.median(p.busy_cores for p in points if p.workers == 1)
    fullest = max(p.workers for p in points)
    most = statistics.median(p.busy_cores for p in points if 2 * p.workers >= fullest)
    return replace(
        blank,
        step_cpu_secs=step,
        more_ps_cpu_secs=more_ps,
        more_worker_cpu_secs=more_workers,
        lone_cores=lone,
        most_cores=max(lone, most),
    )


def plan(job: Job, costs: Costs, efficiency: float) -> str:
    """The answer of ``--plan``, in words and a table."""
    asked = (
        f"{job.model_bytes / 1e6:g} MB, {job.workers} workers, {job.compute_secs * 1e3:g} ms of computation,"
        f" {_NETWORK.value:g} Gbit/s"
    )
    needed = ps_needed(job, costs, efficiency)
    alone = forecast(Job(**{**asdict(job), "workers": 1}), needed.ps if needed else 1, costs)
    if needed is None:
        answer = f"no number of ps is enough for {asked}: the calls of a step alone keep a ps busy"
        counts = [1, 4, 16, 64, 256]
    else:
        answer = f"{needed.ps} ps for {asked}: {told(needed)}"
        counts = sorted({max(1, needed.ps // 4), max(1, needed.ps // 2), needed.ps, 2 * needed.ps})
    lines = [
        answer,
        f"a step of one worker alone takes {1e3 / alone.steps_per_s:.1f} ms",
        *(f"  {ps:4} ps: {told(forecast(job, ps, costs))}" for ps in counts),
    ]
    return "\n".join(lines)


def told(f: Forecast) -> str:
    """A forecast in words."""
    return (
        f"{f.steps_per_s:.1f} steps/s, {f.efficiency:.0%} of what the workers could do; each ps sends"
        f" {f.bytes_per_s / 1e6:.0f} MB/s and receives as much; busiest: {f.bottleneck},"
        f" {f.utilisation[f.bottleneck]:.0%}"
    )


def forecasts(costs: Costs) -> list[dict[str, Any]]:
    """What the model says of the example of docs/scaling.md: 100 MB, 50 ms of computation, 10 Gbit/s."""
    network = 10e9 / 8 * NETWORK_EFFICIENCY
    return [
        asdict(forecast(Job(100e6, workers, 0.05, network), ps, costs)) | {"workers": workers}
        for ps in (1, 2, 4, 8, 16)
        for workers in (1, 2, 4, 8, 16, 32, 64, 128)
    ]


def draw() -> None:
    """Draws the results file, where there is a matplotlib."""
    python = str(PEERS_PYTHON) if PEERS_PYTHON.exists() else sys.executable
    program = str(ROOT / "benchmarks" / "scaling_plot.py")
    plot = subprocess.run([python, program, str(RESULTS), str(PICTURE)], capture_output=True, text=True)
    print(
        f"wrote {RESULTS}" + (f" and {PICTURE}" if plot.returncode == 0 else f"; no plot: {plot.stderr.strip()[-200:]}")
    )


def main(argv: list[str]) -> None:
    """Measures and fits, or plans."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    if _PLAN.value:
        if not RESULTS.exists():
            raise SystemExit(f"{RESULTS.relative_to(ROOT)} is missing: measure first, without --plan")
        costs = Costs(**json.loads(RESULTS.read_text())["costs"])
        network = _NETWORK.value * 1e9 / 8 * NETWORK_EFFICIENCY
        job = Job(_MODEL_MB.value * 1e6, _WORKERS.value, _STEP_MS.value / 1e3, network, ps_cores=_PS_CORES.value)
        print(plan(job, costs, _EFFICIENCY.value))
        return
    document = json.loads(RESULTS.read_text()) if _REFIT.value else measured()
    points = [Point(**{k: v for k, v in p.items() if k in Point.__dataclass_fields__}) for p in document["points"]]
    host = fitted(points)
    document["model"] = asdict(host)
    document["costs"] = asdict(priced(document["prices"]))
    print(
        f"one step takes {host.step_cpu_secs * 1e6:.0f} us of processor time, {host.more_ps_cpu_secs * 1e6:.0f} more"
        f" for each further ps with a variable, {host.more_worker_cpu_secs * 1e6:.0f} more for each further"
        f" worker; a lone worker keeps"
        f" {host.lone_cores:.2f} cores busy, many {host.most_cores:.2f}"
    )
    print("| ps | workers | measured steps/s | model | error | processor us a step | model | KB for a ps in a step |")
    print("|---|" + "---:|" * 7)
    for raw, p in zip(document["points"], points, strict=True):
        says = host.steps_per_s(p.ps, p.workers)
        raw["model_steps_per_s"] = says
        raw["error"] = says / p.steps_per_s - 1
        print(
            f"| {p.ps} | {p.workers} | {p.steps_per_s:.0f} | {says:.0f} | {raw['error']:+.0%} | {p.cpu_us:.0f} |"
            f" {host.cpu_secs(p.ps, p.workers) * 1e6:.0f} | {p.ps_bytes / 1e3:.0f} |"
        )
    document["forecasts"] = forecasts(Costs(**document["costs"]))
    document["curves"] = [
        {"ps": ps, "workers": workers, "steps_per_s": host.steps_per_s(ps, workers)}
        for ps in SHAPES
        for workers in range(1, max(SHAPES[ps]) + 1)
    ]
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    draw()


if __name__ == "__main__":
    app.run(main)
