"""TensorFlow 1 programs as a user starts them: one process for each task, flags, Supervisor, checkpoints, events."""

import glob
import re

import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import programs
from tests.kit import real_mnist
from tests.runtime.kit import addresses

pytestmark = pytest.mark.chaos


def _hosts(cluster: dict[str, list[str]]) -> list[str]:
    return [f"--{job}_hosts={','.join(hosts)}" for job, hosts in cluster.items()]


def test_two_workers_count_exactly() -> None:
    """Two workers count on one ps without losing a step."""
    flags = [*_hosts(addresses(ps=1, worker=2)), "--times=200"]
    with programs() as start:
        start("counter", *flags, "--job_name=ps")
        workers = [
            start("counter", *flags, "--job_name=worker", f"--task_index={i}") for i in range(2)
        ]
        assert [re.findall(r"total (\d+)", w.result()) for w in workers] == [["400"], ["400"]]


@pytest.mark.parametrize(
    "sync",
    [pytest.param(False, id="async", marks=pytest.mark.nightly), pytest.param(True, id="sync")],
)
def test_training_restarts_from_checkpoint(tmp_path, sync: bool) -> None:
    """Two ps and two workers train, and a second run begins where the first ended."""

    def train(last_step: int) -> list[str]:
        flags = [
            *_hosts(addresses(ps=2, worker=2)),
            f"--logdir={tmp_path}",
            f"--last_step={last_step}",
        ]
        flags += ["--sync"] if sync else []
        with programs() as start:
            for i in range(2):
                start("trainer", *flags, "--job_name=ps", f"--task_index={i}")
            workers = [
                start("trainer", *flags, "--job_name=worker", f"--task_index={i}") for i in range(2)
            ]
            return [w.result() for w in workers]

    for said in train(200):
        found = re.search(r"line ([-\d.]+) ([-\d.]+) step (\d+)", said)
        assert found, said
        # Asynchronous: each ps gives what it has when it is read, so a worker may have the first
        # slope with the last offset, and its gradient of 0.4 may come as late as the last step.
        near = 0.1 if sync else 0.7
        assert [float(v) for v in found.groups()[:2]] == [
            pytest.approx(3, abs=near),
            pytest.approx(-1, abs=near),
        ]
        assert int(found[3]) >= 200
        assert "devices /job:ps/task:1 /job:ps/task:0 /job:ps/task:0" in said
    newest = tf.train.latest_checkpoint(str(tmp_path))
    assert newest is not None and int(re.findall(r"\d+", newest)[-1]) >= 200
    assert "line/slope" in dict(tf.train.list_variables(str(tmp_path)))
    assert glob.glob(str(tmp_path / "events.out.tfevents.*"))
    if not sync:
        (step, *_) = [int(s) for said in train(10) for s in re.findall(r"step (\d+)", said)]
        assert step >= 200, "the second run began where the first one ended"


def test_two_devices_share_a_product() -> None:
    """Two devices of one machine share a matrix product."""
    with programs() as start:
        said = start("split_matmul").result()
    assert re.search(r"devices 2 ran on \['CPU:0', 'CPU:1'\] in [\d.]+", said), said


@real_mnist.needed
def test_mnist_tutorial_learns(tmp_path) -> None:
    """The MNIST tutorial learns, and writes its costs and its graph with devices."""
    cluster = addresses(ps=1, worker=1)
    flags = [f"--{job}_host={hosts[0]}" for job, hosts in cluster.items()] + [
        f"--logdir={tmp_path}"
    ]
    with programs() as start:
        start("mnist_softmax", *flags, "--job_name=ps", MNIST_DIR=real_mnist.DIRECTORY)
        said = start(
            "mnist_softmax", *flags, "--job_name=worker", MNIST_DIR=real_mnist.DIRECTORY
        ).result()
    accuracy = float(re.search(r"accuracy ([\d.]+)", said)[1])
    assert accuracy > 0.75 and "done" in said.splitlines(), said
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    costs = events.Scalars("cost")
    assert len(costs) == 150 and costs[-1].value < costs[0].value
    nodes = {node.name: node.device for node in _graph(events).node}
    assert nodes["weights/Variable"].startswith("/job:ps") and nodes["softmax/MatMul"].startswith(
        "/job:worker"
    )


def _graph(events):
    return events.Graph()
