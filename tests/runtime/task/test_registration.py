"""Registering stages: what a sender says of a program holds for that sender alone, and only lists are taken."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.plan.exporting import own_program, write_program
from runtime.plan.place import Device
from runtime.plan.plan import Program, ProgramOutput, Stage, StageCall
from runtime.state.participants import TaskEnvironment
from runtime.task import compiler
from runtime.task.registry import RegisteredCall
from runtime.task.worker import Worker
from runtime.tensor_spec import TensorSpec
from runtime.wire.messages import call_from_proto, call_to_proto
from tests.runtime.kit import TARGET, in_thread, limited, servers

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
VECTOR, WHOLE = TensorSpec((3,), F32), TensorSpec((3,), I32)
SQUARE = TensorSpec((2, 2), F32)


def no_fetch(*_: Any) -> Any:
    raise AssertionError("nothing is fetched here")


def worker(**limits: int) -> Worker:
    return Worker("ps", 0, no_fetch, TaskEnvironment(limits=rt.Limits(**limits)))


def sent(program: Program, *, with_blob: bool = True) -> StageCall:
    """Returns a call of a program as it comes over the wire."""
    stage = Stage(
        device=Device("ps", 0),
        inputs=program.arguments,
        outputs=(ProgramOutput(0),),
        output_specs=program.results,
        program=program,
        operations=("doubled",),
    )
    inputs = tuple(range(len(program.arguments)))
    call = StageCall(stage, 0, inputs, (len(inputs),), replies=(0,))
    return call_from_proto(call_to_proto(call, with_blob=with_blob))


def doubled(scale: float = 2.0) -> Program:
    return write_program(lambda a: (a * scale,), [VECTOR], "cpu")


def lie(program: Program) -> Program:
    return dataclasses.replace(program, results=(WHOLE,))


def run(task: Worker, call: RegisteredCall | None) -> Any:
    assert call is not None
    outputs, done = task.execute(call, 1, 1, [np.ones(3, np.float32)])
    call.prepared.wait(done)
    return np.asarray(outputs[0]).tolist()


@limited(spare_stages=1)
def test_false_description_is_refused() -> None:
    """A program with a false description is refused although the compiler knows the program."""
    task, program = worker(), doubled(3.5)
    assert run(task, task.registrar.register(sent(program), foreign=True)) == [3.5] * 3
    assert task.registrar.register(sent(doubled(1.5)), foreign=True) is not None
    assert (
        len(task.registry) == 1
        and task.registrar.register(sent(program, with_blob=False), foreign=True) is None
    )
    with pytest.raises(
        rt.InvalidArgumentError, match=r"gives \(float32\[3\]\), its stage declares \(int32\[3\]\)"
    ):
        task.registrar.register(sent(lie(program)), foreign=True)


def test_false_description_convinces_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The description of one sender is believed for no other."""
    task, program = worker(), doubled(4.5)
    compiling, may_end = threading.Event(), threading.Event()
    compiled = compiler._compile

    def slowly(made: Program, *rest: Any) -> Any:
        if made.results == (WHOLE,):
            compiling.set()
            assert may_end.wait(60)
        return compiled(made, *rest)

    monkeypatch.setattr(compiler, "_compile", slowly)
    thread, heard = in_thread(lambda: task.registrar.register(sent(lie(program)), foreign=True))
    assert compiling.wait(60)
    assert task.registrar.register(sent(program, with_blob=False), foreign=True) is None, (
        "its bytes are asked for"
    )
    assert run(task, task.registrar.register(sent(program), foreign=True)) == [4.5] * 3
    may_end.set()
    thread.join(60)
    assert isinstance(heard[0], rt.InvalidArgumentError)


@pytest.mark.parametrize(
    "fn", [jnp.linalg.cholesky, lambda a: a + 1], ids=["of a custom call", "plain"]
)
def test_foreign_module_is_no_program(fn: Callable[[Any], Any]) -> None:
    """A compiled module of another process is refused, by its bytes and by its hash."""
    task = worker()
    own = own_program(lambda a: (fn(a),), [SQUARE], "cpu")
    exported = jax.export.export(jax.jit(lambda a: (fn(a),)))(np.eye(2, dtype=np.float32))
    kept = StageCall(dataclasses.replace(sent(own).stage, program=own), 0, (0,), (1,), replies=(0,))
    assert task.registrar.register(kept) is not None
    assert task.registrar.register(sent(own, with_blob=False), foreign=True) is None
    for blob in (own.blob, bytes(exported.serialize())):
        with pytest.raises(rt.InvalidArgumentError, match="not a program that this task can read"):
            task.registrar.register(sent(Program(blob, own.arguments, own.results)), foreign=True)


def test_bytes_of_other_hash_refused() -> None:
    """A program whose bytes do not match their hash is refused."""
    with pytest.raises(rt.NotFoundError, match="does not match its SHA-256"):
        worker().registrar.register(
            sent(dataclasses.replace(doubled(), sha256="00" * 32)), foreign=True
        )


def test_callbacks_stay_in_the_client() -> None:
    """A program with a callback is refused in one line before it leaves the client."""

    def shout(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    with rt.Graph().as_default(), rt.Session() as session:
        for fn in (shout, lambda x: jax.pure_callback(np.sin, x, x)):
            y = rt.call(fn, rt.constant(1.0), name="loud")
            with pytest.raises(rt.InvalidArgumentError, match=r"loud.*rt\.Print") as caught:
                session.run(y)
            assert "\n" not in str(caught.value)


def test_server_must_be_able_to_compile() -> None:
    """A server does not start where JAX may not compile."""
    with (
        jax.disable_jit(),
        pytest.raises(rt.InvalidArgumentError, match="JAX_DISABLE_JIT is set.*unset it"),
    ):
        rt.Server({"local": ["localhost:0"]}, "local", 0)


def test_looked_for_nan_has_a_name() -> None:
    """A NaN that JAX looks for is an error with the operation's name."""
    with rt.Graph().as_default(), rt.Session() as session, jax.debug_nans(True):
        x = rt.placeholder(np.float32, [2], name="x")
        with pytest.raises(rt.InvalidArgumentError, match=r"running \[logs\].*nan"):
            session.run(rt.call(jnp.log, x, name="logs"), {x: -np.ones(2, np.float32)})


def test_decompositions_run_on_a_ps() -> None:
    """A list names an operation of JAX's; the task has JAX make the custom call."""
    matrix = np.array([[4.0, 2.0], [2.0, 3.0]], np.float32)
    with servers(ps=1, worker=1) as cluster:
        with rt.Graph().as_default(), rt.device("/job:ps/task:0"):
            v = rt.Variable(matrix, name="v")
            found = [
                rt.call(fn, v, name=fn.__name__)
                for fn in (jnp.linalg.cholesky, jnp.linalg.inv, jnp.linalg.det)
            ]
            with rt.Session(cluster[TARGET].target) as session:
                session.run(v.initializer)
                values = session.run(found)
    for value, fn in zip(values, (np.linalg.cholesky, np.linalg.inv, np.linalg.det), strict=True):
        np.testing.assert_allclose(value, fn(matrix), rtol=1e-5)
