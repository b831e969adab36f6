"""A server that leaves at the end of training: what comes meanwhile is told so, and takes it for no failure."""

import threading
from typing import Any

import pytest

import runtime as rt
from tests.kit.waits import until
from tests.runtime.kit import TARGET, servers

PS = "/job:ps/task:0"


@pytest.mark.parametrize(
    ("leaving", "error", "words"),
    [
        (True, rt.TaskLeftError, "training is over"),
        (False, rt.UnavailableError, "its server has stopped"),
    ],
)
def test_step_meets_a_stopping_server(leaving: bool, error: type[Exception], words: str) -> None:
    """A step that comes while a server stops ends with the reason of the stop."""
    compiling, go_on = threading.Event(), threading.Event()
    with rt.Graph().as_default(), servers(sockets=True, ps=1, worker=1) as made:
        server, find = made[PS], made[PS].worker.executor.find_device

        def slow(*arguments: Any) -> Any:
            compiling.set()
            assert go_on.wait(60)
            return find(*arguments)

        with rt.device(PS):
            v, w = rt.Variable(2.0, name="v"), rt.Variable(2.0, name="w")
        with rt.Session(made[TARGET].target) as session:
            session.run(v.initializer)
            session.run(v)
            server.worker.executor.find_device = slow  # type: ignore[method-assign]
            other = threading.Thread(
                target=lambda: pytest.raises(rt.OpError, session.run, w.initializer), daemon=True
            )
            other.start()
            assert compiling.wait(60)
            stop = threading.Thread(
                target=server.stop, args=(30.0,), kwargs={"leaving": leaving}, daemon=True
            )
            stop.start()
            until(lambda: server.worker.presence.gone is not None)
            with pytest.raises(error, match=words):
                session.run(v)
            go_on.set()
            stop.join(60)
            other.join(60)
        assert not stop.is_alive() and not other.is_alive()
