"""A ps with a backup fetches tensors from another task, dies and goes on as itself: the other knows it as new."""

import contextlib
import json
import time

import numpy as np
import pytest

import runtime as rt
from tests.kit.processes import programs
from tests.runtime.kit import TARGET, addresses

pytestmark = pytest.mark.chaos

SERVE = """
import json, sys, runtime as rt
cluster, job, index = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
options = {"ps_backups": 1, "ps_backups_lag": 0} if job == "ps" else {}
rt.Server(cluster, job, index, **options).join()
"""
DEATHS, STEPS = 2, 12
AGAIN_SECS = 60.0


def test_steps_after_rebirth_add_theirs() -> None:
    """Every step after a rebirth of the ps adds the value of its own step."""
    cluster = addresses(ps=2, worker=2)

    with programs() as start:
        tasks = (("ps", "0"), ("ps", "1"), ("worker", "1"))
        ps, *_ = [start("python", "-c", SERVE, json.dumps(cluster), *task) for task in tasks]
        with rt.Graph().as_default(), rt.Server(cluster, "worker", 0) as server:
            with rt.device("/job:ps/task:0"):
                v = rt.Variable(np.float32(0), name="v")
            with rt.device(TARGET):
                x = rt.placeholder(np.float32, [], name="x") * 1.0
            with rt.device("/job:worker/task:1"):
                gradient = x * 2.0  # the ps fetches it there, not from the master
            with rt.device("/job:ps/task:0"):
                update = v.assign_add(gradient)
            config = rt.SessionConfig(start_timeout_secs=60, reconnect_secs=AGAIN_SECS)
            with rt.Session(server.target, config=config) as session:
                session.run(v.initializer)
                given = 0.0
                for life in range(DEATHS + 1):
                    if life:
                        ps.kill()
                        ps.restart()
                        _until_it_answers(session, v)
                    assert session.run(v) == given  # nothing is lost
                    for step in range(1, STEPS + 1):
                        number = 1000.0 * life + step
                        given += 2.0 * number
                        assert session.run(update, {"x:0": number}) == given


def _until_it_answers(session: rt.Session, v: rt.Variable) -> None:
    """A step may meet the moment in which the ps is gone."""
    deadline = time.monotonic() + AGAIN_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(rt.UnavailableError, rt.AbortedError):
            session.run(v)
            return
