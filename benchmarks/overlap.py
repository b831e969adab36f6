"""Pipelined steps over a network: two namespaces of this host, and a cable of a given rate between them.

    python -m benchmarks.overlap --rate=1gbit --hidden=4096 --rounds=5

The ps is on one side, the workers are on the other. Both sides hold back what they send (tbf). Each
system takes its turns beside strict steps, and the ratio to strict steps is taken turn by turn.
XLA has one thread in each task, so that the tasks leave the cores to each other and to the kernel.
Without `--rate` all tasks are on this host.
"""

import os
import statistics
import subprocess
import sys

from absl import app, flags

from benchmarks.step_rate import Running, _systems
from tests.harness.training.start.namespaces_program import HERE, THERE, far_side

FLAGS = flags.FLAGS
_INSIDE = "BENCH_INSIDE"


def define_flags() -> None:
    """Defines what `main` reads."""
    flags.DEFINE_string("rate", "", "Rate of the cable, as tbf takes it: 1gbit, 10gbit.")
    flags.DEFINE_integer("hidden", 4096, "Width of the hidden layer.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Workers.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Turns of each system.", lower_bound=1)
    flags.DEFINE_float("seconds", 1.5, "Length of a turn, in seconds.", lower_bound=0.1)
    flags.DEFINE_integer("threads", 1, "Threads of XLA in each task; 0 for the task's own share.")
    flags.DEFINE_list("systems", ["ours", "pipelined", "pipelined2"], "Of those of step_rate.")


def _limit_rate(*inside: str) -> None:
    """Holds back what a side sends."""
    device = "far" if inside else "near"
    queue = f"root tbf rate {FLAGS.rate} burst 128kb latency 50ms"
    subprocess.run([*inside, *f"tc qdisc add dev {device} {queue}".split()], check=True)


def _measure(hosts: tuple[str, str], far: tuple[str, ...]) -> None:
    known = _systems()
    running: list[Running] = []
    try:
        for name in FLAGS.systems:
            running.append(
                Running(name, known[name], 1, FLAGS.workers, FLAGS.hidden, "cpu", hosts, far)
            )
            running[-1].wait_ready()
        for turn in range(FLAGS.rounds):
            for one in running if turn % 2 else reversed(running):
                one.turn(FLAGS.seconds)
    finally:
        for one in running:
            one.stop()
    print(f"{FLAGS.rate or 'one host'}, H={FLAGS.hidden}, {FLAGS.workers} workers")
    print("| | steps/s | CPU us | beside the first |\n|---|---:|---:|---|")
    for one in running:
        ratios = [rate / strict for rate, strict in zip(one.rates, running[0].rates, strict=True)]
        print(
            f"| {one.name} | {statistics.median(one.rates):.1f} "
            f"| {statistics.median(one.cpu_us):.0f} "
            f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}] |"
        )


def main(argv: list[str]) -> None:
    """Measures and prints."""
    os.environ |= {"BELLWETHER_SECURITY": "insecure"}
    if FLAGS.threads:
        os.environ["PJRT_NPROC"] = str(FLAGS.threads)
    if not FLAGS.rate:
        _measure(("127.0.0.1", "127.0.0.1"), ())
    elif _INSIDE in os.environ:
        with far_side() as inside:
            _limit_rate()
            _limit_rate(*inside)
            _measure((HERE, THERE), inside)
    else:
        os.environ[_INSIDE] = "1"
        program = [sys.executable, "-m", "benchmarks.overlap", *argv[1:], *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "-rn", *program])


if __name__ == "__main__":
    define_flags()
    app.run(main)
