"""A ps and a worker need no more memory after 10,000 steps than after 2,000."""

import json

import numpy as np
import psutil
import pytest

from tests.kit.processes import programs
from tests.runtime.kit import SERVE, addresses

pytestmark = pytest.mark.chaos

WARM, STEPS = 2_000, 10_000
LIMIT_MB = 6.0
"""What allocators and caches may still take after the warm-up; 1 KB lost in each step would be 8 MB."""

WORKER = """
import json, sys
import numpy as np
import optax
import psutil
import harness
import runtime as rt

cluster, marks = json.loads(sys.argv[1]), json.loads(sys.argv[2])
server = rt.Server(cluster, "worker", 0)
with rt.device(rt.replica_device_setter(cluster=cluster, worker_device="/job:worker/task:0")):
    step = harness.get_or_create_global_step()
    w = rt.Variable(np.zeros((100, 10), np.float32), name="w")
    x = rt.placeholder(np.float32, [None, 100], name="x")
    loss = rt.numpy.mean((x @ w - 1.0) ** 2)
    train = harness.Optimizer(optax.sgd(0.1, momentum=0.9)).minimize(loss, global_step=step)
with rt.Session(server.target, config=rt.SessionConfig(start_timeout_secs=60.0)) as session:
    session.run(rt.global_variables_initializer())
    batches = [np.random.default_rng(i).random((10, 100), np.float32) for i in range(8)]
    done = 0
    for mark in marks:
        while done < mark:
            _, _, at = session.run([train, loss, step], {x: batches[done % 8]})
            done += 1
        print("AT", int(at), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.nightly
def test_many_steps_take_no_memory() -> None:
    """Ten thousand steps leave the memory of ps and worker as it was."""
    cluster = addresses(ps=1, worker=1)
    resident: list[list[float]] = []
    with programs() as start:
        # Cold: what a forked process shares with its parent hides growth.
        ps = start("python", "-c", SERVE, json.dumps(cluster), "ps", "0", cold=True)
        worker = start(
            "python", "-c", WORKER, json.dumps(cluster), json.dumps([WARM, STEPS]), cold=True
        )
        for mark in (WARM, STEPS):
            assert int(worker.expect(r"AT (\d+)")[1]) == mark
            resident.append(
                [psutil.Process(program.pid).memory_info().rss / 2**20 for program in (ps, worker)]
            )
            worker.enter("")
        assert worker.wait(100) == 0
    growth = np.subtract(resident[1], resident[0])
    assert growth.max() < LIMIT_MB, f"ps and worker grew by {growth} MiB from {resident[0]} MiB"
