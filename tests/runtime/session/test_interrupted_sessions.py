"""Ctrl-C while a session is opened, used and closed: nothing of it stays, here or on its tasks."""

import gc
import os
import signal
import threading

import numpy as np
import pytest

import runtime as rt
from tests.kit.interruptions import interruptions
from tests.kit.waits import until
from tests.runtime import kit

pytestmark = pytest.mark.cluster

_ROOT = os.path.dirname(rt.__file__)
ROOMS = [
    os.path.join(_ROOT, "session"),
    os.path.join(_ROOT, "master"),
    os.path.join(_ROOT, "wire", "peer"),
]


def hearts() -> int:
    """The number of heartbeats of this process."""
    return sum(thread.name.startswith("heartbeat") for thread in threading.enumerate())


# A connection that is lost between two instructions is closed by the collector, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_session_leaves_nothing() -> None:
    """A session that Ctrl-C ends at any place of its life leaves no heartbeat, and no stage on its task."""
    with kit.servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default():
        ps = made["/job:ps/task:0"]
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.zeros(3, np.float32), name="w")
        before = hearts()

        def live() -> None:
            with rt.Session(made[kit.TARGET].target) as session:
                session.run(w.initializer)

        live()
        interrupted = 0
        places = list(interruptions(signal.SIGINT, live, *ROOMS))
        for interrupt in places[:: max(1, len(places) // 100)] + places[-20:]:
            try:
                interrupt(live)
            except KeyboardInterrupt:
                interrupted += 1
            gc.collect()
        assert interrupted > 50
        until(lambda: gc.collect() >= 0 and hearts() == before, "the end of the heartbeats")
        until(lambda: ps.worker.registry.sessions == 0, "the goodbye of all sessions")
        until(
            lambda: made[kit.TARGET].worker.counters.values()["sessions"] == 0,
            "the end of all sessions",
        )
