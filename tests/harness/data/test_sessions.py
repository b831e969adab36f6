"""DataShards in sessions of every kind, in one process."""

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness.tf1.train import training as tf1_training
from runtime.server.local_cluster import InProcessCluster

pytestmark = pytest.mark.cluster
EXAMPLES = 47


class Model:
    """Every training of an example adds 1 to its count."""

    def __init__(self, epochs: float = 1.0) -> None:
        self.step = harness.get_or_create_global_step()
        with rt.device(self.step.device):
            self.counts = rt.Variable(np.zeros(EXAMPLES, np.float32), name="counts")
        self.examples = rt.placeholder(np.int32, [None])
        loss = rt.call(lambda counts, examples: -counts[examples].sum(), self.counts, self.examples)
        self.shards = harness.DataShards(EXAMPLES, 5, epochs=epochs, block_batches=2, slots=8)
        self.train = self.shards.counted(harness.Optimizer(optax.sgd(1.0))).minimize(
            loss, self.step
        )


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with rt.local_cluster(ps=1, workers=1) as made:
        yield made


def test_monitored_session_trains_all_data(
    cluster: InProcessCluster, tmp_path: pathlib.Path
) -> None:
    """A monitored session trains every example of its shards."""
    with rt.Graph().as_default(), cluster.device():
        model = Model()
        last = tf1_training.FinalOpsHook(model.counts)
        with (
            harness.MonitoredTrainingSession(
                cluster.target, checkpoint_dir=str(tmp_path), hooks=[last], save_summaries_secs=None
            ) as session,
            model.shards.open(session) as batches,
        ):
            for batch in batches:
                session.run(
                    model.train, {model.examples: batch.examples.astype(np.int32), **batch.feed}
                )
    assert np.all(last.final_ops_values >= 1) and np.sum(last.final_ops_values) == 50


def test_shards_train_tables(cluster: InProcessCluster) -> None:
    """Rows of a table are trained by every example of the shards."""
    with rt.Graph().as_default(), cluster.device():
        zeros = jax.nn.initializers.zeros
        table = rt.Table("counts", rows=EXAMPLES, dim=1, initializer=zeros)
        examples = rt.placeholder(np.int64, [None])
        loss = rt.call(lambda rows: -rows.sum(), table.lookup(examples))
        shards = harness.DataShards(EXAMPLES, 5, epochs=1, block_batches=2, slots=8)
        optimizer = harness.Optimizer(optax.sgd(1.0), tables=optax.sgd(1.0))
        train = shards.counted(optimizer).minimize(loss, harness.get_or_create_global_step())
        whole = table.lookup(np.arange(EXAMPLES))
        init = rt.global_variables_initializer()
        with rt.Session(cluster.target) as session:
            session.run(init)
            with shards.open(session) as batches:
                for batch in batches:
                    session.run(train, {examples: batch.examples, **batch.feed})
            counts = session.run(whole)
    assert np.all(counts >= 1) and counts.sum() == 50


def test_plain_session_trains_all_data() -> None:
    """A plain session without a cluster trains every example of its epochs."""
    with rt.Graph().as_default():
        model = Model(epochs=2)
        init = rt.global_variables_initializer()
        with rt.Session() as session:
            session.run(init)
            with model.shards.open(session) as batches:
                for batch in batches:
                    session.run(
                        model.train, {model.examples: batch.examples.astype(np.int32), **batch.feed}
                    )
            counts = session.run(model.counts)
            assert (
                np.all(counts >= 2) and np.sum(counts) == 95 and int(session.run(model.step)) == 19
            )


def test_resumed_run_continues_its_data(
    tmp_path: pathlib.Path,
) -> None:
    """A run that is taken up again continues its data where the checkpoint was."""
    for epochs in (1.0, 2.0):
        with (
            rt.local_cluster(ps=1, workers=1) as cluster,
            rt.Graph().as_default(),
            cluster.device(),
        ):
            model = Model(epochs)
            supervisor = harness.Supervisor(
                logdir=str(tmp_path), global_step=model.step, save_summaries_secs=0
            )
            with (
                supervisor.managed_session(cluster.target) as session,
                model.shards.open(session) as batches,
            ):
                for batch in batches:
                    session.run(
                        model.train, {model.examples: batch.examples.astype(np.int32), **batch.feed}
                    )
                counts = session.run(model.counts)
    # 19 batches: the last one is completed from the third epoch
    assert np.all(counts >= 2) and np.sum(counts) == 95


def test_prefetching_session_is_refused(cluster: InProcessCluster) -> None:
    """A session that prefetches is refused for data shards."""
    with rt.Graph().as_default(), cluster.device():
        model = Model()
        with rt.Session(cluster.target, config=rt.SessionConfig(prefetch=1)) as session:
            with pytest.raises(rt.InvalidArgumentError, match="leave SessionConfig.prefetch out"):
                model.shards.open(session).__enter__()


def test_batches_need_their_block() -> None:
    """Batches outside of their with block are refused, since no worker would own their lease."""
    with rt.Graph().as_default():
        model = Model()
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            batches = model.shards.open(session)
            with pytest.raises(RuntimeError, match="read the batches in the block"):
                next(batches)
            with batches:
                next(batches)
            with pytest.raises(RuntimeError, match="read the batches in the block"):
                next(batches)


def test_counting_goes_inside_sync_replicas() -> None:
    """counted refuses SyncReplicas and says how to nest the two."""
    with rt.Graph().as_default():
        harness.get_or_create_global_step()
        shards = harness.DataShards(10, 1)
        sync = harness.SyncReplicas(harness.Optimizer(optax.sgd(1.0)), 1)
        with pytest.raises(
            rt.InvalidArgumentError,
            match=r"make it SyncReplicas\(shards.counted\(optimizer\), ...\)",
        ):
            shards.counted(sync)
