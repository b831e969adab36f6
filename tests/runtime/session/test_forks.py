"""A forked child of a process that trains: it cannot hurt its parent, and is told what it cannot do."""

import pytest

from tests.kit.processes import Program
from tests.runtime import kit

pytestmark = pytest.mark.cluster

PROGRAM = """
import os, sys
import numpy as np
import runtime as rt

cluster = {"ps": [sys.argv[1]], "worker": [sys.argv[2]]}
how = sys.argv[3]
server = rt.Server(cluster, "worker", 0)
with rt.device("/job:ps/task:0"):
    w = rt.Variable(np.zeros(3, np.float32), name="w")
step = w.assign_add(np.ones(3, np.float32))
target = f"grpc://{sys.argv[1]}" if how == "remote" else server.target


def in_child(session):
    if how == "run":
        for act in (lambda: session.run(step), lambda: session.run(w), lambda: rt.Session(target)):
            try:
                act()
            except rt.FailedPreconditionError as error:
                assert "before a fork" in str(error)
            else:
                raise AssertionError("it ran")
    if how == "stop":
        server.stop()
    sys.exit(7)  # by way of the end of the block


child = -1
try:
    with rt.Session(target) as session:
        session.run(w.initializer)
        session.run(step)
        child = os.fork()
        if not child:
            in_child(session)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        for _ in range(3):
            value = session.run(step)
        print("PARENT", value[0], flush=True)
finally:
    if not child:
        os._exit(7)
server.stop()
"""


@pytest.mark.parametrize("how", ["close", "run", "stop", "remote"])
def test_forked_child_leaves_its_parent_alone(how: str) -> None:
    """A child that leaves the block of a session, runs a step or stops the server changes nothing for its parent."""
    cluster = kit.addresses(ps=1, worker=1)
    with kit.processes(cluster, ("ps", 0)):
        with Program(
            "python", "-c", PROGRAM, cluster["ps"][0], cluster["worker"][0], how
        ) as program:
            program.expect("^PARENT 4.0$")
            assert program.wait() == 0
