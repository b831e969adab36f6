"""The ps of `benchmarks.step_budget`: serves as any other, and tells on standard input's word how long its calls took.

Words: `begin` forgets what was measured, `tell` prints {"pull_us", "push_us"}, the medians, `alone`
prints {"apply_us"}: the compiled update called again and again with the last gradients.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

import runtime as rt
from runtime.task.worker import Worker
from runtime.tensor_spec import aligned_buffer
from runtime.wire.connection import Reply


class Stopwatch:
    """Stands between the tensor channel and a task, and times its calls."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._call = worker.call
        self.pull_ns: list[int] = []
        self.push_ns: list[int] = []
        self._last: tuple[int, list[Any]] | None = None
        worker.call = self.call  # type: ignore[method-assign]

    def call(self, handle: int, client: int, step: int, inputs: list[Any]) -> Reply:
        """Answers a call and notes how long that took."""
        began = time.perf_counter_ns()
        reply = self._call(handle, client, step, inputs)
        elapsed = time.perf_counter_ns() - began
        if inputs:
            self.push_ns.append(elapsed)
            self._last = handle, inputs
        else:
            self.pull_ns.append(elapsed)
        return reply

    def begin(self) -> None:
        """Forgets what was measured."""
        self.pull_ns.clear()
        self.push_ns.clear()

    def tell(self) -> dict[str, float]:
        """Median times of both kinds of calls."""
        return {
            "pull_us": statistics.median(self.pull_ns) / 1e3,
            "push_us": statistics.median(self.push_ns) / 1e3,
        }

    def alone(self, times: int = 300) -> dict[str, float]:
        """Median time of the compiled update alone, its inputs warm."""
        assert self._last is not None
        handle, inputs = self._last
        held = [_aligned(value) for value in inputs]
        prepared = self._worker.registry.get(handle).prepared
        found = []
        for _ in range(times):
            began = time.perf_counter_ns()
            _, done = prepared.run(held, 0)
            prepared.wait(done)
            found.append(time.perf_counter_ns() - began)
        return {"apply_us": statistics.median(found) / 1e3}


def _aligned(value: Any) -> Any:
    memory = aligned_buffer(value.nbytes).view(value.dtype).reshape(value.shape)
    memory[...] = np.zeros_like(value)
    return memory


def main(cluster_json: str) -> None:
    """Serves until standard input ends."""
    with rt.Server(json.loads(cluster_json), "ps", 0) as server:
        watch = Stopwatch(server.worker)
        words = {"tell": watch.tell, "alone": watch.alone}
        for line in sys.stdin:
            word = line.strip()
            if word == "begin":
                watch.begin()
            else:
                print(json.dumps(words[word]()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
