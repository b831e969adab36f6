"""A client of a master elsewhere says on whom it waits, whatever it waits for."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import runtime as rt
from runtime import timeouts
from runtime.master import tasks
from runtime.proto import services_pb2
from runtime.server.services import MasterServicer
from tests.kit.changes import SetTimes
from tests.kit.waits import until
from tests.runtime.kit import TARGET, addresses, in_thread, servers


@contextlib.contextmanager
def _said(
    caplog: pytest.LogCaptureFixture, text: str, action: Callable[[], object]
) -> Iterator[None]:
    """Waits until an action that waits has said so three times; the block lets it end."""
    enough = threading.Event()
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                lines.append(record.getMessage())
                if len(lines) >= 3:
                    enough.set()

    listener, logger = Listener(), logging.getLogger("absl")
    logger.addHandler(listener)
    thread = threading.Thread(target=action, daemon=True)
    try:
        with caplog.at_level(logging.INFO):
            thread.start()
            assert enough.wait(60), lines
            yield
            thread.join(60)
            assert not thread.is_alive()
    finally:
        logger.removeHandler(listener)


@contextlib.contextmanager
def _empty_queue() -> Iterator[tuple[rt.Server, rt.Session, rt.Operation, rt.Tensor]]:
    """Yields a server, a session that reaches its master by gRPC, an enqueue and a dequeue of an empty queue."""
    with servers(sockets=True, ps=1, worker=1) as cluster, rt.Graph().as_default():
        server = cluster[TARGET]
        tasks.withdraw(server.address, server)
        with rt.device("/job:ps/task:0"):
            queue = rt.FIFOQueue(1, np.int32, [[]], name="q")
        put, taken = queue.enqueue(3), queue.dequeue()
        with rt.Session(server.target) as session:
            session.run(queue.size())
            yield server, session, put, taken
        until(
            lambda: (
                not [t for t in threading.enumerate() if t.name == "RemoteEngine._renew_session"]
            )
        )


def test_waiting_step_is_logged(set_times: SetTimes, caplog: pytest.LogCaptureFixture) -> None:
    """A step that waits logs the master for which it waits."""
    set_times(timeouts, LOG_EVERY_SECS=0.2)
    set_times(timeouts, RENEW_SECS=0.1)
    with _empty_queue() as (server, session, put, taken):
        with _said(
            caplog,
            f"Waiting for the master at {server.target} to run a step",
            lambda: session.run(taken),
        ):
            session.run(put)


def test_wait_is_logged_despite_slow_renewals(
    monkeypatch: pytest.MonkeyPatch, set_times: SetTimes, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that waits logs so although each lease renewal takes its whole time."""
    set_times(timeouts, LOG_EVERY_SECS=1.0)
    set_times(timeouts, RENEW_SECS=0.5)
    renewals, over = threading.Semaphore(0), threading.Event()

    def renew(
        self: MasterServicer, request: object, context: object
    ) -> services_pb2.RenewSessionResponse:
        renewals.release()
        over.wait(60)
        return services_pb2.RenewSessionResponse()

    monkeypatch.setattr(MasterServicer, "RenewSession", renew)
    with _empty_queue() as (server, session, put, taken):
        assert renewals.acquire(timeout=60)
        threading.Event().wait(0.25)  # in the middle of a renewal
        with caplog.at_level(logging.WARNING):
            thread, _ = in_thread(lambda: session.run(taken))
            for _ in range(4):
                assert renewals.acquire(timeout=60)
        said = caplog.text
        over.set()
        session.run(put)
        thread.join(60)
    assert "to run a step, for" in said


def test_session_waiting_for_tasks_is_logged(
    set_times: SetTimes, caplog: pytest.LogCaptureFixture
) -> None:
    """A session that waits for a task logs the task and its address."""
    set_times(timeouts, LOG_EVERY_SECS=0.2)
    spec = addresses(ps=1, worker=1)
    with rt.Server(spec, "worker", 0) as server, contextlib.ExitStack() as stack:
        tasks.withdraw(server.address, server)
        missing = f"still waiting for /job:ps/task:0 at {spec['ps'][0]}"
        with _said(caplog, missing, lambda: rt.Session(server.target).close()):
            stack.enter_context(rt.Server(spec, "ps", 0))
