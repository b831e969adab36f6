r"""Starts a whole cluster on this machine: `python -m harness.launch --ps=1 --workers=2 -- COMMAND...`.

With --per_task the launcher starts one task of a cluster that an engine (Slurm) has spread over
hosts.

Every task runs COMMAND on a free port, with --ps_hosts, --worker_hosts, --job_name and --task_index
added. A Python program whose own file calls harness.join_cluster() runs without these flags. The
environment has the same in TF_CONFIG. It also has BELLWETHER_ATTEMPT, the number of the start of
this task, and BELLWETHER_TASK_NUMBER, the number of the task with the ps first, both from 0.

The launcher prefixes the tasks' lines, and starts a task that dies again. It stops the ps tasks
when the workers are done, passes Ctrl-C and SIGTERM on, and leaves no process behind. The exit code
is that of the first task that failed for good. Else it is 128+signal if a signal ended the launcher
(with --per_task the task's own code). Bad arguments have the code of `exit_codes.CONFIGURATION`.
Else the code is 0.

With --ps_hosts the launcher adds --workers workers to a running cluster, from --first_worker on.
The program must let workers come and go (--elastic of the example). With --per_task the added
workers are the tasks of a Slurm step.

With --chief the chief is a job of its own (--chief_hosts), and worker 0 a worker like the others.
With --evaluators=N there are evaluators too. The launcher does not wait for evaluators, but they
have --grace_secs for the last checkpoint.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from absl import app, flags

from harness import exit_codes
from harness.launch import gpus, guard, policy, times
from harness.launch.output import LinePrinter, wants_colour
from harness.launch.place import TaskPlace
from harness.launch.ports import hold_ports
from harness.launch.runner import LAUNCHER_NAME, ClusterRunner
from harness.launch.tasks import (
    DRAIN_VARIABLE,
    PER_TASK_VARIABLE,
    REQUIRE_GPU_VARIABLE,
    ClusterTopology,
    claimed_flags,
    takes_flags,
)

LOCAL_HOST = "127.0.0.1"

_PS = flags.DEFINE_integer(
    "ps", 1, "Number of ps tasks, which hold the variables; kept off the GPU.", lower_bound=0
)
_WORKERS = flags.DEFINE_integer(
    "workers",
    1,
    "Number of worker tasks; worker 0 is the chief, unless there is --chief.",
    lower_bound=1,
)
_CHIEF = flags.DEFINE_bool(
    "chief",
    False,
    "Start the chief as a job of its own, as TFJob does: chief/0 beside --workers, with "
    "--chief_hosts.",
)
_PS_HOSTS = flags.DEFINE_list(
    "ps_hosts",
    [],
    "Add workers to a running cluster, whose ps tasks are at these host:port; starts no ps and no "
    "chief.",
)
_FIRST_WORKER = flags.DEFINE_integer(
    "first_worker",
    None,
    "With --ps_hosts: index of the first added worker. No running worker may have it, nor one of "
    "those after it.",
    lower_bound=1,
)
_EVALUATORS = flags.DEFINE_integer(
    "evaluators",
    0,
    "Number of evaluators, which follow the checkpoints: --job_name=evaluator.",
    lower_bound=0,
)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    policy.LaunchOptions.max_restarts,
    "How often one task is started again after it died, before it counts as failed for good. A "
    "task that ran for "
    f"{policy.LaunchOptions.forgive_secs:g} seconds has its count forgiven. 0: never.",
    lower_bound=0,
)
_GRACE_SECS = flags.DEFINE_float(
    "grace_secs",
    policy.LaunchOptions.grace_secs,
    "Seconds that tasks asked to stop have before they are killed: the workers first, then as long "
    "for the ps tasks. Give the chief time for its last checkpoint: more than the trainer's "
    "--preempt_grace_secs. A second signal kills.",
    lower_bound=0.0,
)
_PER_TASK = flags.DEFINE_bool(
    "per_task",
    False,
    "Run one task only, the one that this process is for the engine that has started it: Slurm, "
    "where --ps and "
    "--workers say what the tasks of the step are. The engine runs a launcher for each task.",
)
_EXIT_CODES = flags.DEFINE_enum(
    "exit_codes",
    "plain",
    list(exit_codes.SCHEMES),
    "Whose exit codes the launcher ends with (docs/launch.md).",
)
_TERMINATION_LOG = flags.DEFINE_string(
    "termination_log",
    None,
    "With --per_task: file that the first task which takes all others down with it leaves its exit "
    "code and a reason in.",
)
_GPUS_PER_WORKER = flags.DEFINE_integer(
    "gpus_per_worker",
    None,
    "How many GPUs of this machine each worker gets for itself, by CUDA_VISIBLE_DEVICES. By default "
    "the workers divide all GPUs, or the memory of GPUs that are fewer than the workers. 0: every "
    "task but a ps sees all.",
    lower_bound=0,
)
_REQUIRE_GPU = flags.DEFINE_bool(
    "require_gpu",
    False,
    "A worker without a GPU ends with one line and the code of a wrong configuration. "
    "--gpus_per_worker has this effect too.",
)


def _parse_flags(argv: list[str]) -> list[str]:
    """Returns the program's name and the command; a mistake ends the program with one line."""
    hint = "" if "--" in argv else "; the command to run goes after --"
    return exit_codes.parse_flags(argv, f"{LAUNCHER_NAME}: ", hint)


def _refuse_flags(reason: str) -> NoReturn:
    exit_codes.leave(exit_codes.CONFIGURATION, f"{LAUNCHER_NAME}: {reason}")


def _check_flags(command: list[str], argv: list[str]) -> None:
    given = argv[argv.index("--") + 1 :] if "--" in argv else []
    if not given:
        _refuse_flags(
            "no command to run: write it after --, as in --ps=1 --workers=2 -- python -m "
            "models.mnist.trainer"
        )
    if command != given:
        _refuse_flags(
            f"{command[0]} stands before --: the command to run goes after it, flags of the "
            "launcher before"
        )
    if claimed := claimed_flags(command):
        _refuse_flags(
            f"{claimed[0]} is set by the launcher for every task: leave it out of the command"
        )
    if bool(_PS_HOSTS.value) != (_FIRST_WORKER.value is not None):
        _refuse_flags(
            "--ps_hosts and --first_worker go together: where the ps are, and the index of the "
            "first added worker"
        )
    if _PS_HOSTS.value and (_CHIEF.value or _EVALUATORS.value):
        _refuse_flags(
            "--ps_hosts adds workers and nothing else: leave --chief and --evaluators out"
        )
    # The launcher would take the codes of an engine for plain ones.
    if any(
        argument.lstrip("-").partition("=")[0] == "exit_codes"
        for argument in command
        if argument[:1] == "-"
    ):
        _refuse_flags(
            "--exit_codes goes before --: the launcher reads the plain codes of its tasks"
        )
    if shutil.which(command[0]) is None:
        _refuse_flags(
            f"{command[0]}: no such program: write one that is on PATH, or its path, after --"
        )


def main(argv: list[str]) -> int:
    """Runs what the flags describe; returns the exit code."""
    exit_codes.use(_EXIT_CODES.value)
    command = argv[1:]
    _check_flags(command, sys.argv)
    # If a guard is killed, the orphans of its task become children of this process, and end below.
    guard.become_subreaper()
    try:
        run = _per_task if _PER_TASK.value else _run_local
        return exit_codes.translated(run(command))
    except OSError as error:
        print(f"{LAUNCHER_NAME}: cannot run the cluster: {error}", file=sys.stderr)
        return exit_codes.code(exit_codes.FAILED)
    finally:
        guard.end_children()


def _run_local(command: list[str]) -> int:
    """Runs a cluster on this machine, or workers that join a running cluster."""
    added = _FIRST_WORKER.value or 0
    # Added workers find their ps and their chief at work.
    ps, chiefs = (0, 0) if added else (_PS.value, int(_CHIEF.value))
    held = hold_ports(ps + chiefs + _WORKERS.value)
    hosts = tuple(f"{LOCAL_HOST}:{holder.getsockname()[1]}" for holder in held)
    topology = ClusterTopology(
        hosts[:ps] or tuple(_PS_HOSTS.value),
        ("",) * added + hosts[ps + chiefs :],
        hosts[ps : ps + chiefs],
        _EVALUATORS.value,
    )
    tasks = [
        task
        for task in topology.tasks()
        if not added or (task.job == policy.WORKER and task.index >= added)
    ]
    numbers = {task: number for number, task in enumerate(tasks)}
    # Evaluators come last and need no port.
    return _make_runner(
        command, topology, numbers, dict(zip(tasks, held, strict=False)), os.environ
    ).run()


def _per_task(command: list[str]) -> int:
    """Runs the task of a cluster for which the engine has started this process."""
    # No other task needs to know the address of an added worker beforehand.
    held = hold_ports(1) if _PS_HOSTS.value else []
    where: dict[str, object] = {"ps": _PS.value, "workers": _WORKERS.value}
    if held:
        port = held[0].getsockname()[1]
        where |= {"ps_hosts": _PS_HOSTS.value, "first": _FIRST_WORKER.value, "port": port}
    asked = [sys.executable, "-m", "harness.launch.place", json.dumps(where)]
    answer = subprocess.run(asked, stdout=subprocess.PIPE, check=False)
    if answer.returncode:
        return policy.exit_code_of(answer.returncode)
    place = TaskPlace(**json.loads(answer.stdout))
    if place.said:
        print(f"{LAUNCHER_NAME}: {place.said}", file=sys.stderr)
    # A ps leaves before the patience of its launcher ends.
    own = {
        PER_TASK_VARIABLE: "1",
        DRAIN_VARIABLE: str(max(0.0, _GRACE_SECS.value - times.KILL_GRACE_SECS)),
    }
    task = policy.LaunchTask(place.job, place.index)
    runner = _make_runner(
        command,
        ClusterTopology(tuple(place.ps_hosts), tuple(place.worker_hosts)),
        {task: place.number},
        dict.fromkeys([task], held[0]) if held else {},
        {**os.environ, **place.environ, **own},
    )
    code = runner.run()
    if runner.failure is not None and runner.failure.fatal:
        _end_the_others(runner.failure, place.stop)
    return code


def _end_the_others(failure: policy.TaskFailure, stop: Sequence[str]) -> None:
    """Stops all other tasks of the step, and leaves the reason in --termination_log."""
    if _TERMINATION_LOG.value is not None:
        try:
            # The mode "x" keeps the reason of the first task that failed.
            with contextlib.suppress(FileExistsError), open(_TERMINATION_LOG.value, "x") as log:
                log.write(f"{exit_codes.translated(failure.code)} {failure.why}\n")
        except OSError as error:
            print(
                f"{LAUNCHER_NAME}: --termination_log={_TERMINATION_LOG.value}: {error.strerror}",
                file=sys.stderr,
            )
    try:
        done = subprocess.run(
            stop, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        said = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        said = str(error)
    if said:
        print(
            f"{LAUNCHER_NAME}: the other tasks are not told to stop: {' '.join(stop)}: {said}",
            file=sys.stderr,
        )


def _make_runner(
    command: list[str],
    topology: ClusterTopology,
    tasks: Mapping[policy.LaunchTask, int],
    held: Mapping[policy.LaunchTask, socket.socket],
    environ: Mapping[str, str],
) -> ClusterRunner:
    if _REQUIRE_GPU.value or _GPUS_PER_WORKER.value:
        environ = {**environ, REQUIRE_GPU_VARIABLE: "1"}
    # The names of all tasks count, so that the lines of several launchers are aligned.
    names = [str(task) for task in topology.tasks()]
    out, messages = (
        LinePrinter(stream.buffer, [*names, LAUNCHER_NAME], wants_colour(stream))
        for stream in (sys.stdout, sys.stderr)
    )
    return ClusterRunner(
        command,
        topology,
        policy.LaunchOptions(
            max_restarts=_MAX_RESTARTS.value,
            grace_secs=_GRACE_SECS.value,
            per_task=_PER_TASK.value,
            joins=not _PER_TASK.value and not takes_flags(command),
        ),
        tasks,
        held,
        environ=environ,
        shares=_share_gpus(tasks, environ),
        tasks_out=out,
        messages=messages,
    )


def _share_gpus(
    tasks: Collection[policy.LaunchTask], environ: Mapping[str, str]
) -> dict[policy.LaunchTask, dict[str, str]]:
    each = _GPUS_PER_WORKER.value
    # An engine that starts each task by itself has given the task its GPUs.
    if each == 0 or (each is None and _PER_TASK.value):
        return {}
    try:
        return gpus.share_gpus(tasks, environ, gpus.find_gpus(environ), each)
    except ValueError as error:
        _refuse_flags(str(error))


def run() -> None:
    """Runs the command ``bellwether-launch``. Ends the program with the exit code."""
    exit_codes.open_streams()
    app.run(main, flags_parser=_parse_flags)


if __name__ == "__main__":
    run()
