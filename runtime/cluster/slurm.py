"""The Slurm resolver: the cluster of a job step, from the variables that srun sets.

The ranks of a step fill the jobs in the order of their names: with {"ps": 1, "worker": 3} rank 0 is
the parameter server. Ranks must lie in blocks on the nodes (srun's default when there are fewer
nodes than tasks).

In a heterogeneous job (SLURM_HET_SIZE) the ranks of a step over all its groups go group by group,
while SLURM_STEP_NODELIST is in the order of names: there the variables of each group tell who is
where.
"""

import itertools
import math
import os
import re
from collections.abc import Mapping

from runtime.cluster.gpus import divide_memory, visible_gpus
from runtime.cluster.resolvers import ClusterResolver
from runtime.cluster.spec import ClusterSpec
from runtime.retired import explains_arguments


class SlurmClusterResolver(ClusterResolver):
    """The cluster of the Slurm step of this process.

    Args:
        jobs: number of tasks of each job; by default {"worker": all tasks of the step}.
        port_base: port of the first task on a node; its next task has the next port, and so on.

    Raises:
        RuntimeError: not in a Slurm step, or it has fewer tasks than asked for.
    """

    @explains_arguments
    def __init__(self, jobs: Mapping[str, int] | None = None, port_base: int = 8888) -> None:
        """Makes the resolver; see the class."""
        # Slurm numbers the tasks of a step from 0 and calls the number PROCID.
        rank = int(_read_slurm("PROCID"))
        jobs = {"worker": int(_read_slurm("STEP_NUM_TASKS"))} if jobs is None else jobs
        groups = _node_groups()
        places = _rank_places(groups)
        if sum(jobs.values()) > len(places):
            raise RuntimeError(
                f"the jobs {dict(jobs)} need {sum(jobs.values())} tasks, this Slurm step has "
                f"{len(places)}: "
                "raise srun --ntasks"
            )
        # All tasks must assign ranks alike, so jobs go by name and not by the order of the
        # argument.
        order = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
        tasks = {
            task: f"{node}:{port_base + local}"
            for task, (node, local) in zip(order, places, strict=False)
        }
        self._cluster_spec = ClusterSpec(
            {job: [tasks[job, i] for i in range(jobs[job])] for job in sorted(jobs)}
        )
        self._own_task = order[rank] if rank < len(order) else (None, None)
        # A step with --distribution=cyclic has other ranks on each node, and every address would be
        # wrong.
        if (
            rank < len(places)
            and os.environ.get("SLURMD_NODENAME", places[rank][0]) != places[rank][0]
        ):
            raise RuntimeError(
                f"rank {rank} runs on {os.environ['SLURMD_NODENAME']}, not on {places[rank][0]}: "
                "the ranks must lie in blocks on the nodes, use srun --distribution=block"
            )
        # A ps computes on the CPU, and other groups have GPUs of their own.
        ranks = [
            other
            for other, (job, _) in enumerate(order)
            if job != "ps" and _group_of(groups, other) == _group_of(groups, rank)
        ]
        self._sharing: tuple[int, int] | None = None
        if rank in ranks:
            nodes = [places[other][0] for other in ranks]
            own = nodes[ranks.index(rank)]
            self._sharing = nodes[: ranks.index(rank)].count(own), max(map(nodes.count, nodes))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster of the step, and gives this task its share of the node's GPUs.

        CUDA_VISIBLE_DEVICES has the GPUs of the task. XLA_CLIENT_MEM_FRACTION has its part of the
        memory where tasks are more than GPUs.

        Raises:
            InvalidArgumentError: The memory of a GPU is not enough for so many tasks.
        """
        on_node = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
        if on_node and self._sharing is not None:
            number, tasks = self._sharing
            # All tasks have equally many GPUs. GPUs that are left over stay unused.
            each = max(1, on_node // tasks)
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(
                os.environ.get("CUDA_VISIBLE_DEVICES"), number * each % on_node, each, on_node
            )
            os.environ |= divide_memory(math.ceil(tasks / on_node), os.environ)
        return self._cluster_spec

    def _task(self) -> tuple[str | None, int | None]:
        return self._own_task


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands a Slurm node list.

    >>> expand_hostlist("n[1-2],m5,o[03-04,6]")
    ['n1', 'n2', 'm5', 'o03', 'o04', 'o6']
    """
    return [
        "".join(parts)
        for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hostlist)
        for parts in itertools.product(
            *map(_expand_range, re.findall(r"\[[^\]]*\]|[^\[]+", pattern))
        )
    ]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands Slurm's task counts.

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        # Slurm writes runs of equal counts short: 2(x3) is 2,2,2.
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise RuntimeError(f"SLURM_STEP_TASKS_PER_NODE: cannot read {tasks_per_node!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_range(part: str) -> list[str]:
    """Expands "[08-10,12]"; anything without brackets is itself."""
    if not part.startswith("["):
        return [part]
    names = []
    for piece in part[1:-1].split(","):
        first, _, last = piece.partition("-")
        # Leading zeros belong to the name: [08-10] is 08, 09, 10.
        names += [
            f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)
        ]
    return names


def _node_groups() -> list[dict[str, int]]:
    """Returns the number of tasks on each node, in the order of ranks, for each group; most jobs are one group."""
    size = int(os.environ.get("SLURM_HET_SIZE", 1))
    if size > 1:
        groups = [
            _tasks_by_node(f"JOB_NODELIST_HET_GROUP_{group}", f"TASKS_PER_NODE_HET_GROUP_{group}")
            for group in range(size)
        ]
        # A step may run on one group alone. Then the sum differs, and the variables of the step are
        # right.
        if sum(sum(nodes.values()) for nodes in groups) == int(_read_slurm("STEP_NUM_TASKS")):
            return groups
    return [_tasks_by_node("STEP_NODELIST", "STEP_TASKS_PER_NODE")]


def _tasks_by_node(nodelist: str, tasks_per_node: str) -> dict[str, int]:
    """Returns the number of tasks on each node, from the Slurm variables of these names."""
    hosts, counts = (
        expand_hostlist(_read_slurm(nodelist)),
        expand_tasks_per_node(_read_slurm(tasks_per_node)),
    )
    if len(counts) != len(hosts):
        raise RuntimeError(
            f"SLURM_{tasks_per_node} has {len(counts)} nodes, SLURM_{nodelist} {len(hosts)}"
        )
    return dict(zip(hosts, counts, strict=True))


def _rank_places(groups: list[dict[str, int]]) -> list[tuple[str, int]]:
    """Returns the node, and the number on the node, of each rank; a node may be in several groups."""
    places: list[tuple[str, int]] = []
    used: dict[str, int] = {}
    for nodes in groups:
        for node, count in nodes.items():
            # Two groups may share a node. Ports and GPUs of the second group follow those of the
            # first.
            first = used.get(node, 0)
            places += [(node, first + local) for local in range(count)]
            used[node] = first + count
    assert len({*places}) == len(places), "two ranks have one place"
    return places


def _group_of(groups: list[dict[str, int]], rank: int) -> int:
    """Returns the number of the group of a rank; the last group for a rank beyond all groups."""
    ends = itertools.accumulate(sum(nodes.values()) for nodes in groups)
    return next((group for group, end in enumerate(ends) if rank < end), len(groups) - 1)


def _read_slurm(name: str) -> str:
    value = os.environ.get(f"SLURM_{name}")
    if value is None:
        raise RuntimeError(
            f"SLURM_{name} is not set: not inside a Slurm step? Start this program with srun"
        )
    return value
