"""This project's trainer of the MLP as `ours.py`, with the options that trade freshness or precision for time."""

import itertools
import json
import sys
from dataclasses import dataclass

import jax
import numpy as np
import optax

import harness
import runtime as rt
from benchmarks.systems.protocol import BATCH, INPUTS, batches, initial, measure
from models.mnist.model import MODELS


@dataclass(frozen=True)
class Options:
    """What differs from the default.

    Attributes:
        prefetch: as in `runtime.SessionConfig`.
        bfloat16_wire: parameters and gradients travel as bfloat16.
        accumulate: batches of 100 to each pull and push.
    """

    prefetch: int = 0
    bfloat16_wire: bool = False
    accumulate: int = 1


def main(job: str, index: int, cluster_json: str, hidden: int, options_json: str) -> None:
    """Serves as a ps, or measures as a worker."""
    cluster = json.loads(cluster_json)
    options = Options(**json.loads(options_json))
    jax.config.update("jax_platforms", "cpu")
    server = rt.Server(cluster, job, index)
    if job == "ps":
        server.join()
        return
    loss_fn = harness.accumulated(MODELS["mlp"].loss_fn, options.accumulate)
    with rt.device(rt.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        global_step = rt.Variable(0, dtype=np.int64, name="global_step", trainable=False)
        params = rt.variables(initial(hidden), name="mlp")
        x = rt.placeholder(np.float32, [None, INPUTS], name="x")
        y = rt.placeholder(np.int32, [None], name="y")
        pulled = harness.on_wire(params) if options.bfloat16_wire else params
        loss = rt.call(loss_fn, pulled, x, y, name="loss")
        train_op = harness.Optimizer(optax.sgd(0.1)).minimize(loss, global_step=global_step)
        initialise = rt.global_variables_initializer()
        waiting = rt.report_uninitialized_variables()
    config = rt.SessionConfig(
        device_filters=("/job:ps", f"/job:worker/task:{index}"),
        start_timeout_secs=60.0,
        prefetch=options.prefetch,
    )
    session = rt.Session(server.target, config=config)
    if index == 0:
        session.run(initialise)
    while len(session.run(waiting)):
        pass
    fetches = [train_op, loss, global_step]
    if options.accumulate == 1:
        measure(lambda images, labels: session.run(fetches, {x: images, y: labels}), seed=index)
    else:
        large = _larger(options.accumulate, seed=index)
        measure(lambda *_: session.run(fetches, dict(zip((x, y), next(large), strict=True))), seed=index)
    session.close()
    server.stop()


def _larger(times: int, seed: int) -> "itertools.cycle[tuple[np.ndarray, np.ndarray]]":
    """Batches of ``times`` times 100 examples."""
    made = batches(seed)
    wide = []
    for i in range(0, len(made), times):
        images = np.concatenate([part for part, _ in made[i : i + times]])
        wide.append((images, np.concatenate([part for _, part in made[i : i + times]])))
    assert wide[0][0].shape == (times * BATCH, INPUTS)
    return itertools.cycle(wide)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
