"""The probes that `harness.manifests` prints, against real tasks: a ps that restores for long lives, a frozen one dies.

They are made as the kubelet makes them, but faster one after the other than every periodSeconds:
whoever fails fewer than failureThreshold of them in a row is not killed when they come more seldom.
"""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from harness.exit_codes import PREEMPTED
from harness.manifests.render import render
from harness.manifests.request import ClusterRequest
from runtime.server.training_end import DRAIN_VARIABLE
from tests.faults import PRELOAD, LocalCluster, no_leaks
from tests.harness.manifests.kubelet import Probe

pytestmark = [pytest.mark.disk, pytest.mark.timeout(900)]
MIB = 512
RUNS_SECS, RESTS_SECS = 0.01, 0.24
"""A ps on a machine that is busy with other work: it has a twenty-fifth of the time."""
WAIT_SECS = 600.0
ASKED = ClusterRequest(1, 1, MIB * 1e6)


def probe(engine: str, name: str) -> Probe:
    """A probe of the ps in the manifest of an engine."""
    made = next(
        o
        for o in yaml.safe_load_all(render(engine, ASKED))
        if o["kind"] in ("JobSet", "TFJob", "StatefulSet")
    )
    spec = made["spec"]
    if engine == "jobset":
        spec = next(job for job in spec["replicatedJobs"] if job["name"] == "ps")["template"][
            "spec"
        ]
    elif engine == "tfjob":
        spec = spec["tfReplicaSpecs"]["PS"]
    found = Probe.of(spec["template"]["spec"]["containers"][0], name)
    assert found is not None
    return found


@contextlib.contextmanager
def started(logdir: Path) -> Iterator[LocalCluster]:
    command = [
        "python",
        "-m",
        "tests.harness.manifests.probe_program",
        f"--logdir={logdir}",
        f"--mib={MIB}",
    ]
    env = {"JAX_PLATFORMS": "cpu", DRAIN_VARIABLE: "0"}
    with no_leaks(), LocalCluster(command, preload=PRELOAD, env=env, start=False) as cluster:
        yield cluster


def port_of_ps(cluster: LocalCluster) -> int:
    return int(cluster.addresses["ps:0"].rpartition(":")[2])


def test_engines_have_the_same_probes() -> None:
    """The manifests of all engines have the same probes."""
    for name in ("livenessProbe", "readinessProbe"):
        (_,) = {probe(engine, name) for engine in ("jobset", "tfjob", "statefulset")}


def test_only_failures_in_row_kill() -> None:
    """Only failures in a row reach the threshold that kills."""
    found = Probe(2222, failure_threshold=3)
    assert found.kills([True, False, False, False, True])
    assert not found.kills([False, False, True, False, False])


@pytest.mark.nightly
def test_probe_tells_restoring_from_frozen(tmp_path: Path) -> None:
    """A probe spares a ps that restores for long and kills a frozen ps."""
    liveness, readiness = probe("jobset", "livenessProbe"), probe("jobset", "readinessProbe")
    with started(tmp_path) as cluster, ThreadPoolExecutor(liveness.failure_threshold) as kubelet:
        port = port_of_ps(cluster)

        def ask() -> "Future[bool]":
            return kubelet.submit(liveness.passes, "127.0.0.1", port)

        cluster.start("ps:0")
        cluster.expect("ps:0", "serves at")
        assert readiness.passes("127.0.0.1", port) and liveness.passes("127.0.0.1", port)
        cluster.start("worker:0")
        cluster.wait_step(1)
        cluster.stop("worker:0")  # it saves
        assert cluster.wait("worker:0", WAIT_SECS) == PREEMPTED.plain
        cluster.stop("ps:0")
        cluster.wait("ps:0")

        cluster.start("ps:0")
        cluster.expect("ps:0", "serves at")
        process = psutil.Process(
            next(life for life in cluster.lives("ps:0") if life.code is None).pid
        )
        cluster.start("worker:0")
        cluster.expect("worker:0", "chief: restore the newest checkpoint")
        results = []
        deadline = time.monotonic() + WAIT_SECS
        while not cluster.lines("worker:0", "training goes on from step"):
            assert time.monotonic() < deadline, cluster.lines("worker:0")[-5:]
            results.append(ask())
            # The test is one of time: the ps has a share of a core only.
            process.suspend()
            time.sleep(RESTS_SECS)
            process.resume()
            time.sleep(RUNS_SECS)
        passed = [result.result() for result in results]
        assert len(passed) > liveness.failure_threshold, "it was over too soon to say anything"
        assert not liveness.kills(passed)

        cluster.freeze("ps:0")
        assert liveness.kills(
            result.result() for result in [ask() for _ in range(liveness.failure_threshold)]
        )
        cluster.thaw("ps:0")
        assert liveness.passes("127.0.0.1", port), "whoever comes back in time lives"
        cluster.stop("worker:0")
        assert cluster.wait("worker:0", WAIT_SECS) == PREEMPTED.plain
