"""What two users could share has a name for each of them: aggregates, clocks, averages, slots of parts."""

import pathlib
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from runtime.server.local_cluster import InProcessCluster
from tests.harness.optimizers.kit import in_threads
from tests.kit.waits import until

pytestmark = pytest.mark.cluster


class Two:
    """A worker that trains two variables by two optimizers: the gradient of ``a`` is 1, that of ``b`` 100."""

    def __init__(
        self,
        cluster: InProcessCluster,
        worker: int,
        same: bool,
        wrap: Callable[..., harness.SyncReplicas],
    ) -> None:
        self.graph = rt.Graph()
        with self.graph.as_default(), cluster.device(worker):
            steps = [
                rt.Variable(np.int64(0), name=name, trainable=False)
                for name in ("step_a", "step_b")
            ]
            a = rt.Variable(np.float32(0), name="a")
            b = a if same else rt.Variable(np.float32(0), name="b")
            self.values = [a, b]
            self.optimizers = [wrap(harness.Optimizer(optax.sgd(1.0))) for _ in range(2)]
            losses = [
                rt.call(lambda v: v, a, name="loss_a"),
                rt.call(lambda v: 100 * v, b, name="loss_b"),
            ]
            self.trains = [
                optimizer.minimize(loss, step, [variable])
                for optimizer, loss, step, variable in zip(
                    self.optimizers, losses, steps, self.values, strict=True
                )
            ]
            self.init = rt.global_variables_initializer()
        self.session = rt.Session(cluster.target_of(worker), self.graph)


@pytest.mark.parametrize(("ps", "same"), [(1, False), (1, True), (2, False)])
def test_two_aggregates_stay_separate(ps: int, same: bool) -> None:
    """Two synchronous optimizers of one graph never mix their gradients, even when workers step in
    opposite orders.
    """

    def wrap(optimizer: harness.Optimizer) -> harness.SyncReplicas:
        return harness.SyncReplicas(optimizer, 2)

    with rt.local_cluster(ps=ps, workers=2) as cluster:
        workers = [Two(cluster, index, same, wrap) for index in range(2)]
        one, other = workers
        one.session.run(one.init)
        waits = [optimizer.waiting_for for optimizer in one.optimizers]
        first = threading.Thread(target=lambda: one.session.run(one.trains[0]))
        first.start()
        until(lambda: one.session.run(waits[0]))
        second = threading.Thread(target=lambda: other.session.run(other.trains[1]))
        second.start()
        until(
            lambda: not second.is_alive() or "workers [1] are in" in str(one.session.run(waits[1]))
        )
        in_threads(
            [lambda: one.session.run(one.trains[1]), lambda: other.session.run(other.trains[0])]
        )
        first.join()
        second.join()
        assert one.session.run(one.values) == ([-101.0, -101.0] if same else [-1.0, -100.0])
        for worker in workers:
            worker.session.close()


def test_two_clocks_stay_separate() -> None:
    """Two stale-synchronous optimizers of one graph have clocks of their own."""

    def wrap(optimizer: harness.Optimizer) -> harness.StaleSynchronous:
        return harness.StaleSynchronous(optimizer, 3)

    with rt.local_cluster(ps=1, workers=1) as cluster:
        worker = Two(cluster, 0, False, wrap)
        clocks = {
            op.body.attrs["resource"]["name"]
            for op in worker.graph.get_operations()
            if "DeferredUpdate" in op.type
        }
        assert len(clocks) == 2
        worker.session.close()


def averaged(
    transformation: optax.GradientTransformation, value: object
) -> tuple[harness.Optimizer, rt.Variable, rt.Operation]:
    variable = rt.Variable(value, name="w")
    optimizer = harness.Optimizer(transformation)
    return (
        optimizer,
        variable,
        optimizer.minimize(rt.call(lambda v: jnp.sum(v.astype(jnp.float32)), variable)),
    )


def test_each_average_has_its_own_slot() -> None:
    """Two moving averages with different names have slots of their own."""
    with rt.Graph().as_default():
        fast = harness.ExponentialMovingAverage(0.5, warm_up=False, name="fast")
        slow = harness.ExponentialMovingAverage(0.9, warm_up=False, name="slow")
        optimizer, w, train = averaged(slow.after(fast.after(optax.sgd(1.0))), np.float32(10))
        found = [ema.variables(optimizer, w) for ema in (fast, slow)]
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(session.run(found), [9.5, 9.9], rtol=1e-6)
        assert {"fast/average", "slow/average"} <= set(optimizer.get_slot_names())


def test_averages_of_one_name_are_refused() -> None:
    """Two moving averages of one name, and a name with other characters, are refused."""
    with rt.Graph().as_default():
        fast, slow = harness.ExponentialMovingAverage(0.5), harness.ExponentialMovingAverage(0.9)
        optimizer, w, _ = averaged(slow.after(fast.after(optax.sgd(1.0))), np.float32(10))
        with pytest.raises(
            rt.InvalidArgumentError, match="two moving averages of one optimizer are called 'ema'"
        ):
            fast.variables(optimizer, w)
        with pytest.raises(
            rt.InvalidArgumentError, match="small letters, digits and _ only, not 'My Average'"
        ):
            harness.ExponentialMovingAverage(name="My Average")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_average_of_a_narrow_type_moves(dtype: object) -> None:
    """The average of a narrow variable moves by steps that its type could not hold."""
    with rt.Graph().as_default():
        ema = harness.ExponentialMovingAverage(0.999, warm_up=False)
        optimizer, w, train = averaged(ema.after(optax.sgd(0.0)), jnp.ones(2, dtype))
        far = w.assign(np.full(2, 3, w.dtype))
        average = ema.variables(optimizer, w)
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            session.run(far)
            for _ in range(100):
                session.run(train)
            found = session.run(average)
        assert found.dtype == w.dtype
        np.testing.assert_allclose(found.astype(np.float32), 3 - 2 * 0.999**100, rtol=1e-2)


def parted(
    transformation: optax.GradientTransformation, parts: int
) -> tuple[list[rt.Variable], rt.Operation]:
    """A table of 8 rows in several parts, and its training."""
    table = np.arange(16 * 130, dtype=np.float32).reshape(16, 130) / 100
    variables = [
        rt.Variable(rows, name=f"part_{i}") for i, rows in enumerate(np.split(table, parts))
    ]
    harness.partitioned("table", variables)

    def loss(*rows: jax.Array) -> jax.Array:
        return sum(jnp.sum((i + 1) * row**2) for i, row in enumerate(rows))

    optimizer = harness.Optimizer(transformation)
    return variables, optimizer.minimize(rt.call(loss, *variables))


@pytest.mark.parametrize(
    "transformation",
    [
        optax.adam(0.1),
        optax.adafactor(0.1, min_dim_size_to_factor=4),
        optax.novograd(0.1),
        optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, key=7)),
    ],
    ids=["adam", "adafactor", "novograd", "noise"],
)
def test_slots_of_parts_are_restored(
    tmp_path: pathlib.Path, transformation: optax.GradientTransformation
) -> None:
    """Training in two halves with a checkpoint between them equals training without a pause."""
    with rt.Graph().as_default():
        variables, train = parted(transformation, 2)
        saver = harness.Saver()
        with rt.Session() as session:
            session.run(rt.global_variables_initializer())
            for step in range(6):
                if step == 3:
                    path = saver.save(session, tmp_path / "model.ckpt", step)
                session.run(train)
            expected = session.run(variables)
        with rt.Session() as session:
            saver.restore(session, path)
            for _ in range(3):
                session.run(train)
            found = session.run(variables)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, two)


def test_counts_fit_other_partitions(tmp_path: pathlib.Path) -> None:
    """The step counts of a partitioned table are restored into another number of parts."""
    for parts in (2, 4):
        with rt.Graph().as_default():
            _, train = parted(optax.adam(0.1), parts)
            saver = harness.Saver()
            with rt.Session() as session:
                if parts == 2:
                    session.run(rt.global_variables_initializer())
                    session.run(train)
                    path = saver.save(session, tmp_path / "model.ckpt", 1)
                saver.restore(session, path)


def test_parts_are_made_before_their_slots() -> None:
    """partitioned is refused after an optimizer has made slots for the parts."""
    with rt.Graph().as_default():
        variables = [rt.Variable(np.zeros((2, 3), np.float32), name=f"part_{i}") for i in range(2)]
        harness.Optimizer(optax.adam(0.1)).minimize(
            rt.call(lambda *v: sum(map(jnp.sum, v)), *variables)
        )
        with pytest.raises(
            rt.InvalidArgumentError,
            match="an optimizer has slots of parts of 'table': call partitioned",
        ):
            harness.partitioned("table", variables)
