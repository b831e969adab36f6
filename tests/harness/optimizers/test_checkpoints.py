"""Checkpoints of synchronous training: whole steps only, on all ps."""

import os
import pathlib
import threading
from typing import Any

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from tests.harness.optimizers.kit import cluster, in_threads

pytestmark = pytest.mark.cluster

WORKERS = 3
STEPS = 400
SIZE = 1000


class _Worker:
    """Each step takes 1 from every element of both variables, which live on different ps."""

    def __init__(self, server: rt.Server, chief: bool) -> None:
        self.graph = rt.Graph()
        with self.graph.as_default():
            with rt.device("/job:ps/task:0"):
                self.step = harness.get_or_create_global_step()
                a = rt.Variable(np.zeros(SIZE, np.float32), name="a")
            with rt.device("/job:ps/task:1"):
                b = rt.Variable(np.zeros(SIZE, np.float32), name="b")
            with rt.device(f"/job:worker/task:{server.task.index}"):
                loss = rt.call(lambda a, b: a.sum() + b.sum(), a, b)
            self.optimizer = harness.SyncReplicas(
                harness.Optimizer(optax.sgd(1.0)), WORKERS, WORKERS
            )
            self.train = self.optimizer.minimize(loss, self.step)
            config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=60)
            self.session = rt.Session(server.target, self.graph, config)
            self.coord = harness.Coordinator()
            self.threads: list[threading.Thread] = []
            if chief:
                self.session.run(rt.global_variables_initializer())
                runner = self.optimizer.get_chief_queue_runner()
                self.threads = runner.create_threads(
                    self.session, self.coord, daemon=True, start=True
                )
                self.saver = harness.Saver(max_to_keep=None)

    def work(self) -> None:
        for _ in range(STEPS):
            self.session.run(self.train)

    def close(self) -> None:
        self.coord.request_stop()
        self.coord.join(self.threads, stop_grace_period_secs=10)
        self.session.close()


def test_every_checkpoint_holds_whole_steps(tmp_path: pathlib.Path) -> None:
    """Every checkpoint of synchronous training holds the values of one whole step on all ps."""
    with cluster(2, WORKERS) as spec:
        servers = [rt.Server(spec, "worker", i) for i in range(WORKERS)]
        try:
            workers = [_Worker(server, chief=i == 0) for i, server in enumerate(servers)]
            training = threading.Event()

            def save() -> list[Any]:
                paths = []
                while not training.is_set() or len(paths) < 2:
                    paths.append(
                        workers[0].saver.save(workers[0].session, tmp_path / "m", workers[0].step)
                    )
                return paths

            def work() -> None:
                try:
                    in_threads([w.work for w in workers])
                finally:
                    training.set()

            paths, _ = in_threads([save, work])
            in_threads([w.close for w in workers])
        finally:
            for server in servers:
                server.stop()
    for path in sorted(set(paths)):
        step = int(os.path.basename(path))
        for name in ("a", "b"):
            assert np.unique(harness.load_variable(path, name)).tolist() == [-step], (path, name)
    assert len(set(paths)) >= 3
