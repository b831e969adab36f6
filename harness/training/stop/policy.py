"""The decisions of a run's end: the phases of a task, the patience after a stop, the wait for the other tasks.

Pure functions: events and times go in; the next phase, or an instruction, comes out. ``lifecycle``
and ``waiting`` ask the cluster, act and log. The tables in
``tests/harness/training/stop/test_end_policy.py`` are the specification.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.training import times


class RunPhase(enum.Enum):
    """Place of a task on its way through a run."""

    OPENING = enum.auto()
    """There is no session yet."""
    TRAINING = enum.auto()
    """Steps run. After a stop they have the grace period to end."""
    WAITING = enum.auto()
    """The chief waits for the training tasks, and recovers the ps tasks for them."""
    ENDING = enum.auto()
    """The last steps are saved and the end is reported.

    A task that stays silent cuts this short.
    """
    OVER = enum.auto()
    """Nothing is left to save or to report."""


class RunEvent(enum.Enum):
    """An event of a run. Some events move the task to another phase."""

    OPENS = "a session is to be opened"
    OPENED = "the session is open"
    WAITS = "the chief begins to wait for the other tasks"
    WAITED = "the wait is over"
    ENDS = "training is to end"
    INTERRUPTED = "a signal has interrupted the end, which begins again"
    DONE = "the end is reported, or nothing is to be reported"


# An event that comes twice, or late, is no error: signals, threads and the two faces may all end a
# run.
_NEXT: Mapping[RunEvent, tuple[frozenset[RunPhase], RunPhase]] = {
    RunEvent.OPENS: (frozenset(RunPhase), RunPhase.OPENING),
    RunEvent.OPENED: (frozenset({RunPhase.OPENING}), RunPhase.TRAINING),
    RunEvent.WAITS: (frozenset({RunPhase.TRAINING, RunPhase.ENDING}), RunPhase.WAITING),
    RunEvent.WAITED: (frozenset({RunPhase.WAITING}), RunPhase.TRAINING),
    RunEvent.ENDS: (frozenset({RunPhase.TRAINING, RunPhase.WAITING}), RunPhase.ENDING),
    RunEvent.INTERRUPTED: (frozenset({RunPhase.ENDING}), RunPhase.TRAINING),
    RunEvent.DONE: (frozenset(RunPhase), RunPhase.OVER),
}
"""By event: the phases that it ends, and the phase that it leads to."""
assert _NEXT.keys() == {*RunEvent}, "an event leads nowhere"


def next_phase(phase: RunPhase, event: RunEvent) -> RunPhase:
    """Returns the phase after an event; the same phase for an event of another phase.

        next_phase(RunPhase.TRAINING, RunEvent.WAITS)   # RunPhase.WAITING

    Args:
        phase: Phase before the event.
        event: The event.
    """
    ended, after = _NEXT[event]
    return after if phase in ended else phase


class StopAction(enum.Enum):
    """An instruction to the thread that watches a task after a stop."""

    LOOK_AGAIN = "nothing takes too long"
    CANCEL_STEPS = (
        "a step outlives the stop: it may wait for a gradient of a worker that has stopped"
    )
    CLOSE_SESSION = "a task is silent: a last save may wait for a ps whose machine is gone"


def after_stop(
    phase: RunPhase,
    step_secs: float,
    silent_secs: float,
    *,
    step_limit: float,
    silence_limit: float,
) -> StopAction:
    """Returns the instruction for a task that is to stop.

        after_stop(RunPhase.TRAINING, 31.0, 0.0, step_limit=30.0, silence_limit=30.0)
        # StopAction.CANCEL_STEPS

    Args:
        phase: Phase of the task.
        step_secs: Seconds that a step has run since the stop; 0 where no step runs.
        silent_secs: Seconds since the last sign of life of the most silent task.
        step_limit: Seconds that a step may take after the stop.
        silence_limit: Seconds that a task may be silent while training ends.
    """
    # While the chief waits for others its own steps recover lost tasks. These have limits of their
    # own.
    if phase is RunPhase.TRAINING and step_secs > 0 and step_secs >= step_limit:
        return StopAction.CANCEL_STEPS
    if phase is RunPhase.ENDING and silent_secs >= silence_limit:
        return StopAction.CLOSE_SESSION
    return StopAction.LOOK_AGAIN


@dataclass(frozen=True)
class WaitLimits:
    """Silences after which the chief waits no longer.

    Attributes:
        ps_secs: Seconds without an answer of the ps tasks.
        worker_secs: Seconds without a sign of life of a worker.
    """

    ps_secs: float
    worker_secs: float


@dataclass(frozen=True)
class WaitState:
    """A chief's wait for the other tasks; times in seconds on any clock that only goes forward.

    Attributes:
        began: Begin of the wait.
        answered_at: Time of the last answer of the ps tasks.
        logged_at: Time of the last line that names the tasks that are waited for.
        gone: Tasks that were given up.
        wait_secs: Seconds that the next question may wait for an answer.
        over: True when the wait is over.
    """

    began: float
    answered_at: float
    logged_at: float = -math.inf
    gone: frozenset[str] = frozenset()
    wait_secs: float = 0.0
    over: bool = False


@dataclass(frozen=True)
class WaitNews:
    """Lines for the log after one answer.

    Attributes:
        given_up: Tasks given up since the last answer, with the silence of each in seconds.
        awaited: Words for the tasks that are waited for; empty when no line is due.
        lasts: True if the wait lasts, which is worth a warning.
    """

    given_up: Mapping[str, float]
    awaited: str = ""
    lasts: bool = False


def after_answer(
    state: WaitState, silences: Mapping[str, float], now: float, limits: WaitLimits
) -> tuple[WaitState, WaitNews]:
    """Returns the next state of a wait, and the news for the log, after an answer of the ps tasks.

    Args:
        state: State before the answer.
        silences: By task that still trains: seconds since its last sign of life; infinite for one
            that never came.
        now: The time.
        limits: Silences after which no task is waited for.
    """
    assert now >= state.answered_at, "the clock only goes forward"
    assert not state.over, "the wait has ended"
    # A worker that never came to any ps has the time of a silent worker, from the begin of the wait
    # on.
    quiet = {
        task: now - state.began if secs == math.inf else secs for task, secs in silences.items()
    }
    left = {task: secs for task, secs in quiet.items() if secs < limits.worker_secs}
    gone = frozenset(quiet.keys() - left.keys())
    news = WaitNews({task: quiet[task] for task in sorted(gone - state.gone)})
    state = replace(state, answered_at=now, gone=gone, over=not left)
    if not left:
        return state, news
    # Asked again when the next worker could be given up, or when any of them is done: the ps
    # answers then.
    soonest = limits.worker_secs - max(left.values())
    state = replace(
        state, wait_secs=min(times.LONGEST_WAIT_SECS, max(times.SHORTEST_WAIT_SECS, soonest))
    )
    # The first line comes at once: a user who has just seen the last step wants to know why nothing
    # ends.
    if now - state.logged_at >= times.LONGEST_WAIT_SECS:
        words = [
            f"{task} (silent for {secs:.0f} s)" if secs >= times.QUIET_SECS else task
            for task, secs in left.items()
        ]
        news = replace(
            news, awaited=", ".join(words), lasts=now - state.began >= times.LONGEST_WAIT_SECS
        )
        state = replace(state, logged_at=now)
    return state, news


def after_loss(state: WaitState, now: float, limits: WaitLimits) -> WaitState:
    """Returns the next state of a wait after a question that the ps tasks did not answer.

    Args:
        state: State before the question.
        now: The time.
        limits: Silences after which no task is waited for.
    """
    assert now >= state.answered_at >= state.began, "the clock only goes forward"
    return replace(state, over=now - state.answered_at >= limits.ps_secs)
