"""The place of a process in its cluster, as the engine tells, for a launcher with `--per_task`.

    srun python -m harness.launch.place 1 3                          # ps, workers; prints JSON
    srun python -m harness.launch.place n1:10064,n2:10064 4 2 23456  # ps that run, first worker, workers, port

The launcher runs this program instead of importing the module, because the resolvers import all of the runtime. The
program returns that memory at its end, and the launcher stays small.
"""

import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from harness import exit_codes
from harness.launch.policy import PS, WORKER

if TYPE_CHECKING:
    import runtime as rt

LOWEST_PORT, JOBS, TASKS = 10000, 320, 64
"""Ports of tasks: 64 for each of 320 jobs, below those that the system hands out by itself (from 32768 on)."""


@dataclass(frozen=True)
class Place:
    """The place of one task in its cluster, for the launcher of that task.

    Attributes:
        ps_hosts: Addresses (`host:port`) of the ps, by task index.
        worker_hosts: Addresses of the workers, by task index.
        job: Job of this task.
        index: Index of this task.
        number: Number of this task among those of its host, from 0.
        stop: Command that stops the launchers of all tasks.
        environ: Variables that are added to the environment of the task.
        said: Line for the log; empty for none.
    """

    ps_hosts: tuple[str, ...]
    worker_hosts: tuple[str, ...]
    job: str
    index: int
    number: int
    stop: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    said: str = ""


class ForAllError(RuntimeError):
    """A mistake that every task of the step finds. Only the first task reports it."""


def _step(tasks: int, asked: str) -> None:
    """Checks that this process is a task of a Slurm step of so many tasks.

    Raises:
        RuntimeError: The process is no such task. One line says what to do.
    """
    if "SLURM_PROCID" not in os.environ:
        raise RuntimeError("SLURM_PROCID is not set: --per_task runs in a Slurm step, start it with srun")
    missing = [
        name
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if name not in os.environ
    ]
    if missing:
        raise RuntimeError(f"{missing[0]} is not set, although SLURM_PROCID is: pass on what srun has set")
    found = int(os.environ["SLURM_STEP_NUM_TASKS"])
    if found != tasks:
        raise ForAllError(
            f"{asked} are {tasks} tasks, and this Slurm step has {found}: give sbatch --ntasks={tasks}, or the "
            "launcher other numbers"
        )


def _resolved(jobs: Mapping[str, int], asked: str) -> tuple[str, int, "rt.ClusterSpec", "functools.partial[Place]"]:
    """Returns the job and the index of this task, the cluster of the step, and the place but for addresses and task."""
    environ = dict(os.environ)
    _step(sum(jobs.values()), asked)
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    # The import takes a second, and most of the memory. A mistake is found without it.
    import runtime as rt

    resolver = rt.SlurmClusterResolver(jobs, LOWEST_PORT + int(job) % JOBS * TASKS)
    # This call also gives the task its GPUs, by CUDA_VISIBLE_DEVICES of this process.
    cluster = resolver.cluster_spec()
    # `_step` has seen that there are as many tasks as ranks.
    assert resolver.task_type is not None and resolver.task_id is not None
    # A step over the groups of a heterogeneous job is a step of each of them.
    groups = [environ[f"SLURM_JOB_ID_HET_GROUP_{n}"] for n in range(int(environ.get("SLURM_HET_SIZE", 0)))] or [job]
    place = functools.partial(
        Place,
        number=int(environ["SLURM_LOCALID"]),
        stop=("scancel", "--signal=TERM", *(f"{group}.{step}" for group in groups)),
        environ={name: value for name, value in os.environ.items() if environ.get(name) != value},
    )
    return resolver.task_type, resolver.task_id, cluster, place


def added_in_slurm(ps_hosts: Sequence[str], first: int, workers: int, port: int) -> Place:
    """Returns the place of this task in a Slurm step of workers that join a running cluster.

    Args:
        ps_hosts: Addresses of the ps.
        first: Index of the worker that is the first task of the step.
        workers: Number of tasks of the step.
        port: Free port of this host, where this task is to serve. Nobody needs to know it beforehand.

    Raises:
        RuntimeError: As ``in_slurm``.
    """
    job, number, cluster, place = _resolved({WORKER: workers}, f"--workers={workers}")
    host, index = cluster.task_address(job, number).rpartition(":")[0], first + number
    return place(ps_hosts=tuple(ps_hosts), worker_hosts=("",) * index + (f"{host}:{port}",), job=job, index=index)


def in_slurm(ps: int, workers: int) -> Place:
    """Returns the place of this task in a Slurm step whose first tasks are the ps.

    Raises:
        RuntimeError: This is no step, or the step has another number of tasks. One line says what to do.
    """
    job, index, cluster, place = _resolved({PS: ps, WORKER: workers}, f"--ps={ps} --workers={workers}")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    again = os.environ["SLURM_PROCID"] == "0" and restarts != "0"
    return place(
        ps_hosts=tuple(cluster.task_address(PS, number) for number in range(ps)),
        worker_hosts=tuple(cluster.task_address(WORKER, number) for number in range(workers)),
        job=job,
        index=index,
        said=f"job {os.environ['SLURM_JOB_ID']} was requeued, this is restart {restarts}" if again else "",
    )


def main(argv: list[str]) -> int:
    """Prints the place of this task among so many ps and workers, or added workers. Returns the exit code."""
    try:
        if len(argv) == 4:
            first, workers, port = map(int, argv[1:])
            found = added_in_slurm(argv[0].split(","), first, workers, port)
        else:
            ps, workers = map(int, argv)
            found = in_slurm(ps, workers)
    except (RuntimeError, ValueError) as error:
        if not isinstance(error, ForAllError) or os.environ["SLURM_PROCID"] == "0":
            print(f"launch: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION.plain
    print(json.dumps(asdict(found)))
    return exit_codes.DONE.plain


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
