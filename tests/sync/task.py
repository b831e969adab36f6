"""One task of a small synchronous training job; run as a program by tests, told what to do in JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import optax

import harness
import runtime as rt

ROWS, FEATURES, OUTPUTS = 4, 5, 3
STEPS = 50
RULES = {"sgd": lambda: optax.sgd(0.1), "adam": lambda: optax.adam(0.01)}


def batches(workers: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [steps, workers, rows, features] and targets, the same in every process."""
    random = np.random.RandomState(7)
    shape = (steps, workers, ROWS)
    return random.randn(*shape, FEATURES).astype(np.float32), random.randn(*shape, OUTPUTS).astype(np.float32)


def initial() -> tuple[np.ndarray, np.ndarray]:
    """The initial values of the two variables."""
    return np.full((FEATURES, OUTPUTS), 0.1, np.float32), np.zeros(OUTPUTS, np.float32)


def loss_fn(w: Any, b: Any, x: Any, y: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((x @ w + b - y) ** 2)


class Model:
    """The graph of one worker.

    Args:
        server: the worker's server.
        rule: name of the update rule.
        wrap: makes the optimizer synchronous, or what is tested.
    """

    def __init__(self, server: rt.Server, rule: str, wrap: Callable[[harness.Optimizer], Any]) -> None:
        self.graph = rt.Graph()
        here = f"/job:worker/task:{server.task.index}"
        setter = rt.replica_device_setter(cluster=server.cluster, worker_device=here)
        with self.graph.as_default(), rt.device(setter):
            self.step = harness.get_or_create_global_step()
            w, b = initial()
            self.variables = [rt.Variable(w, name="w"), rt.Variable(b, name="b")]
            self.x = rt.placeholder(np.float32, [None, FEATURES])
            self.y = rt.placeholder(np.float32, [None, OUTPUTS])
            self.loss = rt.call(loss_fn, *self.variables, self.x, self.y)
            self.optimizer = wrap(harness.Optimizer(RULES[rule]()))
            self.train = self.optimizer.minimize(self.loss, self.step)
            self.init = rt.global_variables_initializer()
            self.missing = rt.report_uninitialized_variables()

    def fetches(self) -> list[Any]:
        """What a training step fetches; the last two are whether the gradients counted, and the step afterwards."""
        return [self.train, getattr(self.optimizer, "accepted", self.step), self.step]


class Replica(Model):
    """The graph of one worker, and its session.

    Args:
        server: the worker's server.
        rule: name of the update rule.
        wrap: makes the optimizer synchronous, or what is tested.
        chief: whether it initialises, and runs what a chief runs.
    """

    def __init__(self, server: rt.Server, rule: str, wrap: Callable[[harness.Optimizer], Any], chief: bool) -> None:
        super().__init__(server, rule, wrap)
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=30)
        self.session = rt.Session(server.target, self.graph, config)
        self.coord = harness.Coordinator()
        self.threads: list[threading.Thread] = []
        if chief:
            if len(self.session.run(self.missing)):
                self.session.run(self.init)
            if hasattr(self.optimizer, "get_chief_queue_runner"):
                runner = self.optimizer.get_chief_queue_runner()
                self.threads = runner.create_threads(self.session, self.coord, daemon=True, start=True)
        while len(self.session.run(self.missing)):
            self.coord.wait_for_stop(0.05)

    def run(self, x: np.ndarray, y: np.ndarray) -> tuple[int, bool]:
        """One training step; gives the step afterwards, and whether the gradients counted."""
        _, counted, step = self.session.run(self.fetches(), {self.x: x, self.y: y})
        return int(step), bool(counted)

    def close(self) -> None:
        """Ends the runner and the session."""
        self.coord.request_stop()
        self.coord.join(self.threads, stop_grace_period_secs=10)
        self.session.close()


def main(job: str, index: int, options: dict[str, Any]) -> None:
    """Serves, or trains until told otherwise; prints one line of JSON for each step."""
    server = rt.Server(options["cluster"], job, index)
    if job == "ps":
        print("ready", flush=True)
        server.join()
        return
    workers = options["total"]

    def wrap(optimizer: harness.Optimizer) -> Any:
        return harness.SyncReplicas(optimizer, options["needed"], workers, sync_timeout_secs=options.get("timeout"))

    x, y = batches(workers)
    if "logdir" in options:
        supervised(Model(server, options.get("rule", "sgd"), wrap), index, options, x, y)
        return
    replica = Replica(server, options.get("rule", "sgd"), wrap, chief=index == 0)
    step = int(replica.session.run(replica.step))
    while step < options["steps"]:
        step, counted = replica.run(x[step % STEPS, index], y[step % STEPS, index])
        print(json.dumps([step, counted]), flush=True)
    dropped = int(replica.session.run(replica.optimizer.dropped_gradients))
    print(json.dumps({"step": step, "dropped": dropped}), flush=True)
    replica.close()


def supervised(model: Model, index: int, options: dict[str, Any], x: np.ndarray, y: np.ndarray) -> None:
    """Trains under a Supervisor, which recovers; prints the variables at the end."""
    with model.graph.as_default():
        supervisor = harness.Supervisor(
            is_chief=index == 0,
            logdir=options["logdir"],
            global_step=model.step,
            save_model_secs=options["save_secs"],
            summary_op=None,
        )
        target = f"grpc://{options['cluster']['worker'][index]}"
        with supervisor.managed_session(target) as session:
            step = int(session.run(model.step))
            while step < options["steps"]:
                feeds = {model.x: x[step % STEPS, index], model.y: y[step % STEPS, index]}
                _, counted, after = session.run(model.fetches(), feeds)
                step = int(after)
                print(json.dumps([step, bool(counted)]), flush=True)
            print(json.dumps({"step": step, "values": [v.tolist() for v in session.run(model.variables)]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
