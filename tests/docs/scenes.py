"""What is there before the first code block of a page: a model in a cluster, under the names that the pages use."""

import contextlib
import os
import pathlib
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import harness
import runtime as rt
from tests.docs.blocks import Block

BATCH = np.random.default_rng(0).normal(size=(8, 784)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32)


def _init(key: object, x: object) -> dict[str, Any]:
    """Parameters as Flax linen nests them: 784 -> 4 -> 10."""
    layers = {"Dense_0": (784, 4), "Dense_1": (4, 10)}
    return {
        n: {"kernel": np.full(s, 0.01, np.float32), "bias": np.zeros(s[1], np.float32)}
        for n, s in layers.items()
    }


def _apply(params: Any, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def _loss_fn(params: Any, x: jax.Array, y: jax.Array | int = 3) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        _apply(params, x), jnp.broadcast_to(y, x.shape[:1])
    ).mean()


class Scene:
    """A cluster of 1 ps and 2 workers in this process, and a model of which worker 0 has made the graph."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self.cluster = self._open.enter_context(rt.local_cluster(ps=1, workers=2))
        self._open.enter_context(self.cluster.device())
        self.names: dict[str, Any] = {
            "__name__": "page",
            **{"rt": rt, "harness": harness, "jax": jax, "jnp": jnp, "np": np, "optax": optax},
            "model": types.SimpleNamespace(init=_init, apply=_apply),
            "init_params": lambda key: _init(key, None),
            "key": jax.random.key(0),
            "loss_fn": _loss_fn,
            "accuracy_fn": lambda params, x, y: (_apply(params, x).argmax(-1) == y).mean(),
            "schedule": optax.cosine_decay_schedule(1e-3, 100),
            "batch": BATCH,
            "task_index": 0,
            "feature_config": types.SimpleNamespace(
                name="words", vocabulary_size=100, embedding_dim=8
            ),
            "target": self.cluster.target,
            "me": harness.Member(
                self.cluster.cluster, "worker", 0, self.cluster.servers["worker", 0]
            ),
        }
        self.graph()

    def graph(self) -> None:
        """Makes the graph that the page talks about."""
        n = self.names
        self.inputs()
        n["params"] = rt.variables(_init(None, None), name="net")
        n["loss"] = rt.call(_loss_fn, n["params"], n["x"])
        n["accuracy"] = rt.call(n["accuracy_fn"], n["params"], n["images"], n["labels"])

    def inputs(self) -> None:
        """Makes a graph without a model."""
        n = self.names
        rt.reset_default_graph()
        n["graph"] = rt.get_default_graph()
        n["global_step"] = harness.get_or_create_global_step()
        n["x"] = n["images"] = rt.placeholder(jnp.float32, [None, 784], name="x")
        n["y"] = n["labels"] = rt.placeholder(jnp.int32, [None], name="y")
        n["feeds"] = {n["x"]: BATCH}

    def train_op(self) -> None:
        """Adds an optimizer with moving averages, and a session in which all has its first value."""
        ema = harness.ExponentialMovingAverage(0.999)
        optimizer = harness.Optimizer(ema.after(optax.adam(1e-3)))
        self.names["train_op"] = optimizer.minimize(
            self.names["loss"], global_step=self.names["global_step"]
        )
        self.session()

    def session(self) -> None:
        """A session, in which every variable that has none gets its first value."""
        if "session" not in self.names:
            session = rt.Session(self.cluster.target)
            self._open.callback(session.close)
            self.names["session"] = self.names["sess"] = session
        self.names["session"].run(rt.global_variables_initializer())

    def as_here(self, code: str) -> str:
        """The code with addresses and paths of this machine."""
        return code.replace("ps0:2222", self.cluster.cluster.task_address("ps", 0)).replace(
            "/tmp/run", "run"
        )

    def before(self, block: Block) -> None:
        """Called before each block."""

    def after(self, block: Block) -> None:
        """Called after each block."""

    def close(self) -> None:
        """Ends the cluster."""
        self._open.close()


class Checkpoints(Scene):
    """A run whose global step is 1200."""

    def graph(self) -> None:
        super().graph()
        n = self.names
        n["part_0"], n["part_1"] = (
            rt.Variable(np.ones((2, 3), np.float32), name=f"table/{i}") for i in range(2)
        )
        rt.Variable(np.zeros((784, 4), np.float32), name="mlp/dense/kernel")
        self.train_op()
        n["session"].run(rt.assign(n["global_step"], 1200))
        n["kernel"] = n["params"]["Dense_0"]["kernel"]
        n["pipeline"] = types.SimpleNamespace(
            get_state=lambda: {"position": 7}, set_state=lambda state: None
        )
        theirs = {"params": {"dense": {"kernel": np.full((784, 4), 7, np.float32)}}}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(os.path.abspath("their/checkpoint"), theirs)

    def after(self, block: Block) -> None:
        if "their/checkpoint" in block.code:
            np.testing.assert_array_equal(self.names["session"].run(self.names["kernel"]), 7)


class Training(Scene):
    """Training that is stopped after a few steps, as its loop has no end of its own."""

    def graph(self) -> None:
        super().graph()
        n = self.names
        n["server"] = self.cluster.servers["worker", 0]
        # what feeds a loop that feeds nothing, and ends it
        examples = rt.FIFOQueue(20, [jnp.float32], [[8, 784]])
        n["x"] = examples.dequeue()
        loss = rt.call(_loss_fn, n["params"], n["x"])
        n["train_op"] = harness.Optimizer(optax.sgd(0.1)).minimize(
            loss, global_step=n["global_step"]
        )
        n["evaluate"] = lambda session: session.run(
            n["accuracy"], {n["images"]: BATCH, n["labels"]: LABELS}
        )
        with rt.Session(self.cluster.target) as session:
            many = rt.placeholder(jnp.float32, [None, 8, 784])
            session.run(examples.enqueue_many(many), {many: np.stack([BATCH] * 20)})
            session.run(examples.close())

    def after(self, block: Block) -> None:
        if "managed_session" in block.code:
            assert harness.load_variable("run", "global_step") == 20


class Evaluation(Scene):
    """A run that has finished and left its checkpoints."""

    def graph(self) -> None:
        super().graph()
        n = self.names
        n |= {"test_images": BATCH, "test_labels": LABELS}
        train_op = harness.Optimizer(optax.sgd(0.1)).minimize(
            n["loss"], global_step=n["global_step"]
        )
        supervisor = harness.Supervisor(
            is_chief=True, logdir="run", global_step=n["global_step"], summary_op=None
        )
        with supervisor.managed_session(self.cluster.target) as session:
            for _ in range(5):
                session.run(train_op, n["feeds"])
        with rt.device(None):  # the evaluator's variables are its own
            super().graph()

    def after(self, block: Block) -> None:
        if "Evaluator(" in block.code:
            assert harness.latest_checkpoint("run/eval/best")


class Optimizers(Scene):
    """A model, which the page makes anew."""

    def before(self, block: Block) -> None:
        if "params = " in block.code:
            self.inputs()
            self.names.pop("session", None)
        if "session" in block.code:
            self.session()
            supervisor = harness.Supervisor(is_chief=True, logdir="run", summary_op=None)
            self.names["supervisor"] = supervisor
            self.names["session"] = supervisor.prepare_or_wait_for_session(self.cluster.target)
            self._open.callback(supervisor.stop)

    def after(self, block: Block) -> None:
        n = self.names
        if "params = " in block.code:
            n["loss"] = rt.call(_loss_fn, n["params"], n["x"])
        elif "train_op = " in block.code:
            self.session()
            step = n["session"].run(n["global_step"])
            n["session"].run(n["train_op"], n["feeds"])
            assert n["session"].run(n["global_step"]) == step + 1


class Monitoring(Scene):
    """A model with a training operation and a session."""

    def graph(self) -> None:
        super().graph()
        self.names["step"] = 1
        self.names["writer"] = self._open.enter_context(harness.FileWriter("traces"))
        self.names |= {"is_chief": True, "options": types.SimpleNamespace(train_steps=2000)}
        self.train_op()

    def after(self, block: Block) -> None:
        if "figures.jsonl" in block.code:
            self.names["supervisor"].summary_writer.add_scalars({"loss": 1.0}, 1)
            assert pathlib.Path("figures.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


class Design(Scene):
    """A worker of a cluster whose ps is served here."""

    def graph(self) -> None:
        self.names |= {"images": BATCH, "labels": LABELS}

    def as_here(self, code: str) -> str:
        free = rt.local_cluster(ps=1, workers=2)
        free.stop()
        for name, task in zip(
            ("ps0:2222", "w0:2222", "w1:2222"), free.cluster.tasks(), strict=True
        ):
            code = code.replace(name, free.cluster.task_address(task.job, task.index))
        self._ps = self._open.enter_context(rt.Server(free.cluster, "ps", 0))
        return super().as_here(code)

    def before(self, block: Block) -> None:
        self._stopper = threading.Thread(target=self._stop_after_some_steps)
        self._stopper.start()

    def _stop_after_some_steps(self) -> None:
        while self.names.get("step", 0) < 5:
            self._open_wait.wait(0.05)
        self.names["sv"].request_stop()

    _open_wait = threading.Event()

    def after(self, block: Block) -> None:
        self._stopper.join()
        self.names["server"].stop()


SCENES: dict[str, type[Scene]] = {
    "checkpoints.md": Checkpoints,
    "checkpoint_files.md": Checkpoints,
    "supervisor.md": Training,
    "evaluator.md": Evaluation,
    "optimizers.md": Optimizers,
    "monitoring.md": Monitoring,
    "architecture.md": Design,
}
"""Of the pages that need more than the model."""
