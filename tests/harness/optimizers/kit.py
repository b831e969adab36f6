"""A cluster of real processes for synchronous training; workers may be threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import runtime as rt
from runtime.master.config import SessionConfig
from runtime.master.tasks import LocalTask
from runtime.proto import services_pb2 as pb
from runtime.rpc import rpc
from tests.harness.optimizers.task import RULES, initial, loss_fn, run
from tests.kit.ports import free_ports
from tests.kit.processes import Task


def start(job: str, index: int, options: dict[str, Any]) -> Task:
    """One task in a process of its own."""
    return Task(run, job, index, options)


def steps(task: Task) -> list[tuple[int, bool]]:
    """(step, counted) of each training step of a worker so far."""
    return task.said_so_far("STEP")


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody listens on."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


@contextmanager
def cluster(ps: int, workers: int) -> Iterator[dict[str, list[str]]]:
    """ps processes that serve, and the addresses of all tasks."""
    with serving(ps, workers) as (spec, _):
        yield spec


@contextmanager
def serving(ps: int, workers: int) -> Iterator[tuple[dict[str, list[str]], list[Task]]]:
    """The addresses of all tasks, and the ps processes that serve."""
    ports = free_addresses(ps + workers)
    spec = {"ps": ports[:ps], "worker": ports[ps:]}
    processes = [start("ps", i, {"cluster": spec}) for i in range(ps)]
    try:
        for process in processes:
            process.hear("SERVING")
        yield spec, processes
    finally:
        for process in processes:
            process.close()


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


def alone(
    rule: str, x: Sequence[np.ndarray] | np.ndarray, y: Sequence[np.ndarray] | np.ndarray
) -> list[np.ndarray]:
    """Returns the values that one process reaches on the concatenated batches.

    Args:
        rule: Name of the update rule.
        x: Inputs of each step, of shape [workers, rows, ...].
        y: Targets of each step, of shape [workers, rows, ...].
    """
    transformation = RULES[rule]()
    values: list[Any] = [jnp.asarray(v) for v in initial()]
    state = transformation.init(values)
    gradient = jax.jit(jax.grad(loss_fn, argnums=(0, 1)))
    for k in range(len(x)):
        both = (of[k].reshape(-1, of[k].shape[-1]) for of in (x, y))
        grads = gradient(*values, *both)
        change, state = transformation.update(list(grads), state, values)
        values = optax.apply_updates(values, change)
    return [np.asarray(v) for v in values]


def reset(server: rt.Server, containers: list[str] | None = None) -> None:
    """Clears containers on all ps; all of them by default."""
    session = server.master.create_session(SessionConfig(device_filters=("/job:ps",)))
    for task in session.tasks.values():
        if isinstance(task, LocalTask):
            task.server.worker.store.clear(containers)
        else:
            request = pb.ClearRequest(containers=containers or (), all=containers is None)
            rpc.call(task._stub.Clear, request, timeout=10.0, task=task.name)
    session.close()
