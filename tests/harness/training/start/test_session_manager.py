"""The session manager by itself: the order of initialising, what is not ready, and the run records under it."""

import contextlib
import math
import pathlib
import re
import threading
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from harness import timeouts
from harness.tf1.train import training as tf1_training
from harness.training import times
from harness.training.start import readiness
from runtime.lowlevel import RunRecords
from runtime.plan.planner import make_plan
from tests.kit.changes import SetTimes
from tests.kit.ports import free_ports
from tests.runtime.kit import addresses

PS = "/job:ps/task:0"

pytestmark = pytest.mark.usefixtures("graph")


# -- SessionManager ------------------------------------------------------------------------------------------------


def test_local_ready_op_needs_init_op() -> None:
    """A local ready operation needs a local init operation."""
    with pytest.raises(ValueError, match="must also pass a local_init_op"):
        harness.SessionManager(ready_for_local_init_op=rt.no_op())


def test_two_checkpoint_locations_are_refused() -> None:
    """Two locations of checkpoints are refused."""
    with pytest.raises(ValueError, match="Can not provide both"):
        harness.SessionManager().prepare_session(
            "", checkpoint_dir="a", checkpoint_filename_with_path="b"
        )


def test_chief_may_wait_for_checkpoint(target: str, tmp_path: pathlib.Path) -> None:
    """A chief may wait for a checkpoint up to a time, then initialises."""
    v = rt.Variable(1.0, name="v")
    init, saver = rt.global_variables_initializer(), harness.Saver()
    change = v.assign(7.0)
    manager = harness.SessionManager(recovery_wait_secs=0.05)

    def prepare(master: str, secs: float) -> float:
        with manager.prepare_session(
            master, init, saver, str(tmp_path), wait_for_checkpoint=True, max_wait_secs=secs
        ) as session:
            return float(session.run(v))

    assert prepare(target, 0.3) == 1.0  # none came: it initialises, as TF1 does

    def write() -> None:
        with rt.Session(target, v.graph) as other:
            other.run(change)
            saver.save(other, str(tmp_path / "model.ckpt"), global_step=3)

    empty = rt.Server.create_local_server()
    later = threading.Timer(0.3, write)
    later.start()
    assert prepare(empty.target, 60) == 7.0
    later.join()
    empty.stop()


def test_local_init_follows_its_needs(target: str) -> None:
    """Local initialisation runs after the variables that it needs."""
    v = rt.Variable(1.0, name="v")
    local = rt.Variable(v * 2.0, name="local", local=True)
    manager = harness.SessionManager(
        local_init_op=local.initializer,
        ready_for_local_init_op=rt.report_uninitialized_variables([v]),
    )
    with manager.prepare_session(target, init_op=v.initializer) as session:
        assert session.run(local) == 2.0


def test_impossible_local_init_is_named(target: str) -> None:
    """Local initialisation whose needs stay uninitialized is an error with their names."""
    v = rt.Variable(1.0, name="v")
    manager = harness.SessionManager(
        local_init_op=rt.no_op(), ready_for_local_init_op=rt.report_uninitialized_variables([v])
    )
    with pytest.raises(RuntimeError, match="did not make model ready for local_init.*v"):
        manager.prepare_session(target, init_op=rt.no_op())


def test_early_local_init_is_an_error(target: str) -> None:
    """Local initialisation that reads an uninitialized variable is an error."""
    v = rt.Variable(1.0, name="v", collections=["mine"])
    local = rt.Variable(v * 2.0, name="local", local=True)
    manager = harness.SessionManager(local_init_op=local.initializer)
    with pytest.raises(rt.FailedPreconditionError, match="v"):
        manager.prepare_session(target, init_op=rt.no_op())


def test_reading_ready_op_gives_reason(target: str) -> None:
    """A ready operation that reads its variable gives the reason until the variable has a value."""
    v = rt.Variable(1.0, name="v")
    manager = harness.SessionManager(ready_op=rt.group(v.value() * 1.0))
    graph = rt.get_default_graph()
    with rt.Session(target) as session:
        reason = readiness.reason(session, v.value() * 1.0)
        assert reason is not None and reason.startswith(
            "/job:local/task:0: Attempting to use uninitialized value v: run"
        )
        session.run(v.initializer)
    manager.wait_for_session(target, max_wait_secs=5).close()
    assert not graph.finalized


def test_recover_session_tells_readiness(target: str) -> None:
    """recover_session returns whether the model is ready."""
    v = rt.Variable(1.0, name="v")
    manager = tf1_training.SessionManager(ready_op=rt.report_uninitialized_variables())
    session, is_ready = manager.recover_session(target)
    assert not is_ready
    session.run(v.initializer)
    session.close()
    session, is_ready = manager.recover_session(target)
    assert is_ready
    session.close()


# -- run records ---------------------------------------------------------------------------------------------------


def test_load_fences_older_sessions(target: str) -> None:
    """A load cuts off the sessions that used the values before."""
    v = rt.Variable(1.0, name="v")
    add = v.assign_add(1.0)
    chief = RunRecords(target, is_chief=True)
    chief.claim()
    with rt.Session(target) as old:
        old.run(v.initializer)
        assert old.run(add) == 2.0
        generation = chief.inspect()[old.task].generation
        assert chief.load() == {old.task: generation + 1}
        for fetch in (add, v, v.assign_sub(1.0)):  # known to the task, or new to it
            with pytest.raises(rt.AbortedError, match="restored since the session began"):
                old.run(fetch)
        with rt.Session(target) as new:
            assert new.run(v) == 2.0  # nothing was added


def test_first_load_fences_no_session(target: str) -> None:
    """A load of a fresh task cuts off no session."""
    v = rt.Variable(1.0, name="v")
    chief = RunRecords(target, is_chief=True)
    chief.claim()
    with rt.Session(target) as session:
        assert chief.load() == {session.task: 0}
        session.run(v.initializer)


def test_chiefs_session_survives_the_fence(target: str) -> None:
    """The chief's own session continues after a load, and other sessions do not."""
    v = rt.Variable(1.0, name="v")
    chief = RunRecords(target, is_chief=True)
    chief.claim()
    with rt.Session(target) as own, rt.Session(target) as other:
        own.run(v.initializer)
        before = own.value_ids
        assert own.run(v) == other.run(v) == 1.0
        own.adopt_generations(chief.load())
        assert own.run(v) == 1.0  # planned before, and registered again
        assert own.value_ids != before
        with rt.Session(target) as new:
            assert new.value_ids == own.value_ids
        with pytest.raises(rt.AbortedError, match="restored since the session began"):
            other.run(v)


def test_deposed_chiefs_orders_are_refused(target: str) -> None:
    """The orders of a deposed chief are refused."""
    old, new = RunRecords(target, is_chief=True), RunRecords(target, is_chief=True)
    old.claim()
    assert old.leads()
    new.claim()
    assert not old.leads() and new.leads()
    for order in (old.load, old.open, lambda: old.finish(120.0)):
        with pytest.raises(rt.PermissionDeniedError, match="has taken the lead"):
            order()
    new.load()
    new.open()


def test_orders_need_a_claim(target: str) -> None:
    """An order without a claim is refused."""
    with pytest.raises(rt.AbortedError, match="restarted since a chief took the lead"):
        RunRecords(target, is_chief=True).load()


def test_wait_ends_with_the_load(target: str) -> None:
    """A wait for a load ends with the load."""
    chief, other = RunRecords(target, is_chief=True), RunRecords(target)
    chief.claim()
    chief.load()
    assert not other.wait_loaded(0.01)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(other.wait_loaded(30)))
    thread.start()
    chief.open()
    thread.join(60)
    assert done == [True]


def test_new_run_forgets_finished_tasks(target: str) -> None:
    """A new run forgets the tasks that were done."""
    chief = RunRecords(target, is_chief=True)
    chief.claim()
    chief.join()
    chief.done(leave=False)
    chief.finish(120.0)
    assert chief.inspect()[chief.task].phase == "finished"
    chief.open()
    record = chief.inspect()[chief.task]
    assert (record.phase, record.done) == ("ready", ())


# -- the task's side -----------------------------------------------------------------------------------------------


def test_ps_leaves_after_last_worker() -> None:
    """A ps leaves when every worker is done, and not before."""
    ports = free_ports(3)
    spec = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{p}" for p in ports[1:]]}
    ps, *workers = (
        rt.Server(spec, "ps", 0),
        rt.Server(spec, "worker", 0),
        rt.Server(spec, "worker", 1),
    )
    joined = threading.Thread(target=ps.join)
    joined.start()
    RunRecords(workers[0].target).done(leave=True)
    joined.join(0.1)
    assert joined.is_alive()
    RunRecords(workers[1].target).done(leave=True)
    joined.join(60)
    assert not joined.is_alive()
    for worker in workers:
        worker.stop()


def test_wait_until_initialized_lists_missing(target: str) -> None:
    """wait_until_initialized returns the missing variables at its limit, or an empty list as soon
    as all have values.
    """
    v, w = rt.Variable(1.0, name="v"), rt.Variable(1.0, name="w")
    soon = rt.wait_until_initialized([v, w], 0.01)
    patient = rt.wait_until_initialized([v, w], 30.0)
    with rt.Session(target) as session, rt.Session(target) as other:
        assert session.run(soon).tolist() == [b"v", b"w"]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(session.run(patient).tolist()))
        thread.start()
        other.run([v.initializer, w.initializer])
        thread.join(60)
        assert found == [[]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fetches of the plans that sessions make."""
    found: list[Any] = []

    def counted(fetches: Any, *args: Any) -> Any:
        found.append(fetches)
        return make_plan(fetches, *args)

    monkeypatch.setattr("runtime.session.session.make_plan", counted)
    return found


def test_new_session_takes_over_plans(target: str, planned: list[Any]) -> None:
    """A session for the same devices takes over plans, and a session elsewhere plans by itself."""
    v = rt.Variable(1.0, name="v")
    x = rt.placeholder("float32", [None], name="x")
    product = rt.call(lambda value, array: (value * array).sum(), v, x)
    with rt.Session(target) as first, rt.Session(target) as second, rt.Session("") as elsewhere:
        first.run(v.initializer)
        assert first.run(product, {x: [1.0, 2.0]}) == 3.0
        before = len(planned)
        second.take_plans(first)
        assert second.run(product, {x: [2.0, 3.0]}) == 5.0
        assert len(planned) == before
        elsewhere.take_plans(first)  # other devices: it plans by itself
        elsewhere.run(v.initializer)
        assert elsewhere.run(product, {x: [1.0, 2.0]}) == 3.0
        assert len(planned) == before + 2


def test_plans_with_python_calls_carry_over(target: str, planned: list[Any]) -> None:
    """Sessions that follow each other plan a step with a Python call once."""
    add = rt.lowlevel.python_call(
        lambda _, arrays: [arrays[0] + 1],
        [rt.constant(np.ones(3, np.float32))],
        [((3,), np.float32)],
        name="add",
    )
    total = rt.numpy.sum(add.outputs[0])
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(rt.Session(target))
        assert before.run(total) == 6.0
        count = len(planned)
        for _ in range(3):
            session = stack.enter_context(rt.Session(target))
            session.take_plans(before)
            assert session.run(total) == 6.0
            assert len(planned) == count and not session._taken
            before = session


def test_worker_ignores_its_own_copy() -> None:
    """A worker does not wait for its own copy that no chief initialises."""
    with rt.local_cluster(ps=1, workers=2) as cluster:
        with rt.Graph().as_default() as chiefs, rt.device("/job:ps/task:0"):
            rt.Variable(3.0, name="shared")
            chief = harness.SessionManager(ready_op=rt.report_uninitialized_variables())
            init = rt.global_variables_initializer()
        with rt.Graph().as_default() as workers:
            with rt.device("/job:ps/task:0"):
                shared = rt.Variable(1.0, name="shared")
            with rt.device("/job:worker/task:1/cpu:0"):
                own = rt.Variable(0.0, name="own")
            copy = own.assign(shared)
            patient = harness.SessionManager(
                ready_op=rt.report_uninitialized_variables([shared]),
                recovery_wait_secs=0.05,
                graph=workers,
            )
            strict = harness.SessionManager(
                ready_op=rt.report_uninitialized_variables(), recovery_wait_secs=0.05, graph=workers
            )
        with pytest.raises(
            rt.DeadlineExceededError, match="the chief has not yet initialised shared"
        ):
            patient.wait_for_session(cluster.target_of(1), max_wait_secs=0.5)
        with chief.prepare_session(cluster.target_of(0), init), chiefs.as_default():
            with patient.wait_for_session(cluster.target_of(1), max_wait_secs=30) as session:
                assert session.run([copy, own])[0] == 3.0
            with strict.wait_for_session(cluster.target_of(1), max_wait_secs=30) as session:
                assert session.run(own) == 3.0


def test_long_wait_says_how_long(set_times: SetTimes, caplog: pytest.LogCaptureFixture) -> None:
    """A wait for a ps is counted from its beginning, and its later lines are rare."""
    set_times(timeouts, LOG_EVERY_SECS=0.5)
    set_times(times, ATTEMPT_SECS=0.2, LOG_RARELY_SECS=math.inf)
    spec = addresses(ps=1, worker=1)
    with (
        rt.Server(spec, "worker", 0) as server,
        pytest.raises(rt.DeadlineExceededError, match=f"still waiting for {PS} at"),
        rt.Graph().as_default(),
    ):
        with rt.device(PS):
            step = rt.Variable(0, name="step")
        harness.SessionManager().prepare_session(
            server.target, init_op=step.initializer, max_wait_secs=6
        )
    lines = [m for m in caplog.messages if f"still waiting for {PS}" in m]
    waited = [int(re.findall(r"\(for (\d+) s now\)$", line)[0]) for line in lines]
    assert len(waited) == 4 and waited == sorted(waited) and waited[-1] > 0
