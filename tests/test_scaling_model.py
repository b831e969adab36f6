"""The cost model of docs/scaling.md: known queueing results, limits that hold for any numbers, and its command line."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import ROOT
from benchmarks.scaling_model import Costs, Job, forecast, ps_needed, throughput

COSTS = Costs(
    ps_step_secs=150e-6, ps_byte_secs=0.3e-9, worker_step_secs=200e-6, worker_byte_secs=0.3e-9
)
JOB = Job(model_bytes=400e6, workers=64, compute_secs=0.12, network_bytes_per_s=2.9e9)
seconds = st.floats(1e-6, 1.0)
jobs = st.builds(
    Job,
    model_bytes=st.floats(1e3, 1e10),
    workers=st.integers(1, 200),
    compute_secs=st.floats(0.0, 2.0),
    network_bytes_per_s=st.floats(1e7, 5e10),
)


def test_balanced_stations_give_the_textbook_result() -> None:
    """Balanced stations give the textbook's throughput."""
    # N customers over K equal stations without delay: N / (N + K - 1) rounds in the time of one
    # service.
    demands = {"a": 2.0, "b": 2.0, "c": 2.0}
    assert throughput(5, 0.0, demands, {}) == pytest.approx(5 / (5 + 3 - 1) / 2.0)


def test_one_customer_never_waits() -> None:
    """One customer never waits."""
    assert throughput(1, 0.5, {"a": 0.25, "b": 0.25}, {"b": 4}) == pytest.approx(1.0)


@given(st.integers(1, 100), seconds, seconds, seconds, st.integers(1, 8))
def test_throughput_keeps_general_bounds(
    customers: int, delay: float, one: float, other: float, servers: int
) -> None:
    """Throughput keeps the bounds of any queueing network."""
    rate = throughput(customers, delay, {"one": one, "other": other}, {"one": servers})
    assert rate <= customers / (delay + one + other) * (1 + 1e-9)
    assert rate <= min(servers / one, 1 / other) * (1 + 1e-9)
    assert rate >= 1 / (delay + one + other) * (1 - 1e-9)


@pytest.mark.parametrize(("customers", "delay"), [(0, 1.0), (1, 0.0)])
def test_impossible_networks_are_refused(customers: int, delay: float) -> None:
    """Impossible networks are refused."""
    with pytest.raises(ValueError):
        throughput(customers, delay, {}, {})


@given(jobs, st.integers(1, 64))
def test_more_workers_never_do_less(job: Job, ps: int) -> None:
    """No station is busier than always, and more workers never do less."""
    found = forecast(job, ps, COSTS)
    assert all(0 <= busy <= 1 + 1e-9 for busy in found.utilisation.values())
    assert 0 < found.efficiency <= 1 + 1e-9
    more = forecast(replace(job, workers=job.workers + 1), ps, COSTS)
    assert more.steps_per_s >= found.steps_per_s * (1 - 1e-9)


def test_one_workers_step_is_the_sum() -> None:
    """One worker's step takes the sum of its parts."""
    job = replace(JOB, workers=1)
    found = forecast(job, 4, COSTS)
    # its own card is the limit, not a quarter of it on a ps
    transfers = 2 * job.model_bytes / job.network_bytes_per_s
    ps_core = COSTS.ps_step_secs + COSTS.ps_byte_secs * job.model_bytes / 4
    own = 4 * COSTS.worker_step_secs + COSTS.worker_byte_secs * job.model_bytes
    expected = job.compute_secs + transfers + ps_core + own + 2 * job.round_trip_secs
    assert found.steps_per_s == pytest.approx(1 / expected)
    assert found.efficiency == pytest.approx(1.0)


def test_many_workers_saturate_the_bottleneck() -> None:
    """Many workers saturate the scarcest place."""
    slow = forecast(replace(JOB, workers=1000, network_bytes_per_s=1e8), 1, COSTS)
    assert slow.bottleneck.startswith("ps network")
    assert slow.steps_per_s == pytest.approx(1e8 / JOB.model_bytes, rel=0.01)
    small = forecast(replace(JOB, workers=1000, model_bytes=4e3, compute_secs=0.001), 1, COSTS)
    assert small.bottleneck == "ps core"
    assert small.steps_per_s == pytest.approx(1 / COSTS.ps_step_secs, rel=0.02)


def test_needed_ps_are_the_fewest() -> None:
    """The number of ps needed is the fewest that reaches the efficiency."""
    found = ps_needed(JOB, COSTS, efficiency=0.9)
    assert found is not None
    assert found.efficiency >= 0.9
    assert found.ps > 1
    assert forecast(JOB, found.ps - 1, COSTS).efficiency < 0.9


def test_more_ps_cannot_help_calls() -> None:
    """No number of ps helps where the calls are the limit."""
    calls = replace(JOB, model_bytes=4.0, workers=1000, compute_secs=0.0, round_trip_secs=0.0)
    assert ps_needed(calls, replace(COSTS, worker_step_secs=0.0), most=64) is None


@pytest.mark.cluster
def test_scaling_command_answers() -> None:
    """The command line answers with ps and steps per second."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--model_mb=400", "--workers=64"]
    command += ["--step_ms=120", "--network_gbit=25"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert " ps for 400 MB, 64 workers" in answer.stdout
    assert "steps/s" in answer.stdout
