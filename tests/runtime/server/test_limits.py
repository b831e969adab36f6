"""What a well-formed request may ask for has a limit, and the error names it."""

import contextlib
import math
import socket
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import runtime as rt
from runtime.lowlevel import RunRecords
from runtime.master import tasks
from runtime.proto import services_pb2 as pb
from runtime.state.leadership import EPOCHS_AT_ONCE, Leadership
from runtime.state.write_gate import PAUSE_SECS
from runtime.transport import frames, rpc
from runtime.transport.messages import MAX_SLOTS
from runtime.transport.rpc import MAX_REQUEST_BYTES
from tests.runtime import kit
from tests.runtime.stranger import OWNER, Stranger, key_of, refused, stranger
from tests.runtime.transport import kit as transport_kit

ORDER = pb.CheckpointOrder
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def server() -> Iterator[rt.Server]:
    with rt.Server(kit.addresses(local=1), "local", 0) as made:
        yield made


@pytest.fixture
def they(server: rt.Server) -> Iterator[Stranger]:
    with stranger(server) as made:
        yield made


@pytest.mark.parametrize("secs", [86400.0, math.nextafter(PAUSE_SECS, 11), math.inf, math.nan, -1.0])
def test_nobody_holds_updates_for_longer_than_a_checkpoint_may(server: rt.Server, they: Stranger, secs: float) -> None:
    with refused(INVALID, f"{PAUSE_SECS:g} s at most"):
        they.order(pause=ORDER.Pause(job=1, seconds=secs))
    assert not server.worker.gate._snapshot  # it was not paused either
    they.order(pause=ORDER.Pause(job=2, seconds=PAUSE_SECS))
    assert server.worker.gate.resume(2)


def test_the_coordinators_pause_is_the_longest() -> None:
    from runtime.checkpoint import coordinator

    assert coordinator.PAUSE_SECS == PAUSE_SECS


@pytest.mark.parametrize("epoch", [2**64 - 1, 2**63, 2**63 - 1, EPOCHS_AT_ONCE + 1])
def test_epochs_cannot_be_used_up(server: rt.Server, they: Stranger, epoch: int) -> None:
    with refused(INVALID, str(epoch), "epoch 1"):
        they.claim(epoch)
    assert server.worker.store.run.leadership == Leadership(1, OWNER)
    chief = RunRecords(server.target, is_chief=True)
    assert chief.claim().leadership.epoch == 2


def test_a_task_that_has_restarted_takes_the_epoch_of_the_others(they: Stranger) -> None:
    they.claim(1 + 100_000)


def test_a_chief_leads_all_tasks_when_one_was_raised_far_above_the_others() -> None:
    with kit.servers(sockets=True, ps=2, worker=1) as made, stranger(made["/job:ps/task:0"]) as they:
        for _ in range(3):
            they.claim(they.epoch + EPOCHS_AT_ONCE - 1)
        lead = RunRecords(made[kit.TARGET].target, is_chief=True).claim()
        assert lead.leadership.epoch == they.epoch + 1
        ps = ("/job:ps/task:0", "/job:ps/task:1")
        assert {made[task].worker.store.run.leadership for task in ps} == {lead.leadership}


@pytest.mark.parametrize("slots", [MAX_SLOTS + 1, 2**27, 2**31 - 1, -1])
def test_a_plan_has_so_many_slots_at_most(they: Stranger, slots: int) -> None:
    session = they.master.CreateSession(pb.CreateSessionRequest(), timeout=60).session
    plan = pb.RegisterPlanRequest(session=session)
    plan.plan.slots = slots
    plan.plan.constants = b""
    with refused(INVALID, "PlanDef.slots", str(MAX_SLOTS)):
        they.master.RegisterPlan(plan, timeout=60)


def step_of(nbytes: int) -> pb.RunStepRequest:
    """A request of about so many bytes, for a session that there is not."""
    return pb.RunStepRequest(session=1, feeds=bytes(nbytes))


def test_compressed_messages_are_refused(server: rt.Server) -> None:
    made = Stranger(server)
    with made.channel:
        for nbytes in (1 << 10, MAX_REQUEST_BYTES - 1000):  # the larger one is 64 KiB when it is compressed
            with pytest.raises(grpc.RpcError) as caught:
                made.master.RunStep(step_of(nbytes), compression=grpc.Compression.Gzip, timeout=120)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, caught.value
            assert "ompression" in caught.value.details()
        made.worker.Unregister(pb.UnregisterRequest(session=1), timeout=60)  # it goes on


def test_a_message_has_so_many_bytes_at_most(server: rt.Server) -> None:
    assert MAX_REQUEST_BYTES == 64 << 20
    made = Stranger(server)
    with made.channel:
        with pytest.raises(grpc.RpcError) as caught:
            made.master.RunStep(step_of(MAX_REQUEST_BYTES - 1000), timeout=120)
        assert "session" in caught.value.details()  # it was read
        with refused(EXHAUSTED, str(MAX_REQUEST_BYTES)):
            made.master.RunStep(step_of(MAX_REQUEST_BYTES), timeout=120)
        with pytest.raises(rt.ResourceExhaustedError, match=r"Server\(max_request_bytes=...\)"):
            rpc.call(made.master.RunStep, step_of(MAX_REQUEST_BYTES), timeout=120, task="/job:local/task:0")


@pytest.mark.parametrize("most", [1 << 20, 4 << 20])
def test_how_much_a_client_elsewhere_feeds_is_an_option_of_its_server(most: int) -> None:
    fed = np.arange((2 << 20) // 4, dtype=np.float32)
    with rt.Server(kit.addresses(local=1), "local", 0, max_request_bytes=most) as server:
        tasks.withdraw(server.address, server)  # as a client in another process sees it
        with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
            x = rt.placeholder(np.float32, fed.shape, name="x")
            if most < fed.nbytes:
                with pytest.raises(rt.ResourceExhaustedError, match="max_request_bytes"):
                    sess.run(x + 1, {x: fed})
            else:
                assert np.array_equal(sess.run(x + 1, {x: fed}), fed + 1)


def say_hello(server: rt.Server, client: int) -> tuple[int, bytes]:
    """Kind and payload of the answer to a hello."""
    with socket.create_connection(("127.0.0.1", server.data_port), timeout=60) as sock, sock.makefile("rwb") as file:
        return transport_kit.say_hello(file, client, key_of(server), server.worker.task)


def test_nobody_is_the_client_0(server: rt.Server) -> None:
    kind, payload = say_hello(server, 0)
    assert kind == frames.ERROR
    assert isinstance(error := frames.decode_error(payload, ""), rt.InvalidArgumentError) and "0" in error.message
    assert say_hello(server, 7)[0] == frames.WELCOME


def test_a_frame_that_announces_more_than_its_handle_takes_is_refused_before_it_comes(server: rt.Server) -> None:
    with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
        w = rt.Variable(np.zeros(3, np.float32), name="w")
        sess.run(rt.global_variables_initializer())
        x = rt.placeholder(np.float32, [3], name="x")
        sess.run(w.assign_add(x), {x: np.ones(3, np.float32)})
        handle = next(h for h in range(1, 100) if _takes(server, h) == 12)
        server.worker.registry.find(server.worker.registered(handle).digest, 7)  # it has registered the same stage
        with (
            socket.create_connection(("127.0.0.1", server.data_port), timeout=60) as sock,
            sock.makefile("rwb") as file,
        ):
            assert transport_kit.say_hello(file, 7, key_of(server), server.worker.task)[0] == frames.WELCOME
            few = b"x" * 4096
            sock.sendall(frames.pack_header(frames.MAGIC, frames.CALL, 0, handle, 1, 1, len(few)) + few)
            fields = frames.unpack_header(file.read(frames.HEADER_BYTES))
            assert fields[1] == frames.ERROR
            error = frames.decode_error(file.read(fields[6]), "")
            assert isinstance(error, rt.InvalidArgumentError) and "got 4096 bytes" in error.message
        assert sess.run(w).tolist() == [1.0] * 3


def _takes(server: rt.Server, handle: int) -> int:
    with contextlib.suppress(rt.OpError):
        layout = server.worker.input_layout(handle)
        return -1 if layout is None else layout.nbytes
    return -1


def test_what_is_held_for_others_is_a_part_of_the_memory() -> None:
    with kit.servers(sockets=True, ps=2, worker=1) as made:
        with rt.Graph().as_default() as graph, rt.Session(made[kit.TARGET].target, graph) as sess:
            x = rt.placeholder(np.float32, [100], name="x")
            with rt.device("/job:ps/task:0"):
                made_there = x * 2
            with rt.device("/job:ps/task:1"):
                used_there = made_there + 1
            fed = {x: np.ones(100, np.float32)}
            assert sess.run(used_there, fed).tolist() == [3.0] * 100
            held = made["/job:ps/task:0"].worker.rendezvous
            assert held.limit_bytes > 1 << 26 and len(held) == 0 and held._bytes == 0
            held.limit_bytes = 1000
            for step in range(3):  # of a session that never fetches them
                held.put((9, step, 0), np.ones(100, np.float32), 1)
            with pytest.raises(rt.ResourceExhaustedError, match=r"1200 bytes.*limit_bytes = 1000"):
                sess.run(used_there, fed)
            held.drop_session(9)
            assert sess.run(used_there, fed).tolist() == [3.0] * 100
            assert len(held) == 0 and held._bytes == 0
