"""The bytes that a step with a table moves, by its own count and by that of the ps."""

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from runtime.tables.paging import SMALLEST
from tests.runtime.kit import TARGET, addresses, processes

pytestmark = pytest.mark.cluster

ROWS, DIM, BATCH, STEPS = 3 * SMALLEST, 16, 2000, 5
HEADERS = 500
"""The most bytes of a step on the wire that are no ids and rows: heads and shapes of four calls and their replies."""


@pytest.mark.parametrize("ps", [1, 2])
def test_step_moves_unique_rows(ps: int) -> None:
    """A step moves each unique row once each way with its id, within 2 %, and counts just these bytes."""
    cluster = addresses(ps=ps, worker=1)
    rng = np.random.default_rng(0)
    batches = [rng.zipf(1.2, BATCH) % ROWS for _ in range(STEPS)]
    unique = sum(len(np.unique(batch)) for batch in batches)
    # The ids go out twice, for the rows and with their gradients.
    expected = unique * 2 * (DIM * 4 + 8)
    names = [("ps", index) for index in range(ps)]
    with processes(cluster, *names), rt.Server(cluster, "worker", 0) as worker:
        with rt.Graph().as_default():
            with rt.device(rt.replica_device_setter(ps_tasks=ps, worker_device=TARGET)):
                ids = rt.placeholder(np.int64, [None])
                table = rt.Table("films", rows=ROWS, dim=DIM)
                loss = rt.call(lambda rows: (rows**2).sum(), table.lookup(ids))
                optimizer = harness.Optimizer(optax.sgd(1.0), tables=harness.rowwise_adagrad(1.0))
                train = optimizer.minimize(loss)
            with rt.Session(worker.target) as session:
                session.run(rt.global_variables_initializer())
                session.run(train, {ids: batches[0]})

                def on_wire() -> float:
                    found = [rt.probe(address, 10).values for address in cluster["ps"]]
                    return sum(v["bytes_received_total"] + v["bytes_sent_total"] for v in found)

                before, sent = worker.report().values["step_bytes_total"], on_wire()
                for batch in batches:
                    session.run(train, {ids: batch})
                assert worker.report().values["step_bytes_total"] - before == expected
                more = on_wire() - sent - expected
    assert 0 < more < min(STEPS * ps * HEADERS, 0.02 * expected)
