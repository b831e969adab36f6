"""A ps receives and applies updates while it applies others: disjoint variables do not wait for each other."""

import threading
from typing import Any

import jax
import numpy as np
import pytest

import runtime as rt
from tests.kit.changes import SetVariables
from tests.runtime.kit import addresses, processes

pytestmark = pytest.mark.cluster

WAIT = rt.SessionConfig(start_timeout_secs=60)
WIDTH = 1 << 16
UPDATES = 20


def _long(value: Any, turns: Any) -> Any:
    return jax.lax.fori_loop(0, turns, lambda _, v: v * 1.0000001 + 1e-9, value)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_gradients_apply_beside_long_update(set_variables: SetVariables, threads: str) -> None:
    """A ps receives and applies gradients while another update computes."""
    # with one, each update computes on the thread that received it
    set_variables(PJRT_NPROC=threads)
    cluster = addresses(ps=1, worker=2)
    with (
        processes(cluster, ("ps", 0)),
        rt.Server(cluster, "worker", 0) as w0,
        rt.Server(cluster, "worker", 1) as w1,
    ):
        with rt.device("/job:ps/task:0"):
            slow = rt.Variable(np.ones(WIDTH, np.float32), name="slow")
            quick = rt.Variable(np.zeros(WIDTH, np.float32), name="quick")
            turns = rt.placeholder(np.int32, [], name="turns")
            lengthy = slow.assign(rt.call(_long, slow, turns))
        gradient = rt.placeholder(np.float32, [WIDTH], name="gradient")
        push = quick.assign_add(gradient)
        ones = np.ones(WIDTH, np.float32)
        with rt.Session(w0.target, config=WAIT) as one, rt.Session(w1.target, config=WAIT) as other:
            one.run(rt.global_variables_initializer())
            one.run(lengthy.op, {turns: 1})
            other.run(push.op, {gradient: ones})
            pushed = 1
            # The long update must outlast twenty short ones: on a busy machine it is made longer
            # until it does.
            for count in (20_000, 200_000, 2_000_000):
                thread = threading.Thread(target=one.run, args=(lengthy.op, {turns: count}))
                thread.start()
                for _ in range(UPDATES):
                    other.run(push.op, {gradient: ones})
                    pushed += 1
                    assert other.run(quick)[0] == pushed
                overtaken = thread.is_alive()
                thread.join(120)
                if overtaken:
                    break
            assert overtaken
            np.testing.assert_array_equal(other.run(quick), np.full(WIDTH, pushed, np.float32))
