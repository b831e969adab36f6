"""Turns of workers that crowd a host: who may begin steps, who waits and for how long, and which steps take part."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime as rt
from runtime.master import tasks
from runtime.task import admission
from runtime.task.admission import AdmissionControl, AdmissionLimits, AdmissionQueue, CpuPressure, Ticket
from tests.kit.processes import Program
from tests.runtime.kit import TARGET, addresses, servers

PS = "/job:ps/task:0"
SECS = 60.0
LIMITS = AdmissionLimits(permit=10.0, quiet=3.0, longest=20.0)
STEPS = 50


# -- the line --------------------------------------------------------------------------------------------------------


def _waits(queue: AdmissionQueue, session: int, now: float) -> Ticket:
    ticket = queue.request(session, now)
    assert ticket is not None
    return ticket


def test_as_many_begin_as_there_is_room_for_and_the_others_in_the_order_they_came() -> None:
    queue = AdmissionQueue(2, LIMITS)
    assert queue.request(1, 0.0) is None and queue.request(2, 0.0) is None
    third, fourth = _waits(queue, 3, 1.0), _waits(queue, 4, 1.0)
    queue.admit(2.0)
    assert not third.admitted and not fourth.admitted
    assert queue.is_first(third) and not queue.is_first(fourth)
    queue.heard_of(2, 2.5)
    queue.admit(3.5)  # 1 has been silent for longer than 3 s, 2 has not
    assert third.admitted and not fourth.admitted
    assert queue.is_first(fourth) and fourth.changed.is_set()


def test_a_turn_goes_on_until_it_is_over_and_then_the_holder_queues_up() -> None:
    queue = AdmissionQueue(1, LIMITS)
    assert queue.request(1, 0.0) is None
    second = _waits(queue, 2, 1.0)
    for now in range(1, 10):
        assert queue.request(1, float(now)) is None
        queue.admit(float(now))
    first = _waits(queue, 1, 10.0)
    queue.admit(10.0)
    assert second.admitted and not first.admitted
    _waits(queue, 2, 20.0)
    queue.admit(20.0)
    assert first.admitted


def test_a_turn_that_is_over_goes_on_while_there_is_room() -> None:
    queue = AdmissionQueue(2, LIMITS)
    assert all(queue.request(1, float(now)) is None for now in range(0, 100, 2))


def test_nobody_waits_longer_than_the_limit() -> None:
    queue = AdmissionQueue(1, AdmissionLimits(permit=1000.0, quiet=1000.0, longest=20.0))
    assert queue.request(1, 0.0) is None
    second, third = _waits(queue, 2, 1.0), _waits(queue, 3, 2.0)
    assert queue.admit(20.0) == 21.0
    assert not second.admitted
    queue.admit(21.0)
    assert second.admitted and not third.admitted
    queue.admit(22.0)
    assert third.admitted


def test_everybody_may_be_called_and_still_queues_up_afterwards() -> None:
    queue = AdmissionQueue(1, LIMITS)
    assert queue.request(1, 0.0) is None
    tickets = [_waits(queue, session, 0.0) for session in (2, 3)]
    queue.admit(0.0, everybody=True)
    assert all(ticket.admitted for ticket in tickets)
    for session in (1, 2, 3):
        queue.heard_of(session, 9.0)
    assert queue.request(1, 10.0) is not None  # there are more than one


def test_the_turn_of_a_session_that_has_ended_is_free() -> None:
    queue = AdmissionQueue(1, LIMITS)
    assert queue.request(1, 0.0) is None
    second = _waits(queue, 2, 0.0)
    queue.forget(1)
    queue.admit(0.0)
    assert second.admitted


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["ask", "heard", "forget"]), st.integers(1, 8), st.floats(0, 4))),
)
def test_no_more_than_the_room_begin_unless_one_has_waited_too_long_and_all_are_called_in_the_end(
    at_once: int, events: list[tuple[str, int, float]]
) -> None:
    queue, now = AdmissionQueue(at_once, LIMITS), 0.0
    waiting: list[Ticket] = []
    holders: dict[int, float] = {}  # with when they were last heard of

    def call(late: float) -> None:
        queue.admit(now)
        for ticket in [p for p in waiting if p.admitted]:
            assert ticket is waiting[0], "not in the order they came"
            waiting.remove(ticket)
            others = [s for s, heard in holders.items() if now < heard + LIMITS.quiet and s != ticket.session]
            assert len(others) < at_once or now >= ticket.since + late
            holders[ticket.session] = now

    for what, session, pause in events:
        now += pause
        call(LIMITS.longest)
        if what == "ask" and session not in {p.session for p in waiting}:
            ticket = queue.request(session, now)
            if ticket is None:
                holders[session] = now
            else:
                holders.pop(session, None)
                waiting.append(ticket)
        elif what == "heard" and session in holders and now < holders[session] + LIMITS.quiet:
            queue.heard_of(session, now)
            holders[session] = now
        elif what == "forget":
            queue.forget(session)
            holders.pop(session, None)
        call(LIMITS.longest)
    now += LIMITS.longest
    call(LIMITS.longest)
    assert not waiting


# -- the crowd -------------------------------------------------------------------------------------------------------


def test_cores_are_crowded_when_a_window_of_them_was_hardly_idle() -> None:
    idle, total = 100.0, 1000.0
    pressure = CpuPressure(lambda: (idle, total))
    assert not pressure(50.0), "not known yet"
    total += 0.2
    assert not pressure(50.05), "the window is not over"
    assert pressure(50.15)
    idle, total = idle + 0.1, total + 0.2
    assert pressure(50.2), "the next window is not over"
    assert not pressure(50.3)
    total += 0.2
    assert not pressure(50.5), "who finds room does not look again at once"
    assert not pressure(51.4), "too long ago to tell of now"
    total += 0.2
    assert pressure(51.5)


def test_the_cores_of_this_host_are_read() -> None:
    idle, total = admission.core_seconds()
    assert 0 <= idle < total


# -- the steps -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[dict[str, rt.Server]]:
    with servers(sockets=True, ps=1, worker=1) as made, rt.Graph().as_default():
        yield made


def _training(ps: int = 1, worker: str = TARGET) -> tuple[rt.Tensor, rt.Tensor]:
    """What a worker computes in a training step, and the step: it gives how many there were."""
    variables = []
    for task in range(ps):
        with rt.device(f"/job:ps/task:{task}"):
            variables.append(rt.Variable(np.ones(8, np.float32), name=f"v{task}"))
    with rt.device(PS):
        steps = rt.Variable(np.int64(0), name="steps")
    with rt.device(worker):
        gradient = rt.numpy.sin(sum(v.value() for v in variables))
    with rt.control_dependencies([v.assign_sub(gradient).op for v in variables]):
        return gradient, steps.assign_add(np.int64(1))


def _in_turn(server: rt.Server) -> int:
    return sum(call.needs_admission for call in server.worker.registry.kept()[0].values())


def test_the_read_of_a_training_step_takes_turns_and_nothing_else_does(cluster: dict[str, rt.Server]) -> None:
    _, counted = _training()
    with rt.Session(cluster[TARGET].target) as session:
        session.run(rt.global_variables_initializer())
        session.run(rt.global_variables())
        assert _in_turn(cluster[PS]) == 0
        session.run(counted)
        assert _in_turn(cluster[PS]) == 1


def test_a_step_that_reads_from_two_ps_takes_no_turns() -> None:
    with servers(sockets=True, ps=2, worker=1) as made, rt.Graph().as_default():
        _, counted = _training(ps=2)
        with rt.Session(made[TARGET].target) as session:
            session.run(rt.global_variables_initializer())
            session.run(counted)
        assert [_in_turn(made[f"/job:ps/task:{i}"]) for i in range(2)] == [0, 0]


def test_a_step_that_may_wait_for_other_workers_takes_no_turns(cluster: dict[str, rt.Server]) -> None:
    gradient, counted = _training()
    with rt.device(PS):
        queue = rt.FIFOQueue(10, [np.float32], shapes=[(8,)], name="gradients")
        sent = queue.enqueue(gradient)
    with rt.Session(cluster[TARGET].target) as session:
        session.run(rt.global_variables_initializer())
        session.run([sent, counted])
        assert _in_turn(cluster[PS]) == 0


@pytest.mark.parametrize(
    ("argument", "variable", "asks"),
    [(None, "0", False), (None, "1", True), (False, None, False), (True, "0", True)],
)
def test_admission_control_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, argument: bool | None, variable: str | None, asks: bool
) -> None:
    monkeypatch.delenv(admission.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(admission.VARIABLE, variable)
    cluster = addresses(ps=1, worker=1)
    with (
        rt.Server(cluster, "ps", 0, admission=argument) as ps,
        rt.Server(cluster, "worker", 0) as worker,
        rt.Graph().as_default(),
    ):
        tasks.withdraw(ps.address, ps)  # reached as if it were in another process
        _, counted = _training()
        with rt.Session(worker.target) as session:
            session.run(rt.global_variables_initializer())
            session.run(counted)
        assert (_in_turn(ps) > 0) == asks


def test_one_worker_at_a_time_trains_until_its_turn_is_over(cluster: dict[str, rt.Server]) -> None:
    cluster[PS].worker.admission = AdmissionControl(
        1, lambda now: True, AdmissionLimits(permit=1000.0, quiet=1000.0, longest=1000.0)
    )
    _, counted = _training()
    counts: list[list[int]] = []

    def train() -> None:
        with rt.Session(cluster[TARGET].target, graph=counted.graph) as session:
            counts.append([int(session.run(counted)) for _ in range(STEPS)])

    with rt.Session(cluster[TARGET].target) as session:
        session.run(rt.global_variables_initializer())
        threads = [threading.Thread(target=train, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECS)
    assert sorted(counts) == [list(range(first, first + STEPS)) for first in range(1, 4 * STEPS, STEPS)]


def test_a_worker_that_falls_silent_holds_nobody_up(cluster: dict[str, rt.Server]) -> None:
    cluster[PS].worker.admission = AdmissionControl(
        1, lambda now: True, AdmissionLimits(permit=1000.0, quiet=0.1, longest=1000.0)
    )
    _, counted = _training()
    with rt.Session(cluster[TARGET].target) as silent, rt.Session(cluster[TARGET].target) as other:
        silent.run(rt.global_variables_initializer())
        assert int(silent.run(counted)) == 1
        assert [int(other.run(counted)) for _ in range(3)] == [2, 3, 4]


def train_for_ever(cluster: dict[str, list[str]]) -> None:
    """The body of worker 0's process in the test below: a line for each step."""
    with rt.Server(cluster, "worker", 0) as server:
        _, counted = _training()
        with rt.Session(server.target) as session:
            while True:
                print(int(session.run(counted)), flush=True)


@pytest.mark.cluster
def test_a_killed_worker_holds_nobody_up() -> None:
    cluster = addresses(ps=1, worker=2)
    with rt.Server(cluster, "ps", 0) as ps, rt.Server(cluster, "worker", 1) as server, rt.Graph().as_default():
        tasks.withdraw(ps.address, ps)
        ps.worker.admission = AdmissionControl(
            1, lambda now: True, AdmissionLimits(permit=1000.0, quiet=0.5, longest=1000.0)
        )
        _, counted = _training(worker="/job:worker/task:1")
        config = rt.SessionConfig(device_filters=("/job:ps", "/job:worker/task:1"))
        with rt.Session(server.target, config=config) as session:
            session.run(rt.global_variables_initializer())
            code = f"from tests.runtime.task.test_admission import train_for_ever; train_for_ever({cluster})"
            with Program("python", "-c", code) as other:
                other.expect("^5$")
                other.kill()
                done = [int(queue) for queue in other.lines(r"^\d+$")]
            assert done == list(range(1, len(done) + 1)) and len(done) >= 5
            kept = int(session.run(counted)) - 1
            assert len(done) <= kept <= len(done) + 1  # the last step was counted, or told of, or neither


def test_nobody_waits_while_the_cores_have_time_to_spare(cluster: dict[str, rt.Server]) -> None:
    cluster[PS].worker.admission = AdmissionControl(
        1, lambda now: False, AdmissionLimits(permit=1000.0, quiet=1000.0, longest=1000.0)
    )
    _, counted = _training()
    with rt.Session(cluster[TARGET].target) as one, rt.Session(cluster[TARGET].target) as other:
        one.run(rt.global_variables_initializer())
        assert [int(s.run(counted)) for s in (one, other, one, other)] == [1, 2, 3, 4]
