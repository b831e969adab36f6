"""Two checkouts of this project beside each other: by how much the second one's step is slower.

    git worktree add --detach ../before HEAD~10
    python -m benchmarks.versions ../before . [--starts=4] [--rounds=40] [--pipelined]

Both train in turns of a fraction of a second, so that a busy machine slows both alike, and what is
compared are the two turns of one round. Processes differ from start to start, and the second to be
started is some 3 % slower on some hosts, so both are started several times, each first in turn. The
figures are medians over all rounds, and of each start.
"""

import pathlib
import statistics
import sys

from absl import app, flags

from benchmarks.step_rate import Running, System

_STARTS = flags.DEFINE_integer(
    "starts", 4, "How often both are started anew, each first in turn.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Turns of each checkout per start.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.4, "Length of a turn.", lower_bound=0.05)
_PS = flags.DEFINE_integer("ps", 1, "ps tasks.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 1, "Workers.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 100, "Hidden units of the MLP.", lower_bound=1)
_PIPELINED = flags.DEFINE_bool("pipelined", False, "Compare steps that prefetch.")


def _started(checkout: pathlib.Path) -> Running:
    options = '{"prefetch": 1}' if _PIPELINED.value else "{}"
    system = System(
        (sys.executable, "-m", "benchmarks.systems.ours"), options=options, checkout=checkout
    )
    running = Running(str(checkout), system, _PS.value, _WORKERS.value, _HIDDEN.value, "cpu")
    running.wait_ready()
    return running


def _start(checkouts: tuple[pathlib.Path, ...], number: int) -> tuple[list[float], list[float]]:
    """One start of both: by round, the time and the processor time of the second as multiples of the first's."""
    order = (0, 1) if number % 2 == 0 else (1, 0)
    running: list[Running] = []
    try:
        for which in order:
            running.append(_started(checkouts[which]))
        for turns in range(_ROUNDS.value):
            for one in running if turns % 2 else reversed(running):
                one.turn(_SECONDS.value)
    finally:
        for one in running:
            one.stop()
    before, after = (running[which] for which in order)
    times = [a / b for a, b in zip(before.rates, after.rates, strict=True)]
    return times, [b / a for a, b in zip(before.cpu_us, after.cpu_us, strict=True)]


def _line(name: str, starts: list[list[float]]) -> str:
    medians = [statistics.median(ratios) for ratios in starts]
    whole = statistics.median(ratio for ratios in starts for ratio in ratios)
    return f"{name:15} {100 * (whole - 1):+5.1f} %  (starts: {', '.join(f'{100 * (m - 1):+.1f}' for m in medians)})"


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) != 3:
        raise app.UsageError("two checkouts are compared: BEFORE AFTER")
    checkouts = tuple(pathlib.Path(name).resolve() for name in argv[1:])
    for checkout in checkouts:
        if not (checkout / "benchmarks" / "systems" / "ours.py").exists():
            raise app.UsageError(f"{checkout} is no checkout of this project")
    found = [_start(checkouts, number) for number in range(_STARTS.value)]
    print(_line("time of a step", [times for times, _ in found]))
    print(_line("processor time", [cpu for _, cpu in found]))


if __name__ == "__main__":
    app.run(main)
