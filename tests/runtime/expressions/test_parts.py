"""A list that costs more than XLA survives is compiled and run in parts, and means the same."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import runtime as rt
from runtime.errors import ResourceExhaustedError
from runtime.expressions.parts import split
from runtime.expressions.reader import jax_settings, read_expressions
from runtime.plan.plan import Program
from runtime.proto import expressions_pb2 as pb
from runtime.proto import stage_pb2
from runtime.task import compiler, times
from runtime.task.compiler import Compiler
from runtime.tensor_spec import TensorSpec
from tests.kit.changes import SetTimes
from tests.runtime import kit
from tests.runtime.expressions.samples import SAMPLES
from tests.runtime.expressions.shapes import chain, deep, tree
from tests.runtime.expressions.test_round_trip import A, written

A_CHAIN = """
import sys
import jax
from runtime.plan.plan import Program
from runtime.task.compiler import Compiler
from runtime.tensor_spec import TensorSpec
data = sys.stdin.buffer.read()
spec = TensorSpec((), jax.numpy.dtype("float32"))
run = Compiler().executable(Program(data, (spec,), (spec,)), (), jax.devices()[0])
print(float(run(jax.numpy.float32(1.0))[0]))
"""


def of_one(main: pb.ComputationDef, *shape: int) -> bytes:
    """Returns a list of one array of float32."""
    spec = stage_pb2.TensorSpecDef(shape=shape, dtype="float32")
    return pb.ExpressionsDef(arguments=[spec], main=main).SerializeToString()


@pytest.mark.cluster
def test_long_chain_ends_no_process() -> None:
    """A chain of 40,000 operations compiles, where XLA's compiler by itself overflows its stack."""
    data = of_one(chain(["mul"], 40_000))
    done = subprocess.run(
        [sys.executable, "-c", A_CHAIN], input=data, capture_output=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, b"1.0\n"), done.stderr[-2000:]


def test_condition_is_traced_once() -> None:
    """A condition in a condition is traced once a level, and not twice."""
    expressions = read_expressions(of_one(deep(["mul"], 1, 18, "while")))
    jax.make_jaxpr(expressions.compute)(np.float32(1))


@pytest.mark.parametrize("name", SAMPLES)
def test_parts_equal_the_whole(name: str) -> None:
    """The parts of a program compute what the whole program does."""
    expressions = read_expressions(written(SAMPLES[name], A))
    most = max([e.cost for e in expressions.main.equations], default=1)
    with jax.enable_x64(True), jax_settings(expressions):
        wanted = jax.jit(expressions.compute)(A)
        parts, results = split(expressions, most)
        values = {0: jnp.asarray(A)}
        for part in parts:
            assert sum(e.cost for e in part.expressions.main.equations) <= most
            made = jax.jit(part.expressions.compute)(*[values[n] for n in part.takes])
            values.update(zip(part.gives, made, strict=True))
    assert len(parts) > 1 or len(expressions.main.equations) < 2
    for number, value in zip(results, wanted, strict=True):
        assert _numbers(values[number]) == pytest.approx(
            _numbers(value), rel=1e-5, abs=1e-6, nan_ok=True
        )


def _numbers(value: Any) -> Any:
    data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return np.atleast_1d(np.asarray(data, np.complex128)).view(np.float64)


def test_arguments_and_constants_may_be_results() -> None:
    """A result may be an argument, a constant or the same value twice."""
    expressions = read_expressions(
        written(lambda a: (a, a, jnp.float32(7), a + 1, (a + 1) * 2, a + 1), A)
    )
    parts, results = split(expressions, 1)
    values = {0: jnp.asarray(A)}
    for part in parts:
        values.update(
            zip(
                part.gives,
                jax.jit(part.expressions.compute)(*[values[n] for n in part.takes]),
                strict=True,
            )
        )
    found = [np.asarray(values[n]) for n in results]
    wanted = [A, A, np.float32(7), A + 1, (A + 1) * 2, A + 1]
    assert len(set(results)) == 6 and all(
        np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


def many(arguments: Any) -> Any:
    """Returns what momentum makes of pairs of arrays."""
    made = []
    for value, slope in arguments:
        speed = 0.9 * slope + jnp.sin(value)
        made.append((value - 0.1 * speed, speed))
    return made


def program(count: int) -> Program:
    """Returns a program that updates so many pairs."""
    arrays = [(np.ones(3, np.float32), np.zeros(3, np.float32))] * count
    data = written(
        lambda *flat: jax.tree.leaves(many(list(zip(flat[::2], flat[1::2], strict=True)))),
        *sum(arrays, ()),
    )
    spec = TensorSpec((3,), np.dtype(np.float32))
    return Program(data, (spec,) * 2 * count, (spec,) * 2 * count)


def test_no_part_is_needlessly_small() -> None:
    """The number of parts is at most twice the cost over the limit of a part."""
    expressions = read_expressions(of_one(tree(["igamma", "sinh"], 60, 600), 600))
    parts, _ = split(expressions, 100)
    assert (
        len(parts) <= 2 * sum(equation.cost for equation in expressions.main.equations) // 100 + 1
    )


def test_any_length_has_parts() -> None:
    """A program of more than 50,000 equations has parts."""
    expressions = read_expressions(of_one(chain(["sinh", "tanh"], 60_000), 4))
    assert len(expressions.main.equations) > 50_000
    parts, _ = split(expressions, 4096)
    assert len(parts) > 10


def test_equal_variables_make_equal_parts() -> None:
    """Equal variables of an update make equal parts, of which none reads another's result."""
    parts, _ = split(read_expressions(program(300).blob), 100)
    assert len(parts) >= 10
    assert len({part.identity for part in parts[:-1]}) == 1  # each ends where a variable ends
    assert not any(set(part.takes) & set(before.gives) for before in parts for part in parts)


def test_parts_update_variables_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update in parts donates its arguments and computes what JAX does."""
    monkeypatch.setattr(compiler, "PART", 100)
    made = program(100)
    arrays = [jnp.full(3, n, jnp.float32) for n in range(200)]
    wanted = jax.tree.leaves(many(list(zip(arrays[::2], arrays[1::2], strict=True))))
    results = Compiler().executable(made, range(200), jax.devices()[0])(*arrays)
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(results, wanted, strict=True))
    assert all(array.is_deleted() for array in arrays)


def test_slow_list_is_refused(monkeypatch: pytest.MonkeyPatch, set_times: SetTimes) -> None:
    """A program whose parts take too long to compile is refused between two parts."""
    set_times(times, COMPILE_SECS=0.0)
    arrays = [np.ones(n + 1, np.float32) for n in range(30)]
    specs = tuple(TensorSpec(array.shape, array.dtype) for array in arrays)
    made = Program(
        written(lambda *leaves: [jnp.cos(leaf) for leaf in leaves], *arrays), specs, specs
    )
    Compiler().executable(made, (), jax.devices()[0])
    monkeypatch.setattr(compiler, "PART", 10)
    with pytest.raises(ResourceExhaustedError, match="parts took .* to compile, more than 0 s"):
        Compiler().executable(made, (), jax.devices()[0])


def test_results_for_later_parts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that a later part reads stays until then."""
    transform = optax.adam(0.1)
    values = [np.full(3, n, np.float32) for n in range(40)]
    flat, tree = jax.tree.flatten((values, transform.init([jnp.asarray(v) for v in values])))
    arguments = [np.asarray(leaf) for leaf in flat]

    def update(*leaves: Any) -> list[Any]:
        parameters, state = jax.tree.unflatten(tree, leaves)
        changes, state = transform.update([jnp.cos(p) for p in parameters], state)
        return jax.tree.leaves((optax.apply_updates(parameters, changes), state))

    specs = tuple(TensorSpec(a.shape, a.dtype) for a in arguments)
    monkeypatch.setattr(compiler, "PART", 100)
    made = Program(written(update, *arguments), specs, specs)
    results = Compiler().executable(made, range(len(specs)), jax.devices()[0])(
        *map(jnp.asarray, arguments)
    )
    wanted = jax.jit(update)(*arguments)
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(results, wanted, strict=True))


@pytest.mark.cluster
def test_update_in_parts_is_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sees all variables as of one instant although programs update them in parts."""
    monkeypatch.setattr(compiler, "PART", 20)
    with kit.servers(sockets=True, ps=1, worker=2) as made, rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            variables = [rt.Variable(np.float32(0), name=f"v{n}") for n in range(60)]
            update = rt.group(*[v.assign_add(1.0) for v in variables])
        with rt.Session(made["/job:worker/task:0"].target, graph) as sess:
            sess.run(rt.global_variables_initializer())
            for step in range(1, 6):
                sess.run(update)
                assert sess.run(list(variables)) == [step] * 60
