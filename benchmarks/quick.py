"""Whether a step has become slower: ours against plain JAX only, in under a minute.

    python -m benchmarks.quick [--keep]

Compares with `benchmarks/results/quick.json`, which `--keep` writes. Two ratios to plain JAX are
kept, because they go wrong in different ways on a busy machine: of the rates, and of the processor
time of a step. Ends with 1 when both are worse than the kept ones by more than a fifth.
"""

import json
import sys
import time

from absl import app, flags

from benchmarks import step_rate
from benchmarks.common import ROOT

KEPT = ROOT / "benchmarks" / "results" / "quick.json"
WORSE = 1.2
SYSTEMS = ("ours", "pipelined")

_KEEP = flags.DEFINE_bool(
    "keep", False, "Write what was measured as what the next reader compares with."
)

Ratios = dict[str, dict[str, float]]


def ratios(figures: dict[str, step_rate.Figures]) -> Ratios:
    """Returns by system the rate and the processor time, as multiples of plain JAX's."""
    plain = figures["plain"]
    return {
        name: {
            "rate": round(figures[name].steps_per_s / plain.steps_per_s, 3),
            "cpu": round(figures[name].cpu_us / plain.cpu_us, 3),
        }
        for name in SYSTEMS
    }


def slower(now: Ratios, kept: Ratios) -> list[str]:
    """Returns the systems whose ratios are both worse than the kept ratios by more than a fifth."""
    return [
        name
        for name in SYSTEMS
        if name in kept
        and now[name]["rate"] * WORSE < kept[name]["rate"]
        and now[name]["cpu"] > kept[name]["cpu"] * WORSE
    ]


def main(argv: list[str]) -> None:
    """Measures, prints, compares."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    figures = step_rate.measure([*SYSTEMS, "plain"], 1, 1, 100, rounds=5, seconds=1.5)
    now = ratios(figures)
    kept: Ratios = json.loads(KEPT.read_text())["ratios"] if KEPT.exists() else {}
    print(
        f"plain JAX: {figures['plain'].steps_per_s:.0f} steps/s, {figures['plain'].cpu_us:.0f} us "
        "of processor time"
    )
    for name in SYSTEMS:
        before = kept.get(name)
        beside = f"  (kept: {before['rate']:.2f} and {before['cpu']:.2f})" if before else ""
        print(
            f"{name:10} {now[name]['rate']:.2f} of its rate, {now[name]['cpu']:.2f} of its "
            f"processor time{beside}"
        )
    if _KEEP.value:
        KEPT.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "ratios": now}, indent=1) + "\n"
        )
        return
    if worse := slower(now, kept):
        print(f"SLOWER than {KEPT.relative_to(ROOT)}: {', '.join(worse)}")
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
