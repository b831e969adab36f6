"""The copies between the host and a GPU in a training step, on the GPUs of ``tests.kit.stand_in_gpus``."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import harness
import runtime as rt
from tests.runtime.kit import TARGET, servers

if "tests.kit.stand_in_gpus" not in sys.modules:
    pytest.skip("needs GPUs: make test-stand-ins", allow_module_level=True)

from tests.kit.stand_in_gpus import AT_MESSAGES, AT_RETURNS, COPIES, PLACED, clear

VARIABLES = 6
PS = 2
SIZE = 20_000
"""Elements of a variable."""
GIVEN = 3
"""The batch, its factor, and the id of the step."""


class Training:
    """A model of variables on two ps, which trains on a device of a worker."""

    def __init__(
        self,
        cluster: dict[str, rt.Server],
        prefetch: int,
        device: str = "/gpu:0",
        size: int = SIZE,
    ) -> None:
        spec = cluster[TARGET].cluster
        with rt.device(rt.replica_device_setter(cluster=spec, worker_device=TARGET + device)):
            self.weights = [rt.Variable(np.full(size, i, np.float32)) for i in range(VARIABLES)]
            self.x = rt.placeholder(np.float32, [size], name="x")
            self.factor = rt.placeholder(np.int64, [], name="factor")

            def loss_fn(key: jax.Array, x: jax.Array, factor: jax.Array, *w: jax.Array) -> Any:
                target = x * factor.astype(np.float32)
                return sum(((a - target) ** 2).sum() for a in w) + 0 * jax.random.uniform(key)

            loss = rt.call(loss_fn, rt.random_key(), self.x, self.factor, *self.weights)
            pairs = zip(self.weights, rt.gradients(loss, self.weights), strict=True)
            self.fetches = [rt.group(*(w.assign_sub(0.25 * g).op for w, g in pairs)), loss]
        self.session = rt.Session(
            cluster[TARGET].target, config=rt.SessionConfig(prefetch=prefetch)
        )
        self.session.run(rt.global_variables_initializer())

    def step(self, x: Any, factor: int = 1) -> float:
        """Trains one step; returns the loss."""
        clear()
        loss: float = self.session.run(self.fetches, {self.x: x, self.factor: factor})[1]
        return loss


@pytest.fixture(params=[0, 1], ids=["strict", "pipelined"])
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    with servers(sockets=True, ps=PS, worker=1) as cluster:
        made = Training(cluster, request.param)
        for _ in range(3):
            made.step(np.ones(SIZE, np.float32))
        yield made
        made.session.close()


def test_step_copies_each_array_once(training: Training) -> None:
    """A step copies what a program takes in and what it gives out, and the copies out begin with the program.

    What is given to a step is copied by one call, and so are the parameters of each ps. The step
    waits once for its program.
    """
    training.step(np.ones(SIZE, np.float32))
    assert (COPIES["in"], COPIES["out"]) == (VARIABLES + GIVEN, VARIABLES + 1)
    assert COPIES["puts"] == 1 + PS
    assert COPIES["late"] == 0
    assert COPIES["waits"] == 1


def test_values_are_those_of_hosts(training: Training) -> None:
    """A GPU computes what a host computes, also when the batch changes after its step."""
    weights, batch = training.session.run(training.weights), np.ones(SIZE, np.float32)
    for step in range(1, 4):
        batch[:] = step
        loss = training.step(batch, factor=2)
        batch[:] = np.nan
        assert np.isfinite(loss)
    found = training.session.run(training.weights)
    if not training.session.config.prefetch:
        for step in range(1, 4):
            weights = [w - 0.5 * (w - 2 * step) for w in weights]
        np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert np.isfinite(found).all()


def test_batch_on_gpu_stays_there(training: Training) -> None:
    """A batch that lies on the GPU is not copied, and serves further steps."""
    batch = jax.device_put(np.ones(SIZE, np.float32), jax.local_devices()[0])
    first, _, _ = (training.step(batch) for _ in range(3))
    assert (COPIES["in"], COPIES["out"]) == (VARIABLES + GIVEN - 1, VARIABLES + 1)
    assert np.isfinite(first) and not batch.is_deleted()


def test_batch_on_another_gpu_moves(training: Training) -> None:
    """A batch on another GPU of the worker goes to the GPU that takes the batch, and stays whole."""
    batch = jax.device_put(np.ones(SIZE, np.float32), jax.local_devices()[1])
    assert np.isfinite(training.step(batch)) and not batch.is_deleted()
    np.testing.assert_array_equal(batch, np.ones(SIZE))


def test_copies_in_begin_early(training: Training) -> None:
    """The batch is copied before the first message, and the parameters of a ps when its reply is there.

    So the parameters of the next pipelined step are copied while the program computes.
    """
    training.step(np.ones(SIZE, np.float32))
    second, whole = GIVEN + VARIABLES // PS, VARIABLES + GIVEN
    pulls, pushes = [GIVEN, GIVEN, GIVEN, second], [whole] * PS
    # Two pulls are sent and received, then two pushes. A pipelined step receives the replies of
    # pushes first, and sends pushes last.
    expected = [*pulls, *pushes, *pushes]
    if training.session.config.prefetch:
        expected = [GIVEN, GIVEN, *pulls, *pushes]
    assert expected == AT_MESSAGES


def test_threads_pull_for_gpu() -> None:
    """Parameters that come on threads are copied once for each step."""
    with servers(sockets=True, ps=PS, worker=1) as cluster:
        # Messages of a megabyte travel on threads.
        made = Training(cluster, 1, size=10 * SIZE)
        clear()
        for _ in range(5):
            made.session.run(made.fetches, {made.x: np.ones(10 * SIZE, np.float32), made.factor: 1})
        weights = made.session.run(made.weights)
        # Two steps were pulled for at first, and one later step with each push.
        assert COPIES["in"] == 5 * GIVEN + 7 * VARIABLES
        assert np.isfinite(weights).all()
        made.session.close()


@pytest.mark.parametrize("training", [1], indirect=True)
def test_memory_outlasts_copies_ahead(training: Training) -> None:
    """The memory of parameters that no step takes is used again only after the copies have read it."""
    training.step(np.ones(SIZE, np.float32))
    ahead = PLACED[-VARIABLES:]
    assert [each.is_deleted() for each in ahead] == [False] * VARIABLES
    clear()
    training.session.run(training.weights)
    assert {*map(id, ahead)} <= {*map(id, AT_RETURNS[0])}


def test_pulled_parameters_are_used_up(training: Training) -> None:
    """The gradients take the memory of the pulled parameters, and a batch keeps its own."""
    training.step(np.ones(SIZE, np.float32))
    large = [a for a in PLACED if a.shape == (SIZE,)]
    assert len(large) == VARIABLES + 1
    # A pipelined step has copied the parameters of the next step, which takes their memory.
    training.step(np.ones(SIZE, np.float32))
    assert sum(a.is_deleted() for a in large) == VARIABLES


@pytest.mark.parametrize("training", [0], indirect=True)
def test_trace_has_copies_and_compute(training: Training) -> None:
    """A traced stage on a GPU has the copy in, the program and the copy out as parts, one after the other."""
    metadata = rt.RunMetadata()
    traced = rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE)
    feeds = {training.x: np.ones(SIZE, np.float32), training.factor: 1}
    for _ in range(2):
        loss = training.session.run(training.fetches, feeds, traced, metadata)[1]
    assert np.isfinite(loss)
    by_device = {
        each.device: {node.node_name: node for node in each.node_stats}
        for each in metadata.step_stats.dev_stats
    }
    nodes = by_device["/job:worker/replica:0/task:0/device:GPU:0"]
    parts = [nodes[name] for name in ("h2d:1", "compute:1", "d2h:1")]
    ends = [part.all_start_nanos + part.all_end_rel_nanos for part in parts]
    stage = nodes["stage:1"]
    assert [part.all_start_nanos for part in parts] == [stage.all_start_nanos, *ends[:2]]
    assert ends[2] == stage.all_start_nanos + stage.all_end_rel_nanos
    moved = [
        part.output[0].tensor_description.allocation_description.requested_bytes for part in parts
    ]
    assert moved[0] >= (VARIABLES + 1) * SIZE * 4
    assert moved[2] > VARIABLES * SIZE * 4
    hosts = [name for device, found in by_device.items() if "CPU" in device for name in found]
    assert not [name for name in hosts if name.startswith(("h2d", "d2h", "compute"))]
    names = {event["name"] for event in harness.timeline.chrome_trace(metadata)["traceEvents"]}
    assert f"d2h {moved[2]} B" in names


@pytest.mark.parametrize("sockets", [False, True], ids=["one process", "sockets"])
def test_host_reads_in_place(sockets: bool) -> None:
    """A stage on the CPU copies nothing to a GPU, and overwrites no memory that it was lent."""
    with servers(sockets=sockets, ps=2, worker=1) as cluster:
        training = Training(cluster, 0, "/cpu:0")
        batch = np.ones(SIZE, np.float32)
        for _ in range(3):
            training.step(batch)
            assert not COPIES.total()
        weights = training.session.run(training.weights)
        np.testing.assert_allclose(weights[3], np.full(SIZE, 1 + 2 / 8), rtol=1e-6)
        np.testing.assert_array_equal(batch, np.ones(SIZE))
        training.session.close()


def test_neighbouring_ps_keeps_its_variables() -> None:
    """A GPU uses up copies of variables that a ps of the same process lends, and not the variables."""
    with servers(ps=2, worker=1) as cluster:
        training = Training(cluster, 0)
        for _ in range(3):
            training.step(np.ones(SIZE, np.float32))
        weights = training.session.run(training.weights)
        for i, weight in enumerate(weights):
            np.testing.assert_allclose(weight, np.full(SIZE, 1 + (i - 1) / 8), rtol=1e-6)
        training.session.close()
