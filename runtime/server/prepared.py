"""Prepared plans: what a session runs. The stages of a plan, registered on their tasks and put into waves."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.plan.plan import Plan, StageCall
from runtime.server.counters import StepTimes, awaited_slots, parts_of, wire_bytes
from runtime.server.dropped import when_dropped
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


@dataclass
class Wave:
    """Stage calls that do not wait for each other."""

    remote: list[RemoteCall] = field(default_factory=list)
    local: list[LocalCall] = field(default_factory=list)
    waits: bool = False
    """Whether there are several calls, of which some may wait for other workers."""


@dataclass
class PreparedPlan:
    """A plan whose stages are registered on their tasks."""

    plan: Plan
    waves: list[Wave]
    uses_step_id: bool
    schedule: list[tuple[Wave, int, int]]  # with what a wave does, and the value to wait for before its sending
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
        made = task.register(call, writes, traced)
        inline = tuple(call.inputs[i] for i in made.inline)
        return LocalCall(task.server.worker, made, inline, call.outputs, call.replies)

    registered: dict[RemoteTask, list[int]] = {}
    waves: dict[int, Wave] = {}
    for call in plan.stages:
        task = tasks[call.stage.device.task_name]
        wave = waves.setdefault(call.wave, Wave())
        if isinstance(task, RemoteTask):
            wave.remote.append(remote(task, call))
        else:
            wave.local.append(local(task, call))
    for number, wave in waves.items():
        hosts = any(call.stage.host for call in plan.stages if call.wave == number)
        wave.waits = hosts and len(wave.remote) + len(wave.local) > 1
    step_id = plan.step_id_slot
    uses_step_id = step_id in plan.fetches or any(step_id in call.inputs for call in plan.stages)
    own = worker.task
    ordered = [waves[number] for number in sorted(waves)]
    schedule = list(zip(ordered, parts_of(plan), awaited_slots(plan, own), strict=True))
    prepared = PreparedPlan(plan, ordered, uses_step_id, schedule, times, wire_bytes(plan, own))
    if registered:  # a step that is under way holds its plan
        when_dropped(prepared, functools.partial(_unregister, session, registered))
    return prepared


def _unregister(session: int, registered: Mapping[RemoteTask, Sequence[int]]) -> None:
    """Tells tasks that a plan is gone."""
    for task, handles in registered.items():
        task.unregister(session, handles)
