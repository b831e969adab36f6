"""Synchronous training under a Supervisor or a monitored session: a lost ps costs time, not exactness."""

import pathlib

import numpy as np
import pytest

from tests.harness.optimizers.kit import alone, free_addresses, start
from tests.harness.optimizers.task import STEPS, batches

pytestmark = pytest.mark.chaos

GATE, GOAL = 200, 300
"""The step at which workers wait for the death, and the last one."""


@pytest.mark.parametrize(
    ("lost", "monitored", "rule"),
    [
        (0, False, "slow"),
        (1, False, "slow"),
        (0, True, "slow"),
        (1, True, "slow"),
        (0, False, "clip"),
        (1, False, "clip"),
    ],
)
def test_lost_ps_leaves_the_model_exact(
    tmp_path: pathlib.Path, lost: int, monitored: bool, rule: str
) -> None:
    """A ps that is killed and started again leaves the trained model exact."""
    ports = free_addresses(4)
    cluster = {"ps": ports[:2], "worker": ports[2:]}
    options = {
        "cluster": cluster,
        "needed": 2,
        "total": 2,
        "steps": GOAL,
        "gate": GATE,
        "rule": rule,
    }
    options |= {"logdir": str(tmp_path), "save_secs": 0.3, "monitored": monitored}
    processes = [start("ps", 0, options), start("ps", 1, options)]
    workers = [start("worker", i, options) for i in range(2)]
    try:
        for worker in workers:
            worker.wait_for(lambda said: len(said) > 30)
        processes[lost].kill()
        for worker in workers:
            worker.tell("go")
        processes.append(start("ps", lost, options))
        last, _ = [worker.hear("END")[1] for worker in workers]
        x, y = batches(2)
        order = [k % STEPS for k in range(GOAL)]
        for mine, wanted in zip(last["values"], alone(rule, x[order], y[order]), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
    finally:
        for process in [*workers, *processes]:
            process.close()
