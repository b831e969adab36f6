"""Operations that wait on a ps: who ends them, and what a dead or cut-off caller leaves behind."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
from tests.harness.optimizers.kit import cluster, free_addresses, reset
from tests.kit.processes import Program
from tests.kit.waits import until
from tests.runtime.kit import in_thread, lanes_to

pytestmark = pytest.mark.cluster

Spec = dict[str, list[str]]
CAPACITY = 10


@pytest.fixture(scope="module")
def spec() -> Iterator[Spec]:
    with cluster(1, 2) as found:
        yield found


@pytest.fixture
def server(spec: Spec) -> Iterator[rt.Server]:
    with rt.Server(spec, "worker", 0) as found:
        reset(found)
        yield found


class Client:
    """A session with a queue on the ps."""

    def __init__(self, server: rt.Server) -> None:
        self.graph = rt.Graph()
        with self.graph.as_default(), rt.device("/job:ps/task:0"):
            self.queue = rt.FIFOQueue(CAPACITY, np.int32, [[]], name="numbers")
            self.value = rt.placeholder(np.int32, [])
            self.enqueue = self.queue.enqueue(self.value)
            self.dequeue = self.queue.dequeue()
            self.size = self.queue.size()
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=20)
        self.session = rt.Session(server.target, self.graph, config)

    def put(self, value: int) -> None:
        self.session.run(self.enqueue, {self.value: value})

    def take(self, **options: Any) -> int:
        return int(self.session.run(self.dequeue, **options))


@pytest.fixture
def client(server: rt.Server) -> Iterator[Client]:
    found = Client(server)
    yield found
    found.session.close()


@pytest.fixture
def here() -> Iterator[tuple[rt.Server, rt.Server]]:
    """A ps and a worker in this process, where a test sees what waits."""
    ports = free_addresses(2)
    cluster = {"ps": ports[:1], "worker": ports[1:]}
    with rt.Server(cluster, "ps", 0) as ps, rt.Server(cluster, "worker", 0) as server:
        yield ps, server


def test_wait_holds_up_no_other_step(client: Client) -> None:
    """A step that waits holds up no other step of its session."""
    thread, results = in_thread(client.take)
    client.put(7)  # the same session, while its other step waits
    thread.join(60)
    assert results == [7]


def test_wait_ends_with_its_session(here: tuple[rt.Server, rt.Server]) -> None:
    """A wait ends when its session closes, and takes no element."""
    ps, server = here
    client, other = Client(server), Client(server)
    thread, results = in_thread(other.take)
    until(lambda: len(ps.worker.waits) > 0)
    other.session.close()
    thread.join(60)
    assert isinstance(results[0], rt.CancelledError)
    client.put(1)
    assert client.take() == 1  # the closed session has taken nothing
    client.session.close()


def test_limited_wait_takes_nothing_later(client: Client) -> None:
    """A wait ends at its time limit and takes no element later."""
    with pytest.raises(rt.DeadlineExceededError):
        client.take(timeout_secs=0.3)
    client.put(1)
    client.put(2)
    assert [client.take(), client.take()] == [1, 2]


def test_wait_survives_a_healed_cut(client: Client) -> None:
    """A wait goes on after a cut that heals and takes one element."""
    thread, results = in_thread(client.take)
    thread.join(0.3)
    for lane in lanes_to(client.session, "/job:ps/task:0"):
        lane.link.interrupt()
    thread.join(0.3)
    client.put(1)
    client.put(2)
    thread.join(60)
    assert results == [1]
    assert int(client.session.run(client.size)) == 1


DEAD_CLIENT = """
import sys, json, types
import runtime as rt
from tests.runtime.kernels.test_waits import Client
cluster, target, puts = json.loads(sys.argv[1])
server = types.SimpleNamespace(target=target) if target else rt.Server(cluster, "worker", 1)
client = Client(server)
client.put(99) if puts else client.take()
"""


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("remote_master", [False, True])
def test_killed_client_takes_and_adds_nothing(remote_master: bool, puts: bool) -> None:
    """A killed client takes and adds nothing, whether its master is its own or the ps's."""
    ports = free_addresses(3)
    cluster = {"ps": ports[:1], "worker": ports[1:]}
    with rt.Server(cluster, "ps", 0) as ps, rt.Server(cluster, "worker", 0) as server:
        client = Client(server)
        for value in range(CAPACITY if puts else 0):
            client.put(value)
        arguments = json.dumps([cluster, ps.target if remote_master else "", puts])
        process = Program("python", "-c", DEAD_CLIENT, arguments)
        try:
            until(lambda: len(ps.worker.waits) > 0)
            process.kill()
            until(lambda: len(ps.worker.waits) == 0)
            if puts:
                assert [client.take(timeout_secs=20) for _ in range(CAPACITY)] == list(
                    range(CAPACITY)
                )
                assert int(client.session.run(client.size)) == 0
            client.put(1)
            assert client.take(timeout_secs=20) == 1
        finally:
            process.close()
            client.session.close()


def test_closed_queue_runs_dry(client: Client) -> None:
    """A closed queue gives out its elements and then OutOfRangeError."""
    with client.graph.as_default(), rt.device("/job:ps/task:0"):
        close = client.queue.close()
    client.put(5)
    client.session.run(close)
    assert client.take() == 5
    with pytest.raises(rt.OutOfRangeError, match="closed and has too few elements"):
        client.take()
    with pytest.raises(rt.CancelledError, match="closed"):
        client.put(6)


def test_sessions_share_resources_by_name(server: rt.Server, client: Client) -> None:
    """Sessions share a queue by name, and another capacity is refused."""
    client.put(3)
    other = Client(server)
    assert other.take() == 3
    other.session.close()
    with rt.Graph().as_default() as graph, rt.device("/job:ps/task:0"):
        size = rt.FIFOQueue(5, np.int32, [[]], name="numbers").size()
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=20)
        with rt.Session(server.target, graph, config) as session:
            with pytest.raises(rt.InvalidArgumentError, match="capacity"):
                session.run(size)


def test_accumulator_works_on_a_ps(server: rt.Server) -> None:
    """An accumulator on a ps averages the gradients of two workers and drops stale ones."""
    with rt.Graph().as_default() as graph, rt.device("/job:ps/task:0"):
        accumulator = rt.ConditionalAccumulator(np.float32, [2], name="a")
        gradient = rt.placeholder(np.float32, [2])
        applied = [accumulator.apply_grad(gradient, 3, worker=w) for w in range(2)]
        taken, waiting, dropped = (
            accumulator.take_grad(2),
            accumulator.num_accumulated(),
            accumulator.num_dropped(),
        )
        to_five = accumulator.set_global_step(5)
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=20)
        with rt.Session(server.target, graph, config) as session:
            thread, results = in_thread(lambda: session.run(taken))
            assert session.run(applied[0], {gradient: [1, 2]})
            assert session.run(applied[1], {gradient: [3, 4]})
            thread.join(60)
            np.testing.assert_array_equal(results[0], [2, 3])
            session.run(to_five)
            assert not session.run(applied[0], {gradient: [1, 2]})
            assert session.run([waiting, dropped]) == [0, 1]


def test_container_is_cleared_alone(
    here: tuple[rt.Server, rt.Server],
) -> None:
    """Clearing a container ends its waits and keeps the resources of others."""
    ps, server = here
    with rt.Graph().as_default() as graph, rt.device("/job:ps/task:0"):
        kept, gone = (
            rt.FIFOQueue(5, np.int32, [[]], name="q", container=c) for c in ("", "experiment")
        )
        accumulator = rt.ConditionalAccumulator(np.float32, [], name="a", container="experiment")
        put = rt.group(kept.enqueue(1), gone.enqueue(1))
        sizes, taken, given = (
            [kept.size(), gone.size()],
            gone.dequeue_many(2),
            accumulator.take_grad(1),
        )
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=20)
        with rt.Session(server.target, graph, config) as session:
            session.run(put)
            assert [int(n) for n in session.run(sizes)] == [1, 1]
            waiting = [
                in_thread(lambda fetch=fetch: session.run(fetch)) for fetch in (taken, given)
            ]  # type: ignore[misc]
            until(lambda: len(ps.worker.waits) == 2)
            for thread, results in waiting:
                while thread.is_alive():  # again, should it have been on its way only
                    reset(server, ["experiment"])
                    thread.join(0.2)
                assert isinstance(results[0], rt.CancelledError)
            assert [int(n) for n in session.run(sizes)] == [1, 0]


def test_resources_have_tensorflow_types() -> None:
    """Queues and accumulators have TensorFlow's operation types for device functions."""
    types = []

    def see(op: Any) -> str:
        types.append(op.type)
        return ""

    with rt.Graph().as_default(), rt.device(see):
        rt.FIFOQueue(1, np.float32)
        rt.PaddingFIFOQueue(1, np.float32, [[None]])
        rt.RandomShuffleQueue(2, 1, [np.float32, "string"])
        rt.ConditionalAccumulator(np.float32)
    assert types == [
        "FIFOQueueV2",
        "PaddingFIFOQueueV2",
        "RandomShuffleQueueV2",
        "ConditionalAccumulator",
    ]
