"""A large table, as docs/models.md trains it: rows are looked up on the ps, and added to there."""

import jax
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from tests.runtime.kit import TARGET, servers

ROWS, WIDTH, PS = 20_000, 8, "/job:ps/task:0"
IDS = np.array([[3, 3, 7], [19_999, 7, 3]], np.int32)


def descend(table: jax.Array, ids: jax.Array, slopes: jax.Array) -> tuple[list[jax.Array], list]:
    return [table.at[ids].add(-0.1 * slopes)], []


def learn(server: rt.Server, kind: str) -> tuple[np.ndarray, float]:
    """Returns the table after three steps, and the bytes of a step."""
    with rt.Graph().as_default():
        with rt.device(PS):
            table = rt.Variable(np.ones((ROWS, WIDTH), np.float32), name=kind)
        ids = rt.placeholder("int32", [None, 3])
        with rt.device(table.device if kind == "rows" else TARGET):
            rows = rt.call(lambda table, ids: table[ids], table, ids)
        with rt.device(TARGET):
            loss = rt.call(lambda rows: (rows**3).mean(), rows)
            (slopes,) = rt.gradients(loss, [rows])
        train_op = (
            rt.update([table], descend, [ids, slopes])
            if kind == "rows"
            else harness.Optimizer(optax.sgd(0.1)).minimize(loss)
        )
        with rt.Session(server.target) as session:
            session.run(table.initializer)
            before = server.report().values["step_bytes_total"]
            for _ in range(3):
                session.run(train_op, {ids: IDS})
            moved = server.report().values["step_bytes_total"] - before
            return session.run(table), moved / 3


def test_rows_alone_travel() -> None:
    """Rows and rt.update train as minimize does, and send a hundredth of the bytes."""
    with servers(ps=1, worker=1) as made:
        dense, many = learn(made[TARGET], "dense")
        sparse, few = learn(made[TARGET], "rows")
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)
    assert not np.array_equal(sparse, np.ones_like(sparse))
    assert 0 < few < many / 100 and many == pytest.approx(2 * ROWS * WIDTH * 4, rel=0.01)
