"""Orders to the run records of a cluster: to all tasks at once, by every kind of target, and what ends them."""

import contextlib
import functools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import runtime as rt
import runtime.session.run_records
from runtime.lowlevel import RunRecords, RunRecordView
from runtime.master import tasks
from runtime.master.tasks import RemoteTask
from runtime.proto import services_pb2 as pb
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.server.report import probe
from runtime.state.leadership import EPOCHS_AT_ONCE, NOBODY, Leadership
from runtime.state.store import Resource
from runtime.wire.dial import ChannelOptions
from tests.kit.ports import free_ports
from tests.kit.processes import Program
from tests.kit.waits import count_waiters, until
from tests.runtime.kit import TARGET, addresses, in_thread, serve, servers
from tests.runtime.stranger import Stranger, refused

pytestmark = pytest.mark.cluster

PS = ["/job:ps/task:0", "/job:ps/task:1"]
LONG_SECS = 600.0
"""More than an order ever waits."""


def waiting(server: rt.Server) -> int:
    """How many orders wait on a task."""
    return count_waiters(server.worker.store.changed)


@pytest.fixture(params=["tasks here", "tasks elsewhere", "master elsewhere"])
def cluster(request: pytest.FixtureRequest) -> Iterator[dict[str, rt.Server]]:
    """Two ps and two workers; the target reaches the others, and the client the target, in every way."""
    with servers(sockets=request.param != "tasks here", ps=2, worker=2) as made:
        if request.param == "master elsewhere":
            tasks.withdraw(made[TARGET].address, made[TARGET])
        yield made


# -- the orders ------------------------------------------------------------------------------------------------------


def test_every_order_reaches_every_ps(cluster: dict[str, rt.Server]) -> None:
    """Every order of a run reaches the records of all ps."""
    chief = RunRecords(cluster[TARGET].target, is_chief=True)
    other = RunRecords(cluster["/job:worker/task:1"].target)
    assert {record.phase for record in chief.inspect().values()} == {"new"} and chief.task == TARGET
    assert chief.claim().tasks == set(PS)
    assert {record.chief for record in chief.inspect().values()} == {
        f"{TARGET} at {cluster[TARGET].address}"
    }
    assert chief.lead and {record.leadership for record in other.inspect().values()} == {
        chief.lead.leadership
    }
    assert chief.leads()
    assert chief.load() == dict.fromkeys(PS, 0)
    assert not other.wait_loaded(0.01)
    chief.open("/runs/1")
    assert other.wait_loaded(LONG_SECS)
    chief.join(session=1)
    other.join(session=2)
    assert {record.logdir for record in other.inspect().values()} == {"/runs/1"}
    assert {record.joined for record in other.inspect().values()} == {(TARGET, other.task)}
    chief.rest(1)
    assert set(chief.wait_done(0.01)) == {f"{other.task} at {cluster[other.task].address}"}
    chief.finish(9.0, ("", "global_step"), 0)
    for name in PS:
        assert cluster[name].worker.store.run.saved == (("", "global_step"), 0)
    assert {record.saved_step for record in other.done(leave=False, session=2).values()} == {0}
    assert chief.wait_done(LONG_SECS) == {}
    assert {record.done for record in chief.inspect().values()} == {(other.task,)}


def test_stop_order_reaches_waiting_session(cluster: dict[str, rt.Server]) -> None:
    """An order to stop reaches a session that waits for it, with the reason."""
    waits = RunRecords(cluster["/job:worker/task:1"].target)
    thread, results = in_thread(lambda: waits.wait_stop(LONG_SECS))
    # one of them keeps a thread for it
    until(lambda: [waiting(cluster[name]) for name in PS] in ([1, 0], [0, 1]))
    RunRecords(cluster[PS[0]].target).stop("no better for 3 evaluations")
    thread.join(60)
    assert results == [("no better for 3 evaluations", None)]
    assert RunRecords(cluster[TARGET].target).wait_stop(LONG_SECS) == results[0]


@pytest.mark.parametrize("going", PS)
def test_chief_hears_of_draining_ps(cluster: dict[str, rt.Server], going: str) -> None:
    """The chief hears when any ps must go, and no other session does."""
    chief = RunRecords(cluster[TARGET].target, is_chief=True)
    other = RunRecords(cluster["/job:worker/task:1"].target)
    chief.claim()
    thread, results = in_thread(lambda: chief.wait_stop(LONG_SECS))
    until(lambda: all(waiting(cluster[name]) for name in PS))
    chief.claim()  # as in a recovery: whoever waits already is still the chief
    cluster[going].worker.store.run.go_at(time.monotonic() + 30)
    thread.join(60)
    ((reason, secs),) = results
    assert reason == "" and 0 < secs <= 30
    # the other ps is not kept waiting
    until(lambda: not any(waiting(cluster[name]) for name in PS))
    assert other.wait_stop(0.01) == ("", None)


def test_close_ends_wait_for_stop(cluster: dict[str, rt.Server]) -> None:
    """Closing the records ends the wait for an order to stop, and other orders work."""
    records = RunRecords(cluster["/job:worker/task:1"].target)
    thread, results = in_thread(lambda: records.wait_stop(LONG_SECS))
    until(lambda: any(waiting(cluster[name]) for name in PS))
    records.close()
    thread.join(60)
    assert type(results[0]) is rt.CancelledError
    until(lambda: not any(waiting(cluster[name]) for name in PS))
    with pytest.raises(rt.CancelledError):
        records.wait_stop(LONG_SECS)
    assert list(records.inspect()) == PS  # all else goes on


def test_first_task_keeps_record_without_ps() -> None:
    """The first worker keeps the record in a cluster without ps."""
    with servers(worker=2) as made:
        last = RunRecords(made["/job:worker/task:1"].target)
        assert list(last.inspect()) == [TARGET]


def test_device_filters_choose_record_tasks(cluster: dict[str, rt.Server]) -> None:
    """Device filters say which ps keep the record."""
    config = rt.SessionConfig(device_filters=["/job:ps/task:1", "/job:worker/task:0"])
    assert list(RunRecords(cluster[TARGET].target, config).inspect()) == [PS[1]]


def test_orders_reach_waiting_resources(cluster: dict[str, rt.Server]) -> None:
    """Orders of the run reach the resources that wait for workers."""
    told: list[tuple[Any, ...]] = []

    class Waits(Resource):
        def retire(self, client: int, index: int) -> None:
            told.append(("retired", client, index))

        def set_finished(self, finished: bool) -> None:
            told.append(("finished", finished))

    cluster[PS[0]].worker.store.resource("", "waits", Waits)
    chief = RunRecords(cluster[TARGET].target, is_chief=True)
    chief.claim()
    chief.rest(5)
    chief.finish(9.0)
    RunRecords(cluster["/job:worker/task:1"].target).done(False, 6)
    said = [what for what in told if what != ("finished", False)]
    assert said == [("retired", 5, 0), ("finished", True), ("finished", True), ("retired", 6, 1)]


def test_an_order_opens_no_session(
    cluster: dict[str, rt.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order of a run opens no session."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a session")

    for server in cluster.values():
        monkeypatch.setattr(server.master, "create_session", refuse)
    chief = RunRecords(cluster[TARGET].target, is_chief=True)
    chief.claim()
    chief.load()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_later_chief_leads(cluster: dict[str, rt.Server]) -> None:
    """A chief that another chief has deposed is refused."""
    old, new = (RunRecords(cluster[TARGET].target, is_chief=True) for _ in range(2))
    with pytest.raises(rt.AbortedError, match="/job:ps/task:[01]: restarted since a chief took"):
        old.load()
    old.claim()
    new.claim()
    with pytest.raises(
        rt.PermissionDeniedError, match=f"task:[01]: refused to load for {TARGET}: {TARGET} has"
    ):
        old.load()


def test_concurrent_claims_agree_on_one(cluster: dict[str, rt.Server]) -> None:
    """Of chiefs that claim at once exactly one leads."""
    chiefs = [RunRecords(cluster[TARGET].target, is_chief=True) for _ in range(4)]
    begin = threading.Barrier(len(chiefs))

    def claim(chief: RunRecords) -> RunRecords:
        begin.wait(60)
        chief.claim()
        return chief

    claims = [in_thread(functools.partial(claim, chief)) for chief in chiefs]
    for thread, _ in claims:
        thread.join(120)
    leads = [chief for chief in chiefs if chief.leads()]
    assert len(leads) == 1 and leads[0].lead
    assert {record.leadership for record in leads[0].inspect().values()} == {
        leads[0].lead.leadership
    }
    leads[0].load()
    for chief in chiefs:
        if chief is not leads[0] and chief.lead and chief.lead.leadership:
            with pytest.raises(rt.PermissionDeniedError):
                chief.load()


def test_repeated_claim_keeps_its_epoch(
    cluster: dict[str, rt.Server],
) -> None:
    """A chief that claims again keeps its epoch until another chief has led."""
    chief, other = (RunRecords(cluster[TARGET].target, is_chief=True) for _ in range(2))
    assert chief.lead and other.lead
    chief.claim()
    cluster[PS[1]].worker.store.run.leader.leadership = NOBODY  # as one that was started again
    chief.claim()
    assert {record.leadership for record in chief.inspect().values()} == {
        Leadership(1, chief.lead.owner)
    }
    other.claim()
    assert other.lead.leadership.epoch == 2
    chief.claim()
    assert {record.leadership for record in chief.inspect().values()} == {
        Leadership(3, chief.lead.owner)
    }


def test_far_ahead_task_is_followed(cluster: dict[str, rt.Server]) -> None:
    """A claim goes beyond the epoch of a task that is far ahead."""
    ahead = 3 * EPOCHS_AT_ONCE
    cluster[PS[1]].worker.store.run.leader.leadership = Leadership(ahead, 1)
    chief = RunRecords(cluster[TARGET].target, is_chief=True)
    chief.claim()
    assert {record.leadership.epoch for record in chief.inspect().values()} == {ahead + 1}


def test_missing_task_keeps_no_other() -> None:
    """An order reaches the tasks that are there and names the one that is missing."""
    spec = addresses(ps=2, worker=1)
    with rt.Server(spec, "ps", 1) as ps, rt.Server(spec, "worker", 0) as worker:
        records = RunRecords(worker.target, is_chief=True)
        records.answer_secs = 0.3
        reached = RunRecords(
            worker.target, rt.SessionConfig(device_filters=["/job:ps/task:1"]), is_chief=True
        )
        assert reached.claim().tasks == {PS[1]}
        records.lead = reached.lead
        for order in (
            records.claim,
            records.join,
            lambda: records.finish(9.0),
            lambda: records.done(leave=False),
        ):
            with pytest.raises(
                rt.UnavailableError, match=f"still waiting for {PS[0]} at {spec['ps'][0]}"
            ):
                order()
        assert ps.worker.store.run.phase == "finished"
        assert ps.worker.store.run.state()["done"] == [TARGET]
        records.answer_secs = 60.0  # one that comes later is waited for
        thread, results = in_thread(records.inspect)
        with rt.Server(spec, "ps", 0):
            thread.join(60)
        assert list(results[0]) == PS


def test_restarted_task_takes_no_order() -> None:
    """An order to a task that has restarted since the session began is aborted."""
    spec = addresses(ps=1, worker=1)
    order = RunOrder(inspect=RunOrder.Inspect())
    with rt.Server(spec, "worker", 0) as worker:
        task = RemoteTask(PS[0], spec["ps"][0], 1, ChannelOptions())
        with rt.Server(spec, "ps", 0):
            task.meet(task.status(worker.cluster, TARGET, 30))
            assert task.send_run_order(order, time.monotonic() + 30).phase == RunReply.NEW
        with rt.Server(spec, "ps", 0):
            with pytest.raises(
                rt.AbortedError, match=f"{PS[0]}: restarted since the session began"
            ):
                while True:  # gRPC finds out that the connection is gone when it is used
                    with contextlib.suppress(rt.UnavailableError):
                        task.send_run_order(order, time.monotonic() + 30)
        task.close(1)


def test_server_before_start_is_waited_for() -> None:
    """An order waits for a server that has not started."""
    spec = addresses(ps=1, worker=1)
    ps = rt.Server(spec, "ps", 0, start=False)
    tasks.withdraw(ps.address, ps)
    with rt.Server(spec, "worker", 0) as worker:
        thread, results = in_thread(RunRecords(worker.target).inspect)
        ps.start()
        thread.join(60)
    ps.stop()
    assert list(results[0]) == PS[:1]


def test_foreign_cluster_takes_no_order() -> None:
    """A task of another cluster definition takes no order."""
    here, there = addresses(ps=1, worker=1), addresses(ps=1, worker=1)
    with (
        rt.Server(here, "worker", 0) as worker,
        rt.Server({**there, "ps": here["ps"]}, "ps", 0) as ps,
    ):
        tasks.withdraw(ps.address, ps)
        with pytest.raises(
            rt.InvalidArgumentError, match="the cluster definition of /job:ps/task:0 differs"
        ):
            RunRecords(worker.target, is_chief=True).claim()
        assert not ps.worker.store.run.leader.leadership


def test_absent_target_is_an_error() -> None:
    """A target where nobody listens is UnavailableError, and text that is no target NotFoundError."""
    records = RunRecords(f"grpc://127.0.0.1:{free_ports(1)[0]}")
    records.answer_secs = 0.2
    with pytest.raises(rt.UnavailableError):
        records.inspect()
    with pytest.raises(rt.NotFoundError, match="not a session target"):
        RunRecords("localhost:1").inspect()


def test_malformed_orders_are_refused() -> None:
    """Orders of another incarnation, without a lead or with a bad wait are refused."""
    with servers(ps=1, worker=1) as made:
        ps = made[PS[0]]
        they, their = Stranger(ps), Stranger(made[TARGET])
        with they.channel, their.channel:
            with refused(grpc.StatusCode.ABORTED, "restarted since the session began"):
                they.worker.Run(
                    RunOrder(inspect=RunOrder.Inspect(), incarnation=ps.incarnation ^ 1), timeout=30
                )
            with refused(grpc.StatusCode.INVALID_ARGUMENT, "orders nothing"):
                they.worker.Run(RunOrder(incarnation=ps.incarnation), timeout=30)
            order = RunOrder(leadership=Leadership(1, 4711).to_proto(), load=RunOrder.Load())
            order.incarnation = ps.incarnation
            with refused(grpc.StatusCode.ABORTED, "took the lead"):
                they.worker.Run(order, timeout=30)
            none, much = (grpc.StatusCode.INVALID_ARGUMENT, "s for its answer"), "run_order_secs"
            above = (grpc.StatusCode.RESOURCE_EXHAUSTED, much)
            for secs, (code, said) in {
                0.0: none,
                -1.0: none,
                float("nan"): none,
                1e9: above,
                float("inf"): above,
            }.items():
                request = pb.ForwardRunOrderRequest(
                    order=RunOrder(inspect=RunOrder.Inspect()), answer_secs=secs
                )
                with refused(code, said):
                    their.master.ForwardRunOrder(request, timeout=30)
            with refused(grpc.StatusCode.ABORTED, "is not found here"):
                their.master.AdoptGenerations(
                    pb.AdoptGenerationsRequest(session=1, generations={PS[0]: 1}), timeout=30
                )


# -- what ends a wait ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaving", [True, False])
def test_wait_ends_when_task_stops(cluster: dict[str, rt.Server], leaving: bool) -> None:
    """A wait ends when a ps stops, with TaskLeftError if the ps leaves."""
    records = RunRecords(cluster[TARGET].target)
    RunRecords(cluster["/job:worker/task:1"].target).join()
    thread, results = in_thread(lambda: records.wait_done(LONG_SECS))
    until(lambda: all(waiting(cluster[name]) for name in PS))
    cluster[PS[1]].stop(leaving=leaving)
    thread.join(60)  # a minute is what the order itself would wait, and then some
    expected = rt.TaskLeftError if leaving else rt.UnavailableError
    assert type(results[0]) is expected and results[0].task == PS[1], results
    until(lambda: not waiting(cluster[PS[0]]))  # it had been asked too


def test_wait_ends_when_server_stops(cluster: dict[str, rt.Server]) -> None:
    """A wait ends when the caller's own server stops."""
    records = RunRecords(cluster[TARGET].target)
    RunRecords(cluster["/job:worker/task:1"].target).join()
    thread, results = in_thread(lambda: records.wait_done(LONG_SECS))
    until(lambda: all(waiting(cluster[name]) for name in PS))
    cluster[TARGET].stop()
    thread.join(60)
    assert type(results[0]) is rt.UnavailableError, results
    until(lambda: not any(waiting(cluster[name]) for name in PS))


WAIT = """
import sys, runtime as rt
records = rt.lowlevel.RunRecords(sys.argv[1])
print("waits", flush=True)
try:
    records.wait_done(600.0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(0)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_wait_ends_with_its_caller(how: signal.Signals) -> None:
    """A wait on the ps ends when its caller is interrupted or killed."""
    with servers(sockets=True, ps=2, worker=2) as made:
        RunRecords(made["/job:worker/task:1"].target).join()
        with Program("python", "-c", WAIT, made[TARGET].target) as program:
            until(lambda: all(waiting(made[name]) for name in PS))
            program.signal(how)
            # they would wait for a minute
            until(lambda: not any(waiting(made[name]) for name in PS))
            program.wait()
            assert ("interrupted" in program.output()) == (how == signal.SIGINT)


def test_many_waits_leave_control_plane_free() -> None:
    """Forty waits leave the control plane free for other calls."""
    with servers(sockets=True, ps=2, worker=2) as made:
        RunRecords(made["/job:worker/task:1"].target).join()
        records = RunRecords(made[TARGET].target)
        waits = [in_thread(lambda: records.wait_done(LONG_SECS)) for _ in range(40)]
        until(lambda: waiting(made[PS[0]]) == len(waits))
        assert list(records.inspect()) == PS
        with rt.Graph().as_default(), rt.Session(made[TARGET].target) as session:
            assert PS[0] in session.value_ids
        made[PS[0]].stop()
        for thread, results in waits:
            thread.join(60)
            assert type(results[0]) is rt.UnavailableError


# -- processes that die ----------------------------------------------------------------------------------------------


TELLS = """
import json, sys, runtime as rt
from tests.kit.waits import count_waiters, until
server = rt.Server(json.loads(sys.argv[1]), "ps", 1)
until(lambda: count_waiters(server.worker.store.changed))
print("asked", flush=True)
server.join()
"""
"""A ps that tells when an order waits there."""


def test_wait_ends_with_task_process() -> None:
    """A wait ends when the process of a ps is killed."""
    spec = addresses(ps=2, worker=2)
    with contextlib.ExitStack() as stack:
        ps, worker, other = (
            stack.enter_context(rt.Server(spec, job, i))
            for job, i in (("ps", 0), ("worker", 0), ("worker", 1))
        )
        dies = stack.enter_context(Program("python", "-c", TELLS, json.dumps(spec)))
        joins, waits = RunRecords(other.target), RunRecords(worker.target)
        joins.answer_secs = waits.answer_secs = 60.0
        joins.join()
        thread, results = in_thread(lambda: waits.wait_done(LONG_SECS))
        until(lambda: waiting(ps) == 1)
        dies.expect("asked")
        dies.kill()
        thread.join(120)
        assert type(results[0]) is rt.UnavailableError and results[0].task == PS[1], results
        until(lambda: not waiting(ps))


def test_frozen_task_keeps_no_other() -> None:
    """An order reaches the other tasks while one is frozen, and may be repeated."""
    spec = addresses(ps=2, worker=1)
    with (
        rt.Server(spec, "ps", 0) as ps,
        serve(spec, "ps", 1) as frozen,
        rt.Server(spec, "worker", 0) as worker,
    ):
        records = RunRecords(worker.target, is_chief=True)
        records.answer_secs = 60.0
        records.claim()
        frozen.freeze()
        records.answer_secs = 1.0
        with pytest.raises(rt.UnavailableError):
            records.finish(9.0)
        assert ps.worker.store.run.phase == "finished"
        frozen.thaw()
        records.answer_secs = 60.0
        records.finish(9.0)  # again, as one did not answer
        assert {record.phase for record in records.inspect().values()} == {"finished"}


BACKED_UP = (
    "import json, sys, runtime as rt; c = json.loads(sys.argv[1]);"
    "rt.Server(c, 'ps', int(sys.argv[2]), ps_backups=1).join()"
)
"""Its updates may be 100 behind in the backup, but an order to the run record is no update."""


def until_backed_up(spec: dict[str, list[str]]) -> None:
    """Waits until each ps has a backup at the other."""

    def backed_up(address: str) -> bool:
        try:
            return bool(probe(address, 10.0).values["backup_usable"])
        except (rt.UnavailableError, KeyError):
            return False

    until(lambda: all(map(backed_up, spec["ps"])))


def test_answered_orders_survive_in_backup() -> None:
    """An order that was answered is in the backup of a ps that is killed right after."""
    spec = addresses(ps=2, worker=2)
    with contextlib.ExitStack() as stack:
        _, dies = (
            stack.enter_context(Program("python", "-c", BACKED_UP, json.dumps(spec), str(index)))
            for index in range(2)
        )
        worker, second = (
            stack.enter_context(rt.Server(spec, "worker", index)) for index in range(2)
        )
        chief, other = RunRecords(worker.target, is_chief=True), RunRecords(second.target)
        chief.answer_secs = other.answer_secs = 60.0

        def killed_after(*orders: Callable[[], object]) -> RunRecordView:
            """The record after orders, the last of which had only just been answered when the ps was killed."""
            until_backed_up(spec)
            for order in orders:
                order()
            dies.kill()
            dies.restart()
            return chief.inspect()[PS[1]]

        assert chief.lead
        assert killed_after(chief.claim).leadership == chief.lead.leadership
        found = killed_after(chief.load, lambda: chief.open("/runs/1"))
        assert (found.phase, found.logdir, found.leadership) == (
            "ready",
            "/runs/1",
            chief.lead.leadership,
        )
        assert killed_after(chief.join, other.join).joined == (
            worker.worker.task,
            second.worker.task,
        )
        assert killed_after(lambda: other.done(leave=False)).done == (second.worker.task,)
        until_backed_up(spec)
        dies.kill()
        thread, results = in_thread(lambda: chief.done(leave=False))
        dies.restart()  # an order that meets nobody waits for the task to go on
        thread.join(60)
        assert set(results[0][PS[1]].done) == {worker.worker.task, second.worker.task}


def test_waiting_order_outlives_its_task() -> None:
    """An order that waits goes on when its task is killed and starts again."""
    spec = addresses(ps=2, worker=2)
    with contextlib.ExitStack() as stack:
        _, dies = (
            stack.enter_context(Program("python", "-c", BACKED_UP, json.dumps(spec), str(index)))
            for index in range(2)
        )
        worker, second = (
            stack.enter_context(rt.Server(spec, "worker", index)) for index in range(2)
        )
        waits, other = RunRecords(worker.target), RunRecords(second.target)
        waits.answer_secs = other.answer_secs = 60.0
        until_backed_up(spec)
        other.join()
        thread, results = in_thread(lambda: waits.wait_done(LONG_SECS))
        dies.kill()  # before, while or after it is told what to wait for
        dies.restart()
        assert other.inspect()[PS[1]].joined == (second.worker.task,)
        other.done(leave=False)
        thread.join(60)
        assert results == [{}]
