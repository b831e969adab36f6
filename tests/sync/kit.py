"""A cluster of real processes for synchronous training; workers may be threads of the test."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import runtime as rt
from harness.launch.ports import free_ports
from runtime.master.config import SessionConfig
from tests.sync.task import RULES, initial, loss_fn

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Process:
    """One task in a process of its own; its lines are collected, and those of its log."""

    def __init__(self, job: str, index: int, options: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.log: list[str] = []
        self._new = threading.Condition()
        self.popen = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "sync" / "task.py"), job, str(index), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        pairs = [(self.popen.stdout, self.lines), (self.popen.stderr, self.log)]
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                with self._new:
                    lines.append(line.strip())
                    self._new.notify_all()
        with self._new:
            lines.append("")
            self._new.notify_all()

    def wait_for(self, what: Callable[[list[str]], bool], secs: float = 100.0) -> None:
        """Waits until its lines are as wanted; fails when they never are."""
        self._wait_for(self.lines, what, secs)

    def wait_for_log(self, text: str, secs: float = 100.0) -> None:
        """Waits until its log has a line with ``text``."""
        self._wait_for(self.log, lambda log: any(text in line for line in log), secs)

    def _wait_for(self, lines: list[str], what: Callable[[list[str]], bool], secs: float) -> None:
        with self._new:
            self._new.wait_for(lambda: what(lines) or lines[-1:] == [""], secs)
            assert what(lines), (self.lines[-3:], self.log[-5:])

    def steps(self) -> list[tuple[int, bool]]:
        """(step, counted) of each line so far."""
        return [(int(s), bool(c)) for s, c in (json.loads(line) for line in self.lines if line.startswith("["))]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.popen.send_signal(number)

    def end(self) -> None:
        """Kills it and reaps it."""
        self.popen.kill()
        self.popen.wait(30)
        for reader in self._readers:
            reader.join(30)


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody listens on."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


@contextmanager
def cluster(ps: int, workers: int) -> Iterator[dict[str, list[str]]]:
    """ps processes that serve, and the addresses of all tasks."""
    with serving(ps, workers) as (spec, _):
        yield spec


@contextmanager
def serving(ps: int, workers: int) -> Iterator[tuple[dict[str, list[str]], list[Process]]]:
    """The addresses of all tasks, and the ps processes that serve."""
    ports = free_addresses(ps + workers)
    spec = {"ps": ports[:ps], "worker": ports[ps:]}
    processes = [Process("ps", i, {"cluster": spec}) for i in range(ps)]
    try:
        for process in processes:
            process.wait_for(lambda lines: "ready" in lines)
        yield spec, processes
    finally:
        for process in processes:
            process.end()


def in_threads(actions: list[Callable[[], Any]], secs: float = 100.0) -> list[Any]:
    """Runs actions at the same time; gives their results, raises the first error."""
    results: list[Any] = [None] * len(actions)

    def run(i: int) -> None:
        try:
            results[i] = actions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(secs)
    assert not any(t.is_alive() for t in threads), results
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what no event tells; fails after a minute."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


def alone(rule: str, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """What one process gets on the concatenated batches: ``x`` and ``y`` are [steps, workers, rows, ...]."""
    transformation = RULES[rule]()
    values: list[Any] = [jnp.asarray(v) for v in initial()]
    states = [transformation.init(v) for v in values]
    gradient = jax.jit(jax.grad(loss_fn, argnums=(0, 1)))
    for k in range(len(x)):
        grads = gradient(*values, x[k].reshape(-1, x.shape[-1]), y[k].reshape(-1, y.shape[-1]))
        for i, g in enumerate(grads):
            change, states[i] = transformation.update(g, states[i], values[i])
            values[i] = optax.apply_updates(values[i], change)
    return [np.asarray(v) for v in values]


def reset(server: rt.Server, containers: list[str] | None = None) -> None:
    """Clears containers on all ps; all of them by default."""
    session = server.master.create_session(SessionConfig(device_filters=("/job:ps",)))
    session.clear(containers)
    server.master.close_session(session)
