"""A wait ends exactly when nobody waits any more: an element goes to one caller that gets it, or stays in its queue."""

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.master import times
from runtime.wire.peer import Peer
from tests.harness.optimizers.kit import free_addresses, serving
from tests.kit.changes import SetTimes
from tests.kit.processes import Program, programs
from tests.kit.waits import until
from tests.runtime.kit import TARGET, in_thread, lanes_to, peer_of, servers

pytestmark = pytest.mark.cluster

LONG = 60.0


class Client:
    """A session with two queues on the ps, and steps that do more there than wait."""

    def __init__(self, target: str, capacity: int = 10) -> None:
        self.graph = rt.Graph()
        with self.graph.as_default(), rt.device("/job:ps/task:0"):
            self.numbers = rt.FIFOQueue(capacity, np.int32, [[]], name="numbers")
            self.labels = rt.FIFOQueue(capacity, np.int32, [[]], name="labels")
            self.value = rt.placeholder(np.int32, [])
            self.values = rt.placeholder(np.int32, [None])
            self.put_one = self.numbers.enqueue(self.value)
            self.put_many = self.numbers.enqueue_many(self.values)
            self.take_one = self.numbers.dequeue()
            self.size = self.numbers.size()
            text = rt.Variable("a", name="text")
            self.init = text.initializer
            self.steps: dict[str, list[Any]] = {
                "alone": [self.take_one],
                "with its size": [self.take_one, self.size],
                "of two queues": [self.take_one, self.labels.dequeue()],
                "with a string": [self.take_one, text],
                "printed": [rt.Print(self.take_one, [self.take_one], "took", first_n=0)],
            }
        config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=LONG)
        self.session = rt.Session(target, self.graph, config)

    def put(self, value: int) -> None:
        self.session.run(self.put_one, {self.value: value}, timeout_secs=LONG)

    def take(self, timeout_secs: float = LONG) -> int:
        return int(self.session.run(self.take_one, timeout_secs=timeout_secs))

    def peer(self) -> Peer:
        return peer_of(self.session, "/job:ps/task:0")

    def cut(self) -> None:
        for lane in self.peer().lanes():
            lane.link.interrupt()


@pytest.fixture
def cluster() -> Iterator[dict[str, rt.Server]]:
    with servers(sockets=True, ps=1, worker=2) as made:
        yield made


@pytest.fixture
def client(cluster: dict[str, rt.Server]) -> Iterator[Client]:
    found = Client(cluster[TARGET].target)
    with found.session:
        found.session.run(found.init)
        yield found


def _waiting(server: rt.Server) -> int:
    return len(server.worker.waits)


STEPS = ("alone", "with its size", "of two queues", "with a string", "printed")


@pytest.mark.parametrize("step", STEPS)
def test_given_up_step_takes_nothing_later(
    cluster: dict[str, rt.Server], client: Client, step: str
) -> None:
    """A step that its caller gave up takes no element later and keeps no connection."""
    ps = cluster["/job:ps/task:0"]
    client.put(0)
    assert client.take() == 0
    until(lambda: ps.tensors.counters.connections <= 3)
    before = ps.tensors.counters.connections
    for _ in range(5):
        with pytest.raises(rt.DeadlineExceededError):
            client.session.run(client.steps[step], timeout_secs=0.2)
    until(lambda: _waiting(ps) == 0)
    # no thread, no connection stays behind
    until(lambda: ps.tensors.counters.connections <= before)
    for value in (1, 2, 3):
        client.put(value)
    assert [client.take() for _ in range(3)] == [1, 2, 3]


def test_limited_add_is_done_once(client: Client) -> None:
    """Elements of a step with a time limit are added once when the step is repeated."""
    for value in range(10):
        client.put(value)
    with pytest.raises(rt.DeadlineExceededError):
        client.session.run(client.put_many, {client.values: [10, 11]}, timeout_secs=0.2)
    thread, results = in_thread(
        lambda: client.session.run(client.put_many, {client.values: [10, 11]})
    )
    assert [client.take() for _ in range(12)] == list(range(12))
    thread.join(LONG)
    assert results == [None]
    assert int(client.session.run(client.size)) == 0


def test_added_before_limit_stays(client: Client) -> None:
    """Elements that a step added before its time limit stay in the queue."""
    for value in range(8):
        client.put(value)
    with pytest.raises(rt.DeadlineExceededError):
        client.session.run(client.put_many, {client.values: [8, 9, 10, 11]}, timeout_secs=0.5)
    assert [client.take() for _ in range(10)] == list(range(10))
    assert int(client.session.run(client.size)) == 0


def test_many_are_added_once_through_cuts(cluster: dict[str, rt.Server], client: Client) -> None:
    """A step that adds 20 elements adds each once while its connections are cut."""
    ps = cluster["/job:ps/task:0"]
    values = list(range(20))
    thread, results = in_thread(
        lambda: client.session.run(client.put_many, {client.values: values})
    )
    other = Client(cluster["/job:worker/task:1"].target)
    taken = []
    with other.session:
        for _ in values:
            until(lambda: _waiting(ps) == 1 or not thread.is_alive())
            client.cut()
            taken.append(other.take())
        thread.join(LONG)
        assert results == [None]
        assert taken == values
        assert int(other.session.run(other.size)) == 0


def test_repeated_wait_keeps_third_task_values(
    cluster: dict[str, rt.Server],
) -> None:
    """A wait that is sent again keeps the value that a third task made for it."""
    ps, graph = cluster["/job:ps/task:0"], rt.Graph()
    with graph.as_default():
        x = rt.placeholder(np.float32, [3])
        with rt.device("/job:ps/task:0"):
            queue = rt.FIFOQueue(1, np.float32, [[3]], name="vectors")
        with rt.device("/job:worker/task:1"):
            made = x * 2.0
        put, take = queue.enqueue(made), queue.dequeue()
    with rt.Session(cluster[TARGET].target, graph) as session:
        session.run(put, {x: np.ones(3)})
        thread, results = in_thread(
            lambda: session.run(put, {x: np.full(3, 2.0)}, timeout_secs=LONG)
        )
        for _ in range(3):
            until(lambda: _waiting(ps) == 1 or bool(results))
            seen = ps.tensors.counters.accepted
            for lane in lanes_to(session, "/job:ps/task:0"):
                lane.link.interrupt()
            until(lambda seen=seen: ps.tensors.counters.accepted > seen or bool(results))  # type: ignore[misc]
        assert session.run(take, timeout_secs=LONG).tolist() == [2, 2, 2]
        thread.join(LONG)
        assert results == [None]
        assert session.run(take, timeout_secs=LONG).tolist() == [4, 4, 4]
    until(lambda: all(len(server.worker.rendezvous) == 0 for server in cluster.values()))


DYING = """
import json, sys
import runtime as rt
from tests.runtime.kernels.test_given_up import Client
cluster, what = json.loads(sys.argv[1])
client = Client(rt.Server(cluster, "worker", 1).target)
if what == "put_many":
    client.session.run(client.put_many, {client.values: list(range(100, 120))})
else:
    client.session.run(client.steps[what])
"""


@pytest.mark.parametrize("what", ["with its size", "of two queues", "put_many"])
def test_killed_caller_takes_and_adds_nothing(what: str) -> None:
    """A caller that is killed during a wait takes no element and adds none."""
    ports = free_addresses(3)
    spec = {"ps": ports[:1], "worker": ports[1:]}
    with rt.Server(spec, "ps", 0) as ps, rt.Server(spec, "worker", 0) as server:
        client = Client(server.target)
        client.session.run(client.init)
        process = Program("python", "-c", DYING, json.dumps([spec, what]))
        try:
            until(lambda: _waiting(ps) == (2 if what == "of two queues" else 1))
            process.kill()
            expected = list(range(100, 110)) if what == "put_many" else [1, 2]
            if what != "put_many":  # at once: nobody has told the ps that the caller is dead
                client.put(1)
                client.put(2)
            assert [client.take() for _ in expected] == expected
            assert int(client.session.run(client.size)) == 0
        finally:
            process.close()
            client.session.close()


@pytest.mark.chaos
@pytest.mark.parametrize("trouble", ["time limits", "cuts"])
@pytest.mark.parametrize("step", ["alone", "with its size"])
def test_polling_callers_lose_nothing(step: str, trouble: str) -> None:
    """Callers with short time limits or cut connections take each element once."""
    count, draw = 300, random.Random(5)
    with serving(1, 2) as (spec, _), contextlib.ExitStack() as stack:
        made = [stack.enter_context(rt.Server(spec, "worker", i)) for i in range(2)]
        takers = [Client(server.target) for server in made]
        giver = Client(made[0].target)
        for one in (*takers, giver):
            stack.enter_context(one.session)
        giver.session.run(giver.init)
        taken: list[int] = []

        def take(one: Client, seed: int) -> None:
            limits, got = random.Random(seed), -1
            while got < count:
                limit = limits.uniform(0.001, 0.03) if trouble == "time limits" else LONG
                with contextlib.suppress(rt.DeadlineExceededError):
                    got = int(one.session.run(one.steps[step], timeout_secs=limit)[0])
                    taken.append(got)

        threads = [in_thread(lambda one=one, i=i: take(one, i)) for i, one in enumerate(takers)]  # type: ignore[misc]
        pause = threading.Event()
        for value in range(count):
            giver.put(value)
            if trouble == "cuts" and value % 10 == 0:
                draw.choice(takers).cut()
            pause.wait(draw.uniform(0, 0.01))
        for last in range(len(takers)):
            giver.put(count + last)
        for thread, results in threads:
            thread.join(LONG)
            assert results == [None]
        assert sorted(taken) == list(range(count + len(takers)))


POLLING = """
import json, sys
import runtime as rt
from tests.runtime.kernels.test_given_up import Client
cluster, index = json.loads(sys.argv[1])
client = Client(rt.Server(cluster, "worker", index).target)
print("ready", flush=True)
while True:
    try:
        print(int(client.session.run(client.steps["with its size"], timeout_secs=0.5)[0]), flush=True)
    except rt.DeadlineExceededError:
        pass
"""


@pytest.mark.chaos
def test_killed_callers_take_nothing_along() -> None:
    """Processes that are killed while they wait take no element along."""
    workers = 3
    with (
        serving(1, workers + 1) as (spec, _),
        rt.Server(spec, "worker", 0) as server,
        programs() as start,
    ):
        giver = Client(server.target)
        giver.session.run(giver.init)
        pollers = [
            start("python", "-c", POLLING, json.dumps([spec, i + 1])) for i in range(workers)
        ]
        for poller in pollers:
            poller.expect("^ready$")

        def taken() -> list[int]:
            return [int(line) for poller in pollers for line in poller.lines(r"^\d+$")]

        given = 0
        for poller in pollers[1:]:
            poller.kill()
            for _ in range(5):
                giver.put(given)
                given += 1
            until(lambda given=given: len(taken()) >= given)  # type: ignore[misc]
        assert sorted(taken()) == list(range(given))
        giver.session.close()


def test_several_waits_keep_the_limit(client: Client, set_times: SetTimes) -> None:
    """The time limit itself ends a step of several waits."""
    set_times(times, TICK_SECS=7200.0)
    with pytest.raises(rt.DeadlineExceededError):
        client.session.run(client.steps["of two queues"], timeout_secs=0.05)


@pytest.mark.parametrize("end", ["closes its session", "hangs up"])
def test_gone_caller_takes_no_element(
    cluster: dict[str, rt.Server], client: Client, end: str
) -> None:
    """A caller that goes between its call and the queue's turn takes no element."""
    ps = cluster["/job:ps/task:0"]
    client.put(1)
    (queue,) = (
        found for found in ps.worker.store.resources() if found.described["name"] == "numbers"
    )
    other = Client(cluster[TARGET].target)
    with other.session:
        with queue._changed:
            thread, results = in_thread(other.take)
            until(lambda: _waiting(ps) == 1)
            if end == "hangs up":
                other.peer().cancel_calls()
            else:
                other.session.close()
            ((_, cancelled),) = next(iter(ps.worker.waits._waits.values()))
            until(cancelled.is_set)
        thread.join(LONG)
        assert isinstance(results[0], rt.CancelledError)
    assert int(client.session.run(client.size)) == 1
    assert client.take() == 1
