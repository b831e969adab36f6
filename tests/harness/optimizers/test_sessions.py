"""Synchronous training under the sessions that people use, over two ps, with what they see of it in TensorBoard."""

import pathlib
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from tests.harness.optimizers.kit import alone, serving, start, steps
from tests.harness.optimizers.task import STEPS, batches
from tests.kit.waits import until

pytestmark = pytest.mark.chaos

TAG = "sync_replicas/dropped_gradients"


@pytest.mark.parametrize("monitored", [False, True], ids=["Supervisor", "MonitoredTrainingSession"])
def test_replicas_equal_one_process(tmp_path: pathlib.Path, monitored: bool) -> None:
    """Synchronous training under either session gives the model of one process."""
    with serving(2, 2) as (spec, _):
        options = {
            "cluster": spec,
            "needed": 2,
            "total": 2,
            "steps": STEPS,
            "logdir": str(tmp_path),
            "save_secs": 60,
        }
        workers = [start("worker", i, {**options, "monitored": monitored}) for i in range(2)]
        try:
            last, _ = [worker.hear("END")[1] for worker in workers]
            for worker in workers:
                assert steps(worker) == [(k + 1, True) for k in range(STEPS)]
            for mine, wanted in zip(last["values"], alone("sgd", *batches(2)), strict=True):
                np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
        finally:
            for worker in workers:
                worker.close()


@pytest.mark.parametrize("monitored", [False, True], ids=["Supervisor", "MonitoredTrainingSession"])
def test_tensorboard_shows_dropped_gradients(tmp_path: pathlib.Path, monitored: bool) -> None:
    """TensorBoard shows a growing count of dropped gradients."""
    with serving(2, 2) as (spec, _):
        options = {
            "cluster": spec,
            "needed": 1,
            "total": 2,
            "steps": 10**9,
            "logdir": str(tmp_path),
            "save_secs": 60,
        }
        options |= {"monitored": monitored, "summary_secs": 0.3}
        workers = [start("worker", i, options) for i in range(2)]
        try:
            until(lambda: any(value > 0 for value in _curve(tmp_path)))
            values = _curve(tmp_path)
            assert values == sorted(values)  # it counts
            until(lambda: any(not counted for worker in workers for _, counted in steps(worker)))
        finally:
            for worker in workers:
                worker.close()


def _curve(logdir: pathlib.Path) -> list[float]:
    if not list(logdir.glob("*tfevents*")):
        return []
    events: Any = EventAccumulator(str(logdir), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    if TAG in events.Tags()["scalars"]:
        return [event.value for event in events.Scalars(TAG)]
    if TAG in events.Tags()["tensors"]:
        return [
            float(tensor_util.make_ndarray(event.tensor_proto)) for event in events.Tensors(TAG)
        ]
    return []
