"""The place of a process in its cluster, as the engine tells, for a launcher with `--per_task`.

    srun python -m harness.launch.place '{"ps": 1, "workers": 3}'    # prints JSON

The argument holds the arguments of ``in_slurm``, as JSON.

The launcher runs this program instead of importing the module, because the resolvers import all of
the runtime. The program returns that memory at its end, and the launcher stays small.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from harness import exit_codes
from harness.launch.policy import PS, WORKER

LOWEST_PORT, JOBS, TASKS = 10000, 320, 64
"""Ports of tasks: 64 for each of 320 jobs, below those that the system hands out by itself (from 32768 on)."""


@dataclass(frozen=True)
class TaskPlace:
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
    environ: Mapping[str, str]
    said: str


class ForAllError(RuntimeError):
    """A mistake that every task of the step finds. Only the first task reports it."""


def _check_step(tasks: int, asked: str) -> None:
    """Checks that this process is a task of a Slurm step of so many tasks.

    Raises:
        RuntimeError: The process is no such task. One line says what to do.
    """
    if "SLURM_PROCID" not in os.environ:
        raise RuntimeError(
            "SLURM_PROCID is not set: --per_task runs in a Slurm step, start it with srun"
        )
    missing = [
        name
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if name not in os.environ
    ]
    if missing:
        raise RuntimeError(
            f"{missing[0]} is not set, although SLURM_PROCID is: pass on what srun has set"
        )
    found = int(os.environ["SLURM_STEP_NUM_TASKS"])
    if found != tasks:
        raise ForAllError(
            f"{asked} are {tasks} tasks, and this Slurm step has {found}: give sbatch "
            f"--ntasks={tasks}, or the launcher other numbers"
        )


def _step_names(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of this Slurm step, as `scancel` takes them."""
    # A step over the groups of a heterogeneous job is a step of each of them.
    size = int(environ.get("SLURM_HET_SIZE", 0))
    groups = [environ[f"SLURM_JOB_ID_HET_GROUP_{n}"] for n in range(size)]
    return [f"{job}.{environ['SLURM_STEP_ID']}" for job in groups or [environ["SLURM_JOB_ID"]]]


def in_slurm(
    ps: int, workers: int, ps_hosts: Sequence[str] = (), first: int = 0, port: int = 0
) -> TaskPlace:
    """Returns the place of this task in a Slurm step: first tasks are the ps, or all are workers of a running cluster.

        place = in_slurm(ps=1, workers=3)

    Args:
        ps: Number of ps of the step, without ``ps_hosts``.
        workers: Number of workers of the step.
        ps_hosts: Addresses of the ps that run already.
        first: Index of the worker that is the first task of the step, with ``ps_hosts``.
        port: Free port of this host, where this task is to serve, with ``ps_hosts``. No other task
            needs to know it.

    Raises:
        RuntimeError: This is no step, or the step has another number of tasks. One line says what
            to do.
    """
    jobs = {WORKER: workers} if ps_hosts else {PS: ps, WORKER: workers}
    environ = dict(os.environ)
    _check_step(
        sum(jobs.values()),
        " ".join(f"--{job}{'s' * (job == WORKER)}={count}" for job, count in jobs.items()),
    )
    slurm_job = environ["SLURM_JOB_ID"]
    # The import takes a second, and most of the memory. A mistake is found without it.
    import runtime as rt

    resolver = rt.SlurmClusterResolver(jobs, LOWEST_PORT + int(slurm_job) % JOBS * TASKS)
    # This call also gives the task its GPUs, by CUDA_VISIBLE_DEVICES of this process.
    cluster = resolver.cluster_spec()
    job, index = resolver.task_type, resolver.task_id
    # `_check_step` has seen that there are as many tasks as ranks.
    assert job is not None and index is not None
    hosts = {
        name: tuple(cluster.task_address(name, number) for number in range(count))
        for name, count in jobs.items()
    }
    if ps_hosts:
        host = hosts[WORKER][index].rpartition(":")[0]
        index += first
        hosts = {PS: tuple(ps_hosts), WORKER: ("",) * index + (f"{host}:{port}",)}
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    again = environ["SLURM_PROCID"] == "0" and restarts != "0"
    return TaskPlace(
        hosts[PS],
        hosts[WORKER],
        job,
        index,
        number=int(environ["SLURM_LOCALID"]),
        stop=("scancel", "--signal=TERM", *_step_names(environ)),
        environ={name: value for name, value in os.environ.items() if environ.get(name) != value},
        said=f"job {slurm_job} was requeued, this is restart {restarts}" if again else "",
    )


def main(argv: list[str]) -> int:
    """Prints the place of this task by the arguments of ``in_slurm``. Returns the exit code."""
    try:
        found = in_slurm(**json.loads(argv[0]))
    except (RuntimeError, ValueError) as error:
        if not isinstance(error, ForAllError) or os.environ["SLURM_PROCID"] == "0":
            print(f"launch: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION.plain
    print(json.dumps(asdict(found)))
    return exit_codes.DONE.plain


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
