"""Whose leases the chief takes back, by what the run records tell."""

import pytest

import harness
import runtime as rt
from harness.data.data_shards import gone_owners, owner_of
from runtime.lowlevel import RunRecordView

pytestmark = pytest.mark.unit
WORKERS = ("/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2")


def record(done: tuple[str, ...] = (), **silent: float) -> RunRecordView:
    return RunRecordView(
        joined=WORKERS,
        done=done,
        silent={WORKERS[int(name[1:])]: secs for name, secs in silent.items()},
    )


def test_owners_have_distinct_numbers() -> None:
    """The chief and the workers own leases under numbers of their own."""
    tasks = ["/job:chief/task:0", *WORKERS]
    assert [owner_of(task) for task in tasks] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("records", "gone"),
    [
        ([record(w0=0.1, w1=1.0, w2=0.5)], []),
        ([record(w0=0.1, w1=12.0, w2=0.5)], [2]),
        # cut off from one ps only
        ([record(w0=0.1, w1=12.0, w2=0.5), record(w0=0.1, w1=0.4, w2=0.5)], []),
        ([record((WORKERS[2],), w0=0.1, w1=0.4)], [3]),
    ],
)
def test_silent_and_done_workers_are_gone(records: list[RunRecordView], gone: list[int]) -> None:
    """A worker is gone once every record finds it done or silent for too long."""
    assert gone_owners({1, 2, 3}, records, 10.0, {}, 100.0) == gone


def test_unknown_worker_has_its_time() -> None:
    """A worker that no record knows after a restart of all ps is gone only after its time."""
    unknown: dict[int, float] = {}
    nobody = [RunRecordView()]
    assert gone_owners({2}, nobody, 10.0, unknown, 100.0) == []
    assert gone_owners({2}, [record(w1=0.1)], 10.0, unknown, 105.0) == []
    assert gone_owners({2}, nobody, 10.0, unknown, 109.0) == []
    assert gone_owners({2}, nobody, 10.0, unknown, 119.0) == [2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_examples": 0}, "num_examples=0 is not from 1"),
        ({"block_batches": 16}, "block_batches=16 is not from 1 to 15"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"lease_secs": 0}, "lease_secs=0"),
    ],
)
def test_impossible_numbers_are_refused(options: dict[str, float], said: str) -> None:
    """Numbers that mean nothing for DataShards are refused by name."""
    with rt.Graph().as_default(), pytest.raises(rt.InvalidArgumentError, match=said):
        harness.DataShards(**{"num_examples": 10, "batch_size": 2, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("examples", "batch", "epochs"), [(10, 3, 2.0), (10, 4, 0.5), (7, 100, 3.0), (5, 1, 1.0)]
)
def test_epoch_holds_each_example_once(examples: int, batch: int, epochs: float) -> None:
    """The batches of an epoch hold each example once, and the last batch is full."""
    with rt.Graph().as_default():
        shards = harness.DataShards(examples, batch, epochs=epochs, seed=3)
    dealt = [
        int(i) for number in range(shards.num_batches or 0) for i in shards.batch(number).examples
    ]
    assert 0 <= len(dealt) - round(epochs * examples) < batch and len(dealt) % batch == 0
    for start in range(0, len(dealt), examples):
        epoch = dealt[start : start + examples]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(examples))
    assert shards.batch(0).epoch == 0


def test_counting_needs_the_global_step() -> None:
    """A counted optimizer that is not given the global step is refused."""
    import numpy as np
    import optax

    cluster = rt.ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1"]})
    setter = rt.replica_device_setter(cluster=cluster, worker_device="/job:worker/task:0")
    with rt.Graph().as_default(), rt.device(setter):
        step = harness.get_or_create_global_step()
        other = rt.Variable(np.ones(2, np.float32), name="other")
        loss = rt.numpy.sum(other * other)
        shards = harness.DataShards(10, 2, global_step=step)
        with pytest.raises(rt.InvalidArgumentError, match="give apply_gradients the global step"):
            shards.counted(harness.Optimizer(optax.sgd(0.1))).minimize(loss)
