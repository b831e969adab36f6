"""Cutting a step into stages changes nothing: any graph, placed anyhow, gives what it gives in one place."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import (
    Constant,
    Feed,
    Host,
    Nothing,
    Pure,
    Read,
    Update,
)
from runtime.plan.partition import StagePartition, partition_operations
from runtime.plan.place import Device, DeviceChoices, place_operations
from runtime.plan.plan import Plan, VariableOutput
from runtime.plan.planner import make_plan
from runtime.plan.prune import drop_identities, prune_graph
from runtime.task.compiler import Compiler
from runtime.tensor_spec import TensorSpec
from tests.examples import costly
from tests.runtime.kit import servers

WIDTH = 3
TASKS = ("/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1")
ALL = tuple(
    Device(job, task, "CPU", index)
    for job in ("ps", "worker")
    for task in (0, 1)
    for index in (0, 1)
)
DEVICES = DeviceChoices(ALL, ("worker", 0), ("ps", 0))
START = {"a": 3, "b": -5, "c": 7}


@dataclass
class Program:
    """A graph, a step of it, and its variables."""

    graph: rt.Graph
    fetches: list[Any]
    feeds: dict[Tensor, np.ndarray]
    variables: list[rt.Variable]


@dataclass
class Builder:
    """Draws a graph whose reads and writes of each variable are ordered, so that it has one meaning."""

    draw: Any
    devices: Sequence[str]
    tensors: list[Tensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    feedable: list[Tensor] = field(default_factory=list)
    feeds: dict[Tensor, np.ndarray] = field(default_factory=dict)
    variables: list[rt.Variable] = field(default_factory=list)
    since_write: dict[rt.Variable, list[Operation]] = field(default_factory=dict)

    def build(self) -> Program:
        with rt.Graph().as_default() as graph:
            for name, value in START.items():
                with rt.device(self.pick(self.devices)):
                    self.variables.append(rt.Variable(np.full(WIDTH, value, np.int32), name=name))
            for v in self.variables:
                self.since_write[v] = [v.op] if self.draw(st.booleans()) else []
                if self.since_write[v]:
                    self.tensors.append(v.value())
            self.placeholder()
            for _ in range(self.draw(st.integers(1, 12))):
                before = self.some(self.operations, 2)
                with rt.device(self.pick(self.devices)), rt.control_dependencies(before):
                    getattr(self, self.pick(KINDS))()
                self.operations = [
                    o for o in graph.get_operations() if not o.name.startswith(tuple(START))
                ]
        fetches: list[Any] = self.some([*self.tensors, *self.operations], 4, least=1)
        for tensor in self.some(self.feedable, 2):
            self.feeds[tensor] = self.value()
        return Program(graph, fetches, self.feeds, self.variables)

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self.draw(st.integers(0, len(items) - 1))]

    def some(self, items: Sequence[Any], most: int, least: int = 0) -> list[Any]:
        if not items:
            return []
        return list(
            dict.fromkeys(self.pick(items) for _ in range(self.draw(st.integers(least, most))))
        )

    def value(self) -> np.ndarray:
        slope, start = self.draw(st.integers(-9, 9)), self.draw(st.integers(-9, 9))
        return np.arange(WIDTH, dtype=np.int32) * np.int32(slope) + np.int32(start)

    def placeholder(self) -> None:
        tensor = rt.placeholder(np.int32, [None])
        self.feeds[tensor] = self.value()
        self.tensors.append(tensor)

    def constant(self) -> None:
        self.tensors.append(rt.constant(self.value()))

    def large_constant(self) -> None:
        tensor = rt.constant(np.arange(400, dtype=np.int32) * self.draw(st.integers(-9, 9)))
        self.compute(rt.call(lambda big, x: big[-WIDTH:] - x, tensor, self.pick(self.tensors)))

    def compute(self, *tensors: Tensor) -> None:
        self.tensors.extend(tensors)
        self.feedable.extend(tensors)

    def binary(self) -> None:
        fn = self.pick((lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y))
        self.compute(rt.call(fn, self.pick(self.tensors), self.pick(self.tensors)))

    def two_results(self) -> None:
        self.compute(*rt.call(lambda x: (x + 1, x * 2), self.pick(self.tensors)))

    def identity(self) -> None:
        self.compute(rt.identity(self.pick(self.tensors)))

    def on_host(self) -> None:
        self.compute(
            rt.lowlevel.host_call(
                "identity", [self.pick(self.tensors)], [((WIDTH,), np.int32)]
            ).outputs[0]
        )

    def read(self) -> None:
        v = self.pick(self.variables)
        with rt.control_dependencies(
            [o for o in self.since_write[v] if not isinstance(o.body, Read)]
        ):
            tensor = v.read_value()
        self.since_write[v].append(tensor.op)
        self.tensors.append(tensor)

    def write(self) -> None:
        v = self.pick(self.variables)
        with rt.control_dependencies(self.since_write[v]):
            tensor = self.pick((v.assign, v.assign_add, v.assign_sub))(self.pick(self.tensors))
        self.since_write[v] = [tensor.op]
        self.tensors.append(tensor)

    def write_several(self) -> None:
        first = self.pick(self.variables)
        group = [v for v in self.variables if v.device == first.device]
        with rt.control_dependencies([o for v in group for o in self.since_write[v]]):
            op = rt.update(
                group,
                lambda *a: ([x * 2 + a[-1] for x in a[:-1]], [a[0]]),
                [self.pick(self.tensors)],
                outputs=[((WIDTH,), np.int32)],
            )
        for v in group:
            self.since_write[v] = [op]
        self.tensors.append(op.outputs[0])

    def nothing(self) -> None:
        rt.group(*self.some(self.operations, 3), name="nothing")


KINDS = (
    "placeholder constant large_constant binary binary binary two_results identity on_host read "
    "read write write "
    "write_several nothing"
).split()


@st.composite
def programs(draw: Any, devices: Sequence[str]) -> Program:
    return Builder(draw, devices).build()


State = dict[str, np.ndarray]


def evaluate(op: Operation, values: dict[Tensor, Any], state: State) -> None:
    """Runs one operation in numpy."""
    body, inputs = op.body, [values[t] for t in op.inputs]
    if isinstance(body, Read):
        results: Sequence[Any] = [state[body.variable.name]]
    elif isinstance(body, Constant):
        results = [body.value]
    elif isinstance(body, Pure):
        results = body(*inputs)
    elif isinstance(body, Host):
        results = inputs
    elif isinstance(body, Update):
        old = [] if body.overwrites else [state[v.name] for v in body.variables]
        everything = body.fn(*old, *inputs)
        state.update(zip((v.name for v in body.variables), everything, strict=False))
        results = everything[len(body.variables) :]
    else:
        assert isinstance(body, Nothing)
        results = ()
    for tensor, value in zip(op.outputs, results, strict=True):
        values.setdefault(tensor, np.asarray(value))


def in_one_place(program: Program) -> tuple[list[Any], State]:
    """What the step means: the needed operations, one after the other, in the order they were made."""
    needed: set[Operation] = set()
    stack = [
        f.op if isinstance(f, Tensor) else f for f in program.fetches if f not in program.feeds
    ]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [t.op for t in op.inputs if t not in program.feeds]
            stack += [
                c
                for c in op.control_inputs
                if not (c.outputs and set(c.outputs) <= set(program.feeds))
            ]
    values: dict[Tensor, Any] = dict(program.feeds)
    state = {name: np.full(WIDTH, value, np.int32) for name, value in START.items()}
    for op in program.graph.get_operations():
        if op in needed and not isinstance(op.body, Feed):
            evaluate(op, values, state)
    return [values[f] if isinstance(f, Tensor) else None for f in program.fetches], state


def cuts_of(
    program: Program, devices: DeviceChoices
) -> tuple[list[StagePartition], Mapping[Tensor, Tensor], Sequence[Tensor]]:
    needed = prune_graph(program.fetches, program.feeds)
    placed = place_operations(needed.operations, devices)
    needed = drop_identities(needed, lambda a, b: placed[a] == placed[b], program.feeds)
    cuts = partition_operations(
        needed.operations,
        needed.waits_for,
        lambda op: (placed[op], isinstance(op.body, Host)),
        lambda op: placed[op].task_name,
    )
    check_order(needed.operations, needed.waits_for, cuts)
    return cuts, needed.alias, needed.given


def check_order(
    operations: Sequence[Operation],
    waits_for: Mapping[Operation, Sequence[Operation]],
    cuts: Sequence[StagePartition],
) -> None:
    """Every operation is in one stage, after all that it waits for, and stages of one wave do not wait for another."""
    place_of = {op: (c.wave, c.place, i) for c in cuts for i, op in enumerate(c.operations)}
    assert sum(len(c.operations) for c in cuts) == len(place_of) == len(operations)
    assert len({(c.wave, c.place) for c in cuts}) == len(cuts)
    assert [c.wave for c in cuts] == sorted(c.wave for c in cuts)
    for op in operations:
        wave, where, index = place_of[op]
        for before in waits_for[op]:
            earlier = place_of[before]
            assert earlier[0] < wave or earlier[:2] == (wave, where) and earlier[2] < index


SPREAD = [f"{task}/cpu:{i}" for task in TASKS for i in (0, 1)]


@hypothesis.given(programs(SPREAD), st.randoms(use_true_random=False))
def test_cut_keeps_dependencies_and_values(program: Program, random: Any) -> None:
    """The cut of a step into stages keeps every dependency and value."""
    cuts, alias, given = cuts_of(program, DEVICES)
    values: dict[Tensor, Any] = dict(program.feeds)
    values |= {t: t.op.body.value for t in given if isinstance(t.op.body, Constant)}
    state = {name: np.full(WIDTH, value, np.int32) for name, value in START.items()}
    for c in sorted(cuts, key=lambda c: (c.wave, random.random())):  # any order within a wave
        inside = dict(values)
        for op in c.operations:
            for tensor in op.inputs:
                inside[tensor] = inside[alias.get(tensor, tensor)]
            evaluate(op, inside, state)
        values |= {t: inside[t] for op in c.operations for t in op.outputs}
    found = [values[alias.get(f, f)] if isinstance(f, Tensor) else None for f in program.fetches]
    check_equal(found, state, program)


def check_equal(found: Sequence[Any], state: State, program: Program) -> None:
    wanted, wanted_state = in_one_place(program)
    assert len(found) == len(wanted)
    for value, want in zip(found, wanted, strict=True):
        if want is None:
            assert value is None
        else:
            np.testing.assert_array_equal(value, want)
            assert value.dtype == want.dtype
    for name, want in wanted_state.items():
        np.testing.assert_array_equal(state[name], want, err_msg=name)


COMPILER = Compiler()


def interpret(plan: Plan, feeds: Sequence[np.ndarray]) -> tuple[list[Any], State]:
    """Runs a plan by the letter: every stage has only what its call says that it gets, and only from where it says."""
    state = {name: np.full(WIDTH, value, np.int32) for name, value in START.items()}
    master: dict[int, Any] = dict(enumerate([*feeds, *plan.constants]))  # what the master has
    # what tasks hold for others, and how often it will be fetched
    held: dict[tuple[str, int], tuple[Any, int]] = {}
    arrived: dict[int, Any] = {}
    wave = -1
    for call in plan.stages:
        if call.wave != wave:  # what a wave gives is there only after it
            master |= arrived
            arrived, wave = {}, call.wave
        stage, inputs = call.stage, []
        for i, slot in enumerate(call.inputs):
            if i in call.remote:
                source = call.remote[i]
                value, left = held.pop((source.task, source.slot))
                if left > 1:
                    held[source.task, source.slot] = (value, left - 1)
                inputs.append(value)
            else:
                inputs.append(master[slot])
        results: list[Any] = []
        if stage.host:
            results = list(inputs)
            for host in stage.host:
                results.append(results[host.arguments[0]])
        elif stage.program is not None:
            run = COMPILER.executable(stage.program, (), jax.local_devices()[0])
            everything = run(*(state[stage.variables[i].name] for i in stage.reads), *inputs)
            state |= {
                stage.variables[i].name: np.asarray(v)
                for i, v in zip(stage.writes, everything, strict=False)
            }
            results = [np.asarray(v) for v in everything[len(stage.writes) :]]
        outputs = [
            state[stage.variables[o.index].name]
            if isinstance(o, VariableOutput)
            else results[o.index]
            for o in stage.outputs
        ]
        for i, slot in enumerate(call.outputs):
            if i in call.replies:
                arrived[slot] = outputs[i]
            if i in call.holds:
                held[stage.device.task_name, slot] = (outputs[i], call.holds[i].times)
    assert not held, "a task holds what nobody fetches"
    master |= arrived
    return [None if slot < 0 else master[slot] for slot in plan.fetches], state


def specs_of(feeds: Mapping[Tensor, np.ndarray]) -> dict[Tensor, TensorSpec]:
    return {t: TensorSpec.of(v) for t, v in feeds.items()}


ONE_CPU = DeviceChoices(tuple(d for d in ALL if d.index == 0), ("worker", 0), ("ps", 0))


@costly(4)
@hypothesis.given(programs(TASKS))
def test_plan_computes_like_one_place(program: Program) -> None:
    """A plan that is run stage by stage computes what one place does."""
    plan = make_plan(program.fetches, specs_of(program.feeds), ONE_CPU)
    found, state = interpret(plan, list(program.feeds.values()))
    check_equal(found, state, program)


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "sockets"])
def cluster(request: Any) -> Iterator[dict[str, rt.Server]]:
    with servers(sockets=request.param, ps=2, worker=2) as made:
        yield made


@pytest.mark.cluster  # many compilations
@costly(4)
@hypothesis.given(program=programs(TASKS))
def test_servers_compute_like_one_place(cluster: dict[str, rt.Server], program: Program) -> None:
    """Servers compute what one place does and keep no tensor."""
    with program.graph.as_default():
        init = rt.global_variables_initializer()
        everything = {v.spec.name: v.read_value() for v in program.variables}
    with rt.Session(cluster["/job:worker/task:0"].target, program.graph) as session:
        session.run(init)
        found = session.run(program.fetches, program.feeds)
        check_equal(found, session.run(everything), program)
        session.run(init)
        check_equal(session.run(program.fetches, program.feeds), session.run(everything), program)
    for server in cluster.values():
        assert len(server.worker.rendezvous) == 0


def waves_of(
    fetches: Sequence[Any], feeds: Mapping[Tensor, TensorSpec] | None = None
) -> list[list[str]]:
    plan = make_plan(
        [rt.get_default_graph().as_graph_element(f) for f in fetches], feeds or {}, ONE_CPU
    )
    waves: dict[int, list[str]] = {}
    for call in plan.stages:
        waves.setdefault(call.wave, []).append(call.stage.device.task_name)
    return [sorted(waves[w]) for w in sorted(waves)]


@pytest.fixture
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def sgd_step(tasks: int) -> list[Any]:
    setter = rt.replica_device_setter(ps_tasks=tasks, worker_device="/job:worker/task:0")
    with rt.device(setter):
        step = rt.Variable(0, dtype=np.int64, name="global_step", trainable=False)
        weights = [rt.Variable(np.ones((4, 4), np.float32), name=f"w{i}") for i in range(4)]
        x = rt.constant(np.ones((2, 4), np.float32))
        loss = rt.call(
            lambda ws, x: jnp.sum(x @ ws[0] @ ws[1] @ ws[2] @ ws[3]), weights, x, name="loss"
        )
        updates = [
            w.assign_sub(0.1 * g) for w, g in zip(weights, rt.gradients(loss, weights), strict=True)
        ]
        with rt.control_dependencies(updates[3:]):
            count = step.assign_add(1)
    return [*updates, count, loss, step]


@pytest.mark.parametrize("tasks", [1, 2])
def test_between_graph_training_has_three_waves(graph: rt.Graph, tasks: int) -> None:
    """Between-graph training is a read, a computation and an update."""
    train = sgd_step(tasks)
    group = rt.group(*train[:-2])
    ps = [f"/job:ps/task:{i}" for i in range(tasks)]
    assert waves_of([group, *train[-2:]]) == [ps, ["/job:worker/task:0"], ps]


def test_in_graph_replication_has_three_waves(graph: rt.Graph) -> None:
    """In-graph replication is a scatter, a computation and a gather."""
    x = rt.placeholder(np.float32, [8], name="x")
    with rt.device("/job:worker/task:0"):
        parts = [rt.call(lambda x, i=i: x[4 * i : 4 * i + 4], x, name="split") for i in range(2)]
    partial = []
    for i, part in enumerate(parts):
        with rt.device(f"/job:worker/task:{i}"):
            partial.append(rt.numpy.sum(rt.numpy.tanh(part)))
    with rt.device("/job:worker/task:0"):
        total = partial[0] + partial[1]
    found = waves_of([total], {x: TensorSpec((8,), np.dtype(np.float32))})
    assert found == [["/job:worker/task:0"], ["/job:worker/task:1"], ["/job:worker/task:0"]]


def test_remote_tensors_bypass_the_master(graph: rt.Graph) -> None:
    """A tensor between two remote tasks does not pass the master."""
    with rt.device("/job:ps/task:0"):
        v = rt.Variable(np.ones(1000, np.float32), name="v")
    with rt.device("/job:worker/task:1"):
        y = v * 2.0
    with rt.device("/job:ps/task:1"):
        w = rt.Variable(np.zeros(1000, np.float32), name="w")
    plan = make_plan([w.assign(y).op], {}, ONE_CPU)
    assert all(not call.replies for call in plan.stages)
    assert sum(len(call.holds) for call in plan.stages) == 2


def test_unordered_updates_all_count(cluster: dict[str, rt.Server], graph: rt.Graph) -> None:
    """Updates that nothing orders are all applied."""
    with rt.device("/job:ps/task:1"):
        v = rt.Variable(0, name="unordered")
    adds = []
    for i, task in enumerate(TASKS):
        with rt.device(task):
            adds.append(v.assign_add(rt.constant(10**i) * 1))
    with rt.Session(cluster["/job:worker/task:0"].target) as session:
        session.run(v.initializer)
        session.run(rt.group(*adds))
        assert session.run(v) == 1111


def test_later_unordered_write_stays(graph: rt.Graph) -> None:
    """Of two writes that nothing orders the later one of the graph stays."""
    v, y = rt.Variable(0.0, name="v"), rt.constant(1.0)
    for _ in range(3):
        y = y + 1.0
    early, late = v.assign(y), v.assign(100.0)
    with rt.Session("", graph) as session:
        session.run(v.initializer)
        assert session.run([early, late, v.read_value()]) == [4.0, 100.0, 100.0]
        assert session.run(v) == 100.0


def test_shared_session_loses_no_update(cluster: dict[str, rt.Server], graph: rt.Graph) -> None:
    """One session of many threads loses no update."""
    with rt.device("/job:ps/task:1"):
        v = rt.Variable(np.zeros(4, np.int64), dtype=np.int64, name="many")
    x = rt.placeholder(np.int64, [4])
    add, twice = v.assign_add(x), rt.identity(x * 2)
    with rt.Session(cluster["/job:worker/task:0"].target) as session:
        session.run(v.initializer)
        wrong: list[Any] = []

        def work(n: int) -> None:
            for _ in range(100):
                value = np.full(4, n, np.int64)
                found = session.run([twice, add.op], {x: value})[0]
                if not np.array_equal(found, 2 * value):
                    wrong.append(found)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not wrong
        np.testing.assert_array_equal(session.run(v), np.full(4, 100 * 36))


def calls_of_partition(size: int) -> int:
    """Returns the calls that it takes to partition an update of ``size`` variables by one program."""
    counted = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    with rt.Graph().as_default() as graph, rt.device("/job:ps/task:0"):
        variables = [rt.Variable(np.zeros(WIDTH, np.float32), name=f"v{i}") for i in range(size)]
        gradients = [v.value() * 2 for v in variables]
        step = rt.update(variables, lambda *values: (list(values[:size]), ()), gradients)
    program = Program(graph, [step], {}, variables)
    sys.setprofile(count)
    try:
        cuts_of(program, DEVICES)
    finally:
        sys.setprofile(None)
    return counted


def test_large_update_is_partitioned_linearly() -> None:
    """Twice as many variables in an update take about twice the calls to partition the step."""
    assert calls_of_partition(80) < 2.5 * calls_of_partition(40)
