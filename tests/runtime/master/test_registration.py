"""The registration of a plan: every task prepares its stages while the others prepare theirs."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import runtime as rt
from tests.runtime.kit import servers

pytestmark = pytest.mark.cluster


def _wait_before(register: Callable[..., Any], barrier: threading.Barrier) -> Callable[..., Any]:
    # A task that does not know a program is asked twice.
    wait = functools.cache(lambda: barrier.wait(30))

    @functools.wraps(register)
    def wait_and_register(*args: Any, **kwargs: Any) -> Any:
        wait()
        return register(*args, **kwargs)

    return wait_and_register


def test_tasks_register_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tasks that wait for each other in the registration of a step prepare the step."""
    with servers(sockets=True, ps=2, worker=1) as made:
        barrier = threading.Barrier(3)
        with rt.Graph().as_default():
            parts = []
            for number in range(2):
                with rt.device(f"/job:ps/task:{number}"):
                    parts.append(rt.identity(rt.constant(np.float32(number + 1))))
            with rt.device("/job:worker/task:0"):
                total = rt.call(lambda a, b: a + b, *parts)
            with rt.Session(made["/job:worker/task:0"].target) as session:
                for server in made.values():
                    registrar = server.worker.registrar
                    monkeypatch.setattr(
                        registrar, "register", _wait_before(registrar.register, barrier)
                    )
                assert session.run(total) == 3
