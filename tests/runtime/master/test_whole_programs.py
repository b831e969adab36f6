"""Whole programs against a sequential model: steps that wait, write and read values of all types, on any tasks.

The model below knows nothing of stages: it runs the needed operations of a step one after the
other, each as soon as what it waits for is done. Enqueues of one queue are in order, and so are its
dequeues, and so are the reads and writes of one variable. So whatever runs at the same time, a step
has one result; or it can never end, and is left out.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import runtime as rt
from tests.examples import costly
from tests.runtime.kit import TARGET, servers

pytestmark = pytest.mark.cluster

TASKS = ("/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1")
WAIT_SECS = 60.0
"""Far more than any step takes: one that still runs then hangs."""

State = dict[str, Any]
Values = dict[rt.Tensor, Any]


@dataclass(frozen=True)
class Kind:
    """What a tensor is: its type and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def make(self, number: int) -> np.ndarray:
        """Some value of this kind."""
        size = int(np.prod(self.shape))
        if self.dtype.hasobject:
            made = np.array(
                [f"{number}:{i}".encode() * (number % 3) for i in range(size)] or [None], object
            )[:size]
        else:
            made = (np.arange(size) * 3 + number).astype(self.dtype)
        return made.reshape(self.shape)


NUMBERS = (
    np.int32,
    np.int64,
    np.uint8,
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    np.complex64,
    np.bool_,
)
KINDS = tuple(Kind(np.dtype(d), shape) for d in (*NUMBERS, object) for shape in ((), (2,), (2, 0)))


@dataclass(frozen=True)
class Node:
    """An operation of the model."""

    before: tuple[rt.Operation, ...]
    can_run: Callable[[State], bool]
    run: Callable[[State, Values], None]


@dataclass
class Program:
    """A graph, what its operations mean, and steps to run."""

    graph: rt.Graph = field(default_factory=rt.Graph)
    nodes: dict[rt.Operation, Node] = field(default_factory=dict)
    start: State = field(default_factory=dict)
    variables: dict[str, rt.Variable] = field(default_factory=dict)
    steps: list[tuple[list[Any], dict[rt.Tensor, np.ndarray]]] = field(default_factory=list)


def outcome(
    program: Program, fetches: Sequence[Any], feeds: Mapping[rt.Tensor, Any], state: State
) -> Values | None:
    """Runs a step in the model, which changes ``state``; None, and nothing changed, when the step could not end."""
    needed: dict[rt.Operation, None] = {}
    stack = [f.op if isinstance(f, rt.Tensor) else f for f in fetches]
    while stack:
        op = stack.pop()
        if op not in needed and op in program.nodes:
            needed[op] = None
            stack += program.nodes[op].before
    after = {
        name: list(value) if isinstance(value, list) else value for name, value in state.items()
    }
    values: Values = dict(feeds)
    left = [op for op in program.nodes if op in needed]
    while left:
        for op in left:
            node = program.nodes[op]
            if not any(b in left for b in node.before) and node.can_run(after):
                node.run(after, values)
                left.remove(op)
                break
        else:
            return None
    state.update(after)
    return values


NAMES = itertools.count()


@dataclass
class Builder:
    """Draws a program."""

    draw: Any
    program: Program = field(default_factory=Program)
    tensors: dict[Kind, list[rt.Tensor]] = field(default_factory=dict)
    placeholders: dict[rt.Tensor, Kind] = field(default_factory=dict)
    queues: list[tuple[rt.FIFOQueue, Kind, int]] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    last: dict[str, list[rt.Operation]] = field(default_factory=dict)

    def build(self) -> Program:
        """A graph with a few variables and queues, and steps of it."""
        with self.program.graph.as_default():
            for _ in range(self.draw(st.integers(1, 3))):
                self.variable(self.pick(KINDS))
            for _ in range(self.draw(st.integers(1, 2))):
                self.queue(self.pick(list(self.kinds.values())))
            for kind in dict.fromkeys(self.kinds.values()):
                tensor = rt.placeholder(kind.dtype, list(kind.shape))
                self.placeholders[tensor] = kind
                self.tensors[kind] = [tensor]
            for _ in range(self.draw(st.integers(2, 10))):
                made = list(self.program.nodes)
                with rt.device(self.pick(TASKS)), rt.control_dependencies(self.some(made)):
                    getattr(self, self.pick(WHAT))()
            state = dict(self.program.start)
            for _ in range(self.draw(st.integers(1, 5))):
                self.step(state)
        return self.program

    def pick(self, items: Sequence[Any]) -> Any:
        """One of them."""
        return items[self.draw(st.integers(0, len(items) - 1))]

    def some(self, items: Sequence[Any], least: int = 0, most: int = 2) -> list[Any]:
        """Some of them."""
        if not items:
            return []
        return list(
            dict.fromkeys(self.pick(items) for _ in range(self.draw(st.integers(least, most))))
        )

    def variable(self, kind: Kind) -> None:
        """A variable on any task."""
        name = f"v{next(NAMES)}"
        value = kind.make(self.draw(st.integers(0, 9)))
        with rt.device(self.pick(TASKS)):
            self.program.variables[name] = rt.Variable(value, dtype=kind.dtype, name=name)
        self.program.start[name] = value
        self.kinds[name] = kind

    def queue(self, kind: Kind) -> None:
        """A queue on any task, often full."""
        name, capacity = f"q{next(NAMES)}", self.draw(st.integers(1, 3))
        with rt.device(self.pick(TASKS)):
            made = rt.FIFOQueue(capacity, [kind.dtype], [list(kind.shape)], name=name)
        self.queues.append((made, kind, capacity))
        self.program.start[name] = []

    def node(
        self,
        op: rt.Operation,
        run: Callable[[State, Values], None],
        can_run: Callable[[State], bool] = lambda _: True,
    ) -> None:
        """Notes what an operation means."""
        before = (*(t.op for t in op.inputs), *op.control_inputs)
        self.program.nodes[op] = Node(before, can_run, run)

    def after(self, what: str, op_of: Callable[[], rt.Operation]) -> rt.Operation:
        """Makes an operation that comes after the last one that did ``what``."""
        with rt.control_dependencies(self.last.get(what, [])):
            op = op_of()
        self.last[what] = [op]
        return op

    def compute(self) -> None:
        """Doubles numbers, turns truth over; hands strings on."""
        kind = self.pick(list(self.tensors))
        x = self.pick(self.tensors[kind])
        fn: Callable[[Any], Any] = {"O": lambda a: a, "b": lambda a: ~a}.get(
            kind.dtype.kind, lambda a: a + a
        )
        y = rt.identity(x) if kind.dtype.hasobject else rt.call(fn, x)
        self.node(
            y.op, lambda _, values: values.update({y: np.asarray(fn(values[x])).astype(kind.dtype)})
        )
        self.tensors[kind].append(y)

    def read(self) -> None:
        """Reads a variable after its last write."""
        name = self.pick(list(self.program.variables))
        v = self.program.variables[name]
        with rt.control_dependencies(self.last.get(f"write {name}", [])):
            y = v.read_value()
        self.last.setdefault(f"read {name}", []).append(y.op)
        self.node(y.op, lambda state, values: values.update({y: state[name]}))
        self.tensors[self.kinds[name]].append(y)

    def write(self) -> None:
        """Writes a variable after its last write and all reads since then."""
        name = self.pick(list(self.program.variables))
        v, kind = self.program.variables[name], self.kinds[name]
        x = self.pick(self.tensors[kind])
        adds = kind.dtype.kind not in "Ob" and self.draw(st.booleans())
        with rt.control_dependencies(self.last.pop(f"read {name}", [])):
            y = self.after(
                f"write {name}", lambda: (v.assign_add if adds else v.assign)(x).op
            ).outputs[0]

        def run(state: State, values: Values) -> None:
            state[name] = (
                np.asarray(state[name] + values[x]).astype(kind.dtype) if adds else values[x]
            )
            values[y] = state[name]

        self.node(y.op, run)
        self.tensors[kind].append(y)

    def enqueue(self) -> None:
        """Adds an element; waits for room."""
        queue, kind, capacity = self.pick(self.queues)
        x = self.pick(self.tensors[kind])
        op = self.after(f"enqueue {queue.name}", lambda: queue.enqueue(x))
        self.node(
            op,
            lambda state, values: state[queue.name].append(values[x]),
            lambda state: len(state[queue.name]) < capacity,
        )

    def dequeue(self) -> None:
        """Takes an element; waits for one."""
        queue, kind, _ = self.pick(self.queues)
        y = self.after(f"dequeue {queue.name}", lambda: queue.dequeue().op).outputs[0]
        self.node(
            y.op,
            lambda state, values: values.update({y: state[queue.name].pop(0)}),
            lambda state: bool(state[queue.name]),
        )
        self.tensors[kind].append(y)

    def step(self, state: State) -> None:
        """A step of this program that ends, if one is drawn."""
        everything = [*self.program.nodes, *(t for op in self.program.nodes for t in op.outputs)]
        fetches = self.some(everything, least=1, most=4)
        feeds = {
            t: kind.make(self.draw(st.integers(0, 9))) for t, kind in self.placeholders.items()
        }
        if outcome(self.program, fetches, feeds, state) is not None:
            self.program.steps.append((fetches, feeds))


WHAT = "compute compute read read write write enqueue enqueue dequeue dequeue".split()


@st.composite
def programs(draw: Any) -> Program:
    """Programs with steps that can end."""
    return Builder(draw).build()


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "sockets"])
def cluster(request: Any) -> Iterator[dict[str, rt.Server]]:
    with servers(sockets=request.param, ps=2, worker=2) as made:
        yield made


def check(found: Any, wanted: Any, what: Any) -> None:
    if wanted is None:
        assert found is None, what
        return
    assert np.asarray(found, object if wanted.dtype.hasobject else None).dtype == wanted.dtype, what
    np.testing.assert_array_equal(found, wanted, err_msg=str(what))


@costly(4)
@hypothesis.given(program=programs())
def test_program_equals_its_operations_in_order(
    cluster: dict[str, rt.Server], program: Program
) -> None:
    """A program does what its operations do one after the other."""
    with program.graph.as_default():
        init = rt.global_variables_initializer()
    state = dict(program.start)
    with rt.Session(cluster[TARGET].target, program.graph) as session:
        session.run(init)
        for fetches, feeds in program.steps:
            wanted = outcome(program, fetches, feeds, state)
            assert wanted is not None
            found = session.run(fetches, feeds, timeout_secs=WAIT_SECS)
            for fetch, value in zip(fetches, found, strict=True):
                check(value, wanted[fetch] if isinstance(fetch, rt.Tensor) else None, fetch)
            for name, v in program.variables.items():
                check(session.run(v), state[name], name)
    for server in cluster.values():
        assert len(server.worker.rendezvous) == 0
