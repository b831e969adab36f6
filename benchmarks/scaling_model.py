"""What parameter-server training costs at scale: a queueing model, and how many ps a model and its workers need.

A worker goes round: pull, compute, push, and again. Whatever workers share is a station with a
queue: the way out of a ps (pulls), the way into it (pushes) and its processor core. What a worker
has for itself is a delay: its own core, its own network card, the way there and back. Variables are
spread evenly over the ps and a worker talks to all of them at once, so the ps are alike and one of
each kind of station is enough. This is a closed queueing network with one class of customers, the
workers; mean value analysis (Reiser and Lavenberg, 1980; Seidmann's approximation where a station
has several servers) gives its throughput. Times are in seconds, sizes in bytes, rates in bytes or
steps per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NETWORK_EFFICIENCY = 0.94
"""Part of a link's nominal rate that payload gets: Ethernet, IP and TCP headers take the rest."""


@dataclass(frozen=True)
class Costs:
    """The resources that the runtime itself takes.

    Attributes:
        ps_step_secs: processor time of one ps for one worker's step, whatever its size: two calls
            answered.
        ps_byte_secs: further processor time of a ps for each byte of variables on it: send,
            receive, apply.
        worker_step_secs: processor time of a worker for each ps in a step.
        worker_byte_secs: further processor time of a worker for each byte of variables.
    """

    ps_step_secs: float
    ps_byte_secs: float
    worker_step_secs: float
    worker_byte_secs: float


MEASURED = Costs(93.2e-6, 0.421e-9, 50.6e-6, 0.269e-9)
"""Lines through processor times over TCP, of models of 0.3, 3 and 13 MB, on two cores, at version 0.1."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on which network.

    Attributes:
        model_bytes: all variables that a step pulls; as many bytes of gradients are pushed.
        workers: how many.
        compute_secs: of a worker's step alone, forward and backward.
        network_bytes_per_s: of every host's card, each way, after `NETWORK_EFFICIENCY`.
        round_trip_secs: of the network.
        ps_cores: cores that a ps can use for different workers at the same time.
    """

    model_bytes: float
    workers: int
    compute_secs: float
    network_bytes_per_s: float
    round_trip_secs: float = 100e-6
    ps_cores: int = 1


@dataclass(frozen=True)
class Forecast:
    """What the model says of a job.

    Attributes:
        ps: how many there are.
        steps_per_s: of all workers together.
        bytes_per_s: that each ps sends, and as many that it receives.
        utilisation: by station, the part of the time that it is busy, 0 to 1.
        alone_steps_per_s: what the workers would do if none ever waited for another.
    """

    ps: int
    steps_per_s: float
    bytes_per_s: float
    utilisation: Mapping[str, float]
    alone_steps_per_s: float

    @property
    def bottleneck(self) -> str:
        """The busiest station."""
        return max(self.utilisation, key=lambda name: self.utilisation[name])

    @property
    def efficiency(self) -> float:
        """The part of its time that a worker does not wait for other workers, 0 to 1."""
        return self.steps_per_s / self.alone_steps_per_s


def throughput(
    customers: int, delay: float, demands: Mapping[str, float], servers: Mapping[str, int]
) -> float:
    """Rounds per second of a closed queueing network, by mean value analysis.

    Args:
        customers: how many go round, 1 or more.
        delay: seconds of a round that nobody else is in the way of.
        demands: by station, seconds of service in a round.
        servers: by station, how many customers it serves at once; 1 where it is not named.

    Raises:
        ValueError: there is no customer, or a round takes no time.
    """
    if customers < 1:
        raise ValueError(f"{customers} customers: there must be one at least")
    if delay + sum(demands.values()) <= 0:
        raise ValueError("a round takes no time at all")
    queueing, fixed = {}, delay
    # Seidmann: a faster single server, and the rest of the service as a delay
    for name, demand in demands.items():
        queueing[name] = demand / servers.get(name, 1)
        fixed += demand - queueing[name]
    lengths = dict.fromkeys(queueing, 0.0)
    rate = 0.0
    for present in range(1, customers + 1):
        times = {name: demand * (1 + lengths[name]) for name, demand in queueing.items()}
        rate = present / (fixed + sum(times.values()))
        lengths = {name: rate * time for name, time in times.items()}
    return rate


def forecast(job: Job, ps: int, costs: Costs) -> Forecast:
    """What ``ps`` parameter servers and the job's workers do, each process on a host of its own.

    Raises:
        ValueError: there is no ps.
    """
    if ps < 1:
        raise ValueError(f"{ps} ps: there must be one at least")
    there = job.model_bytes / ps
    link = there / job.network_bytes_per_s
    demands = {
        "ps network out": link,
        "ps network in": link,
        "ps core": costs.ps_step_secs + costs.ps_byte_secs * there,
    }
    # A worker's own card passes all bytes while each ps passes its part: what takes longer than
    # that is a delay.
    own_link = 2 * (job.model_bytes / job.network_bytes_per_s - link)
    own_core = costs.worker_step_secs * ps + costs.worker_byte_secs * job.model_bytes
    delay = job.compute_secs + own_core + own_link + 2 * job.round_trip_secs
    servers = {"ps core": job.ps_cores}
    rate = throughput(job.workers, delay, demands, servers)
    return Forecast(
        ps,
        rate,
        rate * there,
        {name: rate * demand / servers.get(name, 1) for name, demand in demands.items()},
        job.workers / (delay + sum(demands.values())),
    )


def ps_needed(job: Job, costs: Costs, efficiency: float = 0.9, most: int = 1024) -> Forecast | None:
    """The fewest ps with which workers lose no more than ``1 - efficiency`` of their time to each other.

    Returns:
        The forecast with that many, or None when not even ``most`` are enough: then the workers'
        own cards or the calls of a step themselves are the limit.
    """
    for ps in range(1, most + 1):
        found = forecast(job, ps, costs)
        if found.efficiency >= efficiency:
            return found
    return None
