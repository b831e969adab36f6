"""A task that takes modules of StableHLO has them tried out by another process: what ends that one is refused."""

import signal
from collections.abc import Iterator

import pytest

import runtime as rt
from runtime.plan.plan import Program
from runtime.task.module_trial import ModuleTrials
from tests.runtime import kit
from tests.runtime.task.test_hostile_programs import PLAIN, changed

pytestmark = pytest.mark.cluster

DIVIDES_BY_ZERO = changed(
    module="""module @m {
        func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
        %one = stablehlo.constant dense<1> : tensor<i32>
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %none = stablehlo.divide %one, %zero : tensor<i32>
        %f = stablehlo.convert %none : (tensor<i32>) -> tensor<f32>
        %all = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4xf32>
        return %all, %b : tensor<4xf32>, tensor<4xf32> } }"""
)
"""Folding constants, XLA's compiler divides, too, and the processor ends the process."""


@pytest.fixture
def trials() -> Iterator[ModuleTrials]:
    made = ModuleTrials()
    made.try_out(PLAIN)
    yield made
    made.close()


def test_a_module_that_has_passed_is_known(trials: ModuleTrials) -> None:
    before = trials.tried
    trials.try_out(PLAIN)
    assert trials.tried == before


def test_the_process_ends_with_its_server() -> None:
    with rt.Server(kit.addresses(local=1), "local", 0, programs="stablehlo") as server:
        server.worker._trials.try_out(PLAIN)
        process = server.worker._trials._process
        assert process is not None and process.poll() is None
    assert process.returncode == -signal.SIGKILL


def test_a_module_that_ends_the_compiler_is_refused_and_the_next_is_tried(trials: ModuleTrials) -> None:
    with pytest.raises(rt.InvalidArgumentError, match="ended the process in which programs are tried out, with SIG"):
        trials.try_out(DIVIDES_BY_ZERO)
    with pytest.raises(rt.InvalidArgumentError, match="not a program that this task can read"):
        trials.try_out(Program(PLAIN.blob[:50], PLAIN.arguments, PLAIN.results))
    trials.try_out(PLAIN)


def test_a_module_that_takes_too_long_is_refused(trials: ModuleTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    trials.try_out(PLAIN)  # the process has started
    assert trials._process is not None
    trials._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(trials, "_secs", 0.2)
    with pytest.raises(rt.InvalidArgumentError, match="takes more than 0.2 s"):
        trials.try_out(changed(calling_convention_version=9))
    assert trials._process is None  # and the next has another


def test_a_module_that_takes_too_much_memory_is_refused(trials: ModuleTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_memory", 1 << 20)
    with pytest.raises(rt.InvalidArgumentError, match="bytes of memory"):
        trials.try_out(DIVIDES_BY_ZERO)
