"""Programs from a peer: what JAX computes is let in, what reaches further or lies about itself is not."""

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

import runtime as rt
from runtime.plan.exporting import export_program
from runtime.plan.plan import Program
from runtime.task.compiler import Compiler
from runtime.task.portable_artifact import check_frame
from runtime.task.program_verifier import ALLOWED_OPERATIONS, verify_program
from runtime.tensor_spec import TensorSpec

pytestmark = pytest.mark.cluster  # hundreds of compilations

F32 = np.dtype(np.float32)
SQUARE = TensorSpec((4, 4), F32)
VECTOR = TensorSpec((4,), F32)


def key() -> Any:
    return jax.random.key(0)


def numpy_functions() -> list[Any]:
    names = "sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh arctanh exp expm1 log log1p sqrt cbrt rint"
    names += " floor sign isnan sort argsort cumsum median linalg.cholesky linalg.qr linalg.svd linalg.eigh"
    names += " linalg.inv linalg.det linalg.slogdet linalg.pinv linalg.eig fft.fft fft.rfft fft.fft2"
    found = []
    for name in names.split():
        fn: Any = jnp
        for part in name.split("."):
            fn = getattr(fn, part)
        found.append(pytest.param(fn, id=name))
    return found


def other_functions() -> list[Any]:
    img: Any = np.ones((1, 8, 8, 4), np.float32)
    conv = ("NHWC", "HWIO", "NHWC")
    scipy = jax.scipy.linalg
    fns: dict[str, Any] = {
        "lu": scipy.lu,
        "schur": scipy.schur,
        "expm": scipy.expm,
        "hessenberg": scipy.hessenberg,
        "solve_triangular": lambda a: scipy.solve_triangular(a, a[0]),
        "solve": lambda a: jnp.linalg.solve(a, a),
        "lstsq": lambda a: jnp.linalg.lstsq(a, a[0]),
        "tridiagonal": jax.lax.linalg.tridiagonal,
        "tridiagonal_solve": lambda a: jax.lax.linalg.tridiagonal_solve(a[0], a[0], a[0], a),
        "gradient of cholesky": jax.grad(lambda a: jnp.sum(jnp.linalg.cholesky(a @ a.T))),
        "gradient of svd": jax.grad(lambda a: jnp.sum(jnp.linalg.svd(a)[1])),
        "top_k": lambda a: jax.lax.top_k(a, 2),
        "approx_max_k": lambda a: jax.lax.approx_max_k(a, 2),
        "erf_inv": jax.scipy.special.erfinv,
        "erf": jax.scipy.special.erf,
        "erfc": jax.scipy.special.erfc,
        "zeta": lambda a: jax.scipy.special.zeta(a, a),
        "polygamma": lambda a: jax.scipy.special.polygamma(1, a),
        "nextafter": lambda a: jnp.nextafter(a, a),
        "gammaln": jax.scipy.special.gammaln,
        "digamma": jax.scipy.special.digamma,
        "betainc": lambda a: jax.scipy.special.betainc(a, a, a),
        "i1e": jax.scipy.special.i1e,
        "convolution": lambda a: jax.lax.conv(img * a[0, 0], jnp.ones((2, 8, 3, 3), jnp.float32), (1, 1), "SAME"),
        "gradient of convolution": jax.grad(
            lambda a: jnp.sum(
                jax.lax.conv_general_dilated(img, a.reshape(2, 2, 4, 1), (1, 1), "SAME", dimension_numbers=conv) ** 2
            )
        ),
        "gradient of max pool": jax.grad(
            lambda a: jnp.sum(jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID"))
        ),
        "batched matmul": lambda a: jnp.einsum("ij,kj->ik", a, a),
        "ragged_dot": lambda a: jax.lax.ragged_dot(a, a[None], jnp.array([4])),
        "attention": lambda a: jax.nn.dot_product_attention(*[a[None, :, None, :]] * 3),
        "scan": lambda a: jax.lax.scan(lambda s, x: (s + x, s * x), jnp.zeros(4, jnp.float32), a),
        "while": lambda a: jax.lax.while_loop(lambda s: s.sum() < 10, lambda s: s + 1, a),
        "cond": lambda a: jax.lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a),
        "switch": lambda a: jax.lax.switch(a[0, 0].astype(int), [jnp.sin, jnp.cos, jnp.tan], a),
        "associative_scan": lambda a: jax.lax.associative_scan(jnp.add, a),
        "checkpoint": jax.grad(lambda a: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(a))),
        "scatter": lambda a: a.at[jnp.array([1, 1])].add(1.0),
        "segment_sum": lambda a: jax.ops.segment_sum(a, jnp.array([0, 1, 1, 0]), 2),
        "dynamic_slice": lambda a: jax.lax.dynamic_slice(a, (a[0, 0].astype(int), 0), (2, 2)),
        "resize": lambda a: jax.image.resize(a, (9, 9), "bicubic"),
        "optimization_barrier": jax.lax.optimization_barrier,
        "reduce_precision": lambda a: jax.lax.reduce_precision(a, 5, 10),
        "bits": lambda a: jax.lax.population_count(jax.lax.bitcast_convert_type(a, jnp.int32)),
        "float8": lambda a: a.astype(jnp.float8_e4m3fn),
        "complex eigenvalues": lambda a: jnp.linalg.eigh(a + 1j * a),
        "rbg": lambda a: jax.random.normal(jax.random.key(0, impl="rbg"), (3,)),
        "normal": lambda a: jax.random.normal(key(), (3,)),
        "gamma": lambda a: jax.random.gamma(key(), a),
        "poisson": lambda a: jax.random.poisson(key(), a),
        "categorical": lambda a: jax.random.categorical(key(), a),
        "permutation": lambda a: jax.random.permutation(key(), a),
        "binomial": lambda a: jax.random.binomial(key(), 10, a),
        "empty": lambda a: jax.lax.empty((3,), jnp.float32),
    }
    return [pytest.param(fn, id=name) for name, fn in fns.items()]


def exported(fn: Callable[[Any], Any], platform: str) -> Program | None:
    """What JAX makes of a function of one 4 x 4 array; None when it has nothing for the platform."""
    try:
        return export_program(lambda a: tuple(jax.tree.leaves(fn(a))), [SQUARE], platform)
    except (NotImplementedError, ValueError) as error:  # JAX itself has none, or gives no guarantee
        assert platform != "cpu", error
        assert "not found for platform" in str(error) or "no compatibility guarantees" in str(error)
        return None


def text_of(program: Program) -> str:
    module = export.deserialize(bytearray(program.blob)).mlir_module_serialized
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        return str(
            stablehlo.deserialize_portable_artifact(context, module).operation.get_asm(print_generic_op_form=True)
        )


@pytest.mark.parametrize("fn", [*numpy_functions(), *other_functions()])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_what_jax_computes_with_is_let_in_unless_it_needs_a_custom_call(
    fn: Callable[[Any], Any], platform: str
) -> None:
    program = exported(fn, platform)
    if program is None:
        return
    calls = re.findall(r'call_target_name = "([^"]*)"', text_of(program))
    if not calls and "chlo.ragged_dot" not in text_of(program):
        verify_program(program)
        return
    with pytest.raises(rt.InvalidArgumentError, match="not allowed .* place what needs it on a device") as caught:
        verify_program(program)
    assert "\n" not in str(caught.value)
    assert not calls or f"custom call {calls[0]!r}" in str(caught.value)


@pytest.mark.chaos
def test_only_what_jax_emits_is_allowed() -> None:
    """Every allowed operation is one that JAX makes of some computation."""
    square, whole = np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)
    more: list[Callable[[Any], Any]] = [
        lambda a: jax.lax.clz(a.astype(jnp.int32)),
        lambda a: jax.lax.shift_right_arithmetic(a.astype(jnp.int32), whole),
        lambda a: jax.lax.round(a, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
        lambda a: jax.lax.atan2(a, a),
        lambda a: jax.lax.min(a, square),
        lambda a: jax.lax.rng_uniform(a[0, 0], a[0, 1], (3,)),
    ]
    emitted: set[str] = set()
    for platform in ("cpu", "tpu"):
        for fn in [*(p.values[0] for p in (*numpy_functions(), *other_functions())), *more]:
            program = exported(fn, platform)  # type: ignore[arg-type]
            if program is not None:
                emitted |= set(re.findall(r'"((?:stablehlo|func)\.[a-z_0-9]+)"', text_of(program)))
    assert set(ALLOWED_OPERATIONS) - emitted == set()
    reaching = "infeed outfeed send recv all_reduce all_gather all_to_all collective_permute after_all partition_id"
    assert not {f"stablehlo.{name}" for name in (*reaching.split(), "custom_call")} & set(ALLOWED_OPERATIONS)


# -- modules made by hand --------------------------------------------------------------------------------------------

PLAIN = export_program(lambda a, b: (a + b, a * 2.0), [VECTOR, VECTOR], "cpu")


def changed(**fields: Any) -> Program:
    """The plain program with other fields in its header, or another module."""
    exported = export.deserialize(bytearray(PLAIN.blob))
    if "module" in fields:
        version = stablehlo.get_current_version()
        fields["mlir_module_serialized"] = stablehlo.serialize_portable_artifact_str(fields.pop("module"), version)
    blob = bytes(dataclasses.replace(exported, **fields).serialize())
    return Program(blob, PLAIN.arguments, PLAIN.results)


def with_body(body: str, rest: str = "") -> Program:
    return changed(
        module="module @m { func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> "
        "(tensor<4xf32>, tensor<4xf32>) { "
        f"{body} return %a, %b : tensor<4xf32>, tensor<4xf32> }} {rest} }}"
    )


def test_a_module_made_by_hand_is_let_in_when_it_only_computes() -> None:
    run = Compiler().executable(with_body("%c = stablehlo.add %a, %b : tensor<4xf32>"), (), jax.local_devices()[0])
    values = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(run(values, values + 1)[1], values + 1)


CUSTOM = "stablehlo.custom_call @{}(%a) : (tensor<4xf32>) -> tensor<4xf32>"
REACHING = {
    "operation 'stablehlo.infeed'": "%t = stablehlo.create_token : !stablehlo.token "
    '%i:2 = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)',
    "operation 'stablehlo.outfeed'": "%t = stablehlo.after_all : !stablehlo.token "
    '%o = "stablehlo.outfeed"(%a, %t) : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token',
    "operation 'stablehlo.partition_id'": "%p = stablehlo.partition_id : tensor<ui32>",
    "operation 'stablehlo.replica_id'": "%p = stablehlo.replica_id : tensor<ui32>",
    "operation 'stablehlo.all_reduce'": '%r = "stablehlo.all_reduce"(%a) ({ ^bb0(%x: tensor<f32>, %y: tensor<f32>): '
    "%s = stablehlo.add %x, %y : tensor<f32> stablehlo.return %s : tensor<f32> }) "
    "{replica_groups = dense<0> : tensor<1x1xi64>} : (tensor<4xf32>) -> tensor<4xf32>",
}


@pytest.mark.parametrize("said", REACHING)
def test_operations_that_reach_outside_are_refused(said: str) -> None:
    first = "stablehlo.(create_token|after_all)" if "feed" in said else said.split("'")[1]
    with pytest.raises(rt.InvalidArgumentError, match=f"operation '{first}' is not allowed in a stage"):
        verify_program(with_body(REACHING[said]))


@pytest.mark.parametrize(
    "target",
    [
        "xla_python_cpu_callback",
        "xla_ffi_python_cpu_callback",
        "xla_ffi_partitioned_python_cpu_callback",
        "tpu_custom_call",
        "mosaic_gpu_v2",
        "tf.call_tf_function",
        "lapack_spotrf",  # without the checks that _ffi has
        "lapack_spotrf_ffi_",
        "cu_system",
        "Sharding",
        "__gpu$xla.gpu.triton",
        "",
    ],
)
def test_custom_calls_that_are_not_listed_are_refused(target: str) -> None:
    with pytest.raises(rt.InvalidArgumentError, match="custom call .* is not allowed in a stage"):
        verify_program(
            with_body(
                f'%c = "stablehlo.custom_call"(%a) {{call_target_name = "{target}"}} : (tensor<4xf32>) -> tensor<4xf32>'
            )
        )


def test_nothing_hides_in_an_inner_function_or_a_loop() -> None:
    inner = "func.func private @inner(%a: tensor<4xf32>) -> tensor<4xf32> { %c = " + CUSTOM.format("evil")
    with pytest.raises(rt.InvalidArgumentError, match="custom call 'evil'"):
        verify_program(with_body("", inner + " return %c : tensor<4xf32> }"))
    loop = (
        "%w = stablehlo.while(%x = %a) : tensor<4xf32> cond { %f = stablehlo.constant dense<false> : tensor<i1> "
        "stablehlo.return %f : tensor<i1> } do { %c = "
        + CUSTOM.format("evil").replace("%a", "%x")
        + " stablehlo.return %c : tensor<4xf32> }"
    )
    with pytest.raises(rt.InvalidArgumentError, match="custom call 'evil'"):
        verify_program(with_body(loop))


def test_callbacks_do_not_even_leave_the_client() -> None:
    def shout(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    with rt.Graph().as_default(), rt.Session() as session:
        for fn in (shout, lambda x: jax.pure_callback(np.sin, x, x)):
            y = rt.call(fn, rt.constant(1.0), name="loud")
            with pytest.raises(rt.InvalidArgumentError, match="loud") as caught:
                session.run(y)
            assert "\n" not in str(caught.value)


# -- programs that lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "results", "said"),
    [
        ((VECTOR,), PLAIN.results, "arguments are not those"),
        ((VECTOR, SQUARE), PLAIN.results, "arguments are not those"),
        ((VECTOR, TensorSpec((4,), np.dtype(np.int32))), PLAIN.results, "arguments are not those"),
        (PLAIN.arguments, (VECTOR,), "results are not those"),
        (PLAIN.arguments, (VECTOR, TensorSpec((5,), F32)), "results are not those"),
    ],
)
def test_a_stage_that_declares_something_else(arguments: Any, results: Any, said: str) -> None:
    with pytest.raises(rt.InvalidArgumentError, match=said):
        verify_program(Program(PLAIN.blob, arguments, results))


def test_a_header_that_says_something_else_than_the_module() -> None:
    small = "module @m { func.func public @main(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> } }"
    with pytest.raises(
        rt.InvalidArgumentError, match=r"module takes \(tensor<2xf32>\), its header says \(tensor<4xf32>"
    ):
        verify_program(changed(module=small))
    with pytest.raises(rt.InvalidArgumentError, match="0 entry functions"):
        verify_program(changed(module=small.replace("main", "other")))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nr_devices": 2}, "wants 2"),
        ({"platforms": ("cpu", "cuda")}, "one platform"),
        ({"disabled_safety_checks": (export.DisabledSafetyCheck.custom_call("evil"),)}, "without JAX's safety checks"),
        ({"module_kept_var_idx": (0, 7)}, "keeps arguments"),
        ({"module_kept_var_idx": (1, 0)}, "keeps arguments"),
        ({"module_kept_var_idx": (0,)}, "module takes"),
        ({"in_tree": jax.tree.structure((([0, 0],), {}))}, "not a flat row"),
        ({"out_tree": jax.tree.structure({"a": 0, "b": 0})}, "not a flat row"),
    ],
    ids=str,
)
def test_headers_that_ask_for_more(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(rt.InvalidArgumentError, match=said):
        verify_program(changed(**fields))


def test_a_program_for_another_platform_does_not_compile() -> None:
    program = export_program(lambda a: (a + 1.0,), [VECTOR], "cuda")
    with pytest.raises(rt.InvalidArgumentError, match="could not be compiled for"):
        Compiler().executable(program, (), jax.local_devices()[0])


# -- damage ----------------------------------------------------------------------------------------------------------


def test_truncated_programs_are_refused_with_a_clean_error() -> None:
    for length in range(0, len(PLAIN.blob) - 64, 13):
        with pytest.raises(rt.InvalidArgumentError, match="not a program that this task can read") as caught:
            verify_program(Program(PLAIN.blob[:length], PLAIN.arguments, PLAIN.results))
        assert "\n" not in str(caught.value)


def test_a_damaged_header_gives_a_clean_error_or_no_damage() -> None:
    """The module itself is guarded by its SHA-256: MLIR's own reader can be crashed by what is not a module."""
    module = export.deserialize(bytearray(PLAIN.blob)).mlir_module_serialized
    start = PLAIN.blob.index(module)
    outside = [i for i in range(len(PLAIN.blob)) if not start <= i < start + len(module)]
    chance = random.Random(0)
    refused = 0
    for _ in range(500):
        blob = bytearray(PLAIN.blob)
        for _ in range(chance.choice((1, 1, 2, 8))):
            blob[chance.choice(outside)] = chance.randrange(256)
        try:
            verify_program(Program(bytes(blob), PLAIN.arguments, PLAIN.results))
        except rt.InvalidArgumentError:
            refused += 1
    assert refused > 100


def damaged(module: bytes, chance: random.Random) -> bytes:
    """The bytes of a module, a few of them changed, missing or added."""
    found = bytearray(module)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(found))
        match chance.randrange(3):
            case 0:
                found[at] = chance.randrange(256)
            case 1:
                del found[at : at + chance.randrange(1, 8)]
            case _:
                found[at:at] = chance.randbytes(chance.randrange(1, 8))
    return bytes(found)


def test_the_frame_of_every_module_that_jax_writes_holds_and_no_part_may_have_another_size() -> None:
    for fn in (jnp.sin, jnp.sort, lambda a: jax.random.normal(key(), (3,)) + a[0, :3]):
        program = exported(fn, "cpu")
        assert program is not None
        check_frame(export.deserialize(bytearray(program.blob)).mlir_module_serialized)
    module = export.deserialize(bytearray(PLAIN.blob)).mlir_module_serialized
    check_frame(module)
    for length in range(len(module)):
        with pytest.raises(ValueError):
            check_frame(module[:length])
    with pytest.raises(ValueError):
        check_frame(module + b"\0")
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        try:
            check_frame(damaged(module, chance))
        except ValueError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("section", ["attribute sizes", "properties"])
def test_sizes_that_end_mlir_s_own_reader_are_refused_before_it_reads(section: str) -> None:
    """An attribute, or the properties of an operation, past the end of its section: MLIR's own check freed twice."""
    module = bytearray(export.deserialize(bytearray(PLAIN.blob)).mlir_module_serialized)
    at = dict(sections(module))[3 if section == "attribute sizes" else 8]
    # Behind the counts: two of them and the first group's dialect and size; one, and then the first size.
    module[at + (4 if section == "attribute sizes" else 1)] = 0xFF
    program = changed(mlir_module_serialized=bytes(module))
    with pytest.raises(rt.InvalidArgumentError, match="module cannot be read: ValueError"):
        verify_program(program)


def sections(module: bytes | bytearray) -> list[tuple[int, int]]:
    """Number and place of each section of a small module, whose lengths take two bytes at most."""
    at = module.index(b"\0", 5) + 1
    found = []
    while at < len(module):
        number, first = module[at], module[at + 1]
        size = 1 if first & 1 else 2
        assert first & 3
        length = int.from_bytes(module[at + 1 : at + 1 + size], "little") >> size
        found.append((number, at + 1 + size))
        at += 1 + size + length
    return found
