"""The gate lets a checkpoint cut between steps, never through one, and holds nobody up for long."""

import threading
import time
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest

from runtime.checkpoint.snapshot import half_done_steps
from runtime.errors import DeadlineExceededError
from runtime.proto import services_pb2 as pb
from runtime.state import times, write_gate
from runtime.state.write_gate import WriteGate
from tests.kit.changes import SetTimes
from tests.kit.waits import until

CUT = 7
TWO = {"a": 1, "b": 1}


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _write(gate: WriteGate, session: int, step: int) -> None:
    gate.enter((session, step))
    gate.leave((session, step), TWO)


def _reported(gates: dict[str, WriteGate]) -> dict[str, list[pb.StepWrites]]:
    return {
        task: [
            pb.StepWrites(
                session=s,
                step=n,
                done=w.done,
                expected=w.expected,
                age_secs=time.monotonic() - w.at,
            )
            for (s, n), w in gate.recent()
        ]
        for task, gate in gates.items()
    }


def test_paused_gate_holds_new_stages() -> None:
    """A paused gate holds new stages until it opens."""
    gate = WriteGate()
    gate.pause(CUT, 60, 1)
    entered = threading.Event()

    def work() -> None:
        _write(gate, 1, 1)
        entered.set()

    thread = _in_thread(work)
    assert not entered.wait(0.05)
    assert gate.resume(CUT)
    assert entered.wait(60)
    thread.join(60)


def test_a_pause_ends_by_itself() -> None:
    """A pause ends after its time."""
    gate = WriteGate()
    gate.pause(CUT, 0.05, 1)
    _write(gate, 1, 1)


def test_only_own_snapshot_ends_pause() -> None:
    """A pause ends by its own snapshot or when the gate opens."""
    gate = WriteGate()
    gate.pause(CUT, 60, 1)
    assert not gate.resume(CUT + 1)
    entered = threading.Event()
    thread = _in_thread(lambda: (_write(gate, 1, 1), entered.set()) and None)
    assert not entered.wait(0.05)
    gate.open()
    assert entered.wait(60)
    thread.join(60)


def test_cut_learns_its_pause_ended() -> None:
    """A snapshot learns that its pause ended before its end."""
    gate = WriteGate("/job:ps/task:0")
    gate.pause(CUT, 0, 1)
    assert gate.resume(CUT)  # its time was over, but nobody came
    gate.pause(CUT, 0, 1)
    _write(gate, 1, 1)
    assert not gate.resume(CUT)
    gate.pause(CUT, 60, 1)
    gate.pause(CUT + 1, 60, 1)
    with pytest.raises(
        DeadlineExceededError, match="/job:ps/task:0: no consistent snapshot: the pause"
    ):
        gate.let_through(CUT, {(1, 7): 1}, 10)
    assert not gate.resume(CUT) and gate.resume(CUT + 1)


def test_pause_awaits_running_stages() -> None:
    """A pause waits for the stages under way and fails after its time."""
    gate = WriteGate("/job:ps/task:0")
    gate.enter((1, 1))
    with pytest.raises(
        DeadlineExceededError,
        match="/job:ps/task:0: no consistent snapshot: 1 writing stages still run",
    ):
        gate.pause(CUT, 60, 0.01)
    gate.leave((1, 1), TWO)
    gate.pause(CUT, 60, 1)
    assert gate.resume(CUT)


def test_only_half_done_steps_pass() -> None:
    """A paused gate lets only half-done steps through."""
    gate = WriteGate("b")
    gate.pause(CUT, 60, 1)
    order: list[int] = []

    def write(step: int) -> None:
        gate.enter((1, step))
        order.append(step)
        gate.leave((1, step), TWO)

    threads = [_in_thread(lambda: write(8)), _in_thread(lambda: write(7))]
    assert gate.let_through(CUT, {(1, 7): 1}, 10) == []
    assert order == [7]
    assert gate.let_through(CUT, {(1, 9): 1}, 0.01) == [(1, 9)]  # its worker is dead
    assert gate.resume(CUT)
    for thread in threads:
        thread.join(60)
    assert order == [7, 8]


def test_forgotten_steps_are_not_awaited() -> None:
    """A gate that has forgotten its steps reports none."""
    gate = WriteGate("a")
    _write(gate, 1, 1)
    assert [key for key, _ in gate.recent()] == [(1, 1)]
    gate.forget()
    assert list(gate.recent()) == []


_STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["none", "a", "b", "both"])), max_size=40
)


@hypothesis.given(_STEPS)
def test_half_done_steps_are_found_exactly(drawn: list[tuple[int, str]]) -> None:
    """The half-done steps are exactly those that one task has written and the other has not."""
    gates = {"a": WriteGate("a"), "b": WriteGate("b")}
    half_done = dict.fromkeys(range(3), 0)
    history = []
    for session, where in drawn:
        if where in ("a", "b"):
            half_done[session] += 1
            if half_done[session] > 5:  # no session has many steps under way at once
                continue
        history.append((session, where))
    for step, (session, where) in enumerate(history):
        for task in {"none": (), "a": ("a",), "b": ("b",), "both": ("a", "b")}[where]:
            _write(gates[task], session, step)
    found = half_done_steps(_reported(gates))
    for task, other in (("a", "b"), ("b", "a")):
        wanted = set()
        for session in range(3):
            newest = [
                n for n, (of, where) in enumerate(history) if of == session and where != "none"
            ][-16:]
            wanted |= {(session, n) for n in newest if history[n][1] == other}
        assert {(s.session, s.step) for s in found.get(task, [])} == wanted


def test_long_history_leaves_nothing_half_done() -> None:
    """A long history of whole steps leaves none half-done."""
    gates = {"a": WriteGate("a"), "b": WriteGate("b")}
    for step in range(500):
        for gate in gates.values():
            _write(gate, 1, step)
    _write(gates["a"], 1, 500)  # one task is ahead of the other, and has forgotten one step more
    assert {
        task: [s.step for s in steps] for task, steps in half_done_steps(_reported(gates)).items()
    } == {"b": [500]}


def test_cut_hears_of_another_at_once() -> None:
    """A snapshot that waits ends as soon as another one begins."""
    gate, ended = WriteGate(), threading.Event()
    gate.pause(CUT, 60, 1)

    def wait() -> None:
        with pytest.raises(DeadlineExceededError, match="no consistent snapshot"):
            gate.let_through(CUT, {(1, 1): 1}, 60)
        ended.set()

    thread = _in_thread(wait)
    until(lambda: gate._allowed)  # it waits
    gate.pause(CUT + 1, 60, 1)
    assert ended.wait(100)
    thread.join(60)


def test_ended_sessions_leave_nothing(set_times: SetTimes) -> None:
    """The gate forgets a session that has been silent for a while when another session writes."""
    gate = WriteGate()
    set_times(times, REMEMBER_SECS=0.0)
    for session in range(1000):
        for step in range(32):
            _write(gate, session, step)
    assert list(gate._sessions) == [999]


def test_session_that_writes_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among too many sessions the gate forgets the one that has been silent for longest."""
    gate = WriteGate()
    monkeypatch.setattr(write_gate, "SESSIONS", 2)
    for other in range(2, 10):
        _write(gate, 1, other)
        _write(gate, other, 1)
    assert set(gate._sessions) == {1, 9}
