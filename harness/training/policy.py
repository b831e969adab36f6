"""What to do with a session that has just been opened: initialise, restore, keep, wait, join, end or give up.

Pure functions: what the cluster reports, the role, the options and the time go in, a decision and its reason in words
come out. The session manager asks, acts and logs; the tables in the tests are the specification.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ALIVE_SECS = 2.0
"""A chief that was silent for less lives: a living one gives a sign of life every second."""
_SHOWN = 5
"""How many names a reason lists."""


class Role(enum.Enum):
    """The role of the task that decides."""

    CHIEF = "chief"
    OTHER = "worker"


class Action(enum.Enum):
    """What a task does with its session."""

    KEEP = "keep the live model"
    RESTORE = "restore the newest checkpoint"
    INITIALIZE = "initialise"
    JOIN = "join"
    WAIT = "wait"
    END = "end"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class ClusterReport:
    """What the cluster reports.

    Attributes:
        unreachable: why it could not be asked; empty when it could.
        variables: how many variables the graph shares with the cluster.
        missing: names of those that have no value.
        phases: phase of the run record ("new", "loading", "ready", "finished") by task; empty without a cluster.
        addresses: of these tasks, as far as they are known.
        chief: the task that leads, with its address; empty when none does, or it is not known.
        origins: why tasks that should go on from a backup started without values.
        not_ready: what a ready operation of the user's own still misses; empty when nothing.
        checkpoint: path of the newest whole checkpoint, None when there is none.
        logdirs: log directories of the runs that the tasks' values belong to, as far as they were told.
        chief_silent_secs: For how long the chief has given no sign of life; infinite when none is known.
    """

    unreachable: str = ""
    variables: int = 0
    missing: Sequence[str] = ()
    phases: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    chief: str = ""
    origins: Sequence[str] = ()
    not_ready: str = ""
    checkpoint: str | None = None
    logdirs: Sequence[str] = ()
    chief_silent_secs: float = math.inf


@dataclass(frozen=True)
class StartOptions:
    """What the user asked for; times on the clock that gives ``now``.

    Attributes:
        give_up_at: when waiting ends.
        can_initialize: there is an init operation or function.
        wait_for_checkpoint: a chief without a checkpoint waits for one before it initialises.
        recovering: training has been going on before.
        started_again: a launcher has started this task before, in the same run.
    """

    give_up_at: float
    can_initialize: bool = True
    wait_for_checkpoint: bool = False
    recovering: bool = False
    started_again: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do, and why, in words for the log."""

    action: Action
    reason: str


def decide(now: float, role: Role, report: ClusterReport, options: StartOptions) -> Decision:
    """Decides for one task.

    Args:
        now: the time, in seconds on any clock that only goes forward.
        role: the chief gives the variables their values; the others only wait for that.
        report: what the cluster reports.
        options: what the user asked for.
    """
    if report.unreachable:
        return _wait(now, options, report.unreachable)
    return _for_chief(now, report, options) if role is Role.CHIEF else _for_other(now, report, options)


def other_run(report: ClusterReport, logdir: str, step: int | None) -> str:
    """What a chief that keeps a live model must say aloud: that it is another run's. Empty when nothing tells so.

    Args:
        report: what the cluster reports.
        logdir: the chief's own log directory, in the form of those in the report; empty for none.
        step: the global step of the live model, None when it is not known.
    """
    others = [directory for directory in dict.fromkeys(report.logdirs) if directory != logdir]
    if not logdir or not others:
        return ""
    at = "" if step is None else f" (at step {step})"
    own = (
        "which holds no checkpoint" if report.checkpoint is None else f"whose newest checkpoint is {report.checkpoint}"
    )
    return (
        f"the live model{at} is that of a run in {_some(others)}, but the log directory of this chief is {logdir}, "
        f"{own}: that model is kept and trained on. If you meant to begin a new run, stop all tasks and start the ps "
        "tasks again too: the variables live on them"
    )


def rival(report: ClusterReport, logdir: str) -> str:
    """Returns the reason why a chief may not lead: another run's chief lives. Empty when none does.

    Args:
        report: What the cluster reports.
        logdir: The log directory of the chief that asks, in the form of those in the report; empty for none.
    """
    others = [directory for directory in dict.fromkeys(report.logdirs) if directory != logdir]
    running = any(phase in ("loading", "ready") for phase in report.phases.values())
    if not logdir or not others or not running or report.chief_silent_secs >= ALIVE_SECS:
        return ""
    return (
        f"another run trains on this cluster, and its chief, {report.chief}, lives: its log directory is "
        f"{_some(others)}, and this one's is {logdir}. A cluster has one run at a time: stop that one, or start this "
        "one on ps tasks of its own"
    )


def _for_chief(now: float, report: ClusterReport, options: StartOptions) -> Decision:
    if options.started_again and not options.recovering and _tasks_in(report, "finished"):
        return Decision(Action.END, "the run has finished before this task was started again")
    loading = _tasks_in(report, "loading")
    settled = report.variables > 0 or bool(_tasks_in(report, "ready", "finished"))
    if not report.missing and not loading and settled:
        return Decision(Action.KEEP, "every variable has a value on its task: the model is alive, no step is lost")
    lacking = f"no value on its task: {_some(report.missing)}" if report.missing else ""
    if loading:
        half = f"a chief has died while it gave {', '.join(loading)} values"
        lacking = f"{half}; {lacking}" if lacking else half
    lacking = lacking or "nothing tells that anybody has initialised"
    if report.origins and (options.recovering or _tasks_in(report, "ready", "loading")):
        lacking = "; ".join((lacking, *report.origins))
    if report.checkpoint is not None:
        return Decision(Action.RESTORE, f"{lacking}; the newest checkpoint is {report.checkpoint}")
    if options.wait_for_checkpoint and now < options.give_up_at:
        return Decision(Action.WAIT, f"{lacking}; waiting for a checkpoint")
    if options.can_initialize:
        lost = ", so ALL STEPS SO FAR ARE LOST" if options.recovering else ""
        return Decision(Action.INITIALIZE, f"{lacking}; there is no checkpoint{lost}")
    return Decision(
        Action.GIVE_UP, f"{lacking}; there is no checkpoint, and no init_op or init_fn or local_init_op was given"
    )


def _for_other(now: float, report: ClusterReport, options: StartOptions) -> Decision:
    if _tasks_in(report, "finished"):
        return Decision(Action.END, "the chief has finished training")
    loading = _tasks_in(report, "loading")
    if report.missing:
        return _wait(now, options, f"the chief has not yet initialised {_some(report.missing)}{_waited_for(report)}")
    if loading:
        return _wait(now, options, f"the chief is still giving {', '.join(loading)} values{_waited_for(report)}")
    if report.not_ready:
        return _wait(now, options, f"not ready: {report.not_ready}")
    return Decision(Action.JOIN, "the model is ready")


def _wait(now: float, options: StartOptions, reason: str) -> Decision:
    return Decision(Action.WAIT if now < options.give_up_at else Action.GIVE_UP, reason)


def _waited_for(report: ClusterReport) -> str:
    """Whom a task waits for: the chief, or, as long as there is none, the tasks where the first chief will appear."""
    if report.chief:
        return f"; waiting for {report.chief}"
    reached = [f"{task} at {report.addresses[task]}" if task in report.addresses else task for task in report.phases]
    return f"; no chief has come to {', '.join(reached)} yet" if reached else ""


def _tasks_in(report: ClusterReport, *phases: str) -> list[str]:
    return [task for task, phase in report.phases.items() if phase in phases]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
