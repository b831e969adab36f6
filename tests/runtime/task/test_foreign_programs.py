"""Programs from another process, sent to real tasks: what would harm a task is refused, and it goes on serving.

By default a task takes none of these modules, whatever is in them. One that takes modules refuses them by its rules.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

import runtime as rt
from runtime.plan import lower
from runtime.plan.exporting import export_program
from runtime.plan.plan import Program
from runtime.task.program_verifier import DEPTH, OPERATIONS, Function, check_calls, verify_module, verify_program
from runtime.tensor_spec import TensorSpec
from tests.kit import processes as kit
from tests.runtime.kit import addresses, processes, serve

pytestmark = pytest.mark.cluster

WAIT = rt.SessionConfig(start_timeout_secs=120)
F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@dataclass
class Cluster:
    """A ps in a process of its own, and this process as its worker."""

    ps: kit.Program
    server: rt.Server
    by_default: "Cluster | None" = None
    """Another one, whose ps takes no modules."""
    count: int = 0


@pytest.fixture(scope="module")
def default_cluster() -> Iterator[Cluster]:
    """Whose ps was told nothing."""
    addresses_ = addresses(ps=1, worker=1)
    with processes(addresses_, ("ps", 0)) as (ps,), rt.Server(addresses_, "worker", 0) as server:
        yield Cluster(ps, server)


@pytest.fixture(scope="module")
def cluster(default_cluster: Cluster) -> Iterator[Cluster]:
    """Whose ps takes modules."""
    addresses_ = addresses(ps=1, worker=1)
    with serve(addresses_, "ps", 0, env={"BELLWETHER_PS_PROGRAMS": "stablehlo"}) as ps:
        with rt.Server(addresses_, "worker", 0) as server:
            yield Cluster(ps, server, default_cluster)
        ps.stop()


def hostile(text: str, plain: Program) -> Program:
    """A program whose header is that of ``plain`` and whose module is another."""
    exported = export.deserialize(bytearray(plain.blob))
    artifact = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    return replace(plain, blob=bytes(replace(exported, mlir_module_serialized=artifact).serialize()))


def module(body: str, rest: str = "", argument: str = "tensor<4x4xf32>", result: str = "tensor<4x4xf32>") -> str:
    """A module whose entry function has one argument %a and one result, which ``body`` calls %r."""
    return (
        f"module @m {{ func.func public @main(%a: {argument}) -> {result} {{ {body} return %r : {result} }} {rest} }}"
    )


def refused_by(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    argument: tuple[int, ...] = (4, 4),
    result: tuple[int, ...] = (4, 4),
) -> str:
    """Has a ps run a module in place of what the planner made; gives the error, and sees that the ps still serves.

    The ps that takes no modules refuses this one as it refuses all.
    """
    if cluster.by_default is not None:
        assert "lists only; --ps_programs=stablehlo" in refused_by(
            cluster.by_default, monkeypatch, text, argument, result
        )

    def exported(run: Any, arguments: Any, platform: str = "cpu") -> Program:
        plain = export_program(run, arguments, platform)
        return hostile(text, plain) if plain.results[0].shape == result and len(arguments) == 1 else plain

    with rt.device("/job:ps/task:0"):
        x = rt.placeholder(np.float32, argument, name="x")
        y = rt.call(lambda a: jnp.zeros(result, a.dtype) + a.ravel()[0], x, name="hostile")
    with rt.Session(cluster.server.target, config=WAIT) as session, monkeypatch.context() as patch:
        patch.setattr(lower, "export_program", exported)
        patch.setattr(lower, "write_program", exported)
        with pytest.raises(rt.InvalidArgumentError) as caught:
            session.run(y, {x: np.ones(argument, np.float32)})
    assert "\n" not in str(caught.value)
    assert "hostile" in str(caught.value), "it names the operation"
    still_serves(cluster)
    return str(caught.value)


def still_serves(cluster: Cluster) -> None:
    """The same process does what others ask of it."""
    assert cluster.ps.code is None
    cluster.count += 1
    with rt.Graph().as_default(), rt.device("/job:ps/task:0"):
        v = rt.Variable(float(cluster.count), name=f"alive{cluster.count}")
        with rt.Session(cluster.server.target, config=WAIT) as session:
            session.run(v.initializer)
            assert session.run(v.assign_add(1.0)) == cluster.count + 1.0


# -- custom calls ----------------------------------------------------------------------------------------------------

SMALL, LARGE = "tensor<1x1xf32>", "tensor<64x64xf32>"
LAPACK = {
    "potrf": ("(tensor<1x1xf32>, tensor<i32>)", "{uplo = 76 : ui8}"),
    "getrf": ("(tensor<1x1xf32>, tensor<1xi32>, tensor<i32>)", "{}"),
    "geqrf": ("(tensor<1x1xf32>, tensor<1xf32>)", "{}"),
    "syevd": ("(tensor<1x1xf32>, tensor<1xf32>, tensor<i32>)", "{mode = 86 : ui8, uplo = 76 : ui8}"),
    "gehrd": ("(tensor<1x1xf32>, tensor<1xf32>, tensor<i32>)", "{high = 64 : i32, low = 1 : i32}"),
    "sytrd": (
        "(tensor<1x1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<1xf32>, tensor<i32>)",
        "{uplo = 76 : ui8}",
    ),
}


@pytest.mark.parametrize("kernel", LAPACK)
def test_finding_1_a_kernel_that_writes_past_the_end_of_its_result(
    kernel: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, config = LAPACK[kernel]
    count = results.count("tensor")
    call = (
        f'%c:{count} = "stablehlo.custom_call"(%a) {{call_target_name = "lapack_s{kernel}_ffi", api_version = 4 : i32, '
        f"backend_config = {config}}} : ({LARGE}) -> {results} "
    )
    text = module(call + f"%r = stablehlo.reshape %c#0 : ({SMALL}) -> tensor<1xf32>", "", LARGE, "tensor<1xf32>")
    said = refused_by(cluster, monkeypatch, text, (64, 64), (1,))
    assert f"custom call 'lapack_s{kernel}_ffi' is not allowed" in said
    assert "place what needs it on a device of the process that builds the graph" in said


def test_finding_2_a_kernel_that_gives_memory_that_it_has_not_written(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = (
        '%c:2 = "stablehlo.custom_call"(%a) {call_target_name = "lapack_spotrf_ffi", api_version = 4 : i32, '
        f"backend_config = {{uplo = 76 : ui8}}}} : ({SMALL}) -> ({LARGE}, tensor<i32>) "
    )
    text = module(call + f"%r = stablehlo.negate %c#0 : {LARGE}", "", SMALL, LARGE)
    assert "custom call 'lapack_spotrf_ffi'" in refused_by(cluster, monkeypatch, text, (1, 1), (64, 64))


# -- operations that JAX never emits ---------------------------------------------------------------------------------


def test_finding_3_a_dimension_that_is_set_to_less_than_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "%n = stablehlo.constant dense<-1000000> : tensor<i32> "
        '%d = "stablehlo.set_dimension_size"(%a, %n) {dimension = 0 : i64} : (tensor<4xf32>, tensor<i32>) '
        "-> tensor<?xf32, #stablehlo.bounds<4>> "
        "%z = stablehlo.constant dense<0.0> : tensor<f32> "
        "%s = stablehlo.reduce(%d init: %z) applies stablehlo.add across dimensions = [0] "
        ": (tensor<?xf32, #stablehlo.bounds<4>>, tensor<f32>) -> tensor<f32> "
        "%r = stablehlo.reshape %s : (tensor<f32>) -> tensor<1xf32>"
    )
    text = module(body, "", "tensor<4xf32>", "tensor<1xf32>")
    assert "operation 'stablehlo.set_dimension_size'" in refused_by(cluster, monkeypatch, text, (4,), (1,))


# -- calls and sizes -------------------------------------------------------------------------------------------------

T = "tensor<4x4xf32>"
CALL = f"%r = func.call @{{}}(%a) : ({T}) -> {T}"


def function(name: str, body: str) -> str:
    return f"func.func private @{name}(%a: {T}) -> {T} {{ {body} return %r : {T} }}"


def composite(decomposition: str) -> str:
    return f'%r = stablehlo.composite "chlo.sinh" %a {{decomposition = @{decomposition}}} : ({T}) -> {T}'


NEVER_COMPILED = {
    "a function that calls itself": (module(CALL.format("f"), function("f", CALL.format("f"))), "calls go in a circle"),
    "two functions that call each other": (
        module(CALL.format("f"), function("f", CALL.format("g")) + function("g", CALL.format("f"))),
        "calls go in a circle: @f -> @g -> @f|calls go in a circle: @g -> @f -> @g",
    ),
    "a main that calls itself": (module(CALL.format("main")), "calls @main: nothing may call it"),
    "a composite of itself": (module(composite("f"), function("f", composite("f"))), "calls go in a circle"),
    "a value whose size overflows when it is squared": (
        module(
            "%b = stablehlo.constant dense<0.0> : tensor<3037000500x3037000500xf32> %r = stablehlo.negate %a : " + T
        ),
        "bytes are allowed",
    ),
    "a value of more elements than there are 64-bit numbers": (
        module(
            "%z = stablehlo.constant dense<0.0> : tensor<f32> %b = stablehlo.broadcast_in_dim %z, dims = [] : "
            f"(tensor<f32>) -> tensor<4294967296x4294967296x4xf32> %r = stablehlo.negate %a : {T}"
        ),
        "bytes are allowed",
    ),
}


@pytest.mark.parametrize("what", NEVER_COMPILED)
def test_finding_4_a_small_valid_module_that_ends_the_compiler(
    what: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = NEVER_COMPILED[what]
    assert re.search(said, refused_by(cluster, monkeypatch, text))


WINDOW = (
    "%z = stablehlo.constant dense<0.0> : tensor<f32> "
    '%w = "stablehlo.reduce_window"(%a, %z) <{padding = dense<[[0, 1099511627775], [0, 0]]> : tensor<2x2xi64>, '
    "window_dimensions = array<i64: 1099511627776, 1>, window_strides = array<i64: 1099511627776, 1>}> ({ "
    "^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32> "
    f"stablehlo.return %s : tensor<f32> }}) : ({T}, tensor<f32>) -> tensor<1x4xf32> %r = stablehlo.negate %a : {T}"
)


def nested_loops(depth: int) -> str:
    body = "stablehlo.return %x : tensor<4x4xf32>"
    for i in range(depth):
        body = (
            f"%w{i} = stablehlo.while(%x{i} = %a) : {T} cond {{ %f{i} = stablehlo.constant dense<false> : tensor<i1> "
            f"stablehlo.return %f{i} : tensor<i1> }} do {{ {body.replace('%x :', f'%x{i} :')} }}"
            + (f" stablehlo.return %w{i} : {T}" if i < depth - 1 else " ")
        )
    return module(body + f"%r = stablehlo.negate %a : {T}")


def doubling(levels: int) -> str:
    twice = "%b = func.call @f{0}(%a) : ({1}) -> {1} %r = func.call @f{0}(%b) : ({1}) -> {1}"
    functions = [function(f"f{i}", twice.format(i + 1, T)) for i in range(levels)]
    return module(CALL.format("f0"), " ".join([*functions, function(f"f{levels}", f"%r = stablehlo.negate %a : {T}")]))


def chain(length: int) -> str:
    lines = [f"%v{i} = stablehlo.negate %{f'v{i - 1}' if i else 'a'} : {T}" for i in range(length)]
    return module(" ".join([*lines, f"%r = stablehlo.negate %v{length - 1} : {T}"]))


BOMBS = {
    "a window of 2^40 elements": (lambda: module(WINDOW), "'padding' is more than|window of more than"),
    "2^40 numbers in a row": (
        lambda: module(f"%i = stablehlo.iota dim = 0 : tensor<1099511627776xf32> %r = stablehlo.negate %a : {T}"),
        "bytes are allowed",
    ),
    "loops in loops": (lambda: nested_loops(DEPTH + 8), "regions deep"),
    "calls that double": (lambda: doubling(40), "operations with all that it calls|deep"),
    "too many operations": (lambda: chain(OPERATIONS + 1), "more than 50,000 operations"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_finding_18_a_small_module_that_keeps_the_compiler_busy(
    what: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = BOMBS[what]
    assert re.search(said, refused_by(cluster, monkeypatch, text()))


def test_a_program_of_many_bytes_is_refused_unread() -> None:
    program = Program(bytes(17 << 20), (), ())
    with pytest.raises(rt.InvalidArgumentError, match="17,825,792 bytes, 16,777,216 are allowed"):
        verify_program(program)


# -- the rules, without a task ---------------------------------------------------------------------------------------


def verified(text: str, value_bytes: int = 16 << 30) -> None:
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        verify_module(ir.Module.parse(text), value_bytes)


@hypothesis.given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=12))
    )
)
def test_calls_are_accepted_exactly_when_they_never_come_back(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    count, edges = drawn
    reach = np.zeros((count, count), bool)
    for caller, called in edges:
        reach[caller, called] = True
    for _ in range(count):
        reach = reach | (reach.astype(int) @ reach.astype(int) > 0)
    bodies = [
        " ".join(
            [
                *(f"%c{t} = func.call @f{t}(%a) : ({T}) -> {T}" for s, t in sorted(edges) if s == i),
                f"%r = stablehlo.negate %a : {T}",
            ]
        )
        for i in range(count)
    ]
    text = module(CALL.format("f0"), " ".join(function(f"f{i}", body) for i, body in enumerate(bodies)))
    if reach.diagonal().any():
        with pytest.raises(rt.InvalidArgumentError, match="calls go in a circle"):
            verified(text)
    else:
        verified(text)


REFUSED = {
    "an attribute for several devices": (
        module(f'%r = stablehlo.negate %a {{mhlo.sharding = "{{replicated}}"}} : {T}'),
        "attribute 'mhlo.sharding' is not allowed",
    ),
    "an argument that is given to a result": (
        f"module {{ func.func public @main(%a: {T} {{tf.aliasing_output = 7 : i32}}) -> {T} {{ return %a : {T} }} }}",
        "attribute 'tf.aliasing_output'",
    ),
    "many devices": (
        f"module attributes {{mhlo.num_partitions = 512 : i32}} {{ func.func @main(%a: {T}) -> {T} "
        f"{{ return %a : {T} }} }}",
        "'mhlo.num_partitions' is 512 : i32: a stage runs on one device",
    ),
    "a shape that is not known": (
        "module { func.func public @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> } }",
        "shapes are known before the step runs",
    ),
    "a token": (
        "module { func.func public @main(%a: !stablehlo.token) -> !stablehlo.token { return %a : !stablehlo.token } }",
        "values are dense arrays",
    ),
    "a value of no elements whose other dimensions overflow": (
        module(
            "%z = stablehlo.constant dense<> : tensor<0x4611686018427387904x4611686018427387904xf32> "
            f"%r = stablehlo.negate %a : {T}"
        ),
        "bytes are allowed",
    ),
    "a composite that XLA knows with other operands": (
        module(
            '%r:2 = stablehlo.composite "chlo.top_k" %a {composite_attributes = {k = 4000 : i64}, '
            f"decomposition = @f, version = 1 : i32}} : ({T}) -> ({T}, tensor<4x4xi32>) ".replace("%r:2", "%k:2")
            + f"%r = stablehlo.negate %a : {T}",
            f"func.func private @f(%a: {T}) -> ({T}, tensor<4x4xi32>) {{ %i = stablehlo.iota dim = 1 : "
            f"tensor<4x4xi32> return %a, %i : {T}, tensor<4x4xi32> }}",
        ),
        "composite 'chlo.top_k' does not fit",
    ),
    "a composite that nobody knows": (
        module(composite("f").replace("sinh", "system"), function("f", f"%r = stablehlo.negate %a : {T}")),
        "composite 'chlo.system' is not allowed",
    ),
    "a module in the module": (
        f"module {{ module {{}} func.func public @main(%a: {T}) -> {T} {{ return %a : {T} }} }}",
        "operation 'builtin.module' is not allowed",
    ),
    "a function without a body": (
        module(f"%r = stablehlo.negate %a : {T}", f"func.func private @f({T}) -> {T}"),
        "region of 0 blocks",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_breaks_a_rule_is_named(what: str) -> None:
    text, said = REFUSED[what]
    with pytest.raises(rt.InvalidArgumentError, match=said) as caught:
        verified(text)
    assert "\n" not in str(caught.value)


def test_a_call_of_a_function_that_does_not_exist() -> None:
    with pytest.raises(rt.InvalidArgumentError, match="@main calls @nobody, which does not exist"):
        check_calls({"main": Function(1, 0, Counter(["nobody"]), {"nobody": 0})})


def test_the_limit_of_a_value_can_be_given() -> None:
    text = module(f"%r = stablehlo.negate %a : {T}")
    verified(text, 64)
    with pytest.raises(rt.InvalidArgumentError, match="63 bytes are allowed; partition a variable that is larger"):
        verified(text, 63)


# -- who is another process ------------------------------------------------------------------------------------------


def test_what_no_list_can_hold_is_named_before_it_is_sent_and_runs_on_the_worker(default_cluster: Cluster) -> None:
    with rt.device("/job:ps/task:0"):
        x = rt.constant(np.array([[4.0, 2.0], [2.0, 3.0]], np.float32)) * 1.0
        there = rt.call(jnp.linalg.cholesky, x, name="factor")
    with rt.Session(default_cluster.server.target, config=WAIT) as session:
        with pytest.raises(rt.InvalidArgumentError) as caught:
            session.run(there)
    assert str(caught.value) == (
        "operations [factor] cannot be sent to /job:ps/replica:0/task:0/device:CPU:0: JAX's operation 'cholesky' is "
        "not in the table of operations; place them on a device of this process, or start that task with "
        "--ps_programs=stablehlo (Server(programs=), BELLWETHER_PS_PROGRAMS)"
    )
    still_serves(default_cluster)


def test_a_custom_call_on_a_ps_is_refused_with_what_to_do_and_runs_on_the_worker(cluster: Cluster) -> None:
    matrix = np.array([[4.0, 2.0], [2.0, 3.0]], np.float32)
    with rt.device("/job:ps/task:0"):
        x = rt.constant(matrix)
        there = rt.call(jnp.linalg.cholesky, x, name="factor")
    with rt.device("/job:worker/task:0"):
        here = rt.call(jnp.linalg.cholesky, x)
    with rt.Session(cluster.server.target, config=WAIT) as session:
        with pytest.raises(rt.InvalidArgumentError, match="factor.*lapack_spotrf_ffi.*place what needs it") as caught:
            session.run(there)
        assert "/job:ps/task:0" in str(caught.value)
        np.testing.assert_allclose(session.run(here), np.linalg.cholesky(matrix), rtol=1e-6)


def test_a_client_elsewhere_is_another_process_for_its_own_master_too(cluster: Cluster) -> None:
    target = f"grpc://{cluster.server.cluster.task_address('ps', 0)}"
    with rt.device("/job:ps/task:0"):
        there = rt.call(jnp.linalg.cholesky, rt.constant(np.eye(2, dtype=np.float32)), name="factor")
    config = rt.SessionConfig(start_timeout_secs=120, device_filters=["/job:ps"])
    with rt.Session(target, config=config) as session:
        with pytest.raises(rt.InvalidArgumentError, match="factor.*lapack_spotrf_ffi"):
            session.run(there)
        assert session.run(rt.constant(2.0) + 1.0) == 3.0


def test_a_foreign_program_is_verified_though_this_process_has_compiled_it(cluster: Cluster) -> None:
    """Nobody gets past the rules because the task's own session has the same stage."""
    program = export_program(lambda a: (jnp.linalg.cholesky(a),), [TensorSpec((2, 2), F32)], "cpu")
    with rt.Session() as session:
        session.run(rt.call(jnp.linalg.cholesky, rt.constant(np.eye(2, dtype=np.float32))))
    with pytest.raises(rt.InvalidArgumentError, match="custom call"):
        verify_program(program)


@pytest.mark.parametrize("takes", ["cluster", "default_cluster"])
def test_what_the_planner_makes_of_programs_on_a_ps_is_let_in(takes: str, request: pytest.FixtureRequest) -> None:
    """Random initialisers, special functions, sorting, loops, tables and updates in place."""
    cluster: Cluster = request.getfixturevalue(takes)
    key = lambda: jax.random.key(0)  # noqa: E731
    scipy = jax.scipy.special
    fns = [
        lambda a: jax.random.truncated_normal(key(), -1.0, 1.0, (4, 4)) + a,
        lambda a: jax.random.gamma(key(), jnp.abs(a)),
        lambda a: jax.random.permutation(key(), a),
        lambda a: scipy.erf(a) + scipy.erfc(a) + scipy.erfinv(a) + scipy.gammaln(a) + scipy.digamma(a),
        lambda a: jnp.sinh(a) + jnp.arcsinh(a) + jnp.arctan2(a, a) + jnp.nextafter(a, a),
        lambda a: jax.lax.top_k(a, 2)[0] + jax.lax.top_k(a, 2)[1],
        lambda a: jnp.sort(a @ a) + jnp.cumsum(a, 0) + jax.nn.softmax(a),
        lambda a: a.at[jnp.array([0, 0])].add(1.0)[jnp.array([0, 3])],
        lambda a: jax.lax.fori_loop(0, 3, lambda i, s: s * 0.5 + i, a),
    ]
    with rt.device("/job:ps/task:0"):
        v = rt.Variable(np.full((4, 4), 0.5, np.float32), name="table")
        ys = [rt.call(fn, v.assign_add(np.ones((4, 4), np.float32)) * 0.1, name=f"fn{i}") for i, fn in enumerate(fns)]
    with rt.Session(cluster.server.target, config=WAIT) as session:
        session.run(v.initializer)
        assert all(np.isfinite(value).all() for value in session.run(ys))
