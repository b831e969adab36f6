"""The chief of a run is the task whose session says so, whatever its number is, and a cluster has one run."""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from runtime.server.local_cluster import InProcessCluster

pytestmark = pytest.mark.cluster
SECS = 30.0


def within_time(act: Callable[[], Any]) -> Any:
    """Returns what a function returns; fails where it takes as long as a wait that nobody ends."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(SECS)
    assert not thread.is_alive()
    return found[0]


class Model:
    def __init__(self, wrap: Callable[[Any], Any] | None = None) -> None:
        self.step = harness.get_or_create_global_step()
        weights = [rt.Variable(np.zeros(4, np.float32)) for _ in range(2)]
        loss = rt.call(lambda a, b: -(a + b).sum(), *weights)
        self.shards = harness.DataShards(8, 1, block_batches=2, lease_secs=1.0)
        optimizer: Any = harness.Optimizer(optax.sgd(1.0))
        optimizer = wrap(optimizer) if wrap else self.shards.counted(optimizer)
        self.train = optimizer.minimize(loss, self.step)


def supervised(
    cluster: InProcessCluster, model: Model, worker: int, *, chief: bool
) -> tuple[harness.Supervisor, Any]:
    supervisor = harness.Supervisor(is_chief=chief, global_step=model.step, stop_grace_secs=4)
    return supervisor, supervisor.prepare_or_wait_for_session(cluster.target_of(worker))


def test_any_chief_reclaims_leases() -> None:
    """A chief that is not worker 0 takes back the leases of a dead worker."""
    with rt.local_cluster(ps=1, workers=2) as cluster:
        with rt.Graph().as_default(), cluster.device(1):
            model = Model()
            leading, chief = supervised(cluster, model, 1, chief=True)
        with rt.Graph().as_default(), cluster.device(0):
            other = Model()
            ended, dies = supervised(cluster, other, 0, chief=False)
            next(other.shards.open(dies).__enter__())
            dies.close()
            ended.stop()

        def train() -> int:
            with model.shards.open(chief) as batches:
                return sum(1 for batch in batches if chief.run(model.train, batch.feed) is None)

        assert within_time(train) == 8
        chief.close()
        leading.stop()


def test_any_chief_chooses_aggregates() -> None:
    """A chief that is not worker 0 chooses the aggregates of a synchronous run."""
    with rt.local_cluster(ps=2, workers=2) as cluster, rt.Graph().as_default(), cluster.device(1):
        model = Model(lambda optimizer: harness.SyncReplicas(optimizer, 1, 2))
        supervisor, chief = supervised(cluster, model, 1, chief=True)
        within_time(lambda: [chief.run(model.train) for _ in range(3)])
        assert int(chief.run(model.step)) == 3
        chief.close()
        supervisor.stop()


def test_second_run_is_refused(tmp_path: pathlib.Path) -> None:
    """A second run on a cluster is refused until the first has ended."""
    with rt.local_cluster(ps=1, workers=1) as cluster:

        def run(name: str, within: Callable[[], None]) -> int:
            with rt.Graph().as_default(), cluster.device():
                step = harness.get_or_create_global_step()
                more = step.assign_add(1)
                supervisor = harness.Supervisor(
                    logdir=tmp_path / name, save_model_secs=0, save_summaries_secs=0
                )
                with supervisor.managed_session(cluster.target) as session:
                    session.run(more)
                    within()
                    return int(session.run(more))

        def second() -> None:
            with pytest.raises(
                rt.InvalidArgumentError, match="another run trains on this cluster, .*teach"
            ):
                run("student", lambda: None)

        run("teacher", second)
        newest = harness.latest_checkpoint(str(tmp_path / "teacher"))
        assert newest is not None and pathlib.Path(newest).name == "2"
        assert run("student", lambda: None) == 4  # the model is the teacher's, as a line says
