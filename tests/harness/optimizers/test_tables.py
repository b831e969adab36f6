"""Tables trained beside dense variables, by every optimizer, on any number of ps."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from runtime.tables.paging import SMALLEST
from tests.harness.checkpoints.checkpoint_kit import plain_orbax
from tests.harness.optimizers.kit import in_threads
from tests.runtime.kit import TARGET, servers

pytestmark = pytest.mark.cluster

ROWS, DIM = 2 * SMALLEST + 77, 3
EVERY_ROW = np.arange(ROWS)
Transformation = optax.GradientTransformation


def _initial(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype)


def _loss(rows: jax.Array, scale: jax.Array) -> jax.Array:
    weights = jnp.arange(1, rows.shape[0] + 1, dtype=rows.dtype)
    return jnp.mean((jnp.sin(rows) * scale - 1) ** 2 * weights[:, None])


def _build(optimizer: harness.Optimizer, kind: str, first: np.ndarray | None = None) -> Any:
    """Returns ids, a step of training, and the table as a whole."""
    ids = rt.placeholder(np.int64, [None], name="ids")
    scale = rt.Variable(np.ones(DIM, np.float32), name="scale")
    table: Any
    if kind == "table":
        table = rt.Table("table", rows=ROWS, dim=DIM, initializer=_initial)
        rows, whole = table.lookup(ids), table.lookup(EVERY_ROW)
    else:
        table = rt.Variable(first, name="table")
        rows, whole = rt.call(lambda table, ids: table[ids], table, ids), table.value()
    train = optimizer.minimize(rt.call(_loss, rows, scale), harness.get_or_create_global_step())
    return ids, train, whole, scale


def _first_rows() -> np.ndarray:
    with rt.Graph().as_default(), rt.Session() as session:
        whole = rt.Table("table", rows=ROWS, dim=DIM, initializer=_initial).lookup(EVERY_ROW)
        session.run(rt.global_variables_initializer())
        found: np.ndarray = session.run(whole)
        return found


def _trained(kind: str, transformation: Transformation, batches: list[list[int]]) -> Any:
    first = _first_rows() if kind == "dense" else None
    with rt.Graph().as_default(), rt.Session() as session:
        optimizer = harness.Optimizer(transformation, tables=transformation)
        ids, train, whole, scale = _build(optimizer, kind, first)
        session.run(rt.global_variables_initializer())
        for batch in batches:
            session.run(train, {ids: np.array(batch, np.int64)})
        return session.run([whole, scale])


SOME = np.array([0, 1, 5, SMALLEST - 1, SMALLEST, ROWS - 1])


def _draw(seed: int) -> list[list[int]]:
    """Draws batches of ids that mostly repeat."""
    drawn: list[list[int]] = np.random.default_rng(seed).choice(SOME, (4, 9)).tolist()
    return drawn


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "transformation", [optax.sgd(0.1), optax.adagrad(0.1)], ids=["sgd", "adagrad"]
)
def test_rows_equal_dense_bits(transformation: Transformation, seed: int) -> None:
    """SGD and Adagrad train a table to the bits of a dense variable, with ids that repeat."""
    sparse, dense = (_trained(kind, transformation, _draw(seed)) for kind in ("table", "dense"))
    np.testing.assert_array_equal(sparse[0], dense[0])
    np.testing.assert_array_equal(sparse[1], dense[1])


def test_rowwise_adagrad_equals_dense() -> None:
    """The state of a row is the same number for a table and for a dense variable."""
    found = [_trained(kind, harness.rowwise_adagrad(0.1), _draw(0)) for kind in ("table", "dense")]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)


def test_adam_is_lazy() -> None:
    """Adam leaves rows alone that a step has not looked up; its count is that of the table."""
    adam = optax.adam(0.1)
    [[whole, _], [both, _]] = (_trained("table", adam, b) for b in ([[1], [5]], [[1, 5], [1, 5]]))
    first = _first_rows()
    assert np.flatnonzero((whole != first).any(axis=1)).tolist() == [1, 5]
    assert not np.array_equal(whole[[1, 5]], both[[1, 5]])
    # The second update of the table has a count of 2 and the row's first moments.
    assert np.abs(whole[5] - first[5]).max() < 0.11


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_train_as_dense(combiner: str, weighted: bool) -> None:
    """Bags, a lookup of the same table beside them, and their gradients are those of plain JAX."""
    ids, splits = np.array([3, 1, 3, 3, 7, 1]), np.array([0, 2, 2, 5, 6], np.int32)
    weights = np.array([1, 2, 0.5, 3, 1, 2] if weighted else [1] * 6, np.float32)
    norms = {
        "sum": np.ones_like,
        "mean": lambda w: w / w * w.sum(),
        "sqrtn": lambda w: w / w * np.sqrt((w * w).sum()),
    }
    factors = np.concatenate(
        [w / norms[combiner](w) if len(w) else w for w in np.split(weights, splits[1:-1])]
    )
    bag_of = np.repeat(np.arange(4), np.diff(splits))

    def loss_of(bags: jax.Array, alone: jax.Array) -> jax.Array:
        return (bags**3).sum() + (bags[0] * alone.sum(0)).sum()

    def dense_loss(table: jax.Array) -> jax.Array:
        bags = jnp.zeros((4, 2)).at[bag_of].add(table[ids] * factors[:, None])
        return loss_of(bags, table[np.array([1, 8])])

    with rt.Graph().as_default(), rt.Session() as session:
        table = rt.Table("films", rows=10, dim=2, initializer=_initial)
        fed, cuts = rt.placeholder(np.int64, [None]), rt.placeholder("int32", [None])
        bags = table.bag(fed, cuts, combiner=combiner, weights=weights if weighted else None)
        loss = rt.call(loss_of, bags, table.lookup([1, 8]))
        train = harness.Optimizer(optax.sgd(1.0), tables=optax.sgd(1.0)).minimize(loss)
        whole = table.lookup(np.arange(10))
        session.run(rt.global_variables_initializer())
        first = session.run(whole)
        assert bags.shape == (None, 2)
        found, _ = session.run([loss, train], {fed: ids, cuts: splits})
        np.testing.assert_allclose(found, dense_loss(first), rtol=1e-5)
        expected = first - jax.grad(dense_loss)(first)
        np.testing.assert_allclose(session.run(whole), expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(rt.InvalidArgumentError, match="'films': row_splits must ascend"):
            session.run(bags, {fed: ids, cuts: [0, 9]})
    with rt.Graph().as_default():
        with pytest.raises(rt.InvalidArgumentError, match="'median' is none of"):
            rt.Table("films", rows=10, dim=2).bag([1], [0, 1], combiner="median")


def _train_on(
    ps: int, transformation: Transformation, use: Callable[[rt.Session, Any], Any]
) -> Any:
    """Returns what ``use`` makes of a session of a cluster with so many ps."""
    with servers(sockets=True, ps=ps, worker=1) as made, rt.Graph().as_default():
        with rt.device(rt.replica_device_setter(ps_tasks=ps, worker_device=TARGET)):
            optimizer = harness.Optimizer(transformation, tables=transformation)
            parts = _build(optimizer, "table")
        with rt.Session(made[TARGET].target) as session:
            return use(session, parts)


@pytest.mark.parametrize("transformation", [optax.adam(0.1), harness.rowwise_adagrad(0.1)])
def test_checkpoint_fits_any_ps_count(tmp_path: Path, transformation: Transformation) -> None:
    """A table of 1 ps goes on upon 3 ps and then 2 as if nothing had happened, slots and all."""
    batches = [[0, SMALLEST, 5, 5], [ROWS - 1, 5], [SMALLEST, 0, 1]]
    expected = _trained("table", transformation, batches)
    path = ""
    for ps, batch in zip((1, 3, 2), batches, strict=True):

        def go_on(
            session: rt.Session, parts: Any, batch: list[int] = batch, path: str = path
        ) -> Any:
            ids, train, whole, scale = parts
            saver = harness.Saver()
            session.run(rt.global_variables_initializer())
            if path:
                saver.restore(session, path)
            session.run(train, {ids: np.array(batch)})
            step = harness.get_global_step()
            return saver.save(session, str(tmp_path / "m"), step), session.run([whole, scale])

        path, found = _train_on(ps, transformation, go_on)
    # A program of another process is compiled for itself, and may round otherwise.
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    _, arrays = plain_orbax(tmp_path / "m")
    np.testing.assert_array_equal(arrays["table"], found[0])
    assert all(a.shape[0] == ROWS for name, a in arrays.items() if a.shape and "table" in name)


def test_reader_sees_no_later_update() -> None:
    """Rows that a program has fetched, and a snapshot of a save, stay as they are in later steps."""
    with servers(ps=1, worker=1) as made, rt.Graph().as_default():
        with rt.device("/job:ps/task:0"):
            table = rt.Table("table", rows=10, dim=2, initializer=jax.nn.initializers.zeros)
        with rt.device(TARGET):
            rows = table.lookup([3, 3])
            loss = rt.call(lambda rows: -rows.sum(), rows)
            train = harness.Optimizer(optax.sgd(1.0), tables=optax.sgd(1.0)).minimize(loss)
        store = made["/job:ps/task:0"].worker.store
        with rt.Session(made[TARGET].target) as session:
            session.run(rt.global_variables_initializer())
            session.run(train)
            seen, memory = session.run(rows), store.snapshot()
            session.run(train)
            again = store.snapshot()
            del again
            before = store.values([("", "table/page_0")])
            session.run(train)
            after = store.values([("", "table/page_0")])
            assert before[("", "table/page_0")]() is not after[("", "table/page_0")]()
            np.testing.assert_array_equal(seen, [[2, 2], [2, 2]])
            np.testing.assert_array_equal(memory["", "table/page_0"][3], [2, 2])
            np.testing.assert_array_equal(session.run(rows)[0], [6, 6])
            store.validate()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([0.5]), "'films': the ids .* are float"),
        ([0, 10], "'films' has rows 0 to 9, and no row 10"),
        (np.array([2**40]), f"'films' has rows 0 to 9, and no row {2**40}"),
        (np.array([-3], np.int32), "'films' has rows 0 to 9, and no row -3"),
    ],
)
def test_bad_ids_are_refused(ids: Any, message: str) -> None:
    """Ids that are no rows of the table are refused, with the table and the id."""
    with rt.Graph().as_default(), rt.Session() as session:
        films = rt.Table("films", rows=10, dim=2)
        session.run(rt.global_variables_initializer())
        with pytest.raises(rt.InvalidArgumentError, match=message):
            session.run(films.lookup(ids))


def test_misuse_is_named() -> None:
    """Uses that a table does not support are refused by name, when the graph is made or at the first step."""
    with rt.Graph().as_default(), rt.Session() as session:
        films = rt.Table("films", rows=10, dim=2)
        with pytest.raises(rt.InvalidArgumentError, match=r"table 'films' of 10 rows and dim 2"):
            rt.Table("films", rows=10, dim=3)
        computed = rt.call(lambda x: x + 1, rt.placeholder("int32", [2]), name="next_ids")
        with pytest.raises(rt.InvalidArgumentError, match="a device computes the ids 'next_ids:0'"):
            films.lookup(computed)
        rows = films.lookup([1])
        with pytest.raises(rt.FailedPreconditionError, match="uninitialized value films/page_0"):
            session.run(rows)
        loss = rt.call(lambda rows: rows.sum(), rows)
        with pytest.raises(rt.InvalidArgumentError, match="tables= is missing.*'films'"):
            harness.Optimizer(optax.sgd(0.1)).minimize(loss)
        step = harness.get_or_create_global_step()
        plain = harness.Optimizer(optax.sgd(0.1), tables=optax.sgd(0.1))
        with pytest.raises(rt.InvalidArgumentError, match="table 'films'.* max_staleness"):
            harness.StaleSynchronous(plain, 1).minimize(loss, step)
        clipping = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        with pytest.raises(rt.InvalidArgumentError, match="clip_by_global_norm.*'films'"):
            harness.Optimizer(clipping, tables=optax.sgd(0.1)).minimize(loss)
        with pytest.raises(rt.InvalidArgumentError, match="tables= begins with clip"):
            harness.Optimizer(optax.sgd(0.1), tables=clipping)


def test_step_costs_frames_of_dense_step() -> None:
    """A step with tables costs each ps two messages: pulls with reads, and pushes with update and count."""
    with servers(sockets=True, ps=2, worker=1) as made, rt.Graph().as_default():
        with rt.device(rt.replica_device_setter(ps_tasks=2, worker_device=TARGET)):
            ids = rt.placeholder(np.int64, [None])
            scales = [rt.Variable(np.ones(DIM, np.float32), name=f"scale{i}") for i in range(2)]
            first = rt.Table("first", rows=ROWS, dim=DIM)
            second = rt.Table("second", rows=ROWS, dim=DIM + 1)
            found = [first.lookup(ids), second.lookup(ids), first.lookup([5])]
            loss = rt.call(
                lambda scales, found: sum(x.sum() for x in scales) * sum(x.sum() for x in found),
                scales,
                found,
            )
            step = harness.get_or_create_global_step()
            optimizer = harness.Optimizer(optax.adam(0.1), tables=harness.rowwise_adagrad(0.1))
            fetches = [optimizer.minimize(loss, step), step, loss]
        with rt.Session(made[TARGET].target) as session:
            session.run(rt.global_variables_initializer())
            batch = {ids: EVERY_ROW[::7]}
            session.run(fetches, batch)
            channels = [made[f"/job:ps/task:{i}"].tensors for i in range(2)]
            before = [channel.counters.calls for channel in channels]
            for _ in range(5):
                session.run(fetches, batch)
            calls = [c.counters.calls - b for c, b in zip(channels, before, strict=True)]
            assert calls == [10, 10]
            assert session.run(step) == 6


def test_rows_come_after_dependencies() -> None:
    """The gradient of a table that is made under control dependencies comes after them."""
    with rt.Graph().as_default(), rt.Session() as session:
        table = rt.Table("table", rows=10, dim=2)
        loss = rt.call(jnp.sum, table.lookup([3]))
        count = rt.Variable(0, name="count", trainable=False)
        with rt.control_dependencies([count.assign_add(1)]):
            pairs = [(rt.gradients(loss, [table])[0], table)]
        train = harness.Optimizer(optax.sgd(0.1), tables=optax.sgd(0.1)).apply_gradients(pairs)
        session.run(rt.global_variables_initializer())
        session.run(train)
        assert session.run(count) == 1


def _train_together(optimizer: Any, ps: int, batches: Any) -> Any:
    """Returns table and scale after synchronous steps of a worker for each column of ``batches``."""
    workers = len(batches[0])
    total = [0] * workers
    with servers(ps=ps, worker=workers) as made:
        ready = threading.Barrier(workers)

        def work(index: int) -> Any:
            task = f"/job:worker/task:{index}"
            with rt.Graph().as_default():
                with rt.device(rt.replica_device_setter(ps_tasks=ps, worker_device=task)):
                    sync = harness.SyncReplicas(optimizer(), workers, total_num_replicas=workers)
                    ids, train, whole, scale = _build(sync, "table")
                with rt.Session(made[task].target) as session:
                    if index == 0:
                        session.run(rt.global_variables_initializer())
                    ready.wait(60)
                    coord = harness.Coordinator()
                    sync.get_chief_queue_runner().create_threads(session, coord, start=True)
                    for batch in batches:
                        session.run(train, {ids: np.array(batch[index], np.int64)})
                    total[index] = int(session.run(sync.accepted_gradients))
                    found = session.run([whole, scale])
                    ready.wait(60)
                    coord.request_stop()
                    return found

        found = in_threads([functools.partial(work, index) for index in range(workers)])
    assert total[0] == workers * len(batches)
    return found[0]


def _train_alone(transformation: Transformation, clip: float | None, batches: Any) -> Any:
    """Returns table and scale after steps of plain JAX with the mean of all gradients of a step."""
    values = [jnp.asarray(_first_rows()), jnp.ones(DIM)]
    if clip is not None:
        transformation = optax.chain(optax.clip_by_global_norm(clip), transformation)
    state = transformation.init(values)

    def loss(values: Any, batch: Any) -> Any:
        table, scale = values
        return sum(_loss(table[np.array(ids)], scale) for ids in batch) / len(batch)

    for batch in batches:
        change, state = transformation.update(jax.grad(loss)(values, batch), state, values)
        values = optax.apply_updates(values, change)
    return values


@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize(
    ("transformation", "clip"), [(harness.rowwise_adagrad(0.1), None), (optax.sgd(0.1), 0.05)]
)
def test_workers_train_together_as_one(
    ps: int, transformation: Transformation, clip: float | None
) -> None:
    """Rows of three workers are averaged, and clipped with the variables, as in one process."""
    draws = [_draw(seed) for seed in range(3)]
    batches = [[draw[step] for draw in draws] for step in range(4)]

    def optimizer() -> harness.Optimizer:
        dense = transformation
        if clip is not None:
            dense = optax.chain(optax.clip_by_global_norm(clip), transformation)
        return harness.Optimizer(dense, tables=transformation)

    found = _train_together(optimizer, ps, batches)
    wanted = _train_alone(transformation, clip, batches)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
