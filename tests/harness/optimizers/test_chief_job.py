"""Which number and part a worker has by its device, where the chief is a job of its own."""

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness.optimizers.sync_replicas import worker_of

JOBS = {"ps": ["p:1", "q:1"], "chief": ["c:1"], "worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("device", "by_device", "number", "leads"),
    [
        ("/job:chief/task:0", None, 2, True),
        ("/job:worker/task:1", 1, 1, False),
    ],
)
def test_chief_has_its_own_number(
    device: str, by_device: int | None, number: int, leads: bool
) -> None:
    """A chief in a job of its own counts as a worker with the last number, and leads."""
    with (
        rt.Graph().as_default() as graph,
        rt.device(rt.replica_device_setter(cluster=rt.ClusterSpec(JOBS), worker_device=device)),
    ):
        step = harness.get_or_create_global_step()
        weights = rt.Variable(np.ones(3, np.float32), name="weights")
        loss = rt.numpy.sum(weights * weights)
        optimizer = harness.SyncReplicas(harness.Optimizer(optax.sgd(0.1)), 3)
        gradients = optimizer.compute_gradients(loss)
        assert worker_of(gradients) == by_device
        optimizer.apply_gradients(gradients, global_step=step)
        attributes = [getattr(op.body, "attrs", {}) for op in graph.get_operations()]
        assert {of["worker"] for of in attributes if "worker" in of} == {number}
        (runner,) = graph.get_collection(rt.GraphKeys.QUEUE_RUNNERS)
        assert runner.leads == leads
