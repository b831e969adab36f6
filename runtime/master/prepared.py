"""Prepared plans: the stages of a plan, registered on their tasks and put into phases."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.master.calls import FlowCall, LocalCall, Phase, RemoteCall
from runtime.master.config import SessionConfig
from runtime.master.dropped import later, when_dropped
from runtime.master.exchange import Exchange, Run, TracedExchange
from runtime.master.pipeline import Pipeline
from runtime.master.tasks import RemoteTask, Task
from runtime.observe.counters import StepTimes
from runtime.plan.phases import group_waves
from runtime.plan.plan import Plan
from runtime.task.worker import Worker
from runtime.tensor_spec import AnyArray, Array

NOT_COMPUTED = np.array(None)
"""Stands in a step's table of values for what is not computed yet. No stage takes it: it is an array of objects."""


class Registrar(Protocol):
    """The face of a session whose plans are registered."""

    id: int
    foreign: bool
    options: SessionConfig
    tasks: dict[str, Task]
    worker: Worker


@dataclass
class PreparedPlan:
    """A plan whose stages are registered on their tasks.

    Attributes:
        plan: the plan.
        phases: what a step does, in order.
        exchange: how a step makes its calls to other tasks.
        times: where the plan's steps are counted.
        wire_bytes: bytes of tensors of fixed size that a step sends and receives.
        traced: the same plan, registered to be timed.
        pipeline: runs its steps overlapped, for a session that asks for that.
    """

    plan: Plan
    phases: tuple[Phase, ...]
    exchange: Callable[[Run], Exchange]
    times: StepTimes
    wire_bytes: int
    traced: PreparedPlan | None = None
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        step_id = plan.step_id_slot
        self._uses_step_id = step_id in plan.fetches or any(step_id in call.inputs for call in plan.stages)
        self._empty = [NOT_COMPUTED] * (plan.slots - step_id)

    def values(self, feeds: Sequence[Array], next_step_id: Callable[[], Array]) -> list[AnyArray]:
        """Returns the values of a new step, by slot; ``NOT_COMPUTED`` where nothing is computed yet.

        Args:
            feeds: of the plan.
            next_step_id: gives the step's own id.
        """
        plan = self.plan
        values: list[AnyArray] = [*feeds, *plan.constants, *self._empty]
        if self._uses_step_id:
            values[plan.step_id_slot] = next_step_id()
        return values


def register(session: Registrar, plan: Plan, times: StepTimes, *, traced: bool) -> PreparedPlan:
    """Registers the stages of a plan on their tasks.

    Args:
        session: the session of the plan.
        plan: the plan.
        times: where the plan's steps are counted.
        traced: time what it does.

    Raises:
        AbortedError: a task has restarted since the session began.
        UnavailableError: a task is gone.
    """
    writing = Counter(call.stage.device.task_name for call in plan.stages if call.stage.writes and not call.stage.host)
    # One writing stage alone is atomic without this.
    writes = dict(writing) if writing.total() > 1 else None
    worker, timeout = session.worker, session.options.operation_timeout_secs
    registered: dict[RemoteTask, list[int]] = {}
    made: list[RemoteCall | LocalCall] = []
    try:
        for call in plan.stages:
            task = session.tasks[call.stage.device.task_name]
            if isinstance(task, RemoteTask):
                remote = task.register(call, frozenset(plan.fetches), timeout, writes, traced)
                registered.setdefault(task, []).append(remote.handle)
                made.append(remote)
            else:
                local = task.register(call, writes, traced, session.foreign)
                inline = tuple(call.inputs[i] for i in local.inline)
                made.append(LocalCall(task.server.worker, local, inline, call.outputs))
    except BaseException:
        later(functools.partial(_unregister, session.id, registered))
        raise
    waves = sorted({call.wave for call in plan.stages})
    parts, awaited = plan.parts(), plan.awaited_slots(worker.task)
    part_of = dict(zip(waves, parts, strict=True))
    ordered = tuple(
        _phase(plan, made, members, part_of, awaited[waves.index(members[0])]) for members in group_waves(plan)
    )
    exchange: Callable[[Run], Exchange] = Exchange
    if traced:
        own_device = next(d for d in worker.devices if d.type == "CPU").name
        exchange = functools.partial(TracedExchange, device=own_device, tracer=worker.tracer)
    prepared = PreparedPlan(plan, ordered, exchange, times, plan.wire_bytes(worker.task))
    if registered:  # a step that is under way holds its plan
        when_dropped(prepared, functools.partial(_unregister, session.id, registered))
    return prepared


def _unregister(session: int, registered: Mapping[RemoteTask, Sequence[int]]) -> None:
    """Unregisters the handles of a plan that is gone."""
    for task, handles in registered.items():
        task.unregister(session, handles)


def _phase(
    plan: Plan,
    made: Sequence[RemoteCall | LocalCall],
    members: Sequence[int],
    part_of: Mapping[int, int],
    awaited: int,
) -> Phase:
    """Returns the phase of these waves."""
    numbers = [i for i, call in enumerate(plan.stages) if call.wave in members]
    calls = [made[i] for i in numbers]
    flow: tuple[FlowCall, ...] = ()
    if len(numbers) > 1 and any(plan.stages[i].stage.may_wait for i in numbers):
        place = {number: k for k, number in enumerate(numbers)}
        flow = tuple(
            FlowCall(
                made[i],
                part_of[plan.stages[i].wave],
                tuple(place[before] for before in plan.after[i] if before in place),
                plan.stages[i].stage.may_wait,
            )
            for i in numbers
        )
    return Phase(
        part_of[members[0]],
        awaited,
        tuple(c for c in calls if isinstance(c, RemoteCall)),
        tuple(c for c in calls if isinstance(c, LocalCall)),
        flow,
    )
