"""Nothing of a step waits for a wait that it does not depend on, however the step is cut into stages and phases."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import runtime as rt
from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import WAITING, may_wait
from runtime.plan.partition import is_write
from runtime.plan.phases import group_waves
from runtime.plan.place import Device, DeviceChoices
from runtime.plan.plan import Plan
from runtime.plan.planner import make_plan
from runtime.plan.prune import prune_graph
from runtime.task.fitting import check_plan
from runtime.task.host_kernels import KERNELS, find_kernel
from runtime.wire.messages import plan_from_proto, plan_to_proto

TASKS = ("/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0")
DEVICES = DeviceChoices(
    (Device("ps", 0), Device("ps", 1), Device("worker", 0)),
    ("worker", 0),
    ("ps", 0),
)


@st.composite
def steps(draw: Any) -> list[Any]:
    """The fetches of a step with operations that wait, compute, read, write and print, in any order, anywhere."""

    def pick(items: Any) -> Any:
        return items[draw(st.integers(0, len(items) - 1))]

    with rt.Graph().as_default():
        queues, variables = [], []
        for i, task in enumerate(TASKS):
            with rt.device(task):
                queues.append(rt.FIFOQueue(1, np.float32, [[]], name=f"q{i}"))
                variables.append(rt.Variable(np.float32(i), name=f"v{i}"))
        tensors: list[Tensor] = [rt.constant(np.float32(1))]
        operations: list[Operation] = []
        for _ in range(draw(st.integers(2, 14))):
            before = [pick(operations)] if operations and draw(st.integers(0, 3)) == 0 else []
            with rt.device(pick(TASKS)), rt.control_dependencies(before):
                kind = draw(st.integers(0, 6))
                made: Any
                if kind == 0:
                    made = pick(queues).dequeue()
                elif kind == 1:
                    made = pick(queues).enqueue(pick(tensors))
                elif kind == 2:
                    made = pick(variables).assign_add(pick(tensors))
                elif kind == 3:
                    made = pick(variables).read_value()
                elif kind == 4:
                    made = rt.Print(pick(tensors), [pick(tensors)], "printed")
                else:
                    made = rt.call(lambda x, y: x + y, pick(tensors), pick(tensors))
            operations.append(made.op if isinstance(made, Tensor) else made)
            tensors += [made] if isinstance(made, Tensor) else []
        fetches: list[Any] = [
            pick([*tensors[1:], *operations]) for _ in range(draw(st.integers(1, 8)))
        ]
        return list(dict.fromkeys(fetches))


def _over(plan: Plan, stuck: set[int]) -> set[int]:
    """The stages of a step that are over in the end when some of them wait for ever."""
    over: set[int] = set()
    for waves in group_waves(plan):
        members = {i for i, call in enumerate(plan.stages) if call.wave in waves}
        while ready := {i for i in members - over - stuck if over.issuperset(plan.after[i])}:
            over |= ready
        if not members <= over:
            break
    return over


@hypothesis.given(steps(), st.randoms(use_true_random=False))
def test_independent_writes_await_nothing(fetches: list[Any], random: Any) -> None:
    """A write that depends on no wait is made without that wait."""
    plan = make_plan(fetches, {}, DEVICES)
    needed = prune_graph(fetches, {})
    ancestors: dict[str, set[str]] = {}
    for op in needed.operations:
        ancestors[op.name] = {a for b in needed.waits_for[op] for a in (b.name, *ancestors[b.name])}
    stage_of = {name: i for i, call in enumerate(plan.stages) for name in call.stage.operations}
    waiting = [op.name for op in needed.operations if may_wait(op.body)]
    for name in waiting:
        assert plan.stages[stage_of[name]].stage.operations == (name,)
    for call, before in zip(plan.stages, plan.after, strict=True):
        assert all(plan.stages[b].wave < call.wave for b in before)
    assert _over(plan, set()) == set(range(len(plan.stages)))
    for _ in range(4):
        stuck = set(random.sample(waiting, random.randint(0, len(waiting))))
        over = _over(plan, {stage_of[name] for name in stuck})
        for op in needed.operations:
            free = op.name not in stuck and not ancestors[op.name] & stuck
            if free and is_write(op):
                assert stage_of[op.name] in over, f"{op.name} waits for one of {stuck}"
            if not free and op.name in stage_of:
                assert stage_of[op.name] not in over


@hypothesis.given(steps())
def test_plan_survives_its_wire_form(fetches: list[Any]) -> None:
    """A plan is the same after its way to another master."""
    plan = make_plan(fetches, {}, DEVICES)
    there = plan_from_proto(plan_to_proto(plan), rt.Limits())
    assert there.after == plan.after and group_waves(there) == group_waves(plan)


@hypothesis.given(steps(), st.data())
def test_contradicting_plan_is_refused(fetches: list[Any], data: st.DataObject) -> None:
    """A plan from the wire passes its check as it was made, and any damaged number passes or is refused by name."""
    message = plan_to_proto(make_plan(fetches, {}, DEVICES))
    check_plan(plan_from_proto(message, rt.Limits()))
    stage = data.draw(st.integers(0, len(message.stages) - 1))
    lists = [
        message.fetches,
        message.after[stage].stages,
        message.stages[stage].inputs,
        message.stages[stage].outputs,
    ]
    damaged = data.draw(st.sampled_from([numbers for numbers in lists if numbers]))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] = data.draw(st.sampled_from([-7, -2, message.slots, 1 << 30]))
    with pytest.raises(rt.InvalidArgumentError, match=r"(fetches|outputs|(after|inputs) of stage)"):
        check_plan(plan_from_proto(message, rt.Limits()))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda m: m.after.pop(), "after: 2 for 3 stages"),
        (lambda m: m.after[1].stages.append(1), "after of stage 1: there is no number 1 among 1"),
        (lambda m: m.stages.reverse(), "inputs of stage 0: there is no number"),
        (lambda m: setattr(m, "feeds", -1), "feeds and constants: there is no number -1"),
        (lambda m: setattr(m, "slots", 0), "feeds and constants: there is no number 0 among 0"),
    ],
)
def test_contradiction_is_named(damage: Any, what: str) -> None:
    """The error of a plan that contradicts itself names the part."""
    with rt.Graph().as_default():
        with rt.device(TASKS[0]):
            w = rt.Variable(np.float32(1), name="w")
        with rt.device(TASKS[2]):
            y = rt.numpy.tanh(w)
        message = plan_to_proto(make_plan([w.assign_add(y).op], {}, DEVICES))
    damage(message)
    with pytest.raises(rt.InvalidArgumentError, match=what):
        check_plan(plan_from_proto(message, rt.Limits()))


def test_phase_without_waits_is_wave() -> None:
    """Each phase of a plan without waits is one wave."""
    with rt.Graph().as_default():
        with rt.device(TASKS[0]):
            w = rt.Variable(np.float32(1), name="w")
        with rt.device(TASKS[2]):
            y = rt.numpy.tanh(w)
        plan = make_plan([w.assign_add(y).op], {}, DEVICES)
    assert group_waves(plan) == [(0,), (1,), (2,)]


def test_queue_training_stays_three_phases() -> None:
    """Training on what a queue gives stays pull, compute and push."""
    with rt.Graph().as_default():
        with rt.device(TASKS[0]):
            w = rt.Variable(np.float32(1), name="w")
            step = rt.Variable(0, dtype=np.int64, name="step")
        with rt.device(TASKS[2]):
            batch = rt.FIFOQueue(1, np.float32, [[]], name="q").dequeue()
            gradient = rt.numpy.tanh(w) * batch
        with rt.control_dependencies([w.assign_add(gradient)]):
            train = step.assign_add(1)
        plan = make_plan([train.op, step.value()], {}, DEVICES)
    found = group_waves(plan)
    assert all(len(waves) == 1 for waves in found)
    stages = [[c.stage.device.job for c in plan.stages if c.wave in waves] for waves in found]
    assert stages == [["ps", "worker"], ["worker"], ["ps"]] or stages == [
        ["worker", "ps"],
        ["worker"],
        ["ps"],
    ]


def test_every_waiting_kernel_exists() -> None:
    """Every name of a kernel that may wait has a kernel."""
    for name in WAITING:
        assert find_kernel(name) is KERNELS[name]
