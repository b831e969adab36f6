"""Counters: how steps are split, what staleness is, and what a task reports."""

import threading

import numpy as np
import pytest

import runtime as rt
from runtime.observe.counters import STALENESS_BUCKETS, TaskCounters
from runtime.plan.place import Device, DeviceChoices
from runtime.plan.plan import COMPUTE, PULL, PUSH, Plan
from runtime.plan.planner import make_plan
from tests.runtime.kit import TARGET, addresses, processes, servers, train

DEVICES = DeviceChoices((Device("ps", 0), Device("worker", 0)), ("worker", 0), ("ps", 0))


def plans() -> dict[str, Plan]:
    with rt.Graph().as_default():
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.ones(8, np.float32), name="w")
        with rt.device("/job:worker/task:0"):
            y = rt.numpy.tanh(w)
        train = w.assign_add(y)
        return {
            "train": make_plan([train.op], {}, DEVICES),
            "init": make_plan([w.initializer], {}, DEVICES),
            "evaluate": make_plan([y], {}, DEVICES),
        }


def test_training_pulls_computes_and_pushes() -> None:
    """A training step has the parts pull, compute and push, and an evaluation no push."""
    made = plans()
    assert made["train"].parts() == [PULL, COMPUTE, PUSH]
    assert made["evaluate"].parts() == [PULL, COMPUTE]
    assert {name: plan.is_training for name, plan in made.items()} == {
        "train": True,
        "init": False,
        "evaluate": False,
    }


def test_step_bytes_count_both_ways() -> None:
    """The bytes of a step are those sent and received, without values that nobody fetches."""
    assert plans()["train"].wire_bytes("/job:worker/task:0") >= 64
    # the new value is not sent back unasked
    assert plans()["train"].wire_bytes("/job:worker/task:0") <= 96


def test_staleness_counts_updates_since_read() -> None:
    """Staleness counts the updates of others since a session's last read."""
    counters = TaskCounters()
    counters.read(1)
    counters.read(2)
    counters.updated(1)
    counters.updated(2)  # one behind
    counters.read(1)
    counters.updated(1)
    assert counters.staleness[:3] == [2, 1, 0]
    counters.read(3)
    for _ in range(STALENESS_BUCKETS + 5):
        counters.updated(1)
    counters.updated(3)
    assert counters.staleness[-1] >= 1


def test_many_threads_lose_no_count() -> None:
    """Counts of many threads add up."""
    counters = TaskCounters()

    def work() -> None:
        for _ in range(500):
            counters.end(counters.begin(), True, False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters.calls, counters.applied, counters.active) == (2000, 2000, 0)


def test_ps_and_worker_report_figures() -> None:
    """The reports of a ps and a worker have the figures of the steps that were made."""
    with servers(sockets=True, ps=1, worker=1) as made:
        worker = made[TARGET]
        train(worker, 7)
        ps = rt.probe(made["/job:ps/task:0"].address, variables=True)
        own = worker.report()
    assert (ps.task, own.task) == ("/job:ps/task:0", TARGET)
    assert ps.cluster == own.cluster == worker.cluster
    assert own.values["steps_total"] == 7 and own.values["step_bytes_total"] >= 7 * 2048
    parts = [own.values[f"{part}_seconds_total"] for part in ("pull", "compute", "push")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(own.values["step_seconds_total"], rel=0.05)
    assert ps.values["updates_total"] == sum(ps.staleness) == ps.staleness[0] == 7
    assert ps.values["global_step"] == 7
    assert ps.values["variable_bytes"] == 1032
    assert {v.name: v.shape for v in ps.variables} == {"w": (256,), "global_step": ()}
    assert ps.values["apply_seconds_total"] > 0 and ps.values["bytes_received_total"] > 7 * 1024


def test_probe_of_nobody_is_unavailable() -> None:
    """A probe of an address where nobody listens is UnavailableError."""
    with pytest.raises(rt.UnavailableError):
        rt.probe(addresses(ps=1)["ps"][0])


def test_last_error_is_reported() -> None:
    """A report has the last logged error in one line."""
    from absl import logging

    with servers(worker=1) as made:
        logging.error("the disk\nis full")
        assert made[TARGET].report().last_error == "the disk is full"


def test_process_metrics_are_reported() -> None:
    """A report has the figures that the process counts."""
    with servers(worker=1) as made:
        before = made[TARGET].report().values.get("events_lost_total", 0.0)
        rt.lowlevel.metrics.add("events_lost_total", 2)
        rt.lowlevel.metrics.add("events_lost_total")
        assert made[TARGET].report().values["events_lost_total"] == before + 3


def test_unexplained_figure_is_refused() -> None:
    """A figure without an explanation cannot be counted."""
    with pytest.raises(AssertionError, match="tests_total"):
        rt.lowlevel.metrics.add("tests_total")


@pytest.mark.cluster
def test_ps_process_counts_over_wire() -> None:
    """A ps in another process counts the updates that come over the wire."""
    cluster = addresses(ps=1, worker=1)
    with processes(cluster, ("ps", 0)), rt.Server(cluster, "worker", 0) as server:
        train(server, 3)
        assert rt.probe(cluster["ps"][0], 10.0).values["updates_total"] == 3
