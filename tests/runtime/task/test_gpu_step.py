"""The copies between the host and a GPU in a training step, on the GPUs of ``tests.kit.stand_in_gpus``."""

import sys
from typing import Any

import jax
import numpy as np
import pytest

import runtime as rt
from tests.runtime.kit import TARGET, servers

pytestmark = pytest.mark.skipif(
    "tests.kit.stand_in_gpus" not in sys.modules, reason="needs GPUs: make test-stand-ins"
)
VARIABLES = 6
SIZE = 40_000
"""Elements of a variable."""


class Training:
    """A model of variables on two ps, which trains on the GPU of a worker."""

    def __init__(self, cluster: dict[str, rt.Server], prefetch: int) -> None:
        self.expected = [np.full(SIZE, i, np.float32) for i in range(VARIABLES)]
        setter = rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
        with rt.device(setter):
            weights = [rt.Variable(v, name=f"w{i}") for i, v in enumerate(self.expected)]
            self.x = rt.placeholder(np.float32, [SIZE], name="x")
            self.factor = rt.placeholder(np.int64, [], name="factor")

            def loss_fn(key: jax.Array, x: jax.Array, factor: jax.Array, *w: jax.Array) -> Any:
                loss = sum(((a - x * factor.astype(np.float32)) ** 2).sum() for a in w)
                return loss + 0 * jax.random.uniform(key)

            self.loss = rt.call(
                loss_fn, rt.random_key(), self.x, self.factor, *weights, name="loss"
            )
            gradients = rt.gradients(self.loss, weights)
            updates = [w.assign_sub(0.25 * g).op for w, g in zip(weights, gradients, strict=True)]
        self.fetches = [rt.group(*updates, name="train"), self.loss]
        self.weights = weights
        self.session = rt.Session(
            cluster[TARGET].target, config=rt.SessionConfig(prefetch=prefetch)
        )
        self.session.run(rt.global_variables_initializer())

    def step(self, x: Any, factor: int = 1) -> None:
        self.session.run(self.fetches, {self.x: x, self.factor: factor})


def test_copies_of_a_step_are_counted() -> None:
    """A warm step copies each parameter, each feed and its id in, and each gradient and its loss out."""
    from tests.kit.stand_in_gpus import COPIES

    with servers(sockets=True, ps=2, worker=1) as cluster:
        training = Training(cluster, prefetch=0)
        batch = np.ones(SIZE, np.float32)
        for _ in range(3):
            COPIES.clear()
            training.step(batch)
        assert (COPIES["in"], COPIES["out"]) == (VARIABLES + 2 + 1, VARIABLES + 1)
        training.session.close()
