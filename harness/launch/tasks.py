"""The command line, the environment and the guard of each task."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.launch import guard
from harness.launch.gpus import NO_GPU
from harness.launch.policy import CHIEF_JOB, EVALUATOR, PS, WORKER, LaunchTask

ATTEMPT_VARIABLE = "BELLWETHER_ATTEMPT"
NUMBER_VARIABLE = "BELLWETHER_TASK_NUMBER"
"""Which of its launcher's tasks a task is, from 0: for what each task of a host needs one of, such as a port."""
PER_TASK_VARIABLE = "BELLWETHER_PER_TASK"
"""Set where a task has a launcher of its own (`--per_task`), which ends nobody else when the workers are done."""
DRAIN_VARIABLE = "BELLWETHER_DRAIN_SECS"
"""How long a ps serves on after SIGTERM while workers live (``Server.join``)."""
REQUIRE_GPU_VARIABLE = "BELLWETHER_REQUIRE_GPU"
"""Set where a task other than a ps ends without a GPU (``Server(require_gpu=)``)."""
OWN_FLAGS = ("ps_hosts", "worker_hosts", "chief_hosts", "job_name", "task_index")

PS_ENVIRONMENT = {
    # A ps only adds and copies; on a GPU it would take memory from the workers and move every
    # update across the bus.
    **NO_GPU,
    # Large buffers straight from mmap, so that freed ones go back to the system; set, glibc does
    # not let it drift up.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}


@dataclass(frozen=True)
class ClusterTopology:
    """The addresses (`host:port`) of a cluster's tasks, by task index.

    An unknown address is empty.
    """

    ps_hosts: tuple[str, ...]
    worker_hosts: tuple[str, ...]
    chief_hosts: tuple[str, ...] = ()
    """Of the one task of job chief, where the chief is not worker 0."""
    evaluators: int = 0
    """Number of evaluators. They have no address, because they serve no task."""

    @property
    def hosts(self) -> dict[str, tuple[str, ...]]:
        """The addresses by job. The ps tasks come first, because the workers need them."""
        return {
            PS: self.ps_hosts,
            CHIEF_JOB: self.chief_hosts,
            WORKER: self.worker_hosts,
            EVALUATOR: ("",) * self.evaluators,
        }

    def tasks(self) -> list[LaunchTask]:
        """Returns every task, in the order of ``hosts``."""
        return [LaunchTask(job, i) for job, hosts in self.hosts.items() for i in range(len(hosts))]

    def address(self, task: LaunchTask) -> str:
        """Returns the address of a task; empty where that is unknown, and for evaluators."""
        return self.hosts[task.job][task.index]


def takes_flags(command: Sequence[str]) -> bool:
    """Returns True if a task learns from flags which task it is, and not from its environment alone.

    A Python program whose own file calls ``join_cluster`` gets no flags. Such a program need not
    know them, and may refuse unknown flags. All other programs get flags. A module is looked for in
    this directory and on the launcher's path.
    """
    files = program_files(command)
    return not files or not any(
        "join_cluster" in file.read_text(errors="replace") for file in files
    )


def program_files(command: Sequence[str]) -> list[pathlib.Path]:
    """Returns the files that a Python command may run."""
    for argument, following in zip(command[1:], [*command[2:], ""], strict=False):
        if argument == "-m":
            module = pathlib.Path(*following.split("."))
            bases = [pathlib.Path(base, module) for base in ("", *sys.path)]
            files = [
                file for base in bases for file in (base.with_suffix(".py"), base / "__main__.py")
            ]
        elif argument.endswith(".py"):
            files = [pathlib.Path(argument)]
        else:
            continue
        return [file for file in files if file.is_file()]
    return []


def arguments(command: Sequence[str], topology: ClusterTopology, task: LaunchTask) -> list[str]:
    """Returns the command line of one task. A bare `python` is the interpreter of the launcher."""
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    if not takes_flags(command):
        return [program, *command[1:]]
    return [
        program,
        *command[1:],
        f"--ps_hosts={','.join(topology.ps_hosts)}",
        f"--worker_hosts={','.join(topology.worker_hosts)}",
        *([f"--chief_hosts={','.join(topology.chief_hosts)}"] if topology.chief_hosts else []),
        f"--job_name={task.job}",
        f"--task_index={task.index}",
    ]


def environment(
    base: Mapping[str, str],
    topology: ClusterTopology,
    task: LaunchTask,
    attempt: int,
    number: int | None = None,
) -> dict[str, str]:
    """Returns the environment of one task.

    Args:
        base: Environment to begin with.
        topology: Cluster, which goes into TF_CONFIG.
        task: The task.
        attempt: Number of earlier starts; 0 for the first start.
        number: Number of the task among those of its host; by default its place in the topology.
    """
    number = topology.tasks().index(task) if number is None else number
    cluster = {
        job: list(hosts) if all(hosts) else {i: host for i, host in enumerate(hosts) if host}
        for job, hosts in topology.hosts.items()
        if any(hosts)
    }
    # Resolvers of TensorFlow read the same variable.
    config = {
        "cluster": cluster,
        "task": {"type": task.job, "index": task.index},
        "rpc_layer": "grpc",
    }
    own = {
        "PYTHONUNBUFFERED": "1",
        NUMBER_VARIABLE: str(number),
        ATTEMPT_VARIABLE: str(attempt),
        "TF_CONFIG": json.dumps(config),
    }
    return {**base, **own, **(PS_ENVIRONMENT if task.job == PS else {})}


def attempt(environ: Mapping[str, str]) -> int:
    """Returns the number of earlier starts of a task, by its environment; 0 where no launcher counts."""
    return int(environ.get(ATTEMPT_VARIABLE, "0"))


def launcher_ends_ps(environ: Mapping[str, str]) -> bool:
    """Returns True if the launcher of a task ends the ps tasks when the workers have ended."""
    return ATTEMPT_VARIABLE in environ and PER_TASK_VARIABLE not in environ


def watching(topology: ClusterTopology, command: Sequence[str]) -> list[str]:
    """Returns lines for the launcher's log, with the commands for status and curves."""
    # Any task tells the whole cluster.
    some_task = (topology.ps_hosts or topology.worker_hosts)[0]
    lines = [f"what the tasks do: python -m harness.status --target={some_task} --watch"]
    for argument, following in zip(command, [*command[1:], ""], strict=True):
        if argument.startswith("--logdir="):
            following, argument = argument.partition("=")[2], "--logdir"
        if argument == "--logdir" and following:
            lines.append(f"curves: tensorboard --logdir={following}")
    return lines


def start_guarded(
    command: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a command under a guard.

    The guard ends the whole process tree when the command ends, and when the calling thread ends.

    Args:
        command: Program and arguments.
        env: Environment of the command.
        **options: Further options of ``subprocess.Popen``.
    """
    script = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())]
    # Blocked while the guard starts, so that an early signal waits for it instead of ending it
    # half-way.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, guard.WATCHED)
    try:
        return subprocess.Popen(
            [*script, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def claimed_flags(command: Sequence[str]) -> list[str]:
    """Returns the arguments in `command` that set a flag of the launcher's own."""
    names = {f"{dashes}{flag}" for flag in OWN_FLAGS for dashes in ("-", "--")}
    return [argument for argument in command if argument.partition("=")[0] in names]
