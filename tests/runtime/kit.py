"""Parts that the tests of the runtime share: clusters in this process and clusters of processes."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.master import tasks
from runtime.wire.channel import Lane
from runtime.wire.peer import Peer
from tests.kit.ports import free_ports
from tests.kit.processes import Program

TARGET = "/job:worker/task:0"
SERVE = (
    "import json, sys, runtime as rt; c = json.loads(sys.argv[1]); rt.Server(c, sys.argv[2], "
    "int(sys.argv[3])).join()"
)


def addresses(**jobs: int) -> dict[str, list[str]]:
    """A cluster definition with so many tasks of each job, on free ports."""
    ports = iter(free_ports(sum(jobs.values())))
    return {job: [f"localhost:{next(ports)}" for _ in range(count)] for job, count in jobs.items()}


@contextlib.contextmanager
def servers(*, sockets: bool = False, **jobs: int) -> Iterator[dict[str, rt.Server]]:
    """A cluster in this process, its servers by task name.

    Args:
        sockets: let the other tasks talk to worker 0 (and each other) as if they were in other
            processes.
        **jobs: how many tasks each job has.
    """
    cluster = addresses(**jobs)
    with contextlib.ExitStack() as stack:
        made = {
            f"/job:{job}/task:{i}": stack.enter_context(rt.Server(cluster, job, i))
            for job, hosts in cluster.items()
            for i in range(len(hosts))
        }
        if sockets:
            for name, server in made.items():
                if name != TARGET:
                    tasks.withdraw(server.address, server)
        yield made


def set_apart(server: rt.Server, *, host: bool = False) -> None:
    """Lets this process see a server as another process of the user would.

    Args:
        server: The server.
        host: True shows the server as another host would see it, without the token that it leaves for its user.
    """
    tasks.withdraw(server.address, server)
    server._unshare()
    for left in server._tokens if host else ():
        left.close()


def lanes_to(session: rt.Session, task: str) -> list[Lane]:
    """Returns the connections of a session with a master in this process to a task."""
    return peer_of(session, task).lanes()


def peer_of(session: rt.Session, task: str) -> Peer:
    """Returns the task of a session with a master in this process, as the session sees the task."""
    found: Peer = session._engine.tasks[task].peer  # type: ignore[attr-defined]
    return found


def serve(cluster: Mapping[str, Sequence[str]], job: str, index: int, **options: Any) -> Program:
    """One server process of a cluster; ``options`` are those of ``Program``."""
    return Program("python", "-c", SERVE, json.dumps(cluster), job, str(index), **options)


@contextlib.contextmanager
def processes(
    cluster: Mapping[str, Sequence[str]], *names: tuple[str, int], **options: Any
) -> Iterator[list[Program]]:
    """Server processes for some tasks of a cluster, each with the ``options``; all gone at the end, by SIGTERM."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(serve(cluster, job, index, **options)) for job, index in names]
        try:
            yield made
        finally:
            for task in made:
                task.thaw()
                task.stop()


def array(*values: Any, dtype: Any = np.int32) -> np.ndarray:
    """A 1-D array."""
    return np.array(values, dtype)


@contextlib.contextmanager
def target_of_kind(kind: str) -> Iterator[str]:
    """A session target: nothing but this process, a server here with a ps over sockets, or a master elsewhere."""
    if kind == "private":
        yield ""
        return
    with servers(sockets=True, ps=1, worker=1) as made:
        server = made[TARGET]
        if kind == "remote master":
            tasks.withdraw(server.address, server)
        yield server.target


KINDS = ("private", "local master", "remote master")


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A call on a thread of its own, and what it gives or raises."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def train(server: rt.Server, steps: int) -> None:
    """Steps that write a variable and the global step on ps 0, computed on worker 0."""
    with rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.ones(256, np.float32), name="w")
            step = rt.Variable(0, dtype=np.int64, name="global_step")
        with rt.device("/job:worker/task:0"):
            gradient = rt.numpy.tanh(w)
        ops = [w.assign_add(gradient).op, step.assign_add(1).op]
        with rt.Session(server.target, graph) as session:
            session.run([w.initializer, step.initializer])
            for _ in range(steps):
                session.run(ops)


@contextlib.contextmanager
def limited(**values: Any) -> Iterator[rt.Limits]:
    """Gives limits; constants, and what follows from a limit, have other values within the block."""
    own = {row.name: values[row.name] for row in rt.Limits.rows() if row.name in values}
    with pytest.MonkeyPatch.context() as patch:
        for name in values.keys() - own.keys():
            patch.setattr(rt.Limits, name, values[name])
        yield rt.Limits(**own)
