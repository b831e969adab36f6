"""This project's table on one ps: a step of the worker pulls rows, or pushes gradients for row-wise Adagrad."""

import json
import sys
from typing import Any

import numpy as np
import optax

import harness
import runtime as rt
from benchmarks.systems.protocol import DIM, ROWS, id_batches, measure


def main(job: str, index: int, cluster_json: str, options_json: str) -> None:
    """Serves as a ps, or measures as a worker."""
    cluster = json.loads(cluster_json)
    server = rt.Server(cluster, job, index)
    if job == "ps":
        server.join()
        return
    with rt.device(rt.replica_device_setter(cluster=cluster, worker_device="/job:worker/task:0")):
        table = rt.Table("table", rows=ROWS, dim=DIM)
        ids = rt.placeholder(np.int64, [None])
        gradients = rt.placeholder(np.float32, [None, DIM])
        rows = table.lookup(ids)
        optimizer = harness.Optimizer(optax.sgd(0.1), tables=harness.rowwise_adagrad(0.1))
        pairs: list[Any] = [(table.make_gradient({rows: gradients}), table)]
        push = optimizer.apply_gradients(pairs)
    session = rt.Session(server.target)
    session.run(rt.global_variables_initializer())
    steps = {
        "pull": lambda i, g: session.run(rows, {ids: i}),
        "push": lambda i, g: session.run(push, {ids: i, gradients: g}),
    }
    measure(steps[json.loads(options_json)["kind"]], seed=0, data=id_batches())
    session.close()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[5])
