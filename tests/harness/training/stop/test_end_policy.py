"""The phases of a run, the patience after a stop and the wait of its chief, as tables."""

import itertools
import math

import pytest

import runtime as rt
from harness import Supervisor
from harness.training.stop.policy import (
    RunEvent,
    RunPhase,
    StopAction,
    WaitLimits,
    WaitState,
    after_answer,
    after_loss,
    after_stop,
    next_phase,
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
    ("phase", "step_secs", "silent_secs", "action"),
    [
        (RunPhase.TRAINING, 0.0, 99.0, StopAction.LOOK_AGAIN),
        (RunPhase.TRAINING, 9.9, 0.0, StopAction.LOOK_AGAIN),
        (RunPhase.TRAINING, 10.0, 0.0, StopAction.CANCEL_STEPS),
        (RunPhase.WAITING, 99.0, 99.0, StopAction.LOOK_AGAIN),
        (RunPhase.ENDING, 99.0, 19.9, StopAction.LOOK_AGAIN),
        (RunPhase.ENDING, 0.0, 20.0, StopAction.CLOSE_SESSION),
        (RunPhase.OVER, 99.0, 99.0, StopAction.LOOK_AGAIN),
    ],
)
def test_stop_has_limits(
    phase: RunPhase, step_secs: float, silent_secs: float, action: StopAction
) -> None:
    """A step is cancelled after a stop, a silent task cuts the end short, and a wait for other
    tasks goes on.
    """
    assert after_stop(phase, step_secs, silent_secs, step_limit=10.0, silence_limit=20.0) is action


def test_zero_grace_cancels_no_idle_session() -> None:
    """Without a grace period a running step is cancelled at once, and a session without a step is left alone."""
    assert (
        after_stop(RunPhase.TRAINING, 0.0, 0.0, step_limit=0.0, silence_limit=4.0)
        is StopAction.LOOK_AGAIN
    )
    assert (
        after_stop(RunPhase.TRAINING, 0.1, 0.0, step_limit=0.0, silence_limit=4.0)
        is StopAction.CANCEL_STEPS
    )


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


def test_unanswering_ps_end_the_wait() -> None:
    """The wait ends when the ps tasks have not answered for as long as a task may be silent."""
    state = WaitState(100.0, 103.0)
    assert not after_loss(state, 122.9, _LIMITS).over and after_loss(state, 123.0, _LIMITS).over


def test_story_of_run_is_readable() -> None:
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
