"""The decisions of the launcher: a pure function of the state, one event, the time and the options.

`harness.launch.runner` and `harness.ray.driver` call `react`. Events come in and instructions come
out. The module starts no process and reads no clock, so a test runs every path in microseconds. The
rules, in the order in which they matter:

* A worker that exits with 0 is done, and so is a chief or an evaluator. Any other end of a task is
  a failure. A ps task that leaves by itself is a failure too, unless the launcher has only this
  task (`--per_task`). Then the ps has left because training is over.
* A failed task is started again after a pause that doubles, at most `max_restarts` times. A task
  that ran for `forgive_secs` since its last start has its count forgiven. `harness.exit_codes` has
  a row for each exit code. The row says whether the task is started again at all: a wrong flag
  stays wrong. It also says whether the restart counts: a task that was preempted has not failed.
* A task that failed too often fails for good. The chief (job chief, or worker 0 where there is
  none) and the ps tasks end all other tasks. The failure of another worker does not, because
  asynchronous training continues without it.
* Workers are stopped before ps tasks, because a worker may need its ps for a last checkpoint. Each
  of the two groups gets `grace_secs` before SIGKILL. Evaluators are stopped with the workers. After
  workers that are done by themselves the launcher waits for no evaluator, but evaluators have the
  grace of the ps tasks for the last checkpoint.
* The exit code is that of the first task that failed for good. Else it is 128+signal after a
  signal. A launcher of one task ends with that task's own code after a signal. Else it is 0.
"""

import enum
import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from harness import exit_codes
from harness.launch import times

PS = "ps"
WORKER = "worker"
CHIEF_JOB = "chief"
EVALUATOR = "evaluator"
TRAINERS = (CHIEF_JOB, WORKER)
"""The jobs that train: the run is over when their tasks are done."""


@dataclass(frozen=True, order=True)
class LaunchTask:
    """One task of the cluster, written `worker/1`."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}/{self.index}"


CHIEF = LaunchTask(CHIEF_JOB, 0)
FIRST_WORKER = LaunchTask(WORKER, 0)


@dataclass(frozen=True)
class LaunchOptions:
    """The choices of the user. All times are in seconds."""

    max_restarts: int = 3
    grace_secs: float = 40.0
    """More than the 30 s that `harness.preemptible` gives a chief for its last checkpoint, by default."""
    backoff_secs: float = 0.5
    max_backoff_secs: float = 30.0
    forgive_secs: float = 60.0
    per_task: bool = False
    """There is one task, of a cluster that an engine has spread: after a signal the code is its own."""
    joins: bool = False
    """The program calls ``join_cluster``, which saves at SIGTERM; before that SIGTERM ends it without a traceback."""


class TaskPhase(enum.Enum):
    """The state of one task."""

    WAITING = "waiting to be started again"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed for good"


class RunStage(enum.Enum):
    """The state of the whole cluster, which only moves down this list."""

    RUNNING = 0
    STOPPING_WORKERS = 1
    STOPPING_PS = 2
    FINISHED = 3


@dataclass(frozen=True)
class LaunchedTask:
    """The state of one task.

    `attempt` counts all starts from 0, `restarts` those that count against the limit.
    """

    phase: TaskPhase
    attempt: int = 0
    restarts: int = 0
    since: float = 0.0
    """Running: when it was started. Waiting: when it is to be started."""


@dataclass(frozen=True)
class TaskFailure:
    """A task that failed for good.

    Attributes:
        task: The task.
        code: Exit code of the task; 128+signal for a signal.
        fatal: True if the failure ends all other tasks.
        why: Line for the log.
    """

    task: LaunchTask
    code: int
    fatal: bool
    why: str


@dataclass(frozen=True)
class LaunchState:
    """The state of the whole cluster, as the launcher knows it."""

    tasks: Mapping[LaunchTask, LaunchedTask]
    stage: RunStage = RunStage.RUNNING
    failure: TaskFailure | None = None
    """The first task that failed for good."""
    signal_code: int | None = None
    deadline: float | None = None
    """When the grace period of the tasks being stopped ends."""
    killed: frozenset[LaunchTask] = frozenset()
    """The tasks that have been sent SIGKILL."""

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, as far as it is known."""
        return (self.signal_code or 0) if self.failure is None else self.failure.code


@dataclass(frozen=True)
class TaskExited:
    """The end of a task's process. `returncode` is that of subprocess: negative for a signal."""

    task: LaunchTask
    returncode: int


@dataclass(frozen=True)
class StopSignal:
    """A stop signal to the launcher itself.

    Attributes:
        signum: Number of the signal.
        starting: Tasks that do not serve yet, or never will.
    """

    signum: int
    starting: frozenset[LaunchTask] = frozenset()


@dataclass(frozen=True)
class ClockTick:
    """The passing of time, without another event."""


@dataclass(frozen=True)
class StartTask:
    """The instruction to start a task."""

    task: LaunchTask
    attempt: int


@dataclass(frozen=True)
class SendSignal:
    """The instruction to send a signal to a running task. SIGKILL means the whole process tree."""

    task: LaunchTask
    signum: int


@dataclass(frozen=True)
class LogLine:
    """A line for the user."""

    text: str


@dataclass(frozen=True)
class ShowTail:
    """The instruction to show the user the last lines of a task."""

    task: LaunchTask


Event = TaskExited | StopSignal | ClockTick
Instruction = StartTask | SendSignal | LogLine | ShowTail


def begin(tasks: Iterable[LaunchTask], now: float) -> tuple[LaunchState, tuple[Instruction, ...]]:
    """Returns the first state, and the instructions that start every task in the given order."""
    states = {task: LaunchedTask(TaskPhase.RUNNING, since=now) for task in tasks}
    return LaunchState(states), tuple(StartTask(task, 0) for task in states)


def next_due(state: LaunchState) -> float | None:
    """Returns the time at which the next `ClockTick` is due, on the clock of `react`; None if only an event counts."""
    due = [task.since for task in state.tasks.values() if task.phase is TaskPhase.WAITING]
    if state.deadline is not None:
        due.append(state.deadline)
    return min(due, default=None)


def react(
    state: LaunchState, event: Event, now: float, options: LaunchOptions
) -> tuple[LaunchState, tuple[Instruction, ...]]:
    """Returns the next state, and the instructions after `event` at time `now`.

    `now` is in seconds, on any clock that only goes forward.
    """
    out: list[Instruction] = []
    match event:
        case TaskExited(task, returncode):
            state = _on_exit(state, task, returncode, now, options, out)
        case StopSignal(signum, starting):
            state = _on_signal(state, signum, starting, now, options, out)
        case ClockTick():
            state = _on_tick(state, now, out)
    after = _enter_next_stage(state, now, options, out)
    assert after.stage.value >= state.stage.value, "the stage only moves down its list"
    assert after.stage is not RunStage.FINISHED or not _running_tasks(after), "a task is left"
    return after, tuple(out)


def _on_exit(
    state: LaunchState,
    task: LaunchTask,
    returncode: int,
    now: float,
    options: LaunchOptions,
    out: list[Instruction],
) -> LaunchState:
    was = state.tasks[task]
    # A task that survived SIGKILL was given up. Its end comes late and changes nothing.
    if was.phase is not TaskPhase.RUNNING:
        return state
    if (task.job in _first_jobs(state) and returncode == 0) or state.stage is not RunStage.RUNNING:
        if state.signal_code is not None and options.per_task:
            state = replace(state, signal_code=exit_code_of(returncode))
        return _with_task(state, task, replace(was, phase=TaskPhase.DONE))
    # A task that ran for a while has shown that it can run, so its earlier failures are forgiven.
    restarts = 0 if now - was.since >= options.forgive_secs else was.restarts
    assert restarts <= was.attempt, "every restart is a start"
    # A ps that leaves with 0 while others need it has failed too.
    code = exit_code_of(returncode) or exit_codes.FAILED.plain
    row = exit_codes.of_code(code)
    what = f"{task} {describe(returncode)}"
    counts = row.retry is exit_codes.RetryRule.COUNTED
    most = {exit_codes.RetryRule.NEVER: 0, exit_codes.RetryRule.COUNTED: options.max_restarts}.get(
        row.retry, math.inf
    )
    if restarts < most:
        pause = min(options.backoff_secs * 2**restarts, options.max_backoff_secs)
        which = f"restart {restarts + 1} of {most}" if counts else f"{row.name}: started again"
        out.append(LogLine(f"{what}; {which} in {pause:g} s"))
        again = LaunchedTask(
            TaskPhase.WAITING, was.attempt + 1, restarts + counts, since=now + pause
        )
        return _with_task(state, task, again)
    after = f" after {restarts} restart{'s' * (restarts != 1)}" if restarts else ""
    if row.retry is exit_codes.RetryRule.NEVER:
        after = f" ({row.name}: it would end so again)"
    return _on_failure(state, task, code, f"{what} and failed for good{after}", now, options, out)


def _on_failure(
    state: LaunchState,
    task: LaunchTask,
    code: int,
    why: str,
    now: float,
    options: LaunchOptions,
    out: list[Instruction],
) -> LaunchState:
    """Continues without a task that is not started again, or stops all tasks."""
    # No other task can lead, or has the variables.
    fatal = task.job == PS or task == (CHIEF if CHIEF in state.tasks else FIRST_WORKER)
    # The lines of the task come before the line about the consequences.
    out += [
        ShowTail(task),
        LogLine(f"{why}; {'stopping everything' if fatal else 'going on without it'}"),
    ]
    state = _with_task(state, task, replace(state.tasks[task], phase=TaskPhase.FAILED))
    state = replace(state, failure=state.failure or TaskFailure(task, code, fatal, why))
    return _stop_first(state, frozenset(state.tasks), now, options, out) if fatal else state


def _on_signal(
    state: LaunchState,
    signum: int,
    starting: frozenset[LaunchTask],
    now: float,
    options: LaunchOptions,
    out: list[Instruction],
) -> LaunchState:
    name = signal.Signals(signum).name
    if state.signal_code is not None:
        out.append(LogLine(f"{name} again: killing every task"))
        return _kill_tasks(state, _running_tasks(state), now, out)
    state = replace(state, signal_code=128 + signum)
    both = "the workers, then the ps tasks"
    who = both if len(state.tasks) > 1 else str(next(iter(state.tasks)))
    out.append(
        LogLine(f"{name}: stopping {who}, within {options.grace_secs:g} s{' each' * (who == both)}")
    )
    # A ps is told to leave: it has no work that could be interrupted.
    interrupts = signum == signal.SIGINT and _first_jobs(state) != (PS,) and not options.joins
    # While JAX is imported, Python loses most KeyboardInterrupts: they are raised within a callback
    # of the garbage collector, which discards them. SIGTERM ends such a task at once, and without a
    # traceback.
    terminated = starting if interrupts else frozenset(state.tasks)
    if state.stage is RunStage.RUNNING:
        return _stop_first(state, terminated, now, options, out)
    if state.stage is RunStage.STOPPING_WORKERS:
        out += _stop_signals(state, terminated)
    return state


def _on_tick(state: LaunchState, now: float, out: list[Instruction]) -> LaunchState:
    for task, was in state.tasks.items():
        if was.phase is TaskPhase.WAITING and was.since <= now:
            state = _with_task(state, task, replace(was, phase=TaskPhase.RUNNING, since=now))
            out.append(StartTask(task, was.attempt))
    if state.deadline is None or now < state.deadline:
        return state
    # The ps tasks have not been told to stop yet while workers are stopped, so they are not late.
    late = _running_tasks(
        state, *(_first_jobs(state) if state.stage is RunStage.STOPPING_WORKERS else ())
    )
    stubborn = [task for task in late if task not in state.killed]
    if stubborn:
        out.append(LogLine(f"{', '.join(map(str, stubborn))} did not stop in time: killed"))
        return _kill_tasks(state, stubborn, now, out)
    out.append(LogLine(f"{', '.join(map(str, late))} could not be killed: left to the system"))
    for task in late:
        state = _with_task(state, task, replace(state.tasks[task], phase=TaskPhase.FAILED))
    return state


def _enter_next_stage(
    state: LaunchState, now: float, options: LaunchOptions, out: list[Instruction]
) -> LaunchState:
    """Enters the next stage when no task keeps the cluster in the present stage."""
    if state.stage in (RunStage.RUNNING, RunStage.STOPPING_WORKERS) and not _any_alive(
        state, *_awaited_jobs(state)
    ):
        state = replace(_drop_waiting(state), stage=RunStage.STOPPING_PS)
        # SIGTERM whatever signal the launcher got, as in _on_signal.
        terminated = [task for task in _running_tasks(state, PS) if task not in state.killed]
        out += [SendSignal(task, signal.SIGTERM) for task in terminated]
        waits = terminated or _running_tasks(state, EVALUATOR)
        state = replace(
            state, deadline=now + (options.grace_secs if waits else times.KILL_GRACE_SECS)
        )
    if state.stage is RunStage.STOPPING_PS and not _running_tasks(state):
        state = replace(state, stage=RunStage.FINISHED, deadline=None)
    return state


def _stop_first(
    state: LaunchState,
    terminated: frozenset[LaunchTask],
    now: float,
    options: LaunchOptions,
    out: list[Instruction],
) -> LaunchState:
    """Stops the tasks of the first jobs: `terminated` by SIGTERM, the others by SIGINT."""
    assert state.stage is RunStage.RUNNING, "tasks are stopped once"
    out += _stop_signals(state, terminated)
    return replace(
        _drop_waiting(state), stage=RunStage.STOPPING_WORKERS, deadline=now + options.grace_secs
    )


def _stop_signals(state: LaunchState, terminated: frozenset[LaunchTask]) -> list[Instruction]:
    tasks = _running_tasks(state, *_first_jobs(state))
    return [
        SendSignal(task, signal.SIGTERM if task in terminated else signal.SIGINT) for task in tasks
    ]


def _kill_tasks(
    state: LaunchState, tasks: list[LaunchTask], now: float, out: list[Instruction]
) -> LaunchState:
    assert all(state.tasks[task].phase is TaskPhase.RUNNING for task in tasks)
    out += [SendSignal(task, signal.SIGKILL) for task in tasks]
    return replace(state, deadline=now + times.KILL_GRACE_SECS, killed=state.killed | set(tasks))


def _first_jobs(state: LaunchState) -> tuple[str, ...]:
    """Returns the jobs that are stopped first.

    Trainers and evaluators may need the ps, which come first only alone.
    """
    jobs = (*TRAINERS, EVALUATOR)
    return jobs if any(task.job in jobs for task in state.tasks) else (PS,)


def _awaited_jobs(state: LaunchState) -> tuple[str, ...]:
    """Returns the jobs whose tasks keep the run alive: the trainers, or all first jobs where there is no trainer."""
    return TRAINERS if any(task.job in TRAINERS for task in state.tasks) else _first_jobs(state)


def _any_alive(state: LaunchState, *jobs: str) -> bool:
    return any(
        t.job in jobs and was.phase in (TaskPhase.RUNNING, TaskPhase.WAITING)
        for t, was in state.tasks.items()
    )


def _drop_waiting(state: LaunchState) -> LaunchState:
    for task, was in state.tasks.items():
        if was.phase is TaskPhase.WAITING:
            state = _with_task(state, task, replace(was, phase=TaskPhase.DONE))
    return state


def _running_tasks(state: LaunchState, *jobs: str) -> list[LaunchTask]:
    """Returns the running tasks of some jobs, or of all jobs."""
    return [
        task
        for task, was in state.tasks.items()
        if was.phase is TaskPhase.RUNNING and (not jobs or task.job in jobs)
    ]


def _with_task(state: LaunchState, task: LaunchTask, new: LaunchedTask) -> LaunchState:
    assert task in state.tasks, "the tasks of a run are known at its begin"
    return replace(state, tasks={**state.tasks, task: new})


def exit_code_of(returncode: int) -> int:
    """Returns a subprocess return code as a shell reports it: 128+signal for a signal."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """Returns a subprocess return code in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
