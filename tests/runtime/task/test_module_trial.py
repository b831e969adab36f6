"""A task that takes modules of StableHLO has them tried out by another process: what ends that one is refused."""

import contextlib
import os
import pathlib
import random
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import runtime as rt
from runtime.errors import OpError
from runtime.plan.exporting import export_program
from runtime.plan.plan import Program
from runtime.task.compiler import Compiler
from runtime.task.module_trial import ModuleTrials
from runtime.task.program_verifier import verify_program
from tests.fuzz import modules
from tests.runtime import kit
from tests.runtime.task.test_hostile_programs import PLAIN, SQUARE, changed

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


def test_a_task_with_a_thousand_connections_tries_modules_out() -> None:
    """select(), which waited for the process, takes no descriptor above 1,023: each module gave an InternalError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    with contextlib.ExitStack() as connections:
        connections.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            connections.enter_context(open(os.devnull))
        trials = ModuleTrials()
        connections.callback(trials.close)
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


# -- the sandbox -----------------------------------------------------------------------------------------------------


def threads_of(trials: ModuleTrials) -> list[str]:
    """What the system says of each thread of the process."""
    assert trials._process is not None
    return [path.read_text() for path in pathlib.Path(f"/proc/{trials._process.pid}/task").glob("*/status")]


def test_all_threads_of_the_process_are_in_the_sandbox(trials: ModuleTrials) -> None:
    found = threads_of(trials)
    assert len(found) > 1  # XLA's are among them
    assert all("Seccomp:\t2\n" in one and "NoNewPrivs:\t1\n" in one for one in found)


def _images(a: Any) -> Any:
    images, kernels = jnp.resize(a, (8, 3, 64, 64)), jnp.resize(a, (32, 3, 5, 5))
    return jax.grad(lambda k: jax.lax.conv(images, k, (1, 1), "SAME").sum())(kernels)


LARGER: dict[str, Callable[[Any], Any]] = {
    "matrix products": lambda a: jnp.resize(a, (1500, 1500)) @ jnp.resize(a, (1500, 1500)),
    "a convolution and its gradient": _images,
    "sorting": lambda a: (jnp.sort(jnp.resize(a, (100_000,))), jnp.argsort(jnp.resize(a, (1000,)))),
    "FFT": lambda a: jnp.abs(jnp.fft.fft2(jnp.resize(a, (256, 256)))),
    "random numbers": lambda a: jax.random.normal(jax.random.key(0), (1000, 1000)) * a[0, 0],
    "loops": lambda a: jax.lax.scan(lambda s, x: (jnp.tanh(s @ x), None), a, jnp.stack([a] * 50))[0],
    "many kernels, on several threads of LLVM": lambda a: [jnp.sin(a * n) @ jnp.cos(a + n) for n in range(40)],
}


def test_larger_modules_pass(trials: ModuleTrials) -> None:
    process = trials._process
    for compute in LARGER.values():
        trials.try_out(export_program(lambda a, run=compute: tuple(jax.tree.leaves(run(a))), [SQUARE], "cpu"))
    assert trials._process is process


def passes(program: Program) -> bool:
    """Whether this process, which is in no sandbox, takes a module."""
    try:
        verify_program(program)
        Compiler().executable(program, (), jax.local_devices()[0])
    except OpError:
        return False
    return True


def test_what_passes_without_a_sandbox_passes_in_it(trials: ModuleTrials) -> None:
    """Modules of `make fuzz`; none of these ends the compiler."""
    compared = 0
    for number in range(40):
        chance = random.Random(f"sandbox:{number}")
        program = modules.composed(chance)
        if program is not None and chance.random() < 0.7:
            program = modules.changed(program, chance)
        if program is None:
            continue
        compared += 1
        try:
            trials.try_out(program)
            refused = ""
        except rt.InvalidArgumentError as error:
            refused = error.message
        assert ("ended the process" not in refused) and (not refused) is passes(program), (number, refused)
    assert compared >= 15
