"""Every way to stop, in every kind of session, with every kind of loop: one object is asked, and the end is saved."""

import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.training.stop.preemption import preemptible
from runtime.lowlevel import RunRecords
from runtime.server.local_cluster import InProcessCluster

pytestmark = pytest.mark.cluster
SESSIONS = ("supervisor", "monitored")
LOOPS = ("plain", "shards", "sync")
WAYS = ("hook", "order", "signal", "late", "data")
AT = 5
"""The step at which training is stopped."""
MOST = 10_000
"""Steps of a loop that no stop would end."""


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with rt.local_cluster(ps=1, workers=2) as made:
        yield made


class Counts(harness.SessionRunHook):
    ends = 0

    def end(self, session: rt.Session) -> None:
        self.ends += 1


class Training:
    """One worker's graph, and its loop.

    Args:
        loop: One of LOOPS.
        batches: How many batches there are, where the loop asks for them.
    """

    def __init__(self, loop: str, batches: int, *, chief: bool) -> None:
        self.loop, self.batches, self.chief = loop, batches, chief
        self.step = harness.get_or_create_global_step()
        weights = rt.Variable(np.zeros(4, np.float32))
        loss = rt.call(lambda w: -w.sum(), weights)
        optimizer: Any = harness.Optimizer(optax.sgd(1.0))
        self.shards = harness.DataShards(batches, 1, block_batches=2) if loop == "shards" else None
        if self.shards is not None:
            optimizer = self.shards.counted(optimizer)
        elif loop == "sync":
            optimizer = harness.SyncReplicas(optimizer, 1, 2)
        self.train = optimizer.minimize(loss, self.step)
        self.trained = 0

    def run(self, session: Any, should_stop: Any, at: Any) -> None:
        """Trains until a stop; calls ``at`` after step AT."""

        def train(feed: Any = None) -> None:
            session.run(self.train, feed)
            self.trained += 1
            if self.trained == AT:
                at()

        if self.shards is not None:
            with self.shards.open(session) as batches:
                for batch in batches:
                    train(batch.feed)
            return
        while not should_stop():
            if self.trained == self.batches:
                raise rt.OutOfRangeError("the data has ended")
            train()


def under_supervisor(training: Training, target: str, logdir: str, way: str, at: Any) -> int:
    supervisor = harness.Supervisor(
        is_chief=training.chief,
        logdir=logdir,
        global_step=training.step,
        summary_op=None,
        save_model_secs=3600,
    )
    with supervisor.managed_session(target) as session:
        training.run(
            session, supervisor.should_stop, supervisor.request_stop if way == "hook" else at
        )
    return 1


def in_monitored(training: Training, target: str, logdir: str, way: str, at: Any) -> int:
    hooks: list[Any] = [counts := Counts()]
    if way == "hook":
        hooks.append(harness.StopAtStepHook(last_step=AT))
        at = lambda: None  # noqa: E731
    session = harness.MonitoredTrainingSession(
        target,
        training.chief,
        logdir if training.chief else None,
        hooks=hooks,
        save_summaries_steps=None,
    )
    with session:
        training.run(session, session.should_stop, at)
    return counts.ends


def begin(
    cluster: InProcessCluster, kind: str, loop: str, way: str, logdir: pathlib.Path, *, worker: int
) -> Any:
    """Trains as a worker of the cluster; returns its training, and how many hooks' ends were called."""

    def at() -> None:
        if way == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif way == "order":
            RunRecords(cluster.target_of(1)).stop("it is good enough")

    with rt.Graph().as_default(), cluster.device(worker):
        training = Training(loop, AT if way == "data" else MOST, chief=worker == 0)
        act = under_supervisor if kind == "supervisor" else in_monitored
        return training, act(training, cluster.target_of(worker), str(logdir), way, at)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", SESSIONS)
def test_every_stop_saves_and_ends_well(
    cluster: InProcessCluster, tmp_path: pathlib.Path, kind: str, loop: str, way: str
) -> None:
    """Every way to stop, in every session and loop, ends well and saves the trained steps."""
    if way == "signal":
        with pytest.raises(SystemExit) as raised, preemptible():
            begin(cluster, kind, loop, way, tmp_path, worker=0)
        assert raised.value.code == exit_codes.PREEMPTED.plain
        trained = AT
    else:
        training, ends = begin(
            cluster, kind, loop, "hook" if way == "late" else way, tmp_path, worker=0
        )
        trained = training.trained
        assert ends == 1 and AT <= trained < MOST
    path = harness.latest_checkpoint(str(tmp_path))
    assert path is not None and int(pathlib.Path(path).name) == trained
    if way == "late":
        late, ends = begin(cluster, kind, loop, way, tmp_path, worker=1)
        # a hook that has not begun does not end
        assert late.trained == 0 and ends == (kind == "supervisor")
