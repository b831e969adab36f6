"""What the options that trade freshness or precision for time give and take: steps/s beside the default, and accuracy.

    python -m benchmarks.options                          # both, writes benchmarks/results/options.json
    python -m benchmarks.options --parts=speed            # steps/s only; the other part keeps its last figures
    python -m benchmarks.options --parts=speed --hidden=4096

Speed: 1 ps and 2 workers on this machine, the 784-H-10 MLP of `benchmarks.step_rate`; default and options take turns in
one run. Accuracy: the MNIST example, 1 ps and 2 workers, the same number of epochs with each option, on the test set.
"""

import json
import re
import statistics
import subprocess
import sys
from typing import Any

from absl import app, flags

from benchmarks.common import ROOT
from benchmarks.step_rate import Running, System

FLAGS = flags.FLAGS

TRAINING: dict[str, dict[str, Any]] = {
    "off": {},
    "prefetch": {"prefetch": 1},
    "bfloat16_wire": {"bfloat16_wire": True},
    "accumulate=4": {"accumulate": 4},
}
TRAINER_FLAGS = {
    "off": (),
    "prefetch": ("--prefetch=1",),
    "bfloat16_wire": ("--bfloat16_wire",),
    "accumulate=4": ("--accumulate=4",),
}
BATCH = 100


def speed(hidden: int, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Aggregate steps/s and examples/s of each option, medians over the rounds, and their ratio to the default."""
    program = (sys.executable, "-m", "benchmarks.systems.options_ours")
    running: list[Running] = []
    try:
        for name, options in TRAINING.items():
            running.append(Running(name, System(program, options=json.dumps(options)), 1, 2, hidden, "cpu"))
        for system in running:
            system.wait_ready()
        for _ in range(rounds):
            for system in running:
                system.turn(seconds)
    finally:
        for system in running:
            system.stop()
    found = {}
    for system in running:
        rate = statistics.median(system.rates)
        examples = rate * BATCH * TRAINING[system.name].get("accumulate", 1)
        found[system.name] = {"steps_per_s": rate, "examples_per_s": examples}
    for figures in found.values():
        figures["speedup"] = figures["examples_per_s"] / found["off"]["examples_per_s"]
    return found


def accuracy(name: str, seed: int, epochs: float) -> float:
    """Test accuracy of the MNIST example with an option."""
    trainer = [
        sys.executable,
        "-m",
        "models.mnist.trainer",
        f"--epochs={epochs}",
        f"--seed={seed}",
        "--logdir=",
        "--save_summaries_secs=0",
        *TRAINER_FLAGS[name],
    ]
    command = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", "--", *trainer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    match = re.search(r"Test-Accuracy: ([0-9.]+)", done.stdout)
    if match is None:
        raise RuntimeError(f"training with {name} gave no accuracy: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(match[1])


def main(argv: list[str]) -> None:
    """Measures, prints and writes."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    path = ROOT / "benchmarks" / "results" / "options.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    if "speed" in FLAGS.parts:
        measured = {hidden: speed(int(hidden), FLAGS.rounds, FLAGS.seconds) for hidden in FLAGS.hidden}
        report["speed"] = {**report.get("speed", {}), **measured}
    if "accuracy" in FLAGS.parts:
        seeds = [int(seed) for seed in FLAGS.seeds]
        found = {name: [accuracy(name, seed, FLAGS.epochs) for seed in seeds] for name in TRAINER_FLAGS}
        report["accuracy"] = {"epochs": FLAGS.epochs, "seeds": seeds, "test_accuracy": found}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    for hidden, rows in report.get("speed", {}).items():
        print(f"1 ps, 2 workers, hidden {hidden}")
        for name, row in rows.items():
            print(
                f"  {name:28} {row['steps_per_s']:7.0f} steps/s {row['examples_per_s']:8.0f} examples/s "
                f"{row['speedup']:6.2f} x"
            )
    if "accuracy" in report:
        print(f"test accuracy after {report['accuracy']['epochs']:g} epochs, seeds {report['accuracy']['seeds']}")
        for name, values in report["accuracy"]["test_accuracy"].items():
            print(f"  {name:28} {'  '.join(f'{value:.4f}' for value in values)}")


if __name__ == "__main__":
    flags.DEFINE_list("parts", ["speed", "accuracy"], "Of: speed, accuracy.")
    flags.DEFINE_list("hidden", ["100", "4096"], "Widths of the model for the speed; others keep their last figures.")
    flags.DEFINE_integer("rounds", 3, "Turns that each option takes.", lower_bound=1)
    flags.DEFINE_float("seconds", 2.0, "Length of a turn, in seconds.", lower_bound=0.1)
    flags.DEFINE_float("epochs", 4.0, "Passes over the training data for the accuracy.", lower_bound=0.1)
    flags.DEFINE_list("seeds", ["1", "2"], "Seeds of the runs for the accuracy.")
    app.run(main)
