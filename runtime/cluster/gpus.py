"""The GPUs of a host: which of them a task sees, and its part of their memory.

The launcher, Ray and the resolver of Slurm divide by these rules.
"""

from collections.abc import Mapping

from runtime.errors import InvalidArgumentError

_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_MEMORY = {
    _FRACTION,
    # An older name. JAX refuses to start where both are set.
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
}
"""Variables by which a user divides the memory of a GPU."""
_MOST_ON_ONE = 18
"""Most tasks on one GPU.

CUDA's context of a task takes about 0.4 GB beside the task's fraction, and a tenth of 80 GB is left.
"""


def divide_memory(tasks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of each task on a GPU; none for one task, or if the user divides its memory.

    Args:
        tasks: Tasks on the GPU.
        environ: Environment of the tasks.

    Raises:
        InvalidArgumentError: The memory is not enough for so many tasks.
    """
    # JAX would take three quarters for each task.
    if tasks < 2 or not _MEMORY.isdisjoint(environ):
        return {}
    if tasks > _MOST_ON_ONE:
        raise InvalidArgumentError(
            f"{tasks} training tasks on one GPU, whose memory is enough for {_MOST_ON_ONE}: start "
            f"fewer workers, or divide the memory by {_FRACTION}"
        )
    # Rounded down, so that the fractions add up to nine tenths at the most.
    return {_FRACTION: f"{900 // tasks / 1000:g}"}


def visible_gpus(visible: str | None, first: int, count: int, on_node: int) -> str:
    """Returns the new CUDA_VISIBLE_DEVICES for a task that may use `count` of the node's GPUs, from number `first` on.

    Args:
        visible: the value that Slurm has set, if any. A value with other than `on_node` names
            stays: Slurm has bound this task to its own GPUs.
        first: number of the task's first GPU on its node.
        count: GPUs of the task.
        on_node: GPUs of the step on the node.

    >>> visible_gpus("0,1,2,3", first=2, count=2, on_node=4)
    '2,3'
    """
    # Without a binding by Slurm a process sees all GPUs of the node.
    if visible is None:
        return ",".join(map(str, range(first, first + count)))
    names = visible.split(",")
    return ",".join(names[first : first + count]) if len(names) == on_node else visible
