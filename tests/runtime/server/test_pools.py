"""Calls that wait on the control plane: how many there may be, and that they take nothing from the others."""

import contextlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import runtime as rt
from runtime.master import tasks
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc
from runtime.proto.run_record_pb2 import RunOrder
from runtime.rpc import rpc
from runtime.server.calls import METHODS
from runtime.server.pools import (
    CALLS,
    CHECKPOINT_ORDERS,
    CLIENT_WAITING,
    ORDERS,
    REGISTRATIONS,
    WAITING,
)
from runtime.server.server import Server
from runtime.state.leadership import Leadership
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.stranger import ORDER, OWNER, Stranger, refused, slice_of, stranger

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[Server]:
    with (
        kit.limited(**limits) as given,
        rt.Server(kit.addresses(local=1), "local", 0, limits=given) as made,
    ):
        yield made


def running(server: Server, pool: str) -> int:
    return server.pools.running(pool)


def connection(server: Server) -> Any:
    """A stub with a connection of its own, not the one that this process has to the server already."""
    option = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(server.address, option)
    return grpc.intercept_channel(channel, rpc._TokenProver(channel, server.address, None, ""))


def wait_stop(channel: Any, server: Server) -> grpc.Future:
    """An order that waits for a minute, and whose reply somebody waits for in another thread."""
    order = RunOrder(incarnation=server.incarnation, wait_stop=RunOrder.WaitStop(secs=60))
    return services_pb2_grpc.WorkerServiceStub(channel).Run.future(order, timeout=60)


def proven(channel: Any, server: Server) -> Any:
    """The same channel, after its first call: one that is made by ``future`` is not made again with a proof."""
    services_pb2_grpc.WorkerServiceStub(channel).Status(pb.StatusRequest(), timeout=60)
    return channel


def test_waiting_orders_are_limited() -> None:
    """Orders that wait are limited for one connection and for all, and an order that ends frees its
    place.
    """
    with (
        serving(waiting_calls=12, client_waiting_calls=8) as server,
        contextlib.ExitStack() as stack,
    ):
        one, other, third = (
            proven(stack.enter_context(connection(server)), server) for _ in range(3)
        )
        stuck = [wait_stop(one, server) for _ in range(8)]
        until(lambda: running(server, WAITING) == 8)
        with refused(EXHAUSTED, f"the limit {CLIENT_WAITING} is 8"):
            wait_stop(one, server).result()
        stuck += [wait_stop(other, server) for _ in range(4)]
        until(lambda: running(server, WAITING) == 12)
        with refused(EXHAUSTED, f"the limit {WAITING} is 12 (--limit_{WAITING}"):
            wait_stop(third, server).result()
        for call in stuck[:3]:
            call.cancel()
        until(lambda: running(server, WAITING) == 9)  # who gives up frees its place
        one.close()
        until(lambda: running(server, WAITING) == 4)


def test_refused_order_is_audited(tmp_path: pathlib.Path) -> None:
    """An order above its limit is in the audit log with the limit's name."""
    log = tmp_path / "audit"
    limits = rt.Limits(waiting_calls=4)
    with rt.Server(kit.addresses(local=1), "local", 0, limits=limits, audit_log=log) as server:
        with connection(server) as channel:
            stuck = wait_stop(proven(channel, server), server)
            until(lambda: running(server, WAITING) == 1)
            with refused(EXHAUSTED):
                wait_stop(channel, server).result()
            stuck.cancel()
        (line,) = [json.loads(text) for text in log.read_text().splitlines() if '"limit"' in text]
        assert (
            line["action"] == "limit"
            and line["outcome"] == "refused"
            and line["peer"] == "127.0.0.1"
        )
        assert "client_waiting_calls" in line["what"]


def test_connection_has_limited_sessions(tmp_path: pathlib.Path) -> None:
    """Sessions are limited for one connection and for all, and a closed session frees its place."""
    log = tmp_path / "audit"
    with (
        kit.limited(client_sessions=2, sessions=3) as limits,
        rt.Server(kit.addresses(local=1), "local", 0, limits=limits, audit_log=log) as server,
    ):
        with contextlib.ExitStack() as stack:
            one, other = (
                services_pb2_grpc.MasterServiceStub(stack.enter_context(connection(server)))
                for _ in range(2)
            )
            made = [
                one.CreateSession(pb.CreateSessionRequest(), timeout=60).session for _ in range(2)
            ]
            with refused(EXHAUSTED, "the limit client_sessions is 2"):
                one.CreateSession(pb.CreateSessionRequest(), timeout=60)
            other.CreateSession(pb.CreateSessionRequest(), timeout=60)
            with refused(EXHAUSTED, "the limit sessions is 3"):
                other.CreateSession(pb.CreateSessionRequest(), timeout=60)
            one.CloseSession(pb.CloseSessionRequest(session=made[0]), timeout=60)
            other.CreateSession(pb.CreateSessionRequest(), timeout=60)
            assert len(server.remote_sessions) == 3 == server.report().values["sessions"]
        assert '"action": "limit"' in log.read_text()  # also what the method itself has refused


@pytest.mark.parametrize("count", [64, pytest.param(1000, marks=pytest.mark.cluster)])
def test_stuck_orders_stop_nothing_else(count: int, tmp_path: pathlib.Path) -> None:
    """Orders that wait stop neither status, registration, saves nor training."""
    with kit.servers(sockets=True, ps=1, worker=1) as made, contextlib.ExitStack() as stack:
        ps = made["/job:ps/task:0"]
        channels = [
            proven(stack.enter_context(connection(ps)), ps) for _ in range(-(-count // 250))
        ]
        stuck = [wait_stop(channels[i // 250], ps) for i in range(count)]
        until(lambda: running(ps, WAITING) == count, secs=120)
        assert rt.probe(ps.address).task == "/job:ps/task:0"
        with rt.Graph().as_default() as graph, rt.Session(made[kit.TARGET].target, graph) as sess:
            with rt.device("/job:ps/task:0"):
                w = rt.Variable(np.zeros(3, np.float32), name="w")
            add = w.assign_add(np.ones(3, np.float32))  # registered only now
            sess.run(rt.global_variables_initializer())
            for _ in range(20):
                sess.run(add)
            with stranger(ps) as they:
                job = they.take([slice_of("w", np.zeros(3, np.float32))])
                (tmp_path / "save").mkdir()
                write = ORDER.Write(job=job, directory=str(tmp_path / "save"))
                assert they.order(write=write).write.files
            assert sess.run(w).tolist() == [20.0] * 3
        assert running(ps, WAITING) == count and not any(call.done() for call in stuck)
    # the servers have stopped: they waited for none of them


def test_queued_call_gets_its_turn() -> None:
    """A call that waits for its turn gets it, and one connection has at most half of the pool."""
    with serving(registrations=2) as server, contextlib.ExitStack() as stack:
        release, begun = threading.Event(), threading.Semaphore(0)
        registrar = server.worker.registrar
        register = registrar.register

        def dawdle(*args: Any, **kwargs: Any) -> Any:
            begun.release()
            assert release.wait(60)
            return register(*args, **kwargs)

        registrar.register = dawdle  # type: ignore[method-assign]  # a compilation that takes its time
        request = pb.RegisterRequest(incarnation=server.incarnation)
        one, other = (proven(stack.enter_context(connection(server)), server) for _ in range(2))
        stubs = [services_pb2_grpc.WorkerServiceStub(channel) for channel in (one, other)]
        waiting = [stubs[0].Register.future(request, timeout=60)]
        assert begun.acquire(timeout=60)
        # after the one that runs
        waiting += [stubs[0].Register.future(request, timeout=60) for _ in range(3)]
        assert running(server, REGISTRATIONS) == 1
        second = stubs[1].Register.future(request, timeout=60)
        assert begun.acquire(timeout=60) and running(server, REGISTRATIONS) == 2
        waiting.pop().cancel()  # it leaves no place behind
        assert rt.probe(server.address).task == "/job:local/task:0"
        release.set()
        for call in (*waiting, second):
            assert call.exception(timeout=60) is not None  # it registers nothing that there is
        for _ in range(2):
            assert begun.acquire(timeout=60)
        until(lambda: running(server, REGISTRATIONS) == 0)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes each write of a checkpoint last until its job ends; returns the event of the first one's beginning."""
    began = threading.Event()

    def write_store(
        directory: str, arrays: object, *, cancelled: Callable[[], bool], **_: object
    ) -> list[object]:
        began.set()
        until(cancelled, secs=120)
        return []

    monkeypatch.setattr("runtime.checkpoint.storage.write_store", write_store)
    return began


def test_waiting_checkpoint_order_ends_with_caller(
    tmp_path: pathlib.Path, endless: threading.Event
) -> None:
    """An order that waits for a job ends with its caller."""
    with serving() as server:
        they = Stranger(server)
        with they.channel:
            they.claim()
            write = ORDER.Write(job=they.take([]), directory=str(tmp_path))
            message = ORDER(leadership=leadership_of(they), write=write)
            calls = [they.worker.Checkpoint.future(message, timeout=60) for _ in range(64)]
            assert endless.wait(60)
            until(lambda: running(server, CHECKPOINT_ORDERS) == 32)  # half of the pool
            assert rt.probe(server.address).task == "/job:local/task:0"
            for call in calls:
                call.cancel()
            # the one that writes ends with its job
            until(lambda: running(server, CHECKPOINT_ORDERS) == 1)
            they.close_session()
        until(lambda: running(server, CHECKPOINT_ORDERS) == 0)


def test_checkpoint_order_has_a_deadline(tmp_path: pathlib.Path, endless: threading.Event) -> None:
    """An order about a checkpoint ends at its deadline."""
    with serving(order_secs=0.5) as server:
        they = Stranger(server)
        with they.channel:
            they.claim()
            write = ORDER.Write(job=they.take([]), directory=str(tmp_path))
            first = they.worker.Checkpoint.future(
                ORDER(leadership=leadership_of(they), write=write), timeout=60
            )
            assert endless.wait(60)
            with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "writing a checkpoint"):
                they.order(write=write)
            they.close_session()
            assert first.exception(timeout=60) is not None


def leadership_of(they: Stranger) -> Any:
    return Leadership(they.epoch, OWNER).to_proto()


def test_every_method_has_a_pool() -> None:
    """Every method of the control plane is in the pool of its kind."""
    plain = {
        f"/{service.full_name}/{method.name}": getattr(pb, method.input_type.name)()
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if hasattr(pb, method.input_type.name)
    }
    assert {
        name.rpartition("/")[2]
        for name, request in plain.items()
        if METHODS[name].pool(request) == CALLS
    } == {
        "Status",
        "Unregister",
        "Trace",
        "Metrics",
        "RenewSession",
        "CloseSession",
        "AdoptGenerations",
    }
    kinds = {field.name for field in RunOrder.DESCRIPTOR.oneofs_by_name["order"].fields}
    run = METHODS["/bellwether.WorkerService/Run"].pool
    waits = {kind for kind in kinds if kind.startswith("wait_")}
    for kind in kinds:
        order = RunOrder()
        getattr(order, kind).SetInParent()
        if kind in waits:
            getattr(order, kind).secs = 5
        assert run(order) == (WAITING if kind in waits else ORDERS), kind
    assert {REGISTRATIONS, WAITING} <= {row.name for row in rt.Limits.rows()}


def test_remote_steps_are_limited() -> None:
    """The waiting steps of a remote client are limited by name, and end with the session."""
    with serving(client_waiting_calls=4) as server:
        tasks.withdraw(server.address, server)  # as a client in another process sees it
        with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
            queue = rt.FIFOQueue(10, [np.float32], shapes=[()], name="q")
            take = queue.dequeue()
            errors: list[Exception] = []
            taken: list[float] = []

            def consume() -> None:
                try:
                    taken.append(float(sess.run(take)))
                except rt.OpError as error:
                    errors.append(error)

            consumers = [threading.Thread(target=consume, daemon=True) for _ in range(8)]
            for thread in consumers:
                thread.start()
            until(lambda: len(errors) == 4)
            assert "the limit client_waiting_calls is 4" in str(errors[0])
            until(lambda: running(server, WAITING) == 4)  # the others, planned by now
            assert not taken
        for thread in consumers:
            thread.join(60)
            assert not thread.is_alive()
        assert len(errors) == 8 and not taken  # the others ended with the session
