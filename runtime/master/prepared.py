"""Prepared plans: the stages of a plan, registered on their tasks and put into phases.

``MasterSession.prepare`` calls ``register_plan`` once for each plan. A step reads the result and
registers nothing.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime import concurrency
from runtime.master.calls import FlowCall, LocalCall, RemoteCall, StepPhase
from runtime.master.config import SessionConfig
from runtime.master.dropped import later, when_dropped
from runtime.master.exchange import (
    NOT_COMPUTED,
    Exchange,
    Moves,
    StepRun,
    TracedExchange,
    begin_moves,
)
from runtime.master.pipeline import Pipeline
from runtime.master.tasks import LocalTask, RemoteTask, Task
from runtime.observe.counters import StepTimes
from runtime.plan.phases import group_waves
from runtime.plan.plan import Plan, StageCall
from runtime.task.worker import Worker
from runtime.tensor_spec import AnyArray, Array


class PlanRegistrar(Protocol):
    """The face of a session for registration."""

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
        phases: the phases of a step, in order.
        exchange: makes the object for a step's calls to other tasks.
        times: the counters of the plan's steps.
        wire_bytes: bytes of tensors of fixed size in the messages of a step.
        described: slots of the other tensors in the messages of a step.
        moves: the copies to accelerators, which begin when a value is there.
        traced: the same plan, registered with timing.
        pipeline: the overlapped steps of the plan, for a session with ``prefetch``.
    """

    plan: Plan
    phases: tuple[StepPhase, ...]
    exchange: Callable[[StepRun], Exchange]
    times: StepTimes
    wire_bytes: int
    described: tuple[int, ...]
    moves: Moves
    traced: PreparedPlan | None = None
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        step_id = plan.step_id_slot
        self._uses_step_id = step_id in plan.fetches or any(
            step_id in call.inputs for call in plan.stages
        )
        table = [NOT_COMPUTED] * plan.slots
        table[plan.feeds : step_id] = plan.constants
        # A constant moves once, and not in each step.
        begin_moves(self.moves, table, range(plan.feeds, step_id))
        # Each step copies this list, which is faster than to build the table slot by slot.
        self._rest = table[plan.feeds :]

    def values(self, feeds: Sequence[AnyArray], step_ids: Iterator[Array]) -> list[AnyArray]:
        """Returns the table of values of a new step, with ``NOT_COMPUTED`` for the outputs of stages.

        Args:
            feeds: the values of the plan's feeds.
            step_ids: the ids of the session's next steps. A plan without a use for the id takes
                none.
        """
        plan = self.plan
        # The order of the slots is that of ``Plan``.
        values: list[AnyArray] = [*feeds, *self._rest]
        if self._uses_step_id:
            values[plan.step_id_slot] = next(step_ids)
        if self.moves:
            begin_moves(self.moves, values, range(plan.step_id_slot + 1))
        return values


class _Registration(NamedTuple):
    """The registration of a plan's stages on another task.

    Attributes:
        handles: those of the stages that are registered so far.
        calls: the calls of all stages.
    """

    handles: list[int]
    calls: futures.Future[list[RemoteCall]]


def register_plan(
    session: PlanRegistrar, plan: Plan, times: StepTimes, *, traced: bool
) -> PreparedPlan:
    """Registers the stages of a plan on their tasks.

    Args:
        session: the session of the plan.
        plan: the plan.
        times: the counters of the plan's steps.
        traced: True to time the stages.

    Raises:
        AbortedError: a task has restarted since the session began.
        UnavailableError: a task is gone.
    """
    registered: dict[RemoteTask, _Registration] = {}
    unregister = functools.partial(_unregister_plan, session.id, registered)
    try:
        calls = _register_stages(session, plan, traced, registered)
    except BaseException:
        # The tasks may be slow or dead, and the error should reach the caller at once.
        later(unregister)
        raise
    worker = session.worker
    exchange: Callable[[StepRun], Exchange] = Exchange
    if traced:
        # The master itself sends and receives, so the spans go to the CPU of its task.
        own_device = next(d for d in worker.devices if d.type == "CPU").name
        exchange = functools.partial(TracedExchange, device=own_device, tracer=worker.tracer)
    phases = _make_phases(plan, calls)
    moves = _find_moves(plan, calls)
    carried = plan.wire_bytes(worker.task), plan.described_slots(worker.task)
    prepared = PreparedPlan(plan, phases, exchange, times, *carried, moves)
    # A step under way holds its plan, so no stage is unregistered during a step.
    if registered:
        when_dropped(prepared, unregister)
    return prepared


def _register_stages(
    session: PlanRegistrar, plan: Plan, traced: bool, registered: dict[RemoteTask, _Registration]
) -> list[RemoteCall | LocalCall]:
    """Registers each stage on its task, and adds what other tasks register to ``registered``.

    The tasks compile their stages at the same time.
    """
    writing = Counter(call.stage.device.task_name for call in plan.stages if call.stage.updates)
    # One writing stage alone is atomic anyway. Several need the write gate of each task.
    writes = dict(writing) if writing.total() > 1 else None
    by_task: dict[Task, list[StageCall]] = {}
    for call in plan.stages:
        by_task.setdefault(session.tasks[call.stage.device.task_name], []).append(call)

    for task, calls in by_task.items():
        if isinstance(task, RemoteTask):
            handles: list[int] = []
            work = functools.partial(
                _register_remotely, session, plan, calls, task, writes, traced, handles
            )
            registered[task] = _Registration(handles, concurrency.in_thread(work, task.name))
    done: dict[Task, Iterator[RemoteCall | LocalCall]] = {}
    for task, calls in by_task.items():
        if not isinstance(task, RemoteTask):
            done[task] = iter(
                [_register_locally(session, plan, call, task, writes, traced) for call in calls]
            )
    done |= {task: iter(of_task.calls.result()) for task, of_task in registered.items()}
    return [next(done[session.tasks[call.stage.device.task_name]]) for call in plan.stages]


def _register_remotely(
    session: PlanRegistrar,
    plan: Plan,
    calls: Sequence[StageCall],
    task: RemoteTask,
    writes: Mapping[str, int] | None,
    traced: bool,
    handles: list[int],
) -> list[RemoteCall]:
    found, timeout = [], session.options.operation_timeout_secs
    for call in calls:
        found.append(task.register(call, frozenset(plan.fetches), timeout, writes, traced))
        handles.append(found[-1].handle)
    return found


def _register_locally(
    session: PlanRegistrar,
    plan: Plan,
    call: StageCall,
    task: LocalTask,
    writes: Mapping[str, int] | None,
    traced: bool,
) -> LocalCall:
    local = task.register(call, writes, traced, session.foreign)
    inline = tuple(call.inputs[i] for i in local.inline)
    leaving = _find_leaving(plan, call)
    return LocalCall(task.server.worker, local, inline, call.outputs, leaving)


def _find_leaving(plan: Plan, call: StageCall) -> tuple[int, ...]:
    """Returns the slots of an accelerator's outputs that the host takes: packs, then the others in their readers' order."""
    taken = [slot for c in plan.stages if not c.stage.is_accelerated for slot in c.inputs]
    packed = [pack.slot for pack in call.packs]
    computed = {*call.outputs} if call.stage.is_accelerated else ()
    return tuple(s for s in dict.fromkeys((*packed, *taken, *plan.fetches)) if s in computed)


def _find_moves(plan: Plan, calls: Sequence[RemoteCall | LocalCall]) -> Moves:
    """Returns the copies of the values that one stage on an accelerator takes, and nothing else."""
    readers = Counter((*plan.fetches, *(slot for c in plan.stages for slot in c.inputs)))
    return [
        (
            local.registered.prepared.place,
            frozenset(s for s in local.inline if readers[s] == 1),
            call.packs,
        )
        for call, local in zip(plan.stages, calls, strict=True)
        if isinstance(local, LocalCall) and call.stage.is_accelerated
    ]


def _unregister_plan(session: int, registered: Mapping[RemoteTask, _Registration]) -> None:
    """Unregisters the handles of a plan that is gone."""
    for task, of_task in registered.items():
        # A plan that failed on one task may still be registered on another.
        futures.wait([of_task.calls])
        if of_task.handles:
            task.unregister(session, of_task.handles)


def _make_phases(plan: Plan, calls: Sequence[RemoteCall | LocalCall]) -> tuple[StepPhase, ...]:
    """Puts the registered calls of a plan into phases."""
    # Times are counted by wave, and a phase counts for the part of its first wave.
    waves = sorted({call.wave for call in plan.stages})
    parts = dict(zip(waves, plan.parts(), strict=True))
    phases = []
    for members in group_waves(plan):
        numbers = [i for i, call in enumerate(plan.stages) if call.wave in members]
        bundles: dict[object, list[RemoteCall]] = {}
        for i in numbers:
            call = calls[i]
            if isinstance(call, RemoteCall):
                key = call.peer if plan.stages[i].stage.joins_bundle else call
                bundles.setdefault(key, []).append(call)
        phases.append(
            StepPhase(
                parts[members[0]],
                tuple(map(RemoteCall.join, bundles.values())),
                tuple(c for c in map(calls.__getitem__, numbers) if isinstance(c, LocalCall)),
                _make_flow(plan, calls, numbers, parts),
            )
        )
    return tuple(phases)


def _make_flow(
    plan: Plan,
    calls: Sequence[RemoteCall | LocalCall],
    numbers: Sequence[int],
    parts: Mapping[int, int],
) -> tuple[FlowCall, ...]:
    """Returns the flow of a phase; empty if no call may wait, or a call has the phase for itself."""
    if len(numbers) < 2 or not any(plan.stages[i].stage.may_wait for i in numbers):
        return ()
    # A flow counts its calls from 0. Stages before the phase have finished, so their numbers drop
    # out.
    place = {number: k for k, number in enumerate(numbers)}
    return tuple(
        FlowCall(
            calls[i],
            parts[plan.stages[i].wave],
            tuple(place[before] for before in plan.after[i] if before in place),
            plan.stages[i].stage.may_wait,
        )
        for i in numbers
    )
