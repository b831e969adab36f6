"""The GPUs of this host, divided among the tasks of one launcher.

The GPUs are counted without JAX, which would take memory of each. Training tasks come first, and an
evaluator has a GPU only if one is left. Where training tasks are more than GPUs, several share one
GPU, and each takes a fraction of its memory.
"""

import itertools
import math
import pathlib
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence

from harness.launch import times
from harness.launch.policy import EVALUATOR, TRAINERS, LaunchTask

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = {VISIBLE: "", "JAX_PLATFORMS": "cpu"}
"""Environment of a task that computes on the CPU."""
_FRACTION = "XLA_CLIENT_MEM_FRACTION"


def find_gpus(environ: Mapping[str, str], root: pathlib.Path = pathlib.Path("/")) -> list[str]:
    """Returns the GPUs that tasks may use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        environ: Environment of the launcher.
        root: Root of the file system.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and {"cuda", "gpu"}.isdisjoint(platforms.split(",")):
        return []
    visible = environ.get(VISIBLE)
    if visible is not None:
        # CUDA sees no device from the first invalid name on.
        is_name = re.compile(r"\s*(\d|GPU-|MIG-)").match
        return [name.strip() for name in itertools.takewhile(is_name, visible.split(","))]
    # A container without GPUs has the directory of its host, but no device.
    if (root / "dev/nvidiactl").exists():
        count = len([*root.glob("proc/driver/nvidia/gpus/*")])
    else:
        count = _ask_nvidia_smi()
    return [str(number) for number in range(count)]


def _ask_nvidia_smi() -> int:
    # Windows' Linux has neither file.
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=times.SMI_SECS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall("^GPU ", listed, re.MULTILINE))


def share_gpus(
    tasks: Collection[LaunchTask],
    environ: Mapping[str, str],
    found: Sequence[str],
    each: int | None = None,
) -> dict[LaunchTask, dict[str, str]]:
    """Returns the variables that give each training task and evaluator its GPUs.

    Args:
        tasks: Tasks of the launcher.
        environ: Environment of the launcher.
        found: GPUs that tasks may use.
        each: GPUs of each training task; by default all GPUs are divided.

    Raises:
        ValueError: There are too few GPUs.

    Examples:
        >>> share_gpus([LaunchTask("worker", 0), LaunchTask("worker", 1)], {}, ["4", "5"])[LaunchTask("worker", 1)]
        {'CUDA_VISIBLE_DEVICES': '5'}
    """
    trainers = [task for task in tasks if task.job in TRAINERS]
    evaluators = [task for task in tasks if task.job == EVALUATOR]
    if each is None:
        left = max(0, len(found) - len(trainers))
        each = (len(found) - min(left, len(evaluators))) // max(1, len(trainers))
    found = _check_enough(found, each, len(trainers), environ)
    if not trainers or not found:
        return {}
    names = iter(found) if each else itertools.cycle(found)
    counts = {**dict.fromkeys(trainers, each or 1), **dict.fromkeys(evaluators, min(each, 1))}
    shares = {task: ",".join(itertools.islice(names, count)) for task, count in counts.items()}
    assert all(shares[task] for task in trainers), "a task that trains has no GPU"
    memory = {} if each else _divide_memory(math.ceil(len(trainers) / len(found)), environ)
    return {task: {VISIBLE: own, **memory} if own else NO_GPU for task, own in shares.items()}


def _check_enough(
    found: Sequence[str], each: int, trainers: int, environ: Mapping[str, str]
) -> Sequence[str]:
    """Returns the GPUs that are divided."""
    needed = each * trainers
    # The GPUs of other makers are not found, and the user says that there are some.
    if not found and VISIBLE not in environ:
        return [str(number) for number in range(needed)]
    if needed > len(found):
        raise ValueError(
            f"--gpus_per_worker={each}: {trainers} training tasks need {needed} GPUs, and there "
            f"are {len(found)}{': ' * bool(found)}{','.join(found)}"
        )
    return found


def _divide_memory(tasks: int, environ: Mapping[str, str]) -> dict[str, str]:
    # The launcher starts without the runtime, which few hosts need here.
    from runtime.lowlevel import divide_memory

    return divide_memory(tasks, environ)


def describe_shares(shares: Mapping[LaunchTask, Mapping[str, str]]) -> str:
    """Returns a line with the GPUs of each task."""
    words = []
    for task, variables in shares.items():
        words.append(f"{task} has {variables[VISIBLE] or 'none'}")
        if _FRACTION in variables:
            words[-1] += f" ({float(variables[_FRACTION]):.0%} of its memory)"
    return f"GPUs of this host: {', '.join(words)}"
