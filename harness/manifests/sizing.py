"""How much memory and how many cores the tasks of a job need: the formulas of docs/memory.md and docs/scaling.md.

Pure functions. Sizes are in bytes, times in seconds, rates in bytes per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 2**20
PROCESS_BYTES = 740 * MIB
"""A process with its compiled programs: of the ps of docs/memory.md, which holds 128 variables."""
HEADROOM = 7 / 6
"""A container's limit over what the formula gives (docs/memory.md)."""
NETWORK_EFFICIENCY = 0.94
PS_STEP_SECS = 93e-6
PS_BYTE_SECS = 0.42e-9
"""Processor time of a ps for a worker's step: for its calls, and for each byte of variables there (docs/scaling.md)."""
ROUND_TRIP_SECS = 100e-6
KEPT_CHECKPOINTS = 5 + 1 + 1
"""In a run directory: those that the trainer keeps, the one that is being written, and the best one."""


@dataclass(frozen=True)
class Workload:
    """What is to be trained, and on what.

    Attributes:
        ps: how many ps; variables are spread evenly over them.
        workers: how many tasks train.
        model_bytes: all variables that are trained.
        slots: bytes of optimizer slots for each byte of these: 0 for SGD, 1 for momentum, 2 for Adam.
        compute_secs: of a worker's step alone, forward and backward.
        network_bytes_per_s: of every host's card, each way, nominally.
        activation_bytes: what a worker's step needs beside parameters and gradients, and its data.

    Raises:
        ValueError: a number is out of range.
    """

    ps: int
    workers: int
    model_bytes: float
    slots: float = 2.0
    compute_secs: float = 0.1
    network_bytes_per_s: float = 10e9 / 8
    activation_bytes: float = 1024 * MIB

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.ps < 1 or self.workers < 1:
            raise ValueError("a job has one ps and one worker at least")
        sizes = self.model_bytes, self.slots, self.compute_secs, self.activation_bytes
        if not all(math.isfinite(size) and size >= 0 for size in sizes) or not self.network_bytes_per_s > 0:
            raise ValueError("sizes and times are not negative, and a network has a rate above 0")


@dataclass(frozen=True)
class Sizes:
    """What the tasks need.

    Attributes:
        ps_bytes: memory of each ps: training, and a checkpoint being written.
        worker_bytes: memory of each worker.
        ps_cores: that the workers' steps keep busy on each ps, 0 to 1: a ps serves on one.
        steps_per_s: of all workers together, by the busiest place.
        busiest: "workers", "ps network" or "ps core".
        run_bytes: of the run directory.
    """

    ps_bytes: int
    worker_bytes: int
    ps_cores: float
    steps_per_s: float
    busiest: str
    run_bytes: int


def sizes(job: Workload) -> Sizes:
    """What a job needs.

    A ps: ``B + P + S + (W + 1) P`` while ``W`` workers train and ``P + S`` more while a checkpoint is written, and a
    sixth above that. A worker: ``2 P`` of the whole model beside its process and activations. Steps: as many as the
    workers make if none ever waits, and no more than the busiest place of a ps takes.
    """
    there = job.model_bytes / job.ps
    held = there * (1 + job.slots)
    ps_bytes = PROCESS_BYTES + held + (job.workers + 1) * there + held
    worker_bytes = PROCESS_BYTES + 2 * job.model_bytes + job.activation_bytes
    rate = job.network_bytes_per_s * NETWORK_EFFICIENCY
    network, core = there / rate, PS_STEP_SECS + PS_BYTE_SECS * there
    around = job.compute_secs + 2 * network + core + 2 * (job.model_bytes - there) / rate + 2 * ROUND_TRIP_SECS
    limits = {"workers": job.workers / around, "ps network": 1 / network if network else math.inf, "ps core": 1 / core}
    busiest = min(limits, key=lambda place: limits[place])
    steps = limits[busiest]
    return Sizes(
        math.ceil(ps_bytes * HEADROOM),
        math.ceil(worker_bytes * HEADROOM),
        min(1.0, steps * core),
        steps,
        busiest,
        math.ceil(KEPT_CHECKPOINTS * job.model_bytes * (1 + job.slots)),
    )
