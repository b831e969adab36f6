"""The whole table of `make bench`: steps per second beside the peers, the bars, a file and a plot.

    python -m benchmarks.table --systems=ours,pipelined,tcp,plain,tf,torch

Every row runs all systems in turns (`benchmarks.step_rate`), so only the ratios within a row mean
something. Written to `benchmarks/results/step_rate.json` and `.png`.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from absl import app, flags

from benchmarks import step_rate
from benchmarks.common import PEERS_PYTHON, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PEERS = ("tf", "torch")

_SYSTEMS = flags.DEFINE_list(
    "systems",
    ["ours", "pipelined", "tcp", "plain", "tf", "torch"],
    "What to measure; `plain` is for one worker only.",
)
_ROWS = flags.DEFINE_list(
    "rows", [], "Rows to measure, as ps-workers-hidden such as 1-2-100; all by default."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns that each system takes in a row.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 3.0, "Length of a turn, in seconds.", lower_bound=0.1)
_WRITE = flags.DEFINE_bool("write", True, "Write the results and the plot.")


@dataclass(frozen=True)
class Row:
    """One row: a cluster and a model, and by system and peer how many times the peer's rate is asked for.

    The peer ``best`` is the faster of the peers.
    """

    ps: int
    workers: int
    hidden: int
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As `--rows` takes it."""
        return f"{self.ps}-{self.workers}-{self.hidden}"


ROWS = (
    Row(1, 1, 100, {"ours": {"tf": 2.8, "torch": 1.5}, "pipelined": {"tf": 4.0}}),
    Row(1, 2, 100, {"ours": {"tf": 3.0, "torch": 1.7}, "pipelined": {"tf": 3.5}}),
    Row(2, 2, 100, {"ours": {"tf": 3.5, "torch": 2.0}, "pipelined": {"tf": 4.0}}),
    Row(1, 4, 100, {"ours": {"tf": 2.6, "torch": 1.4}}),
    Row(1, 1, 4096, {"ours": {"best": 1.6}, "pipelined": {"best": 2.2}}),
    Row(1, 2, 4096, {"ours": {"best": 1.2}, "pipelined": {"best": 1.4}}),
)


@dataclass(frozen=True)
class Verdict:
    """A bar and what was measured."""

    system: str
    peer: str
    bar: float
    ratio: float

    def __str__(self) -> str:
        """Such as `ours 3.1x tf (2.8 ok)`."""
        word = "ok" if self.ratio >= self.bar else "MISSED"
        return f"{self.system} {self.ratio:.2f}x {self.peer} ({self.bar:g} {word})"


def verdicts(row: Row, rates: Mapping[str, float]) -> list[Verdict]:
    """The bars of a row whose systems were measured."""
    found = []
    known = dict(rates)
    if peers := [rates[p] for p in PEERS if p in rates]:
        known["best"] = max(peers)
    for system, bars in row.bars.items():
        for peer, bar in bars.items():
            if system in known and peer in known:
                found.append(Verdict(system, peer, bar, known[system] / known[peer]))
    return found


def versions() -> dict[str, str]:
    """Of everything that was measured."""
    found = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "optax", "grpcio")}
    found["python"] = platform.python_version()
    if PEERS_PYTHON.exists():
        code = (
            "import importlib.metadata as m; print(m.version('tensorflow-cpu'), m.version('torch'))"
        )
        answer = subprocess.run(
            [str(PEERS_PYTHON), "-c", code], capture_output=True, text=True, check=True
        )
        found["tensorflow-cpu"], found["torch"] = answer.stdout.split()
    return found


def machine() -> dict[str, Any]:
    """What it was measured on."""
    with open("/proc/cpuinfo") as lines:
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            "unknown",
        )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 1),
    }


def line(row: Row, systems: Sequence[str], figures: Mapping[str, step_rate.Figures]) -> str:
    """A row of the printed table."""
    rates = [f"{figures[s].steps_per_s:.0f}" if s in figures else "" for s in systems]
    judged = "; ".join(
        map(str, verdicts(row, {name: f.steps_per_s for name, f in figures.items()}))
    )
    return f"| {row.ps} | {row.workers} | {row.hidden} | {' | '.join(rates)} | {judged} |"


def main(argv: list[str]) -> None:
    """Measures, prints and writes."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    if unknown := set(_ROWS.value) - {row.name for row in ROWS}:
        raise app.UsageError(
            f"--rows: there is no {sorted(unknown)}; there are {', '.join(r.name for r in ROWS)}"
        )
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "rows": [],
    }
    systems = _SYSTEMS.value
    print(
        f"| ps | workers | hidden | {' | '.join(systems)} | bars |\n|{'---|' * (len(systems) + 4)}",
        flush=True,
    )
    for row in ROWS:
        if _ROWS.value and row.name not in _ROWS.value:
            continue
        chosen = [s for s in systems if s != "plain" or row.workers == 1]
        figures = step_rate.measure(
            chosen, row.ps, row.workers, row.hidden, _ROUNDS.value, _SECONDS.value
        )
        print(line(row, systems, figures), flush=True)
        rates = {name: f.steps_per_s for name, f in figures.items()}
        document["rows"].append(
            {
                "ps": row.ps,
                "workers": row.workers,
                "hidden": row.hidden,
                "systems": {name: asdict(f) for name, f in figures.items()},
                "bars": [asdict(v) for v in verdicts(row, rates)],
            }
        )
    if _WRITE.value:
        _write(document)


def _write(document: dict[str, Any]) -> None:
    path = RESULTS / "step_rate.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    python = str(PEERS_PYTHON) if PEERS_PYTHON.exists() else sys.executable
    plot = subprocess.run(
        [python, str(ROOT / "benchmarks" / "plot.py"), str(path), str(path.with_suffix(".png"))],
        capture_output=True,
        text=True,
    )
    print(
        f"wrote {path}"
        + (" and its plot" if plot.returncode == 0 else f"; no plot: {plot.stderr.strip()[-200:]}")
    )


if __name__ == "__main__":
    app.run(main)
