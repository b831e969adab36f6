"""The phases of a run, the wait of its chief and the choice of its end, as tables."""

import dataclasses
import itertools
import math

import pytest

import runtime as rt
from harness import Supervisor
from harness.training.stop.policy import (
    EndFacts,
    EndReport,
    LastSave,
    RunEvent,
    RunPhase,
    WaitLimits,
    WaitState,
    after_answer,
    after_loss,
    choose_report,
    choose_save,
    next_phase,
)

_CHIEF = EndFacts(
    is_chief=True,
    saves=True,
    late=False,
    left=False,
    closed=False,
    silenced=False,
    over=True,
    signalled=False,
    shared=True,
    elastic=False,
)
_LIMITS = WaitLimits(ps_secs=20.0, worker_secs=10.0)


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ("OPENS", RunPhase.OPENING),
        ("OPENS ENDS", RunPhase.OPENING),
        ("OPENS OPENED", RunPhase.TRAINING),
        ("OPENS OPENED WAITS", RunPhase.WAITING),
        ("OPENS OPENED WAITS WAITED", RunPhase.TRAINING),
        ("OPENS OPENED WAITS ENDS", RunPhase.ENDING),
        ("OPENS OPENED ENDS WAITS WAITED ENDS", RunPhase.ENDING),
        ("OPENS OPENED ENDS INTERRUPTED", RunPhase.TRAINING),
        ("OPENS OPENED ENDS DONE", RunPhase.OVER),
        ("OPENS OPENED DONE ENDS WAITS", RunPhase.OVER),
        ("OPENS OPENED DONE OPENS OPENED", RunPhase.TRAINING),
    ],
)
def test_events_lead_to_phase(events: str, phase: RunPhase) -> None:
    """A run passes through its phases in order, and an event of another phase changes nothing."""
    found = RunPhase.OPENING
    for name in events.split():
        found = next_phase(found, RunEvent[name])
    assert found is phase


def test_every_phase_can_be_left() -> None:
    """A session may be opened, and an error may end the run, in each phase."""
    for phase, event in itertools.product(RunPhase, RunEvent):
        assert next_phase(phase, event) in RunPhase
        assert next_phase(phase, RunEvent.DONE) is RunPhase.OVER
        assert next_phase(phase, RunEvent.OPENS) is RunPhase.OPENING


@pytest.mark.parametrize(
    ("changes", "save", "report"),
    [
        ({}, LastSave.SAVE, EndReport.DONE),
        ({"shared": False}, LastSave.SAVE, EndReport.MARK),
        ({"shared": False, "saves": False}, LastSave.FINAL, EndReport.NONE),
        ({"is_chief": False, "saves": False}, LastSave.FINAL, EndReport.DONE),
        ({"over": False}, LastSave.SAVE, EndReport.INTERRUPTED),
        ({"signalled": True}, LastSave.SAVE, EndReport.INTERRUPTED),
        ({"is_chief": False, "saves": False, "over": False}, LastSave.FINAL, EndReport.NONE),
        ({"is_chief": False, "saves": False, "over": False, "elastic": True}, LastSave.FINAL, EndReport.GOODBYE),
        ({"late": True}, LastSave.NONE, EndReport.DONE),
        ({"late": True, "over": False}, LastSave.NONE, EndReport.NONE),
        ({"closed": True}, LastSave.CLOSED, EndReport.DONE),
        ({"closed": True, "late": True}, LastSave.NONE, EndReport.DONE),
        ({"closed": True, "is_chief": False, "saves": False}, LastSave.NONE, EndReport.DONE),
        ({"silenced": True, "closed": True}, LastSave.SILENCED, EndReport.DONE),
        ({"silenced": True, "closed": True, "is_chief": False, "saves": False}, LastSave.NONE, EndReport.DONE),
        ({"left": True, "closed": True}, LastSave.LEFT, EndReport.DONE),
    ],
)
def test_facts_choose_the_end(changes: dict[str, bool], save: LastSave, report: EndReport) -> None:
    """The facts about a task say how it saves, and what it reports."""
    facts = dataclasses.replace(_CHIEF, **changes)
    assert (choose_save(facts), choose_report(facts)) == (save, report)


def test_wait_ends_without_trainers() -> None:
    """The wait ends with the first answer that names no task."""
    state, news = after_answer(WaitState(100.0, 100.0), {}, 101.0, _LIMITS)
    assert state.over and state.answered_at == 101.0 and not news.given_up and not news.awaited


def test_silent_worker_is_given_up_once() -> None:
    """A worker that is silent for too long is named once and waited for no longer."""
    state, news = after_answer(WaitState(100.0, 100.0), {"a": 1.0, "b": 11.0}, 111.0, _LIMITS)
    assert news.given_up == {"b": 11.0} and not state.over and news.awaited == "a"
    assert state.wait_secs == 9.0  # until "a" has been silent for too long
    state, news = after_answer(state, {"a": 4.0, "b": 14.0}, 114.0, _LIMITS)
    assert news.given_up == {} and not news.awaited  # the last line was 3 s ago
    state, news = after_answer(state, {"a": 4.0, "b": 21.0}, 121.0, _LIMITS)
    assert news.awaited == "a (silent for 4 s)" and news.lasts
    assert after_answer(state, {"a": 10.0, "b": 30.0}, 130.0, _LIMITS)[0].over


def test_unknown_worker_has_time_to_come() -> None:
    """A worker that never came has the time of a silent worker, from the begin of the wait on."""
    assert not after_answer(WaitState(100.0, 100.0), {"a": math.inf}, 105.0, _LIMITS)[0].over
    assert after_answer(WaitState(100.0, 100.0), {"a": math.inf}, 110.0, _LIMITS)[0].over


def test_ps_that_do_not_answer_end_the_wait() -> None:
    """The wait ends when the ps tasks have not answered for as long as a task may be silent."""
    state = WaitState(100.0, 103.0)
    assert not after_loss(state, 122.9, _LIMITS).over and after_loss(state, 123.0, _LIMITS).over


def test_story_of_a_run_can_be_read() -> None:
    """A Supervisor's run keeps its events, with the phase after each."""
    with rt.Graph().as_default():
        rt.Variable(1.0, name="v")
        sv = Supervisor()
        with sv.managed_session():
            pass
    assert [(event.name, phase.name) for _, event, phase in sv._life.story] == [
        ("OPENED", "TRAINING"),
        ("ENDS", "ENDING"),
        ("DONE", "OVER"),
    ]
