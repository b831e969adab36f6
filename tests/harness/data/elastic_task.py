"""One task of a training run in which every example counts itself; workers come and go.

It says what it does.
"""

from __future__ import annotations

import os
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

import harness
import runtime as rt
from harness import exit_codes

Spec = dict[str, dict[int, str]]


def loss_fn(counts: Any, ballast: Any, examples: Any) -> Any:
    """Its gradient is -1 for each of the examples, and 0 for the ballast that other ps hold."""
    return -jnp.sum(counts[examples]) + 0.0 * jnp.sum(ballast)


class Counting:
    """The graph of one worker: with SGD and a rate of 1 each training of an example adds 1 to its count.

    Synchronous steps apply the mean of several workers' gradients, so a count is less than 1 then,
    and it is the counts of gradients that are exact.

    Args:
        server: the worker's server.
        options: ``examples``, ``batch``, ``epochs``, ``sync``, ``lease_secs``, ``pause`` (seconds
            after the first steps), ``hurry`` (the file whose appearance ends the pauses).
    """

    def __init__(self, server: rt.Server, options: dict[str, Any]) -> None:
        here = f"/job:worker/task:{server.task.index}"
        self.graph = rt.Graph()
        setter = rt.replica_device_setter(cluster=server.cluster, worker_device=here)
        with self.graph.as_default(), rt.device(setter):
            self.step = harness.get_or_create_global_step()
            # on the next ps, where there are two
            ballast = rt.Variable(np.zeros(4, np.float32), name="ballast")
            with rt.device(self.step.device):
                self.counts = rt.Variable(np.zeros(options["examples"], np.float32), name="counts")
            self.examples = rt.placeholder(np.int32, [None])
            loss = rt.call(loss_fn, self.counts, ballast, self.examples)
            self.shards = harness.DataShards(
                options["examples"],
                options["batch"],
                epochs=options["epochs"],
                block_batches=options.get("block", 4),
                slots=options.get("slots", 64),
                lease_secs=options.get("lease_secs", 3.0),
            )
            self.optimizer: Any = self.shards.counted(harness.Optimizer(optax.sgd(1.0)))
            if options["sync"]:
                self.optimizer = harness.SyncReplicas(self.optimizer, elastic=True)
            self.train = self.optimizer.minimize(loss, self.step)

    def fetches(self) -> list[Any]:
        """The training operation, whether it counted, and the step."""
        return [self.train, getattr(self.optimizer, "accepted", self.step), self.step]


def run(job: str, index: int, options: dict[str, Any], pipe: Any) -> None:
    """Serves, or trains to the end of the data; says STEP (step, batch, counted), and END with the counts."""
    logging.set_verbosity(logging.INFO)
    server = rt.Server(options["cluster"], job, index)
    if job == "ps":
        pipe.send(("SERVING",))
        server.join()
        return
    model = Counting(server, options)
    try:
        with model.graph.as_default(), harness.preemptible(20):
            train(server, model, index, options, pipe)
    except rt.OpError as error:
        exit_codes.leave(exit_codes.of_error(error), str(error))


def train(
    server: rt.Server, model: Counting, index: int, options: dict[str, Any], pipe: Any
) -> None:
    """Trains under a Supervisor."""
    supervisor = harness.Supervisor(
        is_chief=index == 0,
        logdir=options.get("logdir"),
        global_step=model.step,
        save_model_secs=options.get("save_secs", 600),
        save_summaries_secs=0,
        stop_grace_secs=options.get("stop_grace_secs", 60),
    )
    pause = options.get("pause", 0.0)
    with (
        supervisor.managed_session(server.target) as session,
        model.shards.open(session) as batches,
    ):
        pipe.send(("JOINED", os.getpid()))
        for batch in batches:
            feeds = {model.examples: batch.examples.astype(np.int32), **batch.feed}
            _, counted, step = session.run(model.fetches(), feeds)
            pipe.send(("STEP", (int(step), batch.number, bool(counted))))
            # The pauses grow towards the end of the data: no machine is so slow that a test meets
            # it by chance.
            left = (
                max(options["examples"] // options["batch"] - int(step), 1)
                / options["examples"]
                * options["batch"]
            )
            resumes = time.monotonic() + pause / left**2
            while time.monotonic() < resumes and not os.path.exists(options.get("hurry", "")):
                if supervisor.coord.wait_for_stop(min(pause, 0.1)):
                    break
        if index == 0:
            end = {"step": int(session.run(model.step)), "counts": session.run(model.counts)}
            if options["sync"]:
                end["accepted"] = int(session.run(model.optimizer.accepted_gradients))
            pipe.send(("END", end))
