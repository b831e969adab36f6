"""This project's own asynchronous trainer of the MLP, as in `models/mnist/trainer.py` without its services."""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

import harness
import runtime as rt
from benchmarks.systems.protocol import CLASSES, INPUTS, initial, measure
from models.mnist import model


@dataclass(frozen=True)
class Training:
    """The graph of one worker: what to feed, what to fetch in every step, and how to begin."""

    x: rt.Tensor
    y: rt.Tensor
    fetches: list[Any]
    initialise: rt.Operation
    waiting: rt.Tensor


def build(cluster: dict[str, list[str]], index: int, hidden: int) -> Training:
    """Adds the training step of worker ``index`` to the default graph."""
    with rt.device(
        rt.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")
    ):
        global_step = rt.Variable(0, dtype=np.int64, name="global_step", trainable=False)
        params = rt.variables(initial(hidden), name="mlp")
        x = rt.placeholder(np.float32, [None, INPUTS], name="x")
        y = rt.placeholder(np.int32, [None], name="y")
        travelling = harness.on_wire(params) if os.environ.get("BENCH_BFLOAT16") else params
        loss = rt.call(model.loss_fn, travelling, x, y, name="loss")
        train_op = harness.Optimizer(optax.sgd(0.1)).minimize(loss, global_step=global_step)
        initialise = rt.global_variables_initializer()
        waiting = rt.report_uninitialized_variables()
    return Training(x, y, [train_op, loss, global_step], initialise, waiting)


def main(job: str, index: int, cluster_json: str, hidden: int, options_json: str) -> None:
    """Serves as a ps, or measures as a worker."""
    cluster = json.loads(cluster_json)
    options = json.loads(options_json)
    backups = json.loads(os.environ.get("BENCH_BACKUPS", "{}")) if job == "ps" else {}
    server = rt.Server(cluster, job, index, **backups)
    if job == "ps":
        server.join()
        return
    training = build(cluster, index, hidden)
    filters = ("/job:ps", f"/job:worker/task:{index}")
    config = rt.SessionConfig(device_filters=filters, start_timeout_secs=60.0, **options)
    session = rt.Session(server.target, config=config)
    if index == 0:
        session.run(training.initialise)
    while len(session.run(training.waiting)):
        pass
    measure(
        lambda images, labels: session.run(
            training.fetches, {training.x: images, training.y: labels}
        ),
        seed=index,
    )
    session.close()
    server.stop()


if __name__ == "__main__":
    assert CLASSES == 10
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
