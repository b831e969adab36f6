"""The memory and the cores that the tasks of a job need: the formulas of docs/memory.md and docs/scaling.md.

Pure functions. Sizes are in bytes, times in seconds, rates in bytes per second.
"""

import math
from dataclasses import dataclass

MIB = 2**20
PROCESS_BYTES = 740 * MIB
"""A process with its compiled programs: of the ps of docs/memory.md, which holds 128 variables."""
CUDA_BYTES = 400 * MIB
"""What CUDA's libraries add to each process that finds them, on CPUs too: measured without a card."""
GPU_PROCESS_BYTES = 4 * 1024 * MIB
"""What a GPU adds to a process of a worker: CUDA's context, its libraries and pinned memory; estimated."""
SHARED_BYTES = 1024 * MIB
"""/dev/shm of a worker with GPUs, for NCCL and data loaders. A container has 64 MiB by default."""
HEADROOM = 7 / 6
"""The limit of a container, over the sum of the formula (docs/memory.md)."""
NETWORK_EFFICIENCY = 0.94
PS_STEP_SECS = 93e-6
PS_BYTE_SECS = 0.42e-9
"""Processor time of a ps for a worker's step: for its calls, and for each byte of variables there (docs/scaling.md)."""
ROUND_TRIP_SECS = 100e-6
KEPT_CHECKPOINTS = 5 + 1 + 1
"""In a run directory: those that the trainer keeps, the one that is being written, and the best one."""


@dataclass(frozen=True)
class JobWorkload:
    """The size of a training job, and of its hosts.

        job = Workload(ps=2, workers=8, model_bytes=400e6)

    Attributes:
        ps: Number of ps. Variables are spread evenly over them.
        workers: Number of tasks that train.
        model_bytes: Bytes of all trained variables.
        slots: Bytes of optimizer slots for each byte of variables: 0 for SGD, 1 for momentum, 2 for
            Adam.
        compute_secs: Seconds of a worker's forward and backward pass.
        network_bytes_per_s: Nominal rate of every host's network card, each way.
        activation_bytes: Bytes of a worker's step beside parameters and gradients, and of its data.
        gpus: GPUs of each worker.

    Raises:
        ValueError: A number is out of range.
    """

    ps: int
    workers: int
    model_bytes: float
    slots: float = 2.0
    compute_secs: float = 0.1
    network_bytes_per_s: float = 10e9 / 8
    activation_bytes: float = 1024 * MIB
    gpus: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.ps < 1 or self.workers < 1:
            raise ValueError("a job has one ps and one worker at least")
        sizes = self.model_bytes, self.slots, self.compute_secs, self.activation_bytes
        if (
            not all(math.isfinite(size) and size >= 0 for size in sizes)
            or not self.network_bytes_per_s > 0
        ):
            raise ValueError("sizes and times are not negative, and a network has a rate above 0")


@dataclass(frozen=True)
class JobSizes:
    """The memory, cores and rate of a job.

    Attributes:
        ps_bytes: Memory of each ps while it trains and writes a checkpoint.
        worker_bytes: Memory of each worker.
        evaluator_bytes: Memory of an evaluator: of a worker without GPUs.
        ps_cores: Cores that the workers' steps keep busy on each ps, 0 to 1. A ps serves on one
            core.
        steps_per_s: Steps of all workers together, as the busiest place permits.
        busiest: Busiest place: "workers", "ps network" or "ps core".
        run_bytes: Bytes of the run directory.
    """

    ps_bytes: int
    worker_bytes: int
    evaluator_bytes: int
    ps_cores: float
    steps_per_s: float
    busiest: str
    run_bytes: int


def sizes(job: JobWorkload) -> JobSizes:
    """Returns the memory, cores and rate of a job.

    A ps has ``B + P + S + (W + 1) P`` while ``W`` workers train, ``P + S`` more while a checkpoint
    is written, and a sixth above that. A worker has ``2 P`` of the whole model beside its process
    and activations, and ``2 P`` more to stage the copies of its GPUs. The steps are those of
    workers that never wait, bounded by the busiest place of a ps.
    """
    there = job.model_bytes / job.ps
    held = there * (1 + job.slots)
    process, gpu_bytes = PROCESS_BYTES, 0.0
    if job.gpus:
        process += CUDA_BYTES
        gpu_bytes = GPU_PROCESS_BYTES + 2 * job.model_bytes + SHARED_BYTES
    ps_bytes = process + held + (job.workers + 1) * there + held
    worker_bytes = process + 2 * job.model_bytes + job.activation_bytes
    rate = job.network_bytes_per_s * NETWORK_EFFICIENCY
    network, core = there / rate, PS_STEP_SECS + PS_BYTE_SECS * there
    # Pull and push cross the network once each, and each waits for a round trip.
    around = (
        job.compute_secs
        + 2 * network
        + core
        + 2 * (job.model_bytes - there) / rate
        + 2 * ROUND_TRIP_SECS
    )
    limits = {
        "workers": job.workers / around,
        "ps network": 1 / network if network else math.inf,
        "ps core": 1 / core,
    }
    busiest = min(limits, key=lambda place: limits[place])
    steps = limits[busiest]
    return JobSizes(
        math.ceil(ps_bytes * HEADROOM),
        math.ceil((worker_bytes + gpu_bytes) * HEADROOM),
        math.ceil(worker_bytes * HEADROOM),
        min(1.0, steps * core),
        steps,
        busiest,
        math.ceil(KEPT_CHECKPOINTS * job.model_bytes * (1 + job.slots)),
    )
