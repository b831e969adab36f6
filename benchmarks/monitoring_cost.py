"""What the standard series cost a training step: the time of what was added to it, beside the time of the step itself.

    python -m benchmarks.monitoring_cost

Adds up, call by call, what one training step executes for the figures (clock readings and sums at the master; the marks
of a pull and of a push at one ps), and compares that with the steps that a worker and a ps in this process do. Measures
too what the chief's samples of all tasks cost, no part of a step. Keeps benchmarks/results/monitoring_cost.json.
"""

import json
import os
import platform
import tempfile
import time
import timeit

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import harness
import runtime as rt
from benchmarks.common import ROOT
from harness.launch.ports import free_ports
from runtime.master import tasks
from runtime.observe.counters import TaskCounters
from runtime.plan.plan import COMPUTE, PULL, PUSH

CALLS = 200_000
STEPS = 2000
SAMPLES = 50
RESULTS = ROOT / "benchmarks" / "results"


def nanoseconds(work: object) -> float:
    """Best of five means, per call."""
    return min(timeit.repeat(work, number=CALLS, repeat=5)) / CALLS * 1e9  # type: ignore[arg-type]


def at_the_master() -> float:
    """The added part of ``MasterSession.run``, three waves, in ns."""
    times = TaskCounters().begin_session(1)[0]
    clock = time.perf_counter_ns
    waves = (PULL, COMPUTE, PUSH)

    def step() -> None:
        parts_ns = times.parts_ns
        began = last = clock()
        for part in waves:
            now = clock()
            parts_ns[part] += now - last
            last = now
        now = clock()
        parts_ns[COMPUTE] += now - last
        now = clock()
        parts_ns[PUSH] += now - last
        times.total_ns += now - began
        times.steps += 1
        times.wire_bytes += 1000

    return nanoseconds(step)


def at_a_ps() -> float:
    """The added part of ``Worker.call`` for a pull and a push, in ns."""
    counters = TaskCounters()

    def step() -> None:
        began = counters.begin()
        counters.read(1)
        counters.end(began, False, False)
        began = counters.begin()
        counters.updated(1)
        counters.end(began, True, False)

    return nanoseconds(step)


def step_time() -> float:
    """Mean time of a training step of the classic MNIST model over the tensor channel, in ns."""
    server_of = {"ps": ["localhost:0"]}
    with rt.Server(server_of, "ps", 0) as ps:
        cluster = {"ps": [ps.address], "worker": ["localhost:0"]}
        with rt.Server(cluster, "worker", 0) as worker, rt.Graph().as_default() as graph:
            ps.cluster = worker.cluster
            tasks.withdraw(ps.address, ps)
            with rt.device(rt.replica_device_setter(cluster=worker.cluster, worker_device="/job:worker/task:0")):
                w1 = rt.Variable(np.zeros((784, 100), np.float32), name="w1")
                w2 = rt.Variable(np.zeros((100, 10), np.float32), name="w2")
                x = rt.placeholder(np.float32, [100, 784], "x")
                loss = rt.numpy.mean(rt.nn.sigmoid(x @ w1) @ w2)
                step = rt.group(*(v.assign_add(g) for v, g in zip((w1, w2), rt.gradients(loss, [w1, w2]), strict=True)))
            with rt.Session(worker.target, graph) as session:
                session.run(rt.global_variables_initializer())
                feeds = {x: np.ones((100, 784), np.float32)}
                for _ in range(200):
                    session.run(step, feeds)
                began = time.perf_counter()
                for _ in range(STEPS):
                    session.run(step, feeds)
                return (time.perf_counter() - began) / STEPS * 1e9


def sample_time() -> float:
    """CPU time of this process for one sample of the standard series over two tasks, asked over gRPC, in ns."""
    cluster = {job: [f"localhost:{port}"] for job, port in zip(("ps", "worker"), free_ports(2), strict=True)}
    with rt.Server(cluster, "ps", 0) as ps, rt.Server(cluster, "worker", 0) as worker:
        for server in (ps, worker):
            tasks.withdraw(server.address, server)
        with tempfile.TemporaryDirectory() as logdir, harness.FileWriter(logdir) as writer:
            series = harness.StandardSeries(worker.cluster, writer)
            series.write(0)
            began = time.process_time_ns()
            for step in range(SAMPLES):
                series.write(step)
            return (time.process_time_ns() - began) / SAMPLES


def main() -> None:
    """Measures, prints, and keeps what it found."""
    master, ps, sample, whole = at_the_master(), at_a_ps(), sample_time(), step_time()
    found = {
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]},
        "step_us": round(whole / 1e3, 1),
        "added_at_the_master_us": round(master / 1e3, 3),
        "added_at_the_ps_us": round(ps / 1e3, 3),
        "percent_of_a_step": round(100 * (master + ps) / whole, 3),
        "sample_of_two_tasks_cpu_ms": round(sample / 1e6, 2),
        "percent_of_a_core_sampling_every_10_s": round(100 * sample / 10e9, 3),
    }
    print(json.dumps(found))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "monitoring_cost.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
