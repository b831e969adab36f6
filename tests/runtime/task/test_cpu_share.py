"""How many threads a task's XLA has, and that a task with one computes on the thread that asks."""

import os
import subprocess
import sys

import pytest

from runtime.cluster.spec import ClusterSpec, TaskId
from runtime.task import cpu_share
from tests.kit.processes import ROOT

HERE = ["localhost:1", "127.0.0.1:2", "localhost:3", "127.0.0.2:4"]

_COMPUTES = """
import time
import numpy as np
import runtime as rt
from runtime.task.executor import PreparedStage
from runtime.wire.codec import aligned_buffer

own, all_threads = [], []
run = PreparedStage.run

def watched(self, *args, **kwargs):
    here, everywhere = time.thread_time(), time.process_time()
    outputs, done = run(self, *args, **kwargs)
    for value in outputs:
        np.asarray(value)
    own.append(time.thread_time() - here)
    all_threads.append(time.process_time() - everywhere)
    return outputs, done

PreparedStage.run = watched
with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server:
    x = rt.placeholder(np.float32, [1 << 20], name="x")
    y = x
    for _ in range(20):
        y = rt.numpy.sin(y) + 1
    w = rt.Variable(np.zeros(1 << 20, np.float32), name="w")
    push = w.assign_add(y)
    with rt.Session(server.target) as session:
        session.run(rt.global_variables_initializer())
        value = aligned_buffer(4 << 20).view(np.float32)  # XLA copies another one first, on a thread of its own
        value[...] = 1
        session.run(push.op, {x: value})
        session.run(y, {x: value})
        own.clear()
        all_threads.clear()
        for _ in range(5):
            session.run(y, {x: value})
            session.run([push], {x: value})
print(sum(own) / sum(all_threads))
"""


@pytest.mark.parametrize(("ps", "of", "expected"), [(1, 2, 2), (2, 2, 1), (3, 2, 1), (4, 16, 4)])
def test_ps_share_cores_for_writing(ps: int, of: int, expected: int) -> None:
    """The ps of one host share the cores by which their writing is paced."""
    spec = ClusterSpec(
        {"ps": [*HERE[:ps], "elsewhere:1"], "worker": [f"localhost:{10 + i}" for i in range(5)]}
    )
    assert cpu_share.share(spec, TaskId("ps", 0), of, of_job=True) == expected


@pytest.mark.parametrize(
    ("job", "workers", "of", "expected"),
    [
        ("worker", 1, 2, 2),
        ("worker", 2, 2, 1),
        ("worker", 4, 2, 1),
        ("ps", 1, 2, 1),
        ("ps", 3, 16, 4),
        ("worker", 3, 16, 5),
    ],
)
def test_workers_divide_the_cores(job: str, workers: int, of: int, expected: int) -> None:
    """The workers of a host divide its cores, and a ps takes what all would get."""
    cluster = ClusterSpec({"ps": ["localhost:9"], "worker": HERE[:workers]})
    assert cpu_share.share(cluster, TaskId(job, 0), of) == expected


def test_other_hosts_take_no_cores() -> None:
    """A task on another host takes no cores."""
    cluster = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:1", "c:1"]})
    assert cpu_share.share(cluster, TaskId("worker", 1), 8) == 8
    assert cpu_share.share(cluster, TaskId("ps", 0), 8) == 4


@pytest.mark.cluster
def test_xla_computes_on_asking_thread() -> None:
    """XLA with one thread computes on the thread that asks."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PJRT_NPROC": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPUTES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) > 0.5
