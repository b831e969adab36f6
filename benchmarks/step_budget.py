"""Where the time of one asynchronous step goes, beside what physics asks for each part. 1 ps, 1 worker, one host.

    python -m benchmarks.step_budget --hidden=100

Columns, microseconds, medians: `step` as it is in training, `floor` the same part alone and warm,
of which no part of this project can be faster: bytes over a bare socket of the same kind, the
compiled programs called again and again. Turns with the clocks alternate with turns without; the
last line says how far the sum of the parts of the one is from the step of the other.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from absl import app, flags

import runtime as rt
from benchmarks.common import ROOT
from benchmarks.systems.ours import Training, build
from benchmarks.systems.protocol import batches, initial
from runtime.tensor_spec import aligned_buffer
from tests.kit.ports import free_ports

_HIDDEN = flags.DEFINE_integer("hidden", 100, "Width of the hidden layer, in units.", lower_bound=1)
_TURNS = flags.DEFINE_integer(
    "turns", 20, "Turns with the clocks, and as many without.", lower_bound=1
)
_SECONDS = flags.DEFINE_float("seconds", 0.25, "Length of a turn, in seconds.", lower_bound=0.1)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")

_ECHO = """
import socket, sys
sock, size = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
window = memoryview(bytearray(size))
while True:
    have = 0
    while have < size:
        count = sock.recv_into(window[have:])
        if not count:
            sys.exit()
        have += count
    sock.sendall(b"1234")
"""


@dataclass(frozen=True)
class Part:
    """One part of a step, microseconds."""

    name: str
    step_us: float
    floor_us: float
    floor: str


def socket_us(nbytes: int, seconds: float) -> float:
    """Median microseconds in which ``nbytes`` cross a bare Unix socket to another process and 4 bytes come back."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 << 10)
        command = [sys.executable, "-c", _ECHO, str(theirs.fileno()), str(nbytes)]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            data = bytes(nbytes)

            def call() -> None:
                ours.sendall(data)
                if len(ours.recv(4, socket.MSG_WAITALL)) < 4:
                    raise RuntimeError(f"the echo process ended with {process.wait()}")

            found = median_us(call, seconds)
            ours.shutdown(socket.SHUT_RDWR)
        return found


def median_us(call: Callable[[], Any], seconds: float) -> float:
    """Median microseconds of a call."""
    for _ in range(5):
        call()
    times: list[int] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e3


class Budget:
    """One ps process, and the worker in this process."""

    def __init__(self, hidden: int) -> None:
        ports = free_ports(2)
        cluster = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
        self._ps = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.systems.budget_ps", json.dumps(cluster)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self._server = rt.Server(cluster, "worker", 0)
        self._training: Training = build(cluster, 0, hidden)
        self._session = rt.Session(
            self._server.target, config=rt.SessionConfig(start_timeout_secs=60.0)
        )
        self._session.run(self._training.initialise)
        self._data = batches(0)
        self._stage = self._watch_stage()

    def _watch_stage(self) -> list[Any]:
        """Keeps what the worker's stage is called with, to call it alone later."""
        worker = self._server.worker
        kept: list[Any] = []
        execute = worker.execute

        def watched(registered: Any, session: int, step: int, inline: Any, *rest: Any) -> Any:
            if not kept and len(inline) > 2:
                kept.append((registered, list(inline)))
            return execute(registered, session, step, inline, *rest)

        worker.execute = watched  # type: ignore[method-assign, assignment]
        self.steps(1)
        worker.execute = execute  # type: ignore[method-assign]
        return kept

    def step(self, i: int) -> None:
        """Trains on the next batch."""
        images, labels = self._data[i % len(self._data)]
        self._session.run(
            self._training.fetches, {self._training.x: images, self._training.y: labels}
        )

    def steps(self, count: int) -> float:
        """Microseconds of each of so many steps, as training sees them."""
        began = time.perf_counter()
        for i in range(count):
            self.step(i)
        return (time.perf_counter() - began) / count * 1e6

    def clocked(self, count: int) -> dict[str, float]:
        """The same with a clock at every part: microseconds of each."""
        self._say("begin")
        before = self._server.worker.counters.values()
        run_ns = 0
        for i in range(count):
            began = time.perf_counter_ns()
            self.step(i)
            run_ns += time.perf_counter_ns() - began
        after = self._server.worker.counters.values()
        ps = self._ask("tell")
        parts = {
            name: (after[f"{name}_seconds_total"] - before[f"{name}_seconds_total"]) / count * 1e6
            for name in ("step", "pull", "compute", "push")
        }
        return {
            **parts,
            "run": run_ns / count / 1e3,
            "ps_pull": ps["pull_us"],
            "ps_push": ps["push_us"],
        }

    def alone(self, seconds: float) -> dict[str, float]:
        """Microseconds of the parts that can run alone: the two programs, and giving received bytes to XLA."""
        registered, inline = self._stage[0]
        held = [_aligned(value) for value in inline]

        def compute() -> None:
            _, done = registered.prepared.run(held)
            registered.prepared.wait(done)

        empty = jax.jit(lambda *arguments: np.int32(0), keep_unused=True).lower(*held).compile()

        def deserialise() -> None:
            jax.block_until_ready(empty(*held))

        return {
            "compute": median_us(compute, seconds),
            "deserialise": median_us(deserialise, seconds),
            "apply": self._ask("alone")["apply_us"],
        }

    def _say(self, word: str) -> None:
        assert self._ps.stdin is not None
        self._ps.stdin.write(word + "\n")
        self._ps.stdin.flush()

    def _ask(self, word: str) -> dict[str, float]:
        self._say(word)
        assert self._ps.stdout is not None
        answer: dict[str, float] = json.loads(self._ps.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends both tasks."""
        self._session.close()
        self._server.stop()
        with self._ps:
            self._ps.kill()


def _aligned(value: Any) -> Any:
    array = np.asarray(value)
    memory = aligned_buffer(array.nbytes).view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory


def measure(hidden: int, turns: int, seconds: float) -> tuple[list[Part], float]:
    """The parts of a step, and the step as it is without the clocks, microseconds."""
    budget = Budget(hidden)
    try:
        each = budget.steps(50)
        count = max(10, int(seconds * 1e6 / each))
        plain, clocked = [], []
        for _ in range(turns):
            plain.append(budget.steps(count))
            clocked.append(budget.clocked(count))
        alone = budget.alone(seconds)
    finally:
        budget.close()
    at = {name: statistics.median(turn[name] for turn in clocked) for name in clocked[0]}
    nbytes = sum(value.nbytes for value in initial(hidden).values())
    crossing, empty = socket_us(nbytes, seconds), socket_us(4, seconds)
    bare = f"{nbytes} bytes over a bare socket"
    deserialise, reply = min(alone["deserialise"], at["compute"]), empty / 2
    parts = [
        Part("client and master", at["run"] - at["pull"] - at["compute"] - at["push"], 0.0, ""),
        Part("pull: ps reads", at["ps_pull"], 0.0, "a reference is taken"),
        Part("pull: wire", at["pull"] - at["ps_pull"], crossing, bare),
        Part(
            "deserialise",
            deserialise,
            0.0,
            "an empty program is given the same arrays; XLA reads where they are",
        ),
        Part("compute", at["compute"] - deserialise, alone["compute"], "the compiled step alone"),
        Part("push: wire", at["push"] - at["ps_push"] - reply, crossing - reply, bare),
        Part("push: apply", at["ps_push"], alone["apply"], "the compiled update alone"),
        Part("push: reply", reply, reply, "4 bytes over a bare socket"),
    ]
    return parts, statistics.median(plain)


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")
    parts, step_us = measure(_HIDDEN.value, _TURNS.value, _SECONDS.value)
    total, floor = sum(p.step_us for p in parts), sum(p.floor_us for p in parts)
    if _JSON.value:
        print(
            json.dumps(
                {
                    "parts": [vars(p) for p in parts],
                    "sum_us": total,
                    "step_us": step_us,
                    "floor_us": floor,
                }
            )
        )
        return
    print(f"{'':20}{'step us':>10}{'floor us':>10}")
    for part in parts:
        print(f"{part.name:20}{part.step_us:10.0f}{part.floor_us:10.0f}  {part.floor}")
    print(f"{'sum':20}{total:10.0f}{floor:10.0f}")
    print(
        f"{'step':20}{step_us:10.0f}{'':12}the sum is {100 * (total / step_us - 1):+.1f} % from it"
    )


if __name__ == "__main__":
    app.run(main)
