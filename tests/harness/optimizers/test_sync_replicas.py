"""Synchronous training over real ps processes: the same model as one process on the concatenated batches."""

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness import timeline
from harness.optimizers.optimizer import WrappedOptimizer
from harness.tf1.train.optimizers import scale_by_tensor
from tests.harness.optimizers.kit import alone, cluster, in_threads, reset
from tests.harness.optimizers.task import STEPS, Replica, batches
from tests.kit.waits import until

pytestmark = pytest.mark.cluster

WORKERS = 4
Spec = dict[str, list[str]]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["1ps", "2ps", "3ps"])
def spec(request: pytest.FixtureRequest) -> Iterator[Spec]:
    with cluster(request.param, WORKERS) as found:
        yield found


@pytest.fixture(scope="module")
def servers(spec: Spec) -> Iterator[list[rt.Server]]:
    found = [rt.Server(spec, "worker", i) for i in range(WORKERS)]
    yield found
    for server in found:
        server.stop()


def _replicas(
    servers: list[rt.Server], count: int, rule: str, needed: int, total: int | None = None
) -> list[Replica]:
    reset(servers[0])

    def wrap(optimizer: harness.Optimizer) -> Any:
        return harness.SyncReplicas(optimizer, needed, total or count)

    return in_threads(
        [lambda i=i: Replica(servers[i], rule, wrap, chief=i == 0) for i in range(count)]  # type: ignore[misc]
    )


@pytest.mark.parametrize("rule", ["sgd", "adam", "clip_momentum", "clip_adam"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicas_equal_one_large_batch(servers: list[rt.Server], count: int, rule: str) -> None:
    """Replicas give the model of one process on all batches, one step each, and waste no gradient."""
    x, y = batches(count)
    replicas = _replicas(servers, count, rule, count)

    def train(i: int) -> list[tuple[int, bool]]:
        return [replicas[i].run(x[k, i], y[k, i]) for k in range(STEPS)]

    outcomes = in_threads([lambda i=i: train(i) for i in range(count)])  # type: ignore[misc]
    # one step each, and no wasted round
    assert outcomes == [[(k + 1, True) for k in range(STEPS)]] * count
    values = replicas[0].session.run(replicas[0].variables)
    for mine, wanted in zip(values, alone(rule, x, y), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
    assert replicas[0].session.run(replicas[0].optimizer.dropped_gradients) == 0
    in_threads([r.close for r in replicas])


@pytest.mark.parametrize("rule", ["clip_momentum", "clip_adam"])
@pytest.mark.parametrize("elastic", [False, True], ids=["backups", "elastic"])
def test_clip_scales_mean_of_any_aggregate(
    servers: list[rt.Server], elastic: bool, rule: str
) -> None:
    """The mean of those gradients that count is clipped, with backup workers and with workers that come and go."""
    reset(servers[0])
    x, y = batches(3)
    counted: dict[int, list[int]] = {}
    done = [False, False, False]

    def wrap(optimizer: harness.Optimizer) -> Any:
        if elastic:
            return harness.SyncReplicas(optimizer, elastic=True)
        # The chief's last gradient may find no other.
        return harness.SyncReplicas(optimizer, 2, 3, sync_timeout_secs=3.0)

    def train(i: int, first: int) -> list[Any]:
        until(lambda: len(counted) >= first)
        replica = Replica(servers[i], rule, wrap, chief=i == 0, by_step=True)
        runs = 0
        # The chief trains until the others have left.
        while runs < 20 or i == 0 and not all(done[1:]):
            step, accepted = replica.run(x[:, i], y[:, i])
            if accepted:
                counted.setdefault(step - 1, []).append(i)
            runs += 1
        done[i] = True
        values = replica.session.run([replica.step, *replica.variables])
        replica.close()
        return values

    chief, *_ = in_threads(
        [lambda i=i: train(i, 10 * i * elastic) for i in range(3)]  # type: ignore[misc]
    )
    steps = range(chief[0])
    sizes = {len(workers) for workers in counted.values()}
    assert len(sizes) > 1 if elastic else 2 in sizes
    batch = [(k % STEPS, counted[k]) for k in steps]
    wanted = alone(rule, [x[which] for which in batch], [y[which] for which in batch])
    for mine, one in zip(chief[1:], wanted, strict=True):
        # The mean is summed in the order of arrival, and a busy machine takes more steps.
        np.testing.assert_allclose(mine, one, rtol=2e-5, atol=2e-6 * len(batch))


def test_workers_may_give_several_gradients(servers: list[rt.Server]) -> None:
    """Two workers that give two gradients each to an aggregate train the model of one process on
    four batches.
    """
    x, y = batches(4, 20)
    replicas = _replicas(servers, 2, "sgd", needed=4, total=2)

    def train(i: int) -> list[int]:
        return [
            replicas[i].run(x[k, 2 * i + j], y[k, 2 * i + j])[0]
            for k in range(20)
            for j in range(2)
        ]

    for steps in in_threads([lambda: train(0), lambda: train(1)]):
        assert steps[1::2] == list(range(1, 21))
    values = replicas[0].session.run(replicas[0].variables)
    for mine, wanted in zip(values, alone("sgd", x, y), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
    in_threads([r.close for r in replicas])


def test_clip_scales_gradients_alone(servers: list[rt.Server]) -> None:
    """Gradients that are constants are clipped as others are, and the learning rate beside them is not."""
    reset(servers[0])
    given = [([10.0, 0.0], 0.0, 4.0), ([0.0, 0.0], 2.0, 8.0)]

    def train(i: int) -> list[Any]:
        with (
            rt.Graph().as_default(),
            rt.device(rt.replica_device_setter(cluster=servers[i].cluster)),
        ):
            step = harness.get_or_create_global_step()
            pair, one = rt.Variable(np.zeros(2, np.float32)), rt.Variable(0.0)
            first, second, rate = given[i]
            fed = rt.placeholder(np.float32, [])
            rule = optax.chain(optax.clip_by_global_norm(1.0), scale_by_tensor("rate", -1.0))
            inner = harness.Optimizer(rule, extra_args={"rate": fed})
            sync = harness.SyncReplicas(inner, 2, worker=i)
            gradients = [rt.constant(np.array(first, np.float32)), rt.constant(second)]
            apply = sync.apply_gradients(list(zip(gradients, [pair, one], strict=True)), step)
            init, missing = rt.global_variables_initializer(), rt.report_uninitialized_variables()
            config = rt.SessionConfig(device_filters=("/job:ps",))
            with rt.Session(servers[i].target, config=config) as session:
                if i == 0:
                    session.run(init)
                until(lambda: not len(session.run(missing)))
                coord = harness.Coordinator()
                runner = sync.get_chief_queue_runner()
                threads = runner.create_threads(session, coord, daemon=True, start=True)
                session.run(apply, {fed: rate})
                values = session.run([pair, one])
                coord.request_stop()
                coord.join(threads)
                return values

    # The mean of the gradients is ((5, 0), 1), and that of the rates 6.
    for values in in_threads([lambda: train(0), lambda: train(1)]):
        wanted = -6 * np.array([5.0, 0.0, 1.0]) / np.sqrt(26.0)
        np.testing.assert_allclose(np.concatenate([values[0], [values[1]]]), wanted, rtol=1e-5)


class _TwoGraphs(WrappedOptimizer):
    """An optimizer that makes another thread's graph while it makes its own."""

    found: list[float]

    def apply_gradients(self, *args: Any, **kwargs: Any) -> rt.Operation:
        with ThreadPoolExecutor(1) as pool:
            self.found = pool.submit(_clipped_step, self.optimizer).result()
        return super().apply_gradients(*args, **kwargs)


def _clipped_step(optimizer: Any) -> Any:
    """Returns a variable from 0 after one step with the gradient (3, 4)."""
    with rt.Graph().as_default():
        step, v = harness.get_or_create_global_step(), rt.Variable(np.zeros(2, np.float32))
        train = optimizer.apply_gradients([(rt.constant(np.float32([3, 4])), v)], step)
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(train)
            return session.run(v)


def test_clip_of_optimizer_stays() -> None:
    """An optimizer clips in another thread's graph while SyncReplicas uses it."""
    inner = harness.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    between = _TwoGraphs(inner, "between")
    for found in (_clipped_step(harness.SyncReplicas(between, 1)), between.found):
        np.testing.assert_allclose(found, [-0.6, -0.8], rtol=1e-6)
    # Another norm counts for the graphs that are made from then on.
    inner.clip_norm = 0.5
    for optimizer in (inner, harness.SyncReplicas(inner, 1)):
        np.testing.assert_allclose(_clipped_step(optimizer), [-0.3, -0.4], rtol=1e-6)


def test_initialised_model_starts_again(servers: list[rt.Server]) -> None:
    """A model that is initialised again starts its steps again on every ps."""
    replicas = _replicas(servers, 2, "sgd", 2)
    x, y = batches(2, 6)

    def train(i: int, start: int) -> list[int]:
        return [replicas[i].run(x[k, i], y[k, i])[0] for k in range(start, start + 3)]

    assert in_threads([lambda: train(0, 0), lambda: train(1, 0)]) == [[1, 2, 3]] * 2
    replicas[0].session.run(replicas[0].init)

    def train_again(i: int) -> None:
        step = 0
        while step < 3:  # what was pushed before the chief has noticed may have to be pushed again
            step = replicas[i].run(x[3 + step, i], y[3 + step, i])[0]

    in_threads([lambda: train_again(0), lambda: train_again(1)])
    for mine, wanted in zip(
        replicas[0].session.run(replicas[0].variables), alone("sgd", x[3:], y[3:]), strict=True
    ):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
    in_threads([r.close for r in replicas])


# -- the classic optimizer's surface -------------------------------------------------------------------------------


def _graph() -> tuple[Any, Any, Any]:
    step = harness.get_or_create_global_step()
    w = rt.Variable(np.ones(2, np.float32), name="w")
    return step, w, rt.call(lambda v: (v**2).sum(), w)


def test_missing_arguments_are_asked_for() -> None:
    """Missing variables, a missing global step and impossible numbers are refused with TensorFlow's
    messages.
    """
    sync = harness.SyncReplicas(harness.Optimizer(optax.sgd(0.1)), 2)
    with rt.Graph().as_default():
        step, w, loss = _graph()
        with pytest.raises(ValueError, match="Must supply at least one variable"):
            sync.apply_gradients([], step)
        with pytest.raises(ValueError, match="Global step is required to check staleness"):
            sync.minimize(loss)
        for early in (
            sync.get_chief_queue_runner,
            lambda: sync.accepted,
        ):
            with pytest.raises(ValueError, match="apply_gradients should be called"):
                early()
        sync.minimize(loss, step)
        assert sync.get_chief_queue_runner().create_threads(None) == []  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 gradients"):
        harness.SyncReplicas(harness.Optimizer(optax.sgd(0.1)), 0)
    with pytest.raises(ValueError, match="worker 2 is not among the 2"):
        harness.SyncReplicas(harness.Optimizer(optax.sgd(0.1)), 2, worker=2)


def test_clip_of_each_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A clip before the push is named with what it acts on; one of each variable is not."""
    clip = optax.clip_by_global_norm(1.0)
    each = optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1))
    harness.SyncReplicas(harness.Optimizer(each, before_push=optax.scale(2.0)), 2)
    assert "before_push" not in caplog.text
    bounded = harness.StaleSynchronous(
        harness.Optimizer(optax.sgd(0.1), before_push=optax.chain(clip)), 1
    )
    harness.SyncReplicas(bounded, 2, name="mine")
    assert "mine: before_push=clip_by_global_norm acts on the gradients of each" in caplog.text


def test_step_takes_two_round_trips(servers: list[rt.Server]) -> None:
    """A synchronous step takes two round trips to each ps."""
    replicas = _replicas(servers, 1, "adam", 1)
    x, y = batches(1)
    replicas[0].run(x[0, 0], y[0, 0])
    metadata = rt.RunMetadata()
    replicas[0].session.run(
        replicas[0].fetches(),
        {replicas[0].x: x[1, 0], replicas[0].y: y[1, 0]},
        rt.RunOptions(trace_level=rt.RunOptions.FULL_TRACE),
        metadata,
    )
    events = timeline.chrome_trace(metadata)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    stages = sorted((e for e in events if e.get("cat") == "stage"), key=lambda e: e["ts"])
    devices = [names[stage["pid"]] for stage in stages]
    jobs = [re.findall("/job:([a-z]+)", device)[0] for device in devices]
    assert [job for job, _ in itertools.groupby(jobs)] == ["ps", "worker", "ps"]
    ps = [device for device in devices if "/job:ps" in device]
    assert {ps.count(device) for device in ps} == {2}
    replicas[0].close()


def test_sync_replicas_work_without_cluster() -> None:
    """SyncReplicas trains in one process without a cluster."""
    with rt.Graph().as_default():
        step, w, loss = _graph()
        sync = harness.SyncReplicas(harness.Optimizer(optax.sgd(0.25)), 1)
        train = sync.minimize(loss, step)
        init = rt.global_variables_initializer()
        with rt.Session() as session:
            session.run(init)
            assert [int(session.run([train, step])[1]) for _ in range(3)] == [1, 2, 3]
            np.testing.assert_allclose(session.run(w), 0.125 * np.ones(2))
            summaries = session.run(harness.summary.merge_all())
            assert b"dropped_gradients" in summaries
