"""The first hour with a table: rows read and written by hand, sizes, configurations, too little memory."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness.monitoring.sampler import TaskStatus
from harness.monitoring.status import variable_rows
from runtime.tables.paging import SMALLEST
from tests.runtime.kit import KINDS, TARGET, addresses, servers, target_of_kind

pytestmark = pytest.mark.cluster

ROWS = SMALLEST + 9


def test_loaded_rows_are_read() -> None:
    """Rows of two ps are written by their ids, the last of an id that comes twice, and no others change."""
    ids = np.array([[ROWS - 1, 3], [SMALLEST, 3]])
    new = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    with servers(sockets=True, ps=2, worker=1) as made, rt.Graph().as_default():
        with rt.device(rt.replica_device_setter(ps_tasks=2, worker_device=TARGET)):
            films = rt.Table("films", rows=ROWS, dim=2)
            given, rows = rt.placeholder(np.int64), rt.placeholder("float32")
            load, found, whole = films.load(given, rows), films.read(given), films.read([0, 3])
            size = films.size()
        with rt.Session(made[TARGET].target) as session:
            assert session.run(size) == (0, 0)
            with pytest.raises(rt.FailedPreconditionError, match="uninitialized value films/page_"):
                session.run(load, {given: ids, rows: new})
            session.run(rt.global_variables_initializer())
            before = session.run(whole)
            session.run(load, {given: ids, rows: new})
            expected = np.array([[[0, 1], [6, 7]], [[4, 5], [6, 7]]])
            np.testing.assert_array_equal(session.run(found, {given: ids}), expected)
            np.testing.assert_array_equal(session.run(whole)[0], before[0])
            session.run(load, {given: np.zeros(0, np.int64), rows: np.zeros((0, 2), np.float32)})
            assert session.run(size) == (ROWS, ROWS * 8)
            for wrong in (new[:1], new[..., :1]):
                with pytest.raises(rt.InvalidArgumentError, match="'films': rows of shape"):
                    session.run(load, {given: ids, rows: wrong})
            with pytest.raises(rt.InvalidArgumentError, match=f"'films' .* no row {ROWS}"):
                session.run(load, {given: [ROWS], rows: new[0, :1]})
            np.testing.assert_array_equal(session.run(found, {given: ids}), expected)
    with rt.Graph().as_default():
        films = rt.Table("films", rows=ROWS, dim=2)
        for wrong in (np.zeros((1, 3), np.float32), np.zeros((2, 2), np.float32), np.float32(1)):
            with pytest.raises(rt.InvalidArgumentError, match="'films': rows .* do not fit ids"):
                films.load([1], wrong)


def test_read_rows_have_no_gradient() -> None:
    """A loss may use rows that ``read`` gives, and trains only those of ``lookup``; the size has slots."""
    with rt.Graph().as_default(), rt.Session() as session:
        films = rt.Table("films", rows=9, dim=2, initializer=jax.nn.initializers.ones)
        loss = rt.call(lambda a, b: (a * b).sum(), films.lookup([1]), films.read([2]))
        train = harness.Optimizer(optax.sgd(1.0), tables=harness.rowwise_adagrad(1.0)).minimize(
            loss
        )
        whole = films.read(np.arange(9))
        session.run(rt.global_variables_initializer())
        session.run(train)
        assert np.flatnonzero((session.run(whole) != 1).any(axis=1)).tolist() == [1]
        assert session.run(films.size()) == (9, 9 * (8 + 4))


def test_another_dim_is_refused() -> None:
    """A program that has the table with rows of another dim is told both shapes."""
    with servers(ps=1, worker=1) as made:
        for dim in (2, 3):
            with rt.Graph().as_default(), rt.Session(made[TARGET].target) as session:
                with rt.device("/job:ps/task:0"):
                    films = rt.Table("films", rows=10, dim=dim)
                with rt.device(TARGET):
                    found = films.lookup([1])
                if dim == 2:
                    session.run(rt.global_variables_initializer())
                    continue
                wanted = r"'films/page_0' was initialised as float32\[10, 2\].*\[10, 3\]"
                with pytest.raises(rt.InvalidArgumentError, match=wanted):
                    session.run(found)


def test_too_large_table_is_refused() -> None:
    """A table that does not fit with its slots is refused before its first row, and the error has the sum."""
    cluster, limits = addresses(ps=1), rt.Limits(task_bytes=1_000_000)
    target = "/job:ps/task:0"
    with rt.Server(cluster, "ps", 0, limits=limits) as server, rt.Graph().as_default():
        with rt.device(target):
            # The rows fit, and the rows with both slots of Adam do not.
            films = rt.Table("films", rows=5000, dim=20)
            loss = rt.call(lambda rows: rows.sum(), films.lookup([1]))
            harness.Optimizer(optax.sgd(1.0), tables=optax.adam(1.0)).minimize(loss)
            initializer = films.array.pages[0].initializer
        before = server.worker.store.ledger.total
        with rt.Session(server.target) as session:
            wanted = (
                "table 'films': 5000 rows with 2 slots need 1200000 bytes on this task.*task_bytes"
            )
            with pytest.raises(rt.ResourceExhaustedError, match=wanted):
                session.run(initializer)
        assert server.worker.store.ledger.total - before < 100_000
        assert not server.worker.store.variables()


def test_status_groups_pages() -> None:
    """The pages of a table are one row in ``harness.status --variables``."""
    with servers(ps=1, worker=1) as made, rt.Graph().as_default():
        with rt.device("/job:ps/task:0"):
            rt.Table("films", rows=ROWS, dim=2)
            rt.Variable(np.zeros(3, np.float32), name="bias")
        with rt.Session(made[TARGET].target) as session:
            session.run(rt.global_variables_initializer())
        report = rt.probe(made["/job:ps/task:0"].address, 10, variables=True)
        rows = variable_rows([TaskStatus("/job:ps/task:0", "", report=report)])
    assert [row[0] for row in rows[1:]] == ["bias", "films"]
    assert rows[2][2:] == ["float32", f"[{ROWS}, 2]", "16.5 KB"]


class RandomUniform:
    """An initializer as Keras and TensorFlow have them."""

    def __init__(self, minval: float = 5.0, maxval: float = 6.0) -> None:
        self._numbers = {"minval": minval, "maxval": maxval, "seed": None}

    def get_config(self) -> dict[str, Any]:
        """Returns the numbers of the initializer."""
        return self._numbers


def test_configs_of_keras_and_tensorflow() -> None:
    """Features of one configuration share a table with the configuration's initializer and combiner."""
    table = types.SimpleNamespace(
        name="films",
        vocabulary_size=50,
        dim=4,
        combiner="mean",
        initializer=RandomUniform(),
        dtype=types.SimpleNamespace(as_numpy_dtype=np.float16),
    )
    features = [types.SimpleNamespace(table=table, name=name) for name in ("seen", "liked")]
    with rt.Graph().as_default(), rt.Session() as session:
        films, again = map(rt.Table.from_config, features)
        assert films is again and films.shape == (50, 4)
        session.run(rt.global_variables_initializer())
        found = session.run(films.read(np.arange(50)))
        assert 5 <= found.min() < 5.1 and 5.9 < found.max() <= 6
        mean = session.run(films.bag([1, 2], [0, 2]))
        assert mean.dtype == np.float16
        np.testing.assert_allclose(mean[0], found[1:3].mean(axis=0), rtol=1e-3)
        keras = types.SimpleNamespace(
            name="words", vocabulary_size=2, embedding_dim=4000, initializer="glorot_uniform"
        )
        words = rt.Table.from_config(keras, dtype=jnp.bfloat16)
        assert words.dtype == jnp.bfloat16 and words.shape == (2, 4000)
        with pytest.raises(rt.InvalidArgumentError, match="'words': combiner None is none of"):
            words.bag([1], [0, 1])
        session.run(rt.global_variables_initializer())
        # Of the 8,000 numbers the largest is close to the limit of the distribution.
        largest = np.abs(session.run(words.read([0, 1])).astype(float)).max()
        np.testing.assert_allclose(largest, (6 / 4002) ** 0.5, rtol=0.02)


def test_bad_configs_are_named() -> None:
    """An object without the fields of a table is refused, as is an initializer without an equal."""
    with rt.Graph().as_default():
        with pytest.raises(rt.InvalidArgumentError, match="is no TableConfig and no Feat"):
            rt.Table.from_config(types.SimpleNamespace(vocabulary_size=9))
        orthogonal = types.SimpleNamespace(
            name="films", vocabulary_size=9, dim=2, initializer="orthogonal"
        )
        with pytest.raises(rt.InvalidArgumentError, match="'films': initializer 'orthogonal'"):
            rt.Table.from_config(orthogonal)
        orthogonal.vocabulary_size = 8
        made = rt.Table.from_config(orthogonal, initializer=jax.nn.initializers.zeros)
        assert made.rows == 8


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_share_a_plan(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bags of any lengths train with one plan; another number of bags, which the program sees, makes a second."""
    config = rt.SessionConfig(log_device_placement=True)
    with target_of_kind(kind) as target, rt.Graph().as_default():
        table = rt.Table("films", rows=50, dim=2, initializer=jax.nn.initializers.ones)
        ids, splits = (rt.placeholder(np.int64, [None], name=name) for name in ("ids", "splits"))
        bags = table.bag(ids, splits, combiner="mean")
        loss = rt.call(lambda bags: bags.sum(), bags, name="loss")
        train = harness.Optimizer(optax.sgd(1.0), tables=optax.sgd(0.0)).minimize(loss)
        with rt.Session(target, config=config) as session:
            session.run(rt.global_variables_initializer())
            caplog.set_level("INFO", "absl")
            for length in (3, 4, 9, 2):
                cuts = [0, 1, length]
                found, _ = session.run([loss, train], {ids: np.arange(length), splits: cuts})
                assert found == 4
            planned = [r.getMessage() for r in caplog.records if "loss: (" in r.getMessage()]
            assert len(planned) == 1
            assert session.run([loss, train], {ids: [1], splits: [0, 1]})[0] == 2
            planned = [r.getMessage() for r in caplog.records if "loss: (" in r.getMessage()]
            assert len(planned) == 2
        whole = table.lookup(ids)
        other = rt.call(lambda rows: rows.sum(), whole)
        with rt.Session(target) as session:
            session.run(rt.global_variables_initializer())
            assert [session.run(other, {ids: range(n)}) for n in (2, 3)] == [4, 6]
