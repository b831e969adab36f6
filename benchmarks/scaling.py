"""How many ps a job needs, and the effect of fewer or more.

    python -m benchmarks.scaling --model_mb=400 --workers=64 --step_ms=120 --network_gbit=25

Puts what a ps and a worker pay for each call and each byte (`benchmarks.scaling_model.MEASURED`)
into the model of a cluster whose processes have hosts of their own.
"""

from __future__ import annotations

from dataclasses import replace

from absl import app, flags

from benchmarks.scaling_model import (
    MEASURED,
    NETWORK_EFFICIENCY,
    Costs,
    Forecast,
    Job,
    forecast,
    ps_needed,
)

_MODEL_MB = flags.DEFINE_float(
    "model_mb", 100.0, "Size of the variables, in 10^6 bytes.", lower_bound=0.0
)
_WORKERS = flags.DEFINE_integer("workers", 16, "Workers.", lower_bound=1)
_STEP_MS = flags.DEFINE_float(
    "step_ms", 100.0, "A worker's computation in a step, in ms.", lower_bound=0.0
)
_NETWORK = flags.DEFINE_float(
    "network_gbit", 10.0, "Every host's network, in Gbit/s.", lower_bound=0.001
)
_PS_CORES = flags.DEFINE_integer(
    "ps_cores", 1, "Cores that a ps uses for different workers.", lower_bound=1
)
_EFFICIENCY = flags.DEFINE_float(
    "efficiency", 0.9, "Part of its time that a worker must not wait for others.", 0.01, 0.999
)


def plan(job: Job, costs: Costs, efficiency: float) -> str:
    """Returns the answer, in words and a table."""
    asked = (
        f"{job.model_bytes / 1e6:g} MB, {job.workers} workers, {job.compute_secs * 1e3:g} ms of "
        "computation,"
        f" {_NETWORK.value:g} Gbit/s"
    )
    needed = ps_needed(job, costs, efficiency)
    alone = forecast(replace(job, workers=1), needed.ps if needed else 1, costs)
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
    """Returns a forecast in words."""
    return (
        f"{f.steps_per_s:.1f} steps/s, {f.efficiency:.0%} of what the workers could do; each ps "
        "sends"
        f" {f.bytes_per_s / 1e6:.0f} MB/s and receives as much; busiest: {f.bottleneck},"
        f" {f.utilisation[f.bottleneck]:.0%}"
    )


def main(argv: list[str]) -> None:
    """Prints how many ps the job of the flags needs."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    network = _NETWORK.value * 1e9 / 8 * NETWORK_EFFICIENCY
    job = Job(
        _MODEL_MB.value * 1e6,
        _WORKERS.value,
        _STEP_MS.value / 1e3,
        network,
        ps_cores=_PS_CORES.value,
    )
    print(plan(job, MEASURED, _EFFICIENCY.value))


if __name__ == "__main__":
    app.run(main)
