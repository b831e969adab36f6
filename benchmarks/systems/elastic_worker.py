"""The tasks of ``benchmarks.elastic`` and ``benchmarks.scale``: light steps of workers that come and go.

    python -m benchmarks.systems.elastic_worker ps|worker INDEX CLUSTER-AS-JSON sync|async

A worker writes the time (``time.monotonic()``, in seconds) of each step to its standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, Self

from benchmarks.common import ROOT
from harness.launch.ports import free_ports

WIDTH = 1000


class Worker:
    """A worker's process, and when it has made its steps."""

    def __init__(self, command: list[str]) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._changed = threading.Condition()
        self._ended = False
        self._steps: list[float] = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                if line.strip() == "READY":
                    self.ready.set()
                else:
                    self._steps.append(float(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def goes_on(self, steps: int = 5) -> None:
        """Waits until it has made some more steps; raises RuntimeError when it ends."""
        with self._changed:
            goal = len(self._steps) + steps
            self._changed.wait_for(lambda: len(self._steps) >= goal or self._ended)
            if len(self._steps) < goal:
                raise RuntimeError("a worker has ended (BENCH_STDERR=1 shows why)")

    def steps(self, start: float, end: float) -> int:
        """How many steps it has made in a time."""
        with self._changed:
            return sum(start <= at <= end for at in self._steps)

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time without a step of it, seconds."""
        with self._changed:
            times = [start, *(at for at in self._steps if start < at < end), end]
        return max(after - before for before, after in zip(times, times[1:], strict=False))

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Waits for its end; gives its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


class Run:
    """ps tasks that know of nobody, and the workers of one run."""

    def __init__(self, ps: int, sync: bool) -> None:
        self.ps = {str(i): f"127.0.0.1:{port}" for i, port in enumerate(free_ports(ps))}
        self._mode = "sync" if sync else "async"
        self.servers = [self._start("ps", i, {"ps": {str(i): self.ps[str(i)]}}) for i in range(ps)]
        self.workers: list[Worker] = []
        for server in self.servers:
            server.ready.wait()

    def _start(self, job: str, index: int, cluster: dict[str, Any]) -> Worker:
        here = [sys.executable, "-m", "benchmarks.systems.elastic_worker"]
        return Worker([*here, job, str(index), json.dumps(cluster), self._mode])

    def worker(self, index: int) -> Worker:
        """Another worker."""
        own = {str(index): f"127.0.0.1:{free_ports(1)[0]}"}
        self.workers.append(self._start("worker", index, {"ps": self.ps, "worker": own}))
        return self.workers[-1]

    def __enter__(self) -> Self:
        """Gives the run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes."""
        for worker in (*self.workers, *self.servers):
            worker.close()


def main(job: str, index: int, cluster: dict[str, dict[str, str]], mode: str) -> None:
    """Serves, or trains until it is told to stop."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import harness
    import runtime as rt

    spec = {name: {int(i): host for i, host in tasks.items()} for name, tasks in cluster.items()}
    server = rt.Server(spec, job, index)
    if job == "ps":
        print("READY", flush=True)
        server.join()
        return
    with rt.device(rt.replica_device_setter(cluster=server.cluster, worker_device=f"/job:worker/task:{index}")):
        step = harness.get_or_create_global_step()
        weights = rt.variables({"w": np.zeros(WIDTH, np.float32), "v": np.zeros(WIDTH, np.float32)}, name="model")
        examples = rt.placeholder(np.int32, [None])
        loss = rt.call(lambda p, i: jnp.mean((p["w"][i] + p["v"][i] - 1) ** 2), weights, examples)
        shards = harness.DataShards(WIDTH, 10, epochs=None, lease_secs=2.0)
        optimizer: Any = shards.counted(harness.Optimizer(optax.sgd(0.1)))
        if mode == "sync":
            optimizer = harness.SyncReplicas(optimizer, elastic=True)
        train = optimizer.minimize(loss, step)
    supervisor = harness.Supervisor(is_chief=index == 0, global_step=step, save_summaries_secs=0)
    with (
        harness.preemptible(20),
        supervisor.managed_session(server.target) as session,
        shards.open(session) as batches,
    ):
        for batch in batches:
            session.run(train, {examples: batch.examples.astype(np.int32), **batch.feed})
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
