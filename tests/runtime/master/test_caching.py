"""Work is done once: plans per session, compilations per process, whoever asks."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import runtime as rt
import runtime.session.session
from runtime.session.feeds import MOST_EVALUATED, WARN_SHAPES
from runtime.task.compiler import Compiler
from tests.kit.processes import ROOT
from tests.runtime.kit import TARGET, servers


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@pytest.fixture
def cluster() -> Iterator[tuple[str, Compiler]]:
    """A target, and the compiler that its worker and its ps share."""
    with servers(sockets=True, ps=1, worker=1) as made:
        compiler = Compiler()
        for server in made.values():
            server.worker.executor.compiler = compiler
        yield made[TARGET].target, compiler


def training() -> tuple[rt.Operation, rt.Tensor, rt.Tensor]:
    with rt.device(rt.replica_device_setter(ps_tasks=1, worker_device=TARGET)):
        w = rt.Variable(np.ones((3, 1), np.float32), name="w")
        x = rt.placeholder(np.float32, [None, 3], name="x")
        loss = rt.numpy.sum((x @ w) ** 2)
        step = w.assign_sub(0.1 * rt.gradients(loss, w)).op
    return step, loss, x


def test_second_run_compiles_nothing(cluster: tuple[str, Compiler], graph: rt.Graph) -> None:
    """A second run of a step plans, traces and compiles nothing until a shape changes."""
    target, compiler = cluster
    step, loss, x = training()
    traced: list[int] = []

    def twice(a: Any) -> Any:
        traced.append(1)
        return a * 2.0

    counted = rt.call(twice, loss)
    with rt.Session(target) as session:
        session.run(rt.global_variables_initializer())
        session.run([step, counted], {x: np.ones((2, 3))})
        graph.finalize()  # a run adds nothing to the graph
        compiled, times = compiler.compilations, len(traced)
        assert compiled > 0
        for _ in range(3):
            session.run([step, counted], {x: np.zeros((2, 3))})
        assert (compiler.compilations, len(traced)) == (compiled, times)
        session.run([step, counted], {x: np.ones((5, 3))})
        assert compiler.compilations == compiled  # a new size is evaluated at first


def test_equal_graphs_compile_once(
    cluster: tuple[str, Compiler],
) -> None:
    """Equal graphs of many sessions compile each stage once."""
    target, compiler = cluster
    compilations = []
    for _ in range(3):
        with rt.Graph().as_default(), rt.Session(target) as session:
            step, _, x = training()
            session.run(rt.global_variables_initializer())
            session.run(step, {x: np.ones((2, 3))})
            compilations.append(compiler.compilations)
    assert compilations[0] == compilations[1] == compilations[2]


PLAN = """
import sys, runtime as rt, numpy as np
from runtime.plan.place import Device, DeviceChoices
from runtime.plan.planner import make_plan
with rt.device(rt.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0")):
    ws = [rt.Variable(np.ones((3, 3), np.float32), name=f"w{i}") for i in range(4)]
    loss = rt.numpy.sum(rt.nn.relu(rt.constant(np.ones((2, 3))) @ ws[0] @ ws[1]) @ ws[2] @ ws[3])
    noise = rt.random.normal((3,))
    steps = [w.assign_sub(g) for w, g in zip(ws, rt.gradients(loss, ws))]
plan = make_plan([*(s.op for s in steps), loss, noise],
                 {}, DeviceChoices((Device("ps", 0), Device("ps", 1), Device("worker", 0)), ("worker", 0), ("ps", 0)))
print([c.stage.program and c.stage.program.sha256 for c in plan.stages])
"""


@pytest.mark.cluster
def test_processes_make_the_same_programs() -> None:
    """Two processes make the same programs, whatever their addresses and hashes."""
    programs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for code, seed in ((PLAN, "1"), ("\n\nimport os\n" + PLAN, "2"))
    ]
    assert programs[0] == programs[1]
    assert programs[0].count("'") >= 6


def test_least_used_plan_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plans of a session are bounded, and the least recently used plan goes."""
    monkeypatch.setattr(runtime.session.recent, "MOST", 3)
    x = rt.placeholder(np.float32, [None], name="x")
    y = x + 1.0
    config = rt.SessionConfig(log_device_placement=True)  # it logs when it plans
    with rt.Session(config=config) as session, caplog.at_level(logging.INFO):
        for size in (1, 2, 3, 1, 4):
            session.run(y, {x: np.zeros(size)})
        caplog.clear()
        session.run(y, {x: np.zeros(1)})
        assert not caplog.records  # it was used after 2
        session.run(y, {x: np.zeros(2)})
        assert caplog.records


def test_restless_placeholder_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A placeholder whose shape keeps changing is named in one warning."""
    x = rt.placeholder(np.float32, [None], name="restless")
    still = rt.placeholder(np.float32, [None], name="still")
    y = x + still
    with rt.Session() as session, caplog.at_level(logging.WARNING):
        for size in range(WARN_SHAPES):
            # So many elements are compiled at once.
            session.run(y, {x: np.zeros(MOST_EVALUATED + size), still: np.zeros(1)})
    assert len(caplog.records) == 1
    assert "'restless:0' was fed with 32 different shapes" in caplog.text


def test_many_fetches_are_one_step(cluster: tuple[str, Compiler]) -> None:
    """Fetching many things is one step, and an update in it runs once."""
    target, _ = cluster
    with rt.device("/job:ps"):
        v = rt.Variable(0, name="v")
    with rt.Session(target) as session:
        session.run(v.initializer)
        add = v.assign_add(1)
        found: list[Any] = session.run([add, add, v.value(), {"again": [add]}])
        assert session.run(v) == 1
        assert found[0] == found[1] == found[3]["again"][0] == 1
