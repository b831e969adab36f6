"""Replicated training as it was written, ``import tensorflow as tf``: synchronous replicas, and towers in one graph."""

import pathlib
import re

import pytest

from tests.kit import processes
from tests.runtime.kit import addresses

pytestmark = pytest.mark.chaos

PROGRAMS = "tests/harness/tf1/programs"


def _command(name: str, ps: int, workers: int) -> tuple[str, ...]:
    hosts = [
        f"--{job}_hosts={','.join(at)}" for job, at in addresses(ps=ps, worker=workers).items()
    ]
    return ("python", "-m", "harness.tf1", f"{PROGRAMS}/{name}.py", *hosts)


def test_replicas_aggregate_their_gradients(tmp_path: pathlib.Path) -> None:
    """Replicas apply the mean of their gradients in every step."""
    command = (*_command("aggregated", ps=1, workers=2), f"--log_dir={tmp_path}")
    with processes.programs() as start:
        ps = start(*command, "--job_name=ps")
        workers = [start(*command, "--job_name=worker", f"--task_index={i}") for i in range(2)]
        said = [worker.result(150) for worker in workers]
        ps.result(60)
    for worker in said:
        step, place, wanted = re.search(
            r"step (\d+) place ([\d.]+) wanted ([\d.]+)", worker
        ).groups()
        assert int(step) == 12, worker
        assert float(place) == pytest.approx(float(wanted), abs=1e-4), (
            "every step is the mean of both gradients"
        )


def test_towers_of_one_graph_train() -> None:
    """Towers of one graph run on all workers."""
    command = _command("towers", ps=1, workers=3)
    with processes.programs() as start:
        others = [start(*command, "--job_name=ps")]
        others += [start(*command, "--job_name=worker", f"--task_index={i}") for i in (1, 2)]
        said = start(*command).result(150)
        for other in others:
            other.stop(30)
    ran = [
        f"/job:{job}/replica:0/task:{task}"
        for job, task in (("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2))
    ]
    assert f"ran on {ran}" in said, said
