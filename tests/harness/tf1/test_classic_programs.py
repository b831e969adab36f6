"""Programs of the kinds that TensorFlow 1's users wrote: no launcher, nothing told about the runtime, exit codes 0."""

import os
import re
from typing import Any

import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import programs
from tests.runtime.kit import addresses

pytestmark = pytest.mark.chaos


def _run(name: str, *flags: str) -> tuple[str, list[str]]:
    """Runs a ps and two workers; gives what each said. All must end by themselves, with code 0."""
    hosts = [f"--{job}_hosts={','.join(at)}" for job, at in addresses(ps=1, worker=2).items()]
    with programs() as start:
        ps = start(name, *hosts, *flags, "--job_name=ps", "--task_index=0")
        workers = [
            start(name, *hosts, *flags, "--job_name=worker", f"--task_index={i}") for i in range(2)
        ]
        said = [worker.result(120) for worker in workers]
        return ps.result(60), said


def test_classic_supervisor_program_trains(tmp_path: Any) -> None:
    """A classic program with a float step trains under a Supervisor, and its ps ends in join."""
    ps, workers = _run("float_step", f"--log_dir={tmp_path}")
    assert "accuracy" not in ps and "Traceback" not in ps
    for i, said in enumerate(workers):
        accuracy, step = re.search(r"accuracy ([\d.]+) step (\d+)", said).groups()
        assert float(accuracy) > 0.85 and int(step) >= 30 and "done" in said.splitlines(), said
        assert any(name.startswith("events.out") for name in os.listdir(tmp_path / f"worker{i}"))
    newest = tf.train.latest_checkpoint(str(tmp_path))
    assert newest is not None and os.path.basename(newest) == "60", "two workers made 30 steps each"


def test_classic_synchronous_program_trains() -> None:
    """A classic synchronous program with an early hook trains."""
    _, workers = _run("sync_replica")
    for said in workers:
        target, step = re.search(r"target ([-\d.]+) step (\d+)", said).groups()
        assert abs(float(target) - 1) < 0.05 and int(step) >= 40, said


def test_ps_waits_for_shared_queue() -> None:
    """A ps that waits for a shared queue ends with its workers."""
    ps, workers = _run("done_queue")
    assert "done [0, 1]" in ps and all("told" in said for said in workers)
