"""Optimizers that wrap another one, made under ``control_dependencies``: what goes before runs once, before."""

from collections.abc import Callable
from typing import Any

import optax
import pytest

import harness
import runtime as rt


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        lambda optimizer: harness.SyncReplicas(optimizer, 1, 1, worker=0),
        lambda optimizer: harness.StaleSynchronous(optimizer, 1, worker=0),
    ],
    ids=["plain", "sync", "stale"],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_dependency_of_training_runs_once(wrap: Callable[[Any], Any], grouped: bool) -> None:
    """An update on which a training operation depends runs once a step."""
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        w, seen = rt.Variable(1.0, name="w"), rt.Variable(0.0, name="seen", trainable=False)
        update = seen.assign_add(1.0)
        with rt.control_dependencies([rt.group(update) if grouped else update]):
            train = wrap(harness.Optimizer(optax.sgd(0.1))).minimize(w * w, global_step=step)
        with rt.Session() as session:
            session.run([rt.global_variables_initializer(), rt.local_variables_initializer()])
            for _ in range(2):
                session.run(train)
            assert session.run([w, seen, step]) == [pytest.approx(0.64), 2.0, 2]
