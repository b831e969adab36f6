"""One task of a small synchronous training job, in a process of its own; it says each step to the test."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

import harness
import runtime as rt

ROWS, FEATURES, OUTPUTS = 4, 5, 3
STEPS = 50
RULES = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.01),
    # forgets nothing: a step too many still shows hundreds of steps later
    "slow": lambda: optax.sgd(0.005),
    # clip in every step
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "clip_momentum": lambda: optax.chain(
        optax.chain(optax.clip_by_global_norm(0.1), optax.add_decayed_weights(1e-3)),
        optax.sgd(0.1, momentum=0.9),
    ),
    "clip_adam": lambda: optax.chain(
        optax.clip_by_global_norm(0.6), optax.adam(optax.exponential_decay(0.01, 10, 0.9))
    ),
}


def batches(workers: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [steps, workers, rows, features] and targets, the same in every process."""
    random = np.random.RandomState(7)
    shape = (steps, workers, ROWS)
    return random.randn(*shape, FEATURES).astype(np.float32), random.randn(*shape, OUTPUTS).astype(
        np.float32
    )


def initial() -> tuple[np.ndarray, np.ndarray]:
    """The initial values of the two variables."""
    return np.full((FEATURES, OUTPUTS), 0.1, np.float32), np.zeros(OUTPUTS, np.float32)


def loss_fn(w: Any, b: Any, x: Any, y: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((x @ w + b - y) ** 2)


def loss_at(step: Any, w: Any, b: Any, x: Any, y: Any) -> Any:
    """The loss on the batch of a step; the batches repeat."""
    return loss_fn(w, b, x[step % STEPS], y[step % STEPS])


class Model:
    """The graph of one worker.

    Args:
        server: the worker's server.
        rule: name of the update rule.
        wrap: makes the optimizer synchronous, or what is tested.
        by_step: it is fed the batches of all steps and takes that of the step at which it reads the
            variables: what it computes is right whatever dies and is repeated meanwhile.
    """

    def __init__(
        self,
        server: rt.Server,
        rule: str,
        wrap: Callable[[harness.Optimizer], Any],
        by_step: bool = False,
    ) -> None:
        self.graph = rt.Graph()
        here = f"/job:worker/task:{server.task.index}"
        setter = rt.replica_device_setter(cluster=server.cluster, worker_device=here)
        with self.graph.as_default(), rt.device(setter):
            self.step = harness.get_or_create_global_step()
            w, b = initial()
            self.variables = [rt.Variable(w, name="w"), rt.Variable(b, name="b")]
            every = [None] if by_step else []
            self.x = rt.placeholder(np.float32, [*every, None, FEATURES])
            self.y = rt.placeholder(np.float32, [*every, None, OUTPUTS])
            if by_step:
                self.loss = rt.call(loss_at, self.step, *self.variables, self.x, self.y)
            else:
                self.loss = rt.call(loss_fn, *self.variables, self.x, self.y)
            self.optimizer = wrap(harness.Optimizer(RULES[rule]()))
            self.train = self.optimizer.minimize(self.loss, self.step)
            self.init = rt.global_variables_initializer()
            self.missing = rt.report_uninitialized_variables()

    def fetches(self) -> list[Any]:
        """What a training step fetches; the last two are whether the gradients counted, and the step afterwards."""
        return [self.train, getattr(self.optimizer, "accepted", self.step), self.step]


class Deadly:
    """A session for a chief's runner in which the process kills itself in the middle of a step.

    Args:
        session: the session.
        commits: the runner's operations that apply an aggregate, the leader's first.
        step: of which it dies.
        when: "gathered": the gradients are promised, and nothing is applied; "half": applied on one
            ps that does not lead; "committed": applied everywhere.
    """

    def __init__(self, session: rt.Session, commits: list[rt.Tensor], step: int, when: str) -> None:
        self.raw = session
        self._commits = commits
        self._step = step
        self._when = when

    def __getattr__(self, name: str) -> Any:
        """All else is the session's."""
        return getattr(self.raw, name)

    def run(self, fetches: Any, feed_dict: Any = None, **options: Any) -> Any:
        """Like the session's, but for one step's commit."""
        feeds = feed_dict or {}
        if fetches != self._commits or any(order[4] != self._step for order in feeds.values()):
            return self.raw.run(fetches, feeds, **options)
        if self._when == "half":
            self.raw.run(self._commits[1], feeds)
        elif self._when == "committed":
            self.raw.run(self._commits, feeds)
        os.kill(os.getpid(), signal.SIGKILL)


class Replica(Model):
    """The graph of one worker, and its session.

    Args:
        server: the worker's server.
        rule: name of the update rule.
        wrap: makes the optimizer synchronous, or what is tested.
        chief: whether it initialises, and runs what a chief runs.
        by_step: see ``Model``.
        dies: the step in which the chief kills itself, and when in it (see ``Deadly``).
    """

    def __init__(
        self,
        server: rt.Server,
        rule: str,
        wrap: Callable[[harness.Optimizer], Any],
        chief: bool,
        by_step: bool = False,
        dies: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(server, rule, wrap, by_step)
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=30)
        self.session = rt.Session(server.target, self.graph, config)
        self.coord = harness.Coordinator()
        self.threads: list[threading.Thread] = []
        if chief:
            if len(self.session.run(self.missing)):
                self.session.run(self.init)
            if hasattr(self.optimizer, "get_chief_queue_runner"):
                runner = self.optimizer.get_chief_queue_runner()
                session: Any = self.session
                if dies is not None:
                    session = Deadly(session, [task.commit for task in runner.tasks], *dies)
                self.threads = runner.create_threads(session, self.coord, daemon=True, start=True)
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


def run(job: str, index: int, options: dict[str, Any], pipe: Any) -> None:
    """Serves, or trains until told otherwise; says STEP with (step, counted) for each, and END with the values."""
    logging.set_verbosity(logging.INFO)
    server = rt.Server(options["cluster"], job, index)
    if job == "ps":
        pipe.send(("SERVING",))
        server.join()
        return
    workers = options["total"]

    def wrap(optimizer: harness.Optimizer) -> Any:
        return harness.SyncReplicas(
            optimizer, options["needed"], workers, sync_timeout_secs=options.get("timeout")
        )

    x, y = (everything[:, index] for everything in batches(workers))
    if "logdir" in options:
        under = monitored if options.get("monitored") else supervised
        model = Model(server, options.get("rule", "sgd"), wrap, by_step=True)
        with under(model, index, options) as session:
            step = int(session.run(model.step))
            gate = options.get("gate", options["steps"])
            while step < options["steps"]:
                if step >= gate:  # the test is to act before the end, however slow its machine is
                    pipe.recv()
                    gate = options["steps"]
                _, counted, after = session.run(model.fetches(), {model.x: x, model.y: y})
                pipe.send(("STEP", (int(after), bool(counted))))
                # Looked up anew at the end: a ps that died just now may have taken everybody back.
                values = (
                    session.run([model.step, *model.variables])
                    if after >= options["steps"]
                    else [after]
                )
                step = int(values[0])
            pipe.send(("END", {"step": step, "values": values[1:]}))
        return
    dies = options.get("dies")
    replica = Replica(
        server, options.get("rule", "sgd"), wrap, index == 0, True, tuple(dies) if dies else None
    )
    step = int(replica.session.run(replica.step))
    while step < options["steps"]:
        step, counted = replica.run(x, y)
        pipe.send(("STEP", (step, counted)))
    dropped = int(replica.session.run(replica.optimizer.dropped_gradients))
    pipe.send(
        (
            "END",
            {"step": step, "dropped": dropped, "values": replica.session.run(replica.variables)},
        )
    )
    replica.close()


@contextmanager
def supervised(model: Model, index: int, options: dict[str, Any]) -> Iterator[rt.Session]:
    """The session of a Supervisor, which recovers."""
    with model.graph.as_default():
        supervisor = harness.Supervisor(
            is_chief=index == 0,
            logdir=options["logdir"],
            global_step=model.step,
            save_model_secs=options["save_secs"],
            save_summaries_secs=options.get("summary_secs", 0),
        )
        with supervisor.managed_session(f"grpc://{options['cluster']['worker'][index]}") as session:
            yield session


@contextmanager
def monitored(
    model: Model, index: int, options: dict[str, Any]
) -> Iterator[harness.MonitoredSession]:
    """A MonitoredTrainingSession as a program of synchronous workers makes it."""
    with (
        model.graph.as_default(),
        harness.MonitoredTrainingSession(
            f"grpc://{options['cluster']['worker'][index]}",
            is_chief=index == 0,
            checkpoint_dir=options["logdir"],
            save_checkpoint_secs=options["save_secs"],
            save_summaries_secs=options.get("summary_secs"),
            save_summaries_steps=None,
        ) as session,
    ):
        yield session
