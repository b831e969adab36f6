"""The decisions of a run's end: the phases of a task, the wait for the other tasks, the last save and the report.

Pure functions: events, facts and the time go in; the next phase, or an instruction, comes out. ``lifecycle`` asks the
cluster, acts and logs. The tables in ``tests/harness/training/stop/test_end_policy.py`` are the specification.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

LONGEST_WAIT_SECS = 10.0
"""Seconds of one wait for the other tasks at most, and between two lines in the log of that wait."""
_SHORTEST_WAIT_SECS = 0.1
_QUIET_SECS = 3.0
"""Silence from which the log names a task as silent. A living task gives a sign of life every second."""


class RunPhase(enum.Enum):
    """Place of a task on its way through a run."""

    OPENING = enum.auto()
    """There is no session yet."""
    TRAINING = enum.auto()
    """Steps run. After a stop they have the grace period to end."""
    WAITING = enum.auto()
    """The chief waits for the tasks that still train, and recovers the tasks that those need."""
    ENDING = enum.auto()
    """The last steps are saved and the end is reported. A task that stays silent cuts this short."""
    OVER = enum.auto()
    """Nothing is left to save or to report."""


class RunEvent(enum.Enum):
    """An event that may move a task to another phase."""

    OPENS = "a session is to be opened"
    OPENED = "the session is open"
    WAITS = "the chief begins to wait for the other tasks"
    WAITED = "the wait is over"
    ENDS = "training is to end"
    INTERRUPTED = "a signal has interrupted the end, which begins again"
    DONE = "the end is reported, or nothing is to be reported"


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


def next_phase(phase: RunPhase, event: RunEvent) -> RunPhase:
    """Returns the phase after an event; the same phase for an event of another phase.

        next_phase(RunPhase.TRAINING, RunEvent.WAITS)   # RunPhase.WAITING

    Args:
        phase: Phase before the event.
        event: The event.
    """
    ended, after = _NEXT[event]
    return after if phase in ended else phase


@dataclass(frozen=True)
class EndFacts:
    """Facts about a task whose training ends.

    Attributes:
        is_chief: True on the chief.
        saves: True where the chief writes checkpoints that a step tells apart.
        late: True if the run had finished before the task came.
        left: True if a task has left, as training is over.
        closed: True if the program has closed the session before the stop.
        silenced: True if a silent task has ended the wait for the last save.
        over: True when training is done; False when it was interrupted.
        signalled: True if a signal has come since the end began.
        shared: True if there are run records.
        elastic: True where workers come and go.
    """

    is_chief: bool
    saves: bool
    late: bool
    left: bool
    closed: bool
    silenced: bool
    over: bool
    signalled: bool
    shared: bool
    elastic: bool


class LastSave(enum.Enum):
    """The way in which the last steps of a task are saved."""

    LEFT = "nothing can be saved, and nothing is to be reported"
    SILENCED = "nothing can be saved, which is an error"
    CLOSED = "nothing can be saved, which is only logged"
    NONE = "nothing is to be saved"
    SAVE = "the chief saves, and again where a task is lost meanwhile"
    FINAL = "the program's last calls run once"


class EndReport(enum.Enum):
    """The report of the end of a task."""

    DONE = "the other tasks are informed that this one is done, and by the chief that training is over"
    MARK = "a mark in the log directory, as there are no other tasks"
    GOODBYE = "the other tasks are informed that training continues without this one"
    INTERRUPTED = "a line about the step that is saved"
    NONE = "nothing"


def choose_save(facts: EndFacts) -> LastSave:
    """Returns the way in which the last steps are saved.

    The departure of a ps comes first: nothing can be saved then, and the session may be closed for that reason.

    Args:
        facts: Facts about the task, before the last save.
    """
    if facts.left:
        return LastSave.LEFT
    if facts.silenced and facts.saves:
        return LastSave.SILENCED
    if facts.closed:
        return LastSave.CLOSED if facts.saves and not facts.late else LastSave.NONE
    if facts.late:
        return LastSave.NONE
    return LastSave.SAVE if facts.saves else LastSave.FINAL


def choose_report(facts: EndFacts) -> EndReport:
    """Returns the report of the end.

    A task with a signal is started again, and so is not reported as done.

    Args:
        facts: Facts about the task, after the last save.
    """
    if facts.over and not facts.signalled:
        if facts.shared:
            return EndReport.DONE
        return EndReport.MARK if facts.saves and not facts.late else EndReport.NONE
    if facts.elastic and not facts.is_chief and facts.shared:
        return EndReport.GOODBYE
    return EndReport.INTERRUPTED if facts.is_chief and not facts.late else EndReport.NONE


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
        given_up: Tasks that are waited for no longer, with their silence in seconds.
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
        silences: By task that still trains: seconds since its last sign of life; infinite for one that never came.
        now: The time.
        limits: Silences after which no task is waited for.
    """
    # A worker that never came to any ps has the time of a silent worker, from the begin of the wait on.
    quiet = {task: now - state.began if secs == math.inf else secs for task, secs in silences.items()}
    left = {task: secs for task, secs in quiet.items() if secs < limits.worker_secs}
    gone = frozenset(quiet.keys() - left.keys())
    news = WaitNews({task: quiet[task] for task in sorted(gone - state.gone)})
    state = replace(state, answered_at=now, gone=gone, over=not left)
    if not left:
        return state, news
    soonest = limits.worker_secs - max(left.values())
    state = replace(state, wait_secs=min(LONGEST_WAIT_SECS, max(_SHORTEST_WAIT_SECS, soonest)))
    if now - state.logged_at >= LONGEST_WAIT_SECS:
        words = [f"{task} (silent for {secs:.0f} s)" if secs >= _QUIET_SECS else task for task, secs in left.items()]
        news = replace(news, awaited=", ".join(words), lasts=now - state.began >= LONGEST_WAIT_SECS)
        state = replace(state, logged_at=now)
    return state, news


def after_loss(state: WaitState, now: float, limits: WaitLimits) -> WaitState:
    """Returns the next state of a wait after a question that the ps tasks did not answer.

    Args:
        state: State before the question.
        now: The time.
        limits: Silences after which no task is waited for.
    """
    return replace(state, over=now - state.answered_at >= limits.ps_secs)
