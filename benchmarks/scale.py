"""What each worker and each ps costs beyond its steps, measured, and what a thousand workers would: ``--help``.

    python -m benchmarks.scale [--json] [--at_workers=1000 --at_ps=64]

Connections, threads, memory and descriptors are slopes: the figures of a ps process, and of the process that holds all
the workers, with many sessions less those with few, for each session more. The orders, the chief's choice and the table
of leases are timed as they are. `docs/scaling.md` has the conclusions.
"""

from __future__ import annotations

import json
import math
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from absl import app, flags

import harness
import runtime as rt
from benchmarks.systems.elastic_worker import Run
from harness.data import lease_table
from harness.launch.ports import free_ports
from harness.optimizers.sync_policy import TaskProgress, choose
from runtime.proto.run_record_pb2 import RunOrder
from runtime.state.cancellation import Cancellation
from runtime.state.run_record import RunRecord

FLAGS = flags.FLAGS
Figures = dict[str, float]
_MANY = (1_000, 64)


class Sessions:
    """Workers of this process, each with a server, a graph and a Supervisor's session of its own."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._open: list[tuple[rt.Server, harness.Supervisor, Any]] = []

    def grow(self, count: int) -> None:
        """Opens sessions until there are so many."""
        while len(self._open) < count:
            index = len(self._open)
            ps = {int(i): host for i, host in self._run.ps.items()}
            server = rt.Server({"ps": ps, "worker": {index: f"127.0.0.1:{free_ports(1)[0]}"}}, "worker", index)
            graph = rt.Graph()
            setter = rt.replica_device_setter(cluster=server.cluster, worker_device=f"/job:worker/task:{index}")
            with graph.as_default(), rt.device(setter):
                step = harness.get_or_create_global_step()
                parts = [rt.Variable(np.zeros(8, np.float32), name=f"part{i}") for i in range(len(ps) * 2)]
                train = rt.group(step.assign_add(1).op, *[part.assign_add(np.ones(8, np.float32)).op for part in parts])
            supervisor = harness.Supervisor(is_chief=index == 0, graph=graph, global_step=step, save_summaries_secs=0)
            session = supervisor.prepare_or_wait_for_session(server.target)
            session.run(train)
            self._open.append((server, supervisor, session))

    def close(self) -> None:
        """Closes the sessions; nobody waits for anybody."""
        for server, supervisor, session in self._open:
            supervisor.request_stop()
            session.close()
            server.stop()


def _process(pid: int) -> Figures:
    process = psutil.Process(pid)
    connections = len(process.net_connections("all"))
    memory = process.memory_full_info().uss
    return {"fds": process.num_fds(), "threads": process.num_threads(), "connections": connections, "bytes": memory}


def per_session(ps: int, few: int, many: int) -> dict[str, Figures]:
    """What a worker's session costs a ps process and its own, with so many ps."""
    with Run(ps, sync=False) as run:
        sessions = Sessions(run)
        try:
            sessions.grow(few)
            before = [_process(pid) for pid in (run.servers[0].pid, psutil.Process().pid)]
            sessions.grow(many)
            after = [_process(pid) for pid in (run.servers[0].pid, psutil.Process().pid)]
            slopes = [{k: (a[k] - b[k]) / (many - few) for k in a} for a, b in zip(after, before, strict=True)]
            asked = _timed(lambda: rt.probe(run.ps["0"], 10.0), 20)
            return {"of a ps": slopes[0], "of a worker": slopes[1], "a status call": {"secs": asked}}
        finally:
            sessions.close()


def _timed(call: Callable[[], object], times: int) -> float:
    """Seconds of a call: the fastest, as this machine has other work too."""
    best = math.inf
    for _ in range(times):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def run_record(workers: int) -> Figures:
    """An order to the run record of one ps, with so many workers: seconds, and bytes of its reply."""
    record = RunRecord(threading.Condition(), lambda: True)
    record.silent = lambda session: 0.5
    for index in range(workers):
        sender, address = f"/job:worker/task:{index}", f"worker-{index}.training.cluster.local:2222"
        order = RunOrder(sender=sender, address=address, join=RunOrder.Join(session=index + 1))
        record.obey(order, "/job:ps/task:0", Cancellation())
    order = RunOrder(sender="/job:worker/task:0", inspect=RunOrder.Inspect())
    reply = record.obey(order, "/job:ps/task:0", Cancellation())
    secs = _timed(lambda: record.obey(order, "/job:ps/task:0", Cancellation()).SerializeToString(), 20)
    return {"secs": secs, "bytes": float(reply.ByteSize())}


def chief_choice(workers: int, ps: int) -> float:
    """Seconds that the chief of a synchronous step spends on choices: it looks when each of the ps has reported."""
    members = frozenset(range(workers))
    missing, whole = TaskProgress(1), TaskProgress(1, tuple(range(workers)))

    def step() -> None:
        for reported in range(1, ps + 1):
            reports = [whole] * reported + [missing] * (ps - reported)
            choose(reports[0], reports[1:], 2**31 - 1, members, 1, False)

    return _timed(step, 5)


def leases(slots: int) -> Figures:
    """Seconds of a lease, and of a mark, on a ps, with so many slots."""
    import jax

    table = lease_table.new_table(slots, (1, 2, 3, 4, 5))
    leased, marked = jax.jit(lease_table.leased), jax.jit(lease_table.marked)
    asked = (np.int32(1), np.int32(10**6), np.int32(1023), np.int32(1023))
    mark = lease_table.mark(slots, 0, 10)
    return {
        "lease secs": _timed(lambda: leased(table, *asked)[1].block_until_ready(), 200),
        "mark secs": _timed(lambda: marked(table, mark).block_until_ready(), 200),
        "mark bytes": float(mark.nbytes),
    }


def checkpoint_entries(ps: int) -> float:
    """Files and directories of one checkpoint of a model that is spread over so many ps."""
    with tempfile.TemporaryDirectory() as directory, rt.local_cluster(ps=ps, workers=1) as cluster:
        graph = rt.Graph()
        with graph.as_default(), cluster.device():
            step = harness.get_or_create_global_step()
            for index in range(4 * ps):
                rt.Variable(np.zeros(8, np.float32), name=f"v{index}")
            supervisor = harness.Supervisor(logdir=directory, global_step=step, save_summaries_secs=0)
            with supervisor.managed_session(cluster.target):
                pass
        newest = harness.latest_checkpoint(directory)
        return float(len(list(pathlib.Path(str(newest)).rglob("*"))))


def measure(few: int, many: int) -> dict[str, Any]:
    """All unit costs."""
    workers, ps = FLAGS.at_workers, FLAGS.at_ps
    return {
        "session": {str(count): per_session(count, few, many) for count in (1, 2)},
        "run record": {str(count): run_record(count) for count in (64, 256, workers)},
        "chief's choice": {f"{w} x {p}": chief_choice(w, p) for w, p in ((64, 2), (256, 16), (workers, ps))},
        "leases": {str(slots): leases(slots) for slots in (1024, 4096)},
        "checkpoint entries": {str(count): checkpoint_entries(count) for count in (1, 2, 4)},
    }


def main(argv: list[str]) -> None:
    """Prints the figures as JSON."""
    print(json.dumps(measure(FLAGS.few, FLAGS.many), indent=1))


if __name__ == "__main__":
    flags.DEFINE_integer("few", 4, "sessions at first", lower_bound=1)
    flags.DEFINE_integer("many", 24, "sessions then", lower_bound=2)
    flags.DEFINE_integer("at_workers", _MANY[0], "workers to work out", lower_bound=1)
    flags.DEFINE_integer("at_ps", _MANY[1], "ps to work out", lower_bound=2)
    app.run(main)
