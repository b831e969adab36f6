"""The content of a launch file for any engine: tasks, their command, environment and sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.launch.policy import EVALUATOR, PS, TRAINERS, WORKER
from harness.launch.tasks import PS_ENVIRONMENT, REQUIRE_GPU_VARIABLE
from harness.manifests import times
from harness.manifests.sizing import MIB, SHARED_BYTES, JobSizes, JobWorkload, sizes

PORT = 2222
assert times.WORKER_GRACE_SECS > times.SAVE_SECS, "the last checkpoint would be cut off"
NEVER_AGAIN = 42
"""The exit code, of the codes for JobSet, of a process that would end so again: wrong flags, damaged data."""
RUNS = "/runs"
TRAINER = ("python", "-m", "models.mnist.trainer")


@dataclass(frozen=True)
class ClusterRequest(JobWorkload):
    """A cluster to be started by an engine, of the size of a workload.

    Attributes:
        name: Name of the job and of all its objects.
        image: Image of the containers.
        ps_image: Image of the ps, which need no CUDA.
        evaluators: Number of evaluators, 0 or 1.
        command: Program and arguments of every task.
        elastic: True if workers come and go. Then the number of workers may change while they
            train.
        exit_codes: True if the command takes ``--exit_codes``, the flag that chooses the exit codes
            for an engine.
    """

    name: str = "bellwether"
    image: str = "bellwether:latest"
    ps_image: str = "bellwether:latest"
    evaluators: int = 0
    command: Sequence[str] = TRAINER
    exit_codes: bool = True
    elastic: bool = False

    @property
    def sizes(self) -> JobSizes:
        """The memory and the cores of the tasks."""
        return sizes(self)

    @property
    def logdir(self) -> str:
        """The run directory, on a volume that all tasks see."""
        return f"{RUNS}/{self.name}"

    def arguments(self, scheme: str, *flags: str) -> list[str]:
        """Returns the command of every task, with the flags that an engine adds."""
        codes = [f"--exit_codes={scheme}"] if self.exit_codes else []
        flags = (*flags, "--elastic") if self.elastic and self.exit_codes else flags
        return [
            *self.command,
            *flags,
            f"--logdir={self.logdir}",
            f"--preempt_grace_secs={times.SAVE_SECS}",
            *codes,
        ]

    def environment(self, job: str) -> dict[str, str]:
        """Returns the variables of a job's tasks, beside those of all pods."""
        return {
            **(PS_ENVIRONMENT if job == PS else {}),
            **({"BELLWETHER_DRAIN_SECS": str(times.PS_DRAIN_SECS)} if job == PS else {}),
            **({REQUIRE_GPU_VARIABLE: "1"} if self.gpus_of(job) else {}),
        }

    def gpus_of(self, job: str) -> int:
        """Returns the GPUs of a task: only tasks that train compute on GPUs."""
        return self.gpus if job in TRAINERS else 0

    def memory_mib(self, job: str) -> int:
        """Returns the memory of a task in MiB, rounded up to a multiple of 64."""
        found = self.sizes
        needed = {PS: found.ps_bytes, EVALUATOR: found.evaluator_bytes}.get(job, found.worker_bytes)
        return math.ceil(needed / MIB / 64) * 64

    def cores(self, job: str) -> float:
        """Returns the cores of a task.

        A ps has the cores that the steps keep busy, and a half for gRPC and checkpoints. A worker
        has one, and one for each GPU.
        """
        if job == PS:
            return math.ceil((self.sizes.ps_cores + 0.5) * 10) / 10
        return 1.0 + self.gpus_of(job)

    def values(self, engine: str) -> dict[str, object]:
        """Returns the values that the templates of all engines fill in."""
        found = self.sizes
        # Slurm gives every task of a group the same room, so the largest task counts. Workers with
        # GPUs are a group of their own.
        groups = {"first": [PS], "second": [WORKER]} if self.gpus else {"first": [PS, WORKER]}
        counts = {PS: self.ps, WORKER: self.workers}
        slurm: dict[str, object] = {}
        for group, jobs in groups.items():
            mib, cores = (max(map(of, jobs)) for of in (self.memory_mib, self.cores))
            slurm[f"{group}_tasks"] = sum(counts[job] for job in jobs)
            slurm[f"{group}_cores"] = math.ceil(cores)
            slurm[f"{group}_core_mib"] = math.ceil(mib / math.ceil(cores))
        return {
            "engine": engine,
            "name": self.name,
            "image": self.image,
            "ps": self.ps,
            "workers": self.workers,
            "evaluators": self.evaluators,
            "gpus": self.gpus,
            "elastic": self.elastic,
            "ps_mib": self.memory_mib(PS),
            "ps_cores": f"{self.cores(PS):g}",
            "steps_per_s": f"{found.steps_per_s:.3g}",
            "busiest": found.busiest,
            "storage_gib": max(1, math.ceil(found.run_bytes / 2**30)),
            "shared_mib": SHARED_BYTES // MIB,
            **slurm,
        }
