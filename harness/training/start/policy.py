"""The decision about a session that has just been opened: initialise, restore, keep, wait, join, end or give up.

Pure functions: the cluster's report, the role, the options and the time go in; a decision and its
reason in words come out. ``SessionManager`` asks, acts and logs. The tables in
``tests/harness/training/start/test_start_policy.py`` are the specification.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.training import times

_SHOWN = 5
"""Number of names that a reason lists."""


class TaskRole(enum.Enum):
    """The role of the task that decides."""

    CHIEF = "chief"
    OTHER = "worker"


class StartAction(enum.Enum):
    """Action of a task with its session."""

    KEEP = "keep the live model"
    RESTORE = "restore the newest checkpoint"
    INITIALIZE = "initialise"
    JOIN = "join"
    WAIT = "wait"
    END = "end"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class ClusterReport:
    """Answer of the cluster to a task that has just opened a session.

    Attributes:
        variables: Number of variables that the graph shares with the cluster.
        missing: Names of the variables without a value.
        phases: Phase of the run record ("new", "loading", "ready", "finished") by task; empty
            without a cluster.
        addresses: Addresses of these tasks, where known.
        chief: Task that leads, with its address; empty when no task leads, or the chief is not
            known.
        origins: Reasons why tasks that should continue from a backup started without values.
        not_ready: Names that a ready operation of the user's own still misses; empty when none.
        checkpoint: Path of the newest whole checkpoint; None when there is none.
        logdirs: Log directories of the runs to which the tasks' values belong, where known.
        chief_silent_secs: Seconds since the chief's last sign of life; infinite without a known
            chief.
    """

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
    """Wishes of the user; times are on the clock of ``now``.

    Attributes:
        give_up_at: Time at which waiting ends.
        can_initialize: True if there is an init operation or function.
        wait_for_checkpoint: True if a chief without a checkpoint waits for a checkpoint before it
            initialises.
        recovering: True if this process has trained in the run before.
        started_again: True if a launcher has started this task before, in the same run.
    """

    give_up_at: float
    can_initialize: bool = True
    wait_for_checkpoint: bool = False
    recovering: bool = False
    started_again: bool = False


@dataclass(frozen=True)
class StartDecision:
    """An action, and its reason in words for the log."""

    action: StartAction
    reason: str


def decide(
    now: float, role: TaskRole, report: ClusterReport, options: StartOptions
) -> StartDecision:
    """Decides for one task.

        report = ClusterReport(missing=["w"], checkpoint="/run/model.ckpt/10")
        decide(now, TaskRole.CHIEF, report, options).action     # StartAction.RESTORE

    Args:
        now: The time, in seconds on any clock that only goes forward.
        role: Role of the task. The chief gives the variables their values; other tasks wait for the
            chief.
        report: Report of the cluster.
        options: Wishes of the user.
    """
    decide_for = _for_chief if role is TaskRole.CHIEF else _for_other
    decision = decide_for(now, report, options)
    assert role is TaskRole.OTHER or decision.action is not StartAction.JOIN, "a chief leads"
    return decision


def other_run(report: ClusterReport, logdir: str, step: int | None) -> str:
    """Returns the warning that a chief keeps the live model of another run; empty when no directory says so.

    Args:
        report: Report of the cluster.
        logdir: Log directory of the chief, in the form of those in the report; empty for none.
        step: Global step of the live model; None when not known.
    """
    others = [directory for directory in dict.fromkeys(report.logdirs) if directory != logdir]
    if not logdir or not others:
        return ""
    at = "" if step is None else f" (at step {step})"
    own = (
        "which holds no checkpoint"
        if report.checkpoint is None
        else f"whose newest checkpoint is {report.checkpoint}"
    )
    return (
        f"the live model{at} is that of a run in {_first_names(others)}, but the log directory of "
        f"this chief is {logdir}, {own}: that model is kept and trained on. If you meant to begin "
        "a new run, stop all tasks and start the ps tasks again too: the variables live on them"
    )


def rival(report: ClusterReport, logdir: str) -> str:
    """Returns the reason why a chief may not lead: another run's chief lives. Empty when none does.

    Args:
        report: Report of the cluster.
        logdir: Log directory of the chief that asks, in the form of those in the report; empty for
            none.
    """
    others = [directory for directory in dict.fromkeys(report.logdirs) if directory != logdir]
    # A run that has finished has no chief any more, whatever its last sign of life was.
    running = any(phase in ("loading", "ready") for phase in report.phases.values())
    if not logdir or not others or not running or report.chief_silent_secs >= times.ALIVE_SECS:
        return ""
    return (
        f"another run trains on this cluster, and its chief, {report.chief}, lives: its log "
        f"directory is {_first_names(others)}, and this one's is {logdir}. A cluster has one run "
        "at a time: stop that one, or start this one on ps tasks of its own"
    )


def _for_chief(now: float, report: ClusterReport, options: StartOptions) -> StartDecision:
    # Only a launcher's second start may take the end of the run for its own: a first start begins
    # another run.
    if options.started_again and not options.recovering and _tasks_in(report, "finished"):
        return StartDecision(
            StartAction.END, "the run has finished before this task was started again"
        )
    loading = _tasks_in(report, "loading")
    # A graph without variables is initialised once, too: the run records say if that has happened.
    settled = report.variables > 0 or bool(_tasks_in(report, "ready", "finished"))
    if not report.missing and not loading and settled:
        return StartDecision(
            StartAction.KEEP,
            "every variable has a value on its task: the model is alive, no step is lost",
        )
    # The reason names everything that was wrong. It is the one line that explains a lost run
    # afterwards.
    lacking = f"no value on its task: {_first_names(report.missing)}" if report.missing else ""
    if loading:
        half = f"a chief has died while it gave {', '.join(loading)} values"
        lacking = f"{half}; {lacking}" if lacking else half
    lacking = lacking or "nothing tells that anybody has initialised"
    # In a new run every ps starts without values, which is no news.
    if report.origins and (options.recovering or _tasks_in(report, "ready", "loading")):
        lacking = "; ".join((lacking, *report.origins))
    # A checkpoint comes before an init operation: nobody means to begin again where there is
    # something to restore.
    if report.checkpoint is not None:
        return StartDecision(
            StartAction.RESTORE, f"{lacking}; the newest checkpoint is {report.checkpoint}"
        )
    if options.wait_for_checkpoint and now < options.give_up_at:
        return StartDecision(StartAction.WAIT, f"{lacking}; waiting for a checkpoint")
    if options.can_initialize:
        lost = ", so ALL STEPS SO FAR ARE LOST" if options.recovering else ""
        return StartDecision(StartAction.INITIALIZE, f"{lacking}; there is no checkpoint{lost}")
    return StartDecision(
        StartAction.GIVE_UP,
        f"{lacking}; there is no checkpoint, and no init_op or init_fn or local_init_op was given",
    )


def _for_other(now: float, report: ClusterReport, options: StartOptions) -> StartDecision:
    if _tasks_in(report, "finished"):
        return StartDecision(StartAction.END, "the chief has finished training")
    # The values count before the phases: a variable without a value is the better reason in the
    # log.
    if report.missing:
        reason = (
            f"the chief has not yet initialised {_first_names(report.missing)}{_waited_for(report)}"
        )
    elif loading := _tasks_in(report, "loading"):
        reason = f"the chief is still giving {', '.join(loading)} values{_waited_for(report)}"
    elif report.not_ready:
        reason = f"not ready: {report.not_ready}"
    else:
        return StartDecision(StartAction.JOIN, "the model is ready")
    waits = now < options.give_up_at
    return StartDecision(StartAction.WAIT if waits else StartAction.GIVE_UP, reason)


def _waited_for(report: ClusterReport) -> str:
    """Returns the words for the chief that a task waits for, or for the ps where the first chief will appear."""
    if report.chief:
        return f"; waiting for {report.chief}"
    reached = [
        f"{task} at {report.addresses[task]}" if task in report.addresses else task
        for task in report.phases
    ]
    return f"; no chief has come to {', '.join(reached)} yet" if reached else ""


def _tasks_in(report: ClusterReport, *phases: str) -> list[str]:
    return [task for task, phase in report.phases.items() if phase in phases]


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
