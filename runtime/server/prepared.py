"""Prepared plans: what a session runs. The stages of a plan, registered on their tasks and put into phases."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.plan.phases import phases
from runtime.plan.plan import Plan, StageCall
from runtime.server.counters import StepTimes, awaited_slots, parts_of, wire_bytes
from runtime.server.dropped import later, when_dropped
from runtime.server.registered import RegisteredCall
from runtime.server.tasks import LocalTask, RemoteCall, RemoteTask, Task
from runtime.server.trace import traced_remote_call
from runtime.server.turns import begins_in_turn
from runtime.server.unchanged import can_skip, skipping_call
from runtime.server.worker import Worker
from runtime.transport.endpoint import host_id

if TYPE_CHECKING:
    from runtime.server.master import MasterOptions
    from runtime.server.pipeline import Pipeline


@dataclass
class LocalCall:
    """One stage call on a task of this process."""

    worker: Worker
    registered: RegisteredCall
    inline: tuple[int, ...]
    outputs: tuple[int, ...]
    replies: tuple[int, ...]


@dataclass(frozen=True)
class FlowCall:
    """One stage call among several of which some may wait.

    Attributes:
        call: the call.
        part: of the step (``runtime.server.counters``), to which its time counts.
        after: the places of the calls in the flow that must be over before it begins.
        waits: whether it may wait.
    """

    call: RemoteCall | LocalCall
    part: int
    after: tuple[int, ...]
    waits: bool


@dataclass
class Phase:
    """Stage calls of a step that begin when those of the phase before are over, and do not wait for each other."""

    remote: list[RemoteCall] = field(default_factory=list)
    local: list[LocalCall] = field(default_factory=list)
    flow: list[FlowCall] = field(default_factory=list)
    """All of them in their place where there are several, of which some may wait: some may begin after others."""


@dataclass
class PreparedPlan:
    """A plan whose stages are registered on their tasks."""

    plan: Plan
    phases: list[Phase]
    uses_step_id: bool
    schedule: list[tuple[Phase, int, int]]  # with what a phase does, and the value to wait for before its sending
    times: StepTimes
    wire_bytes: int
    traced: PreparedPlan | None = None
    pipeline: Pipeline | None = None


def register(
    plan: Plan,
    tasks: Mapping[str, Task],
    options: MasterOptions,
    worker: Worker,
    session: int,
    times: StepTimes,
    *,
    traced: bool,
) -> PreparedPlan:
    """Registers the stages of a plan on their tasks.

    Args:
        plan: the plan.
        tasks: the session's tasks, by name.
        options: the session's.
        worker: of the master's own task.
        session: id of the session.
        times: where the plan's steps are counted.
        traced: time what it does.

    Raises:
        AbortedError: a task has restarted since the session began.
        UnavailableError: a task is gone.
    """
    writing = Counter(call.stage.device.task_name for call in plan.stages if call.stage.writes and not call.stage.host)
    writes = dict(writing) if writing.total() > 1 else None  # one writing stage alone is atomic anyway

    def remote(task: RemoteTask, call: StageCall) -> RemoteCall:
        skips = options.skip_unchanged and not traced and can_skip(call)
        in_turn = not traced and task.host_id == host_id() and begins_in_turn(plan, call)
        fetched, limit = frozenset(plan.fetches), options.operation_timeout_secs
        made = task.register(call, fetched, limit, writes, traced, skips, in_turn)
        registered.setdefault(task, []).append(made.handle)
        if skips:
            made = skipping_call(made, task.reads, times)
        if traced:
            own_device = next(d for d in worker.devices if d.type == "CPU").name
            made = traced_remote_call(made, call.wave, session, own_device, worker.tracer)
        return made

    def local(task: LocalTask, call: StageCall) -> LocalCall:
        made = task.register(call, writes, traced, options.foreign)
        inline = tuple(call.inputs[i] for i in made.inline)
        return LocalCall(task.server.worker, made, inline, call.outputs, call.replies)

    registered: dict[RemoteTask, list[int]] = {}
    made: list[RemoteCall | LocalCall] = []
    try:
        for call in plan.stages:
            task = tasks[call.stage.device.task_name]
            made.append(remote(task, call) if isinstance(task, RemoteTask) else local(task, call))
    except BaseException:
        later(functools.partial(_unregister, session, registered))
        raise
    step_id = plan.step_id_slot
    uses_step_id = step_id in plan.fetches or any(step_id in call.inputs for call in plan.stages)
    own = worker.task
    waves = sorted({call.wave for call in plan.stages})
    parts, awaited = dict(zip(waves, parts_of(plan), strict=True)), awaited_slots(plan, own)
    schedule = [
        (_phase(plan, made, members, parts), parts[members[0]], awaited[waves.index(members[0])])
        for members in phases(plan)
    ]
    ordered = [phase for phase, _, _ in schedule]
    prepared = PreparedPlan(plan, ordered, uses_step_id, schedule, times, wire_bytes(plan, own))
    if registered:  # a step that is under way holds its plan
        when_dropped(prepared, functools.partial(_unregister, session, registered))
    return prepared


def _unregister(session: int, registered: Mapping[RemoteTask, Sequence[int]]) -> None:
    """Tells tasks that a plan is gone."""
    for task, handles in registered.items():
        task.unregister(session, handles)


def _phase(
    plan: Plan, made: Sequence[RemoteCall | LocalCall], members: Sequence[int], parts: Mapping[int, int]
) -> Phase:
    """The phase of these waves."""
    numbers = [i for i, call in enumerate(plan.stages) if call.wave in members]
    calls = [made[i] for i in numbers]
    phase = Phase([c for c in calls if isinstance(c, RemoteCall)], [c for c in calls if isinstance(c, LocalCall)])
    if len(numbers) > 1 and any(plan.stages[i].stage.may_wait for i in numbers):
        place = {number: k for k, number in enumerate(numbers)}
        phase.flow = [
            FlowCall(
                made[i],
                parts[plan.stages[i].wave],
                tuple(place[before] for before in plan.after[i] if before in place),
                plan.stages[i].stage.may_wait,
            )
            for i in numbers
        ]
    return phase
