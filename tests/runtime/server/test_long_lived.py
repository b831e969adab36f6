"""A server outlives its sessions: what it keeps of them is bounded, by counting, and what they still need is there."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

import runtime as rt
from runtime.task.compiler import Compiler
from runtime.task.worker import Worker
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.kit import TARGET, servers

PS = "/job:ps/task:0"
SESSIONS = 200
KEPT = 8


@contextlib.contextmanager
def _cluster() -> Iterator[dict[str, rt.Server]]:
    with kit.limited(spare_stages=KEPT), servers(sockets=True, ps=1, worker=1) as made:
        compiler = Compiler(KEPT)
        for server in made.values():
            server.worker.executor.compiler = compiler
        yield made


def _wait_until_ended(worker: Worker, sessions: int = 0) -> None:
    """A goodbye is not answered: it takes effect a moment later."""
    until(lambda: worker.registry.sessions == sessions)


def _step(number: int) -> tuple[rt.Operation, rt.Variable]:
    """An update that no other number has, on a variable that all have."""
    with rt.device("/job:ps/task:0"):
        w = rt.Variable(np.zeros(3, np.float32), name="w")
        return w.assign_add(np.full(3, number, np.float32)).op, w


@pytest.mark.chaos
def test_many_sessions_leave_few_entries() -> None:
    """Two hundred sessions with their own graphs leave a bounded number of entries."""
    with _cluster() as cluster:
        for number in range(SESSIONS):
            with rt.Graph().as_default(), rt.Session(cluster[TARGET].target) as session:
                with rt.device("/job:ps/task:0"):
                    own = rt.Variable(np.zeros(3, np.float32), name=f"own_{number}")
                session.run(own.initializer)  # a stage of its own
                if number % 20 == 0:  # and a program of its own, on the ps and on the worker
                    step, w = _step(number)
                    session.run(w.initializer)
                    session.run(step)
                    with rt.device(TARGET):
                        session.run(rt.numpy.sin(float(number)))
        assert cluster[PS].worker.executor.compiler.compilations > SESSIONS / 20
        assert max(cluster[PS].worker.registry.kept()[0]) > SESSIONS
        for server in cluster.values():
            worker = server.worker
            _wait_until_ended(worker)
            assert len(worker.registry) <= KEPT
            assert len(worker.executor.compiler) <= KEPT
            assert (
                worker.counters._seen == worker.counters._times == worker.tracer._spans == {}
                and not len(worker.waits)
            )
            assert len(worker.rendezvous) == 0
            assert server.report().values["sessions"] <= 1  # that of the name `session`


@pytest.mark.chaos
def test_live_session_keeps_its_stages() -> None:
    """The stages of a live session stay however many sessions come and go."""
    with _cluster() as cluster, rt.Graph().as_default():
        with rt.Session(cluster[TARGET].target) as old:
            step, w = _step(-1)
            old.run(w.initializer)
            assert old.run(w)[0] == 0
            old.run(step)
            calls = len(cluster[PS].worker.registry)
            for number in range(KEPT + 4):
                with rt.Graph().as_default(), rt.Session(cluster[TARGET].target) as session:
                    session.run(_step(number)[0])
            old.run(step)
            assert old.run(w)[0] == -2 + sum(range(KEPT + 4))
            _wait_until_ended(cluster[PS].worker, 1)
        _wait_until_ended(cluster[PS].worker)
        assert calls <= len(cluster[PS].worker.registry) <= KEPT


def test_equal_graph_compiles_nothing() -> None:
    """The next session of an equal graph compiles nothing."""
    with _cluster() as cluster:
        compilations = []
        for _ in range(3):
            with rt.Graph().as_default(), rt.Session(cluster[TARGET].target) as session:
                step, w = _step(0)
                session.run(w.initializer)
                session.run(step)
                compilations.append(cluster[PS].worker.executor.compiler.compilations)
        assert compilations == compilations[:1] * 3


def test_late_session_must_open_anew() -> None:
    """A session that comes back after its stages were dropped is told to open a new one."""
    with _cluster() as cluster, rt.Graph().as_default():
        with rt.Session(cluster[TARGET].target) as session:
            step, w = _step(0)
            session.run(w.initializer)
            session.run(step)
            worker = cluster[PS].worker
            for known in worker.registry.kept()[2]:
                worker.gone(known, goodbye=False)
            session.run(step)  # nobody has asked for the room
            with kit.limited(spare_stages=0):
                worker.registry.release(0)
            with pytest.raises(rt.AbortedError, match="open a new one"):
                session.run(step)
        with rt.Session(cluster[TARGET].target) as session:
            session.run(step)


def test_unknown_handle_is_not_found() -> None:
    """A handle that was never given is NotFoundError."""
    with pytest.raises(rt.NotFoundError, match="no stage is registered under handle 7"):
        Worker("ps", 0, lambda *_: None).registry.get(7)


def test_vanished_sessions_are_bounded() -> None:
    """Sessions that never say goodbye are bounded by the limit stage_sessions."""
    with kit.limited(stage_sessions=5), _cluster() as cluster, rt.Graph().as_default():
        with rt.Session(cluster[TARGET].target) as session:
            step, _ = _step(0)
            session.run(rt.global_variables_initializer())
            session.run(step)
            kept = cluster[PS].worker.registry
            registration = next(iter(kept.kept()[0].values())).registration
            for number in range(100, 120):  # as if so many others had registered the same and died
                assert kept.find(registration, number) is not None
            assert kept.sessions == 5


def test_planned_session_leaves_nothing() -> None:
    """A session that has planned a step and not run it leaves nothing on the task."""
    with rt.Graph().as_default(), servers(sockets=True, ps=1, worker=1) as cluster:
        with rt.device(PS):
            w = rt.Variable(np.zeros(3, np.float32), name="w")
        with rt.Session(cluster[TARGET].target) as session:
            session._prepare("w", session._split("w", w, ()).substeps[0], [])
            assert cluster[PS].worker.registry.sessions == 1
        _wait_until_ended(cluster[PS].worker)
