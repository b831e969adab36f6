"""What TLS costs a training step over TCP: steps per second with certificates and without, in turns of one run.

    python -m benchmarks.encryption --hidden=100,4096

Trains the model of `benchmarks.step_rate` (100 hidden units are 318 KB of parameters, 4096 are 13
MB) with one ps and one worker on this machine, which share its cores: where they have hosts of
their own, each side pays its half only.
"""

import os
import pathlib
import statistics
import sys
import tempfile

from absl import app, flags

from benchmarks.step_rate import Running, System
from harness import certs

_HIDDEN = flags.DEFINE_list("hidden", ["100", "4096"], "Widths of the hidden layer, in units.")
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Turns that each way takes.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Length of a turn, in seconds.", lower_bound=0.1)

_PROGRAM = (sys.executable, "-m", "benchmarks.systems.ours")
_TCP = ("BELLWETHER_FAST_PATH", "0")


def systems(directory: pathlib.Path) -> dict[str, System]:
    """Returns the ways to compare, with new certificates and a new token in a directory."""
    certificates, token = directory / "certs", directory / "token"
    certs.make_certificates(certificates, [["127.0.0.1"]], days=1, renew=False)
    token.touch(mode=0o600)
    token.write_text(os.urandom(32).hex())
    given = {"insecure": "insecure", "token": str(token), "TLS": str(certificates)}
    return {
        name: System(_PROGRAM, environment=(_TCP, ("BELLWETHER_SECURITY", security)))
        for name, security in given.items()
    }


def measure(hidden: int, rounds: int, seconds: float) -> dict[str, Running]:
    """Runs the ways in turns. Returns their rates and processor times, turn by turn."""
    running: dict[str, Running] = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name, system in systems(pathlib.Path(directory)).items():
                running[name] = Running(name, system, 1, 1, hidden, "cpu")
                running[name].wait_ready()
            for _ in range(rounds):
                for one in running.values():
                    one.turn(seconds)
        finally:
            for one in running.values():
                one.stop()
    return running


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    for hidden in map(int, _HIDDEN.value):
        found = measure(hidden, _ROUNDS.value, _SECONDS.value)
        base = found["insecure"]
        print(f"hidden {hidden}, TCP, 1 ps, 1 worker")
        for name, one in found.items():
            rate, cpu = statistics.median(one.rates), statistics.median(one.cpu_us)
            ratio = statistics.median(
                mine / other for mine, other in zip(one.rates, base.rates, strict=True)
            )
            print(
                f"  {name:10} {rate:9.1f} steps/s {cpu:9.0f} us of processor time a step "
                f"{ratio:6.3f} x"
            )


if __name__ == "__main__":
    app.run(main)
