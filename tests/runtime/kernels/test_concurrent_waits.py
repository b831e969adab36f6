"""Operations of one step that wait do so at the same time, whatever was made first and wherever they are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
from tests.kit.waits import until
from tests.runtime.kit import TARGET, in_thread, lanes_to, servers, target_of_kind

pytestmark = pytest.mark.cluster

LIMIT = 60.0


@pytest.fixture(scope="module", params=["private", "local master", "remote master"])
def target(request: Any) -> Iterator[str]:
    with target_of_kind(request.param) as found:
        yield found


@pytest.fixture
def place(target: str) -> str:
    return "/job:ps/task:0" if target else ""


@pytest.fixture
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def _queue(place: str, name: str, capacity: int = 1) -> Any:
    with rt.device(place):
        return rt.FIFOQueue(capacity, np.float32, [[]], name=name)


def _session(target: str) -> rt.Session:
    session = rt.Session(target)
    session.run(rt.global_variables_initializer())
    return session


@pytest.mark.parametrize("enqueue_first", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_double_buffering_works_in_one_step(
    target: str, place: str, graph: rt.Graph, enqueue_first: bool, full: bool
) -> None:
    """A step may take an element from a queue and add the next one, whichever comes first."""
    queue = _queue(place, f"double_{enqueue_first}_{full}")
    x = rt.placeholder(np.float32, [])
    with rt.device(place):
        total = rt.Variable(np.float32(0), name=f"total_{enqueue_first}_{full}")
    put = queue.enqueue(x) if enqueue_first else None
    taken = queue.dequeue()
    train = total.assign_add(taken * 2.0)
    put = put or queue.enqueue(x)
    with _session(target) as session:
        if full:
            session.run(put, {x: 0}, timeout_secs=LIMIT)
        seen = [
            float(session.run([taken, train, put], {x: k}, timeout_secs=LIMIT)[0])
            for k in range(1, 11)
        ]
        assert seen == list(range(0 if full else 1, 10 if full else 11))
        assert float(session.run(total)) == 2 * sum(seen)
        assert int(session.run(queue.size())) == full


def test_computed_element_awaits_no_dequeue(target: str, place: str, graph: rt.Graph) -> None:
    """A step adds a computed element while another operation of the step waits for an element."""
    queue = _queue(place, "computed")
    with rt.device(place):
        w = rt.Variable(np.float32(3), name="w_of_computed")
        made = w * 2.0
        taken = queue.dequeue()
        seen = taken + w
        train = w.assign_add(taken)
    put = queue.enqueue(rt.numpy.sqrt(made * made))
    after = queue.enqueue(rt.numpy.sqrt(taken))
    with _session(target) as session:
        first, second, _, _ = session.run([taken, seen, train.op, put], timeout_secs=LIMIT)
        assert float(first) == 6 and float(second) in (9, 15)
        assert float(session.run(w)) == 9
        # one in, out, in again: room for one is enough
        session.run([put, taken, after], timeout_secs=LIMIT)
        assert int(session.run(queue.size())) == 1


@pytest.mark.parametrize("answer_first", [False, True])
def test_request_and_answer_share_a_step(
    target: str, place: str, graph: rt.Graph, answer_first: bool
) -> None:
    """A step that asks and a step that answers may be one step or two."""
    requests, answers = (
        _queue(place, f"requests_{answer_first}"),
        _queue(place, f"answers_{answer_first}"),
    )
    x = rt.placeholder(np.float32, [])
    answered = answers.dequeue() if answer_first else None
    ask = requests.enqueue(x)
    if answered is None:
        answered = answers.dequeue()
    asked = requests.dequeue()
    answer = answers.enqueue(asked + 1.0)
    with _session(target) as session:
        # all four in one step, and as two steps of two threads
        assert float(session.run([answered, ask, answer], {x: 1}, timeout_secs=LIMIT)[0]) == 2
        serving, served = in_thread(
            lambda: [session.run(answer, timeout_secs=LIMIT) for _ in range(10)]
        )
        found = [
            float(session.run([ask, answered], {x: k}, timeout_secs=LIMIT)[1]) for k in range(10)
        ]
        serving.join(LIMIT)
        assert served == [[None] * 10]
        assert found == list(range(1, 11))


def test_many_waits_of_one_step(target: str, place: str, graph: rt.Graph) -> None:
    """A ring of full queues with room for one element each turns in one step."""
    queues = [_queue(place, f"ring_{i}") for i in range(6)]
    turn = [queues[(i + 1) % 6].enqueue(queues[i].dequeue() + 1.0) for i in range(6)]
    fill = [q.enqueue(float(i)) for i, q in enumerate(queues)]
    drain = [q.dequeue() for q in queues]
    with _session(target) as session:
        session.run(fill, timeout_secs=LIMIT)
        for _ in range(5):
            session.run(turn, timeout_secs=LIMIT)
        assert sorted(float(v) for v in session.run(drain, timeout_secs=LIMIT)) == [
            float(i + 5) for i in range(6)
        ]


def test_failed_step_ends_its_waits(target: str, place: str, graph: rt.Graph) -> None:
    """A step that fails takes no element later."""
    queue = _queue(place, "failing")
    with rt.device(place):
        missing = rt.Variable(np.float32(0), name="never_initialised")
        x = rt.placeholder(np.float32, [])
        put, taken = queue.enqueue(x), queue.dequeue()
    with rt.Session(target) as session:
        for _ in range(3):
            with pytest.raises(rt.FailedPreconditionError, match="never_initialised"):
                session.run([taken, missing], timeout_secs=LIMIT)
        session.run(put, {x: 5}, timeout_secs=LIMIT)
        assert float(session.run(taken, timeout_secs=LIMIT)) == 5


def test_closed_session_ends_its_waits(target: str, place: str, graph: rt.Graph) -> None:
    """A session that closes ends all waits of its step and holds up no other step."""
    first, second = _queue(place, "first"), _queue(place, "second")
    x = rt.placeholder(np.float32, [])
    both, begun = (
        [first.dequeue(), second.dequeue(), first.enqueue(x), first.dequeue()],
        second.size(),
    )
    session = _session(target)
    thread, results = in_thread(lambda: session.run(both, {x: 1}))
    thread.join(0.5)
    session.run(begun)  # others are not held up
    assert not results
    session.close()
    thread.join(LIMIT)
    assert isinstance(results[0], rt.CancelledError)


@pytest.mark.parametrize("first", [0, 1])
def test_cut_waits_stay_independent(graph: rt.Graph, first: int) -> None:
    """Waits of one step that are sent again after a cut do not wait for each other."""
    place = "/job:ps/task:0"
    sources, results = (
        [_queue(place, f"{what}_{i}") for i in range(2)] for what in ("source", "result")
    )
    x = rt.placeholder(np.float32, [])
    fill = [queue.enqueue(x) for queue in sources]
    move = [
        result.enqueue(source.dequeue() + 1.0)
        for source, result in zip(sources, results, strict=True)
    ]
    taken = [queue.dequeue() for queue in results]
    with servers(sockets=True, ps=1, worker=1) as made, rt.Session(made[TARGET].target) as session:
        ps = made[place].worker
        thread, moved = in_thread(lambda: session.run(move, timeout_secs=LIMIT))
        until(lambda: len(ps.waits) == 2)
        before = {lane: lane.link.connected_at for lane in lanes_to(session, place)}
        for lane in before:
            lane.link.interrupt()
        until(lambda: any(lane.link.connected_at > at for lane, at in before.items()))
        for i in (first, 1 - first):
            session.run(fill[i], {x: i}, timeout_secs=LIMIT)
            assert float(session.run(taken[i], timeout_secs=LIMIT)) == i + 1
        thread.join(LIMIT)
        assert moved == [[None, None]]
