r"""Starts a whole cluster on this machine: `python -m harness.launch --ps=1 --workers=2 -- COMMAND...`.

Every task runs COMMAND with --ps_hosts, --worker_hosts, --job_name and --task_index added, on free ports; a Python
program whose own file calls harness.join_cluster() runs without them, as TF_CONFIG says the same. In the environment
are TF_CONFIG, BELLWETHER_ATTEMPT, which start of the task this is, from 0, and BELLWETHER_TASK_NUMBER, which of the
tasks it is, from 0, the ps first. The launcher prefixes the tasks' lines, starts a task that dies again, stops the ps
tasks when the workers are done, passes Ctrl-C and SIGTERM on, and leaves no process behind. Its exit code is that of
the first task that failed for good, 128+signal if a signal ended it, 2 for bad arguments, else 0.
"""

import os
import shutil
import sys
from typing import NoReturn

from absl import app, flags

from harness.launch import guard, policy
from harness.launch.output import Printer, wants_colour
from harness.launch.ports import hold_ports
from harness.launch.runner import LAUNCHER_NAME, Runner
from harness.launch.tasks import Topology, claimed_flags, gpus

USAGE_ERROR = 2
LOCAL_HOST = "127.0.0.1"

_PS = flags.DEFINE_integer("ps", 1, "Number of ps tasks, which hold the variables; kept off the GPU.", lower_bound=0)
_WORKERS = flags.DEFINE_integer("workers", 1, "Number of worker tasks; worker 0 is the chief.", lower_bound=1)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    policy.LaunchOptions.max_restarts,
    "How often one task is started again after it died, before it counts as failed for good. A task that ran for "
    f"{policy.LaunchOptions.forgive_secs:g} seconds has its count forgiven. 0: never.",
    lower_bound=0,
)
_GRACE_SECS = flags.DEFINE_float(
    "grace_secs",
    policy.LaunchOptions.grace_secs,
    "Seconds that tasks asked to stop have before they are killed: the workers first, then as long for the ps tasks. "
    "Give the chief time for its last checkpoint: more than the trainer's --preempt_grace_secs. A second signal kills.",
    lower_bound=0.0,
)
_GPUS_PER_WORKER = flags.DEFINE_integer(
    "gpus_per_worker",
    0,
    "How many GPUs of this machine each worker gets for itself, by CUDA_VISIBLE_DEVICES. 0: every worker sees all.",
    lower_bound=0,
)
_COLOR = flags.DEFINE_enum(
    "color",
    "auto",
    ["auto", "always", "never"],
    "Whether to colour the tasks' names; auto: on a terminal, unless NO_COLOR is set.",
)


def _parse(argv: list[str]) -> list[str]:
    """The program's name and the command; a mistake ends the program with one line and code 2."""
    try:
        rest: list[str] = flags.FLAGS(argv)
        return rest
    except SystemExit:  # --help has been shown: absl would call that a failure
        sys.exit(0)
    except flags.Error as error:
        hint = "" if "--" in argv else "; the command to run goes after --"
        _refuse(f"{' '.join(str(error).split())}{hint}")


def _refuse(reason: str) -> NoReturn:
    print(f"{LAUNCHER_NAME}: {reason}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _check(command: list[str], argv: list[str]) -> None:
    given = argv[argv.index("--") + 1 :] if "--" in argv else []
    if not given:
        _refuse("no command to run: write it after --, as in --ps=1 --workers=2 -- python -m models.mnist.trainer")
    if command != given:
        _refuse(f"{command[0]} stands before --: the command to run goes after it, flags of the launcher before")
    if claimed := claimed_flags(command):
        _refuse(f"{claimed[0]} is set by the launcher for every task: leave it out of the command")
    if shutil.which(command[0]) is None:
        _refuse(f"{command[0]}: no such program: write one that is on PATH, or its path, after --")
    if _GPUS_PER_WORKER.value:
        try:
            gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), _WORKERS.value - 1, _GPUS_PER_WORKER.value)
        except ValueError as error:
            _refuse(str(error))


def main(argv: list[str]) -> int:
    """Runs the cluster described by the flags; returns the exit code."""
    command = argv[1:]
    _check(command, sys.argv)
    guard.become_subreaper()  # Should a guard be killed, its task's orphans come to us, and end below.
    held = hold_ports(_PS.value + _WORKERS.value)
    hosts = tuple(f"{LOCAL_HOST}:{holder.getsockname()[1]}" for holder in held)
    topology = Topology(ps_hosts=hosts[: _PS.value], worker_hosts=hosts[_PS.value :])
    tasks = topology.tasks()
    names = [str(task) for task in tasks]
    try:
        return Runner(
            command,
            topology,
            policy.LaunchOptions(
                max_restarts=_MAX_RESTARTS.value,
                grace_secs=_GRACE_SECS.value,
                gpus_per_worker=_GPUS_PER_WORKER.value,
            ),
            dict(zip(tasks, held, strict=True)),
            tasks_out=Printer(sys.stdout.buffer, names, wants_colour(_COLOR.value, sys.stdout)),
            messages=Printer(sys.stderr.buffer, [*names, LAUNCHER_NAME], wants_colour(_COLOR.value, sys.stderr)),
        ).run()
    except OSError as error:
        print(f"{LAUNCHER_NAME}: cannot run the cluster: {error}", file=sys.stderr)
        return 1
    finally:
        guard.end_children()


def run() -> None:
    """The command ``bellwether-launch``; ends the program with the exit code."""
    app.run(main, flags_parser=_parse)


if __name__ == "__main__":
    run()
