"""What a well-formed request may ask for has a limit, and the error names it."""

import contextlib
import math
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator

import grpc
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.kernels.accumulator import AccumulatorResource
from runtime.lowlevel import RunRecords
from runtime.master import tasks
from runtime.plan.plan import HeldOutput
from runtime.proto import services_pb2 as pb
from runtime.proto.run_record_pb2 import RunOrder
from runtime.rpc import rpc
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import EPOCHS_AT_ONCE, Leadership
from runtime.state.ledger import NOBODY
from runtime.wire import frames
from runtime.wire.messages import pack
from tests.kit.changes import SetVariables
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.stranger import OWNER, Stranger, key_of, refused, stranger
from tests.runtime.wire import kit as transport_kit

ORDER = pb.CheckpointOrder
DEFAULT = rt.Limits()
MAX_SLOTS, MAX_REQUEST_BYTES, PAUSE_SECS = (
    DEFAULT.plan_slots,
    DEFAULT.request_bytes,
    DEFAULT.pause_secs,
)
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def server() -> Iterator[rt.Server]:
    with rt.Server(kit.addresses(local=1), "local", 0) as made:
        yield made


@pytest.fixture
def they(server: rt.Server) -> Iterator[Stranger]:
    with stranger(server) as made:
        yield made


@pytest.mark.parametrize(
    "secs", [86400.0, math.nextafter(PAUSE_SECS, 11), math.inf, math.nan, -1.0]
)
def test_pause_has_a_limit(server: rt.Server, they: Stranger, secs: float) -> None:
    """A pause of updates longer than a checkpoint's is refused and pauses nothing."""
    words = ("the limit pause_secs is 10.0",) if secs > 0 else ("a pause of",)
    with refused(EXHAUSTED if secs > 0 else INVALID, *words):
        they.order(pause=ORDER.Pause(job=1, seconds=secs))
    assert not server.worker.gate._snapshot  # it was not paused either
    they.order(pause=ORDER.Pause(job=2, seconds=PAUSE_SECS))
    assert server.worker.gate.resume(2)


def test_coordinator_pause_is_longest() -> None:
    """The coordinator's pause is the longest that is allowed."""
    from runtime.checkpoint import times

    assert times.PAUSE_SECS == PAUSE_SECS


@pytest.mark.parametrize("epoch", [2**64 - 1, 2**63, 2**63 - 1, EPOCHS_AT_ONCE + 1])
def test_epochs_cannot_be_used_up(server: rt.Server, they: Stranger, epoch: int) -> None:
    """A claim that jumps too many epochs is refused, and the next chief gets the next epoch."""
    with refused(INVALID, str(epoch), "epoch 1"):
        they.claim(epoch)
    assert server.worker.store.run.leader.leadership == Leadership(1, OWNER)
    chief = RunRecords(server.target, is_chief=True)
    assert chief.claim().leadership.epoch == 2


def test_restarted_task_takes_large_epoch(they: Stranger) -> None:
    """A task takes an epoch that is as far ahead as other tasks may be."""
    they.claim(1 + 100_000)


def test_chief_outranks_a_raised_task() -> None:
    """A chief leads all tasks although a claim has raised one of them far above the others."""
    with (
        kit.servers(sockets=True, ps=2, worker=1) as made,
        stranger(made["/job:ps/task:0"]) as they,
    ):
        for _ in range(3):
            they.claim(they.epoch + EPOCHS_AT_ONCE - 1)
        lead = RunRecords(made[kit.TARGET].target, is_chief=True).claim()
        assert lead.leadership.epoch == they.epoch + 1
        ps = ("/job:ps/task:0", "/job:ps/task:1")
        assert {made[task].worker.store.run.leader.leadership for task in ps} == {lead.leadership}


@pytest.mark.parametrize("slots", [MAX_SLOTS + 1, 2**27, 2**31 - 1, -1])
def test_plan_has_limited_slots(they: Stranger, slots: int) -> None:
    """A plan with too many or negative slots is refused."""
    session = they.master.CreateSession(pb.CreateSessionRequest(), timeout=60).session
    plan = pb.RegisterPlanRequest(session=session)
    plan.plan.slots = slots
    plan.plan.constants = b""
    words = (str(MAX_SLOTS), "the limit plan_slots") if slots > 0 else ()
    with refused(EXHAUSTED if slots > 0 else INVALID, "PlanDef.slots", *words):
        they.master.RegisterPlan(plan, timeout=60)


def step_of(nbytes: int) -> pb.RunStepRequest:
    """A request of about so many bytes, for a session that there is not."""
    return pb.RunStepRequest(session=1, feeds=bytes(nbytes))


def test_compressed_messages_are_refused(server: rt.Server) -> None:
    """A compressed message is refused, and later calls work."""
    made = Stranger(server)
    with made.channel:
        # the larger one is 64 KiB when it is compressed
        for nbytes in (1 << 10, MAX_REQUEST_BYTES - 1000):
            with pytest.raises(grpc.RpcError) as caught:
                made.master.RunStep(step_of(nbytes), compression=grpc.Compression.Gzip, timeout=120)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, caught.value
            assert "ompression" in caught.value.details()
        made.worker.Unregister(pb.UnregisterRequest(session=1), timeout=60)  # it goes on


@pytest.mark.cluster  # seconds for the copies of its bytes
def test_message_has_limited_bytes(server: rt.Server) -> None:
    """A message of the limit's size is read, and a larger one is refused with the limit's name."""
    assert MAX_REQUEST_BYTES == 64 << 20
    made = Stranger(server)
    with made.channel:
        with pytest.raises(grpc.RpcError) as caught:
            made.master.RunStep(step_of(MAX_REQUEST_BYTES - 1000), timeout=120)
        assert "session" in caught.value.details()  # it was read
        with refused(EXHAUSTED, str(MAX_REQUEST_BYTES)):
            made.master.RunStep(step_of(MAX_REQUEST_BYTES), timeout=120)
        with pytest.raises(
            rt.ResourceExhaustedError, match=r"limit request_bytes.*--limit_request_bytes"
        ):
            rpc.call(
                made.master.RunStep,
                step_of(MAX_REQUEST_BYTES),
                timeout=120,
                task="/job:local/task:0",
            )


@pytest.mark.parametrize(
    ("method", "most"),
    [("Status", 1 << 20), ("Metrics", 64 << 10), ("Trace", 64 << 10), ("Run", 2 << 20)],
)
def test_long_short_request_is_unparsed(server: rt.Server, method: str, most: int) -> None:
    """A long request to a method of short requests is refused before it is parsed."""
    with rpc.open_channel(server.address) as channel:
        call = channel.unary_unary(
            f"/bellwether.WorkerService/{method}",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        with refused(EXHAUSTED, f"{most:,}"):
            call(b"\xff" * (most + 1), timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff" * most, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # it was parsed


@pytest.mark.parametrize("most", [1 << 20, 4 << 20])
def test_feed_limit_is_an_option(most: int) -> None:
    """The bytes that a remote client feeds in one step are limited by request_bytes."""
    fed = np.arange((2 << 20) // 4, dtype=np.float32)
    with rt.Server(
        kit.addresses(local=1), "local", 0, limits=rt.Limits(request_bytes=most)
    ) as server:
        tasks.withdraw(server.address, server)  # as a client in another process sees it
        with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
            x = rt.placeholder(np.float32, fed.shape, name="x")
            if most < fed.nbytes:
                with pytest.raises(rt.ResourceExhaustedError, match="request_bytes"):
                    sess.run(x + 1, {x: fed})
            else:
                assert np.array_equal(sess.run(x + 1, {x: fed}), fed + 1)


def say_hello(server: rt.Server, client: int) -> tuple[int, bytes]:
    """Kind and payload of the answer to a hello."""
    with (
        socket.create_connection(("127.0.0.1", server.tensors.port), timeout=60) as sock,
        sock.makefile("rwb") as file,
    ):
        return transport_kit.say_hello(file, client, key_of(server), server.worker.task)


def test_client_zero_is_refused(server: rt.Server) -> None:
    """A hello of client 0 is refused."""
    kind, payload = say_hello(server, 0)
    assert kind == frames.ERROR
    assert (
        isinstance(error := frames.decode_error(payload, ""), rt.InvalidArgumentError)
        and "0" in error.message
    )
    assert say_hello(server, 7)[0] == frames.WELCOME


def test_oversized_frame_is_refused_early(
    server: rt.Server,
) -> None:
    """A frame that announces more bytes than its handle takes is refused before its payload."""
    with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
        w = rt.Variable(np.zeros(3, np.float32), name="w")
        sess.run(rt.global_variables_initializer())
        x = rt.placeholder(np.float32, [3], name="x")
        sess.run(w.assign_add(x), {x: np.ones(3, np.float32)})
        handle = next(h for h in range(1, 100) if _takes(server, h) == 12)
        server.worker.registry.find(
            server.worker.registry.get(handle).registration, 7
        )  # it has registered the same stage
        with (
            socket.create_connection(("127.0.0.1", server.tensors.port), timeout=60) as sock,
            sock.makefile("rwb") as file,
        ):
            assert (
                transport_kit.say_hello(file, 7, key_of(server), server.worker.task)[0]
                == frames.WELCOME
            )
            few = b"x" * 4096
            sock.sendall(
                frames.pack_header(frames.MAGIC, frames.CALL, 0, handle, 1, 1, len(few)) + few
            )
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


@pytest.mark.parametrize("limit", ["task_bytes", "client_bytes"])
def test_held_tensors_have_a_limit(limit: str, set_variables: SetVariables) -> None:
    """Tensors that are held for others count towards the task's and the client's limit."""
    set_variables(BELLWETHER_LIMITS=f"{limit}=400000")
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
            ledger = made["/job:ps/task:0"].worker.ledger
            before = ledger.total
            assert len(held) == 0
            for step in range(3):  # of a session that never fetches them
                held.put((9, step, 0), np.ones(40_000, np.float32), HeldOutput(1))
            if limit == "task_bytes":
                with pytest.raises(
                    rt.ResourceExhaustedError, match=r"bytes are kept .*the limit task_bytes is"
                ):
                    sess.run(used_there, fed)
            else:  # the others are not harmed
                assert sess.run(used_there, fed).tolist() == [3.0] * 100
                with pytest.raises(
                    rt.ResourceExhaustedError, match=r"480768 bytes.*limit client_bytes is"
                ):
                    ledger.check(9)
            held.drop_session(9)
            assert sess.run(used_there, fed).tolist() == [3.0] * 100
            assert len(held) == 0 and ledger.of(9) == 0 and ledger.total == before


@pytest.mark.parametrize("limit", ["task_bytes", "client_bytes"])
def test_queue_elements_are_counted(limit: str, set_variables: SetVariables) -> None:
    """The elements of a queue count towards the limits of bytes, also when their client has left."""
    set_variables(BELLWETHER_LIMITS=f"{limit}=400000")
    with kit.servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            queue = rt.FIFOQueue(100, [np.float32], [[10_000]])
        add, take = queue.enqueue(np.ones(10_000, np.float32)), queue.dequeue()
        ledger = made["/job:ps/task:0"].worker.ledger
        with rt.Session(made[kit.TARGET].target, graph) as sess:
            with pytest.raises(rt.ResourceExhaustedError, match=f"the limit {limit} is 400000"):
                for _ in range(11):
                    sess.run(add)
            kept = ledger.total
            assert 300_000 < kept <= 400_000
            for _ in range(5):
                sess.run(take)
            assert ledger.total < kept - 5 * 40_000 + 20_000
            sess.run(add)
        # what was left is nobody's, and can be taken
        with rt.Session(made[kit.TARGET].target, graph) as other:
            while int(other.run(queue.size())):
                other.run(take)
        until(lambda: ledger.total < 40_000)


def test_registrations_are_counted(set_variables: SetVariables) -> None:
    """The registrations of a session count towards its limit of bytes and go with the session."""
    set_variables(BELLWETHER_LIMITS="client_bytes=5000")
    with kit.servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        ledger = made["/job:ps/task:0"].worker.ledger
        with rt.device("/job:ps/task:0"):
            x = rt.placeholder(np.float32, [1000])
            steps = [x[n:] for n in range(40)]
        with rt.Session(made[kit.TARGET].target, graph) as sess:
            with pytest.raises(rt.ResourceExhaustedError, match="the limit client_bytes is 5000"):
                for step in steps:
                    sess.run(step, {x: np.ones(1000, np.float32)})
        until(lambda: ledger.of(NOBODY) == ledger.total <= 6_000)
        with rt.Session(made[kit.TARGET].target, graph) as other:
            assert other.run(x + 1, {x: np.ones(1000, np.float32)}).tolist() == [2.0] * 1000


def test_full_queue_can_be_emptied(set_variables: SetVariables) -> None:
    """A stage that empties a full queue is not refused."""
    set_variables(BELLWETHER_LIMITS="client_bytes=46300")
    with kit.servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            queue = rt.FIFOQueue(100, [np.float32], [[10_000]])
        add, take = queue.enqueue(np.ones(10_000, np.float32)), queue.dequeue()
        with rt.Session(made[kit.TARGET].target, graph) as sess:
            sess.run(add)
            assert sess.run(take).shape == (10_000,)


def test_variables_are_counted_in_bytes(set_variables: SetVariables) -> None:
    """A client that makes variables without an end is refused, and the others keep training."""
    set_variables(BELLWETHER_LIMITS="task_bytes=400000")
    with kit.servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        ledger = made["/job:ps/task:0"].worker.ledger
        with rt.device("/job:ps/task:0"):
            made_there = [
                rt.Variable(np.zeros(10_000, np.float32), name=f"v{n}") for n in range(12)
            ]
        add = made_there[0].assign_add(np.ones(10_000, np.float32))
        with rt.Session(made[kit.TARGET].target, graph) as sess:
            with pytest.raises(rt.ResourceExhaustedError, match="the limit task_bytes is 400000"):
                for variable in made_there:
                    sess.run(variable.initializer)
            assert 300_000 < ledger.of(NOBODY) <= 400_000
            sess.run(made_there[0].initializer)  # a value in place of another takes no more
            sess.run(add)
            assert sess.run(made_there[0])[0] == 1.0
        rt.Session.reset(made[kit.TARGET].target)
        assert ledger.of(NOBODY) < 100_000


def test_waiting_gradients_are_counted(set_variables: SetVariables) -> None:
    """Gradients that wait in an accumulator count towards their client's limit."""
    set_variables(BELLWETHER_LIMITS="client_bytes=400000")
    with kit.servers(sockets=True, ps=1, worker=1) as made:
        ledger = made["/job:ps/task:0"].worker.ledger
        accumulator = AccumulatorResource(np.dtype(np.float32), (10_000,), ledger=ledger)
        gradient = np.ones(10_000, np.float32)
        with pytest.raises(rt.ResourceExhaustedError, match="the limit client_bytes is 400000"):
            for number in range(12):
                accumulator.apply_grad(gradient, 0, number, 9)
        assert accumulator.num_accumulated == 8 and ledger.of(9) == 8 * 40_000
        accumulator.take_grad(1, Cancellation())
        assert ledger.of(9) == 0


def test_stages_and_values_share_limit() -> None:
    """The stages and values of a session share one limit."""
    limits = rt.Limits(client_bytes=8_000, task_bytes=80_000)
    with rt.Server(kit.addresses(local=1), "local", 0, limits=limits) as server:
        ledger = server.worker.registry.ledger
        ledger.reserve(9, 6_000, stages=True)
        with pytest.raises(rt.ResourceExhaustedError, match="the limit client_bytes is 8000"):
            server.worker.ledger.reserve(9, 1_500)
        ledger.reserve(9, 2_000, stages=True)


def test_own_sessions_have_no_byte_limit() -> None:
    """Sessions of the task's own process have no limit of bytes."""
    limits = rt.Limits(client_bytes=1000, task_bytes=2000)
    with (
        rt.Server(kit.addresses(local=1), "local", 0, limits=limits) as server,
        rt.Graph().as_default() as graph,
    ):
        queue = rt.FIFOQueue(100, [np.float32], [[1000]])
        add, take = queue.enqueue(np.ones(1000, np.float32)), queue.dequeue()
        with rt.Session(server.target, graph) as sess:
            for _ in range(3):
                sess.run(add)
            assert server.worker.ledger.total > 12_000
            for _ in range(3):
                sess.run(take)
            assert server.worker.ledger.total < 1_000  # of stages


def test_oversized_message_is_refused_early() -> None:
    """Tensors that no message can hold are refused before they are copied."""
    large = np.broadcast_to(np.float32(0), (600_000_000,))
    with pytest.raises(
        rt.ResourceExhaustedError, match="2,400,000,000 bytes of tensors in one message"
    ):
        pack([large])
    with rt.Server(kit.addresses(local=1), "local", 0) as server:
        tasks.withdraw(server.address, server)  # as a client in another process sees it
        with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
            x = rt.placeholder(np.float32, [None])
            with pytest.raises(rt.ResourceExhaustedError, match="in one message"):
                sess.run(x[0], {x: large})


def test_oversized_answer_is_refused_early() -> None:
    """An answer above the limit is refused before its step runs, where its size is known."""
    with rt.Server(
        kit.addresses(local=1), "local", 0, limits=rt.Limits(request_bytes=100_000)
    ) as server:
        tasks.withdraw(server.address, server)  # as a client in another process sees it
        with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
            v = rt.Variable(np.zeros(10, np.float32), name="v")
            add = v.assign_add(np.ones(10, np.float32))
            large = rt.call(lambda a: jnp.broadcast_to(a[:1], (50_000,)), add)
            sess.run(v.initializer)
            with pytest.raises(
                rt.ResourceExhaustedError, match="200,000 bytes.*the limit request_bytes is 100000"
            ):
                sess.run(large)
            assert sess.run(v)[0] == 0.0
            queue = rt.FIFOQueue(2, [np.float32], [None])
            x = rt.placeholder(np.float32, [None])
            sess.run(queue.enqueue(x), {x: np.zeros(20_000, np.float32)})
            assert len(sess.run(queue.dequeue())) == 20_000
            for _ in range(2):
                sess.run(queue.enqueue(x), {x: np.zeros(20_000, np.float32)})
            with pytest.raises(
                rt.ResourceExhaustedError, match="160,000 bytes.*the limit request_bytes is 100000"
            ):
                sess.run([queue.dequeue(), queue.dequeue()])


def test_lasting_names_are_counted() -> None:
    """Names of variables that stay on a task are counted in bytes."""
    with kit.servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default() as graph:
        ledger, registry = (
            made["/job:ps/task:0"].worker.ledger,
            made["/job:ps/task:0"].worker.registry,
        )
        with rt.device("/job:ps/task:0"):
            named = [rt.Variable(1.0, name=f"{n:0>1000}") for n in range(40)]
        with rt.Session(made[kit.TARGET].target, graph) as sess:
            with pytest.raises(rt.FailedPreconditionError):
                sess.run(named)
        until(lambda: registry.sessions == 0)
        assert ledger.of(NOBODY) > 40_000


def test_names_have_limited_length() -> None:
    """A name of a variable above 1,024 characters is refused."""
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        value = rt.Variable(1.0, name="n" * 2000)
        with pytest.raises(
            rt.InvalidArgumentError, match="a name of 2,0.. characters, 1,024 are allowed"
        ):
            sess.run(value.initializer)


def test_made_up_sessions_spare_connected() -> None:
    """Sessions without a connection push out no session that is connected."""
    with (
        kit.limited(stage_sessions=3, spare_stages=1),
        kit.servers(sockets=True, ps=1, worker=1) as made,
        rt.Graph().as_default() as graph,
    ):
        registry = made["/job:ps/task:0"].worker.registry
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.zeros(3, np.float32), name="w")
        add = w.assign_add(np.ones(3, np.float32))
        with rt.Session(made[kit.TARGET].target, graph) as sess:
            sess.run(rt.global_variables_initializer())
            sess.run(add)
            registration = next(iter(registry.kept()[0].values())).registration
            for number in range(100, 150):
                assert registry.find(registration, number) is not None
            assert registry.sessions == 3
            sess.run(add)
            assert sess.run(w).tolist() == [2.0] * 3
            with (
                rt.Session(made[kit.TARGET].target, graph) as second,
                rt.Session(made[kit.TARGET].target, graph) as third,
            ):
                for connected in (second, third):
                    connected.run(add)
                with pytest.raises(
                    rt.ResourceExhaustedError, match="the limit stage_sessions is 3"
                ):
                    registry.find(registration, 200)


def test_session_has_limited_stages() -> None:
    """A session above its limit of stages is refused, and other sessions are served."""
    with (
        kit.limited(session_stages=4),
        kit.servers(sockets=True, ps=1, worker=1) as made,
        rt.Graph().as_default() as graph,
    ):
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.zeros(3, np.float32), name="w")
        steps = [w.assign_add(np.full(3, n, np.float32)) for n in range(6)]
        with (
            rt.Session(made[kit.TARGET].target, graph) as greedy,
            rt.Session(made[kit.TARGET].target, graph) as other,
        ):
            greedy.run(rt.global_variables_initializer())
            with pytest.raises(rt.ResourceExhaustedError, match="the limit session_stages is 4"):
                for step in steps:
                    greedy.run(step)
            other.run(steps[1])
            greedy.run(steps[1])  # what it has goes on


def test_run_record_has_limited_tasks() -> None:
    """The run record refuses a task above the limit participants."""
    limits = rt.Limits(participants=3)
    with (
        rt.Server(kit.addresses(local=1), "local", 0, limits=limits) as server,
        stranger(server) as they,
    ):

        def join(name: str) -> None:
            they.worker.Run(
                RunOrder(incarnation=server.incarnation, sender=name, join=RunOrder.Join()),
                timeout=60,
            )

        for number in range(3):
            join(f"/job:worker/task:{number}")
        join("/job:worker/task:0")  # it is there already
        with refused(EXHAUSTED, "the limit participants is 3"):
            join("/job:worker/task:3")
        done = RunOrder(
            incarnation=server.incarnation, sender="/job:worker/task:4", done=RunOrder.Done()
        )
        with refused(EXHAUSTED, "the limit participants is 3"):
            they.worker.Run(done, timeout=60)


def test_saves_under_way_are_limited() -> None:
    """A task refuses a save above the limit checkpoint_jobs until another one is dropped."""
    limits = rt.Limits(checkpoint_jobs=2)
    with (
        rt.Server(kit.addresses(local=1), "local", 0, limits=limits) as server,
        stranger(server) as they,
    ):
        jobs = [they.take([]) for _ in range(2)]
        with refused(EXHAUSTED, "the limit checkpoint_jobs is 2"):
            they.take([])
        they.order(drop=ORDER.Drop(job=jobs[0]))
        they.take([])


def test_run_order_has_limited_time(they: Stranger) -> None:
    """An order that asks for a longer wait than run_order_secs is refused."""
    message = pb.ForwardRunOrderRequest(
        order=RunOrder(inspect=RunOrder.Inspect()), answer_secs=3600
    )
    with refused(EXHAUSTED, "the limit run_order_secs is 60"):
        they.master.ForwardRunOrder(message, timeout=60)


def test_a_save_ends_with_its_session(
    they: Stranger, server: rt.Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a session ends what is written for it, which may take for ever."""
    began = threading.Event()
    ended = threading.Event()

    def write_store(
        directory: str, arrays: object, *, cancelled: Callable[[], bool], **_: object
    ) -> list[object]:
        began.set()
        while not cancelled():
            ended.wait(0.01)
        ended.set()
        return []

    # a disk that takes for ever
    monkeypatch.setattr("runtime.checkpoint.storage.write_store", write_store)
    job = they.take([])
    leadership = Leadership(they.epoch, OWNER).to_proto()
    write = ORDER(leadership=leadership, write=ORDER.Write(job=job, directory=str(tmp_path)))
    first = they.worker.Checkpoint.future(write, timeout=60)
    assert began.wait(60)
    first.cancel()  # as by a connection that breaks: the order comes again
    second = they.worker.Checkpoint.future(write, timeout=60)
    they.close_session()
    assert ended.wait(60)
    with refused(grpc.StatusCode.ABORTED, "its session was closed"):
        second.result()
