"""This project's synchronous trainer of the MLP: ps mode or collective mode."""

import contextlib
import json
import sys
from typing import Any

import jax
import numpy as np
import optax

import harness
import runtime as rt
from benchmarks.systems.protocol import INPUTS, initial, measure_steps
from models.mnist.model import MODELS


def main(job: str, index: int, cluster_json: str, hidden: int, mode: str) -> None:
    """Serves as a ps, or measures as a worker."""
    cluster = json.loads(cluster_json)
    jax.config.update("jax_platforms", "cpu")
    workers = len(cluster["worker"])
    if mode == "collective":
        with harness.join_group(cluster["worker"], index).member():
            train("", contextlib.nullcontext(), index, hidden, harness.CollectiveReplicas, alone=True)
        return
    server = rt.Server(cluster, job, index)
    if job == "ps":
        server.join()
        return
    scope = rt.device(rt.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}"))

    def wrap(optimizer: harness.Optimizer) -> harness.SyncReplicas:
        return harness.SyncReplicas(optimizer, workers)

    train(server.target, scope, index, hidden, wrap, alone=False)


def train(target: str, scope: Any, index: int, hidden: int, wrap: Any, *, alone: bool) -> None:
    """Builds the graph and measures."""
    with scope:
        global_step = harness.get_or_create_global_step()
        params = rt.variables(initial(hidden), name="mlp")
        x = rt.placeholder(np.float32, [None, INPUTS], name="x")
        y = rt.placeholder(np.int32, [None], name="y")
        loss = rt.call(MODELS["mlp"].loss_fn, params, x, y, name="loss")
        train_op = wrap(harness.Optimizer(optax.sgd(0.1))).minimize(loss, global_step=global_step)
    supervisor = harness.Supervisor(is_chief=alone or index == 0, logdir=None, global_step=global_step, summary_op=None)
    with supervisor.managed_session(target) as session:
        fetches = [train_op, loss, global_step]
        measure_steps(lambda images, labels: session.run(fetches, {x: images, y: labels})[2], seed=index)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
