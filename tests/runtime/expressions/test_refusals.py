"""Expression lists from another process: what breaks a rule is refused, with the rule, before it is compiled."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.expressions import reader
from runtime.expressions.reader import DEPTH, LIST_BYTES, PART, VALUES, read_expressions
from runtime.expressions.table import TABLE
from runtime.plan.plan import Program
from runtime.proto import expressions_pb2 as pb
from runtime.proto import stage_pb2
from runtime.task.compiler import Compiler
from runtime.tensor_spec import TensorSpec
from tests.runtime.expressions.shapes import shaped
from tests.runtime.expressions.test_round_trip import A, written

F32 = np.dtype(np.float32)


def plain() -> pb.ExpressionsDef:
    """``sin(a) + a`` of a 4 x 4 array."""
    return pb.ExpressionsDef.FromString(written(lambda a: jnp.sin(a) + a, A))


def of(fn: Callable[[Any], Any]) -> pb.ExpressionsDef:
    return pb.ExpressionsDef.FromString(written(fn, A))


def integers(equation: pb.EquationDef, name: str) -> Any:
    return next(a for a in equation.attributes if a.name == name).integers.values


def attribute(equation: pb.EquationDef, name: str) -> pb.AttributeDef:
    return next(a for a in equation.attributes if a.name == name)


def nested(levels: int) -> pb.ExpressionsDef:
    found = of(lambda a: jax.lax.fori_loop(0, 3, lambda i, s: s + 1, a))
    loop = next(e for e in found.main.equations if e.operation == "scan")
    for _ in range(levels):
        inner = pb.EquationDef.FromString(loop.SerializeToString())
        body = attribute(loop, "jaxpr").computations.values[0]
        del body.equations[:]
        body.equations.append(inner)
        inner.operands[:] = (
            range(len(inner.operands)) if body.arguments >= len(inner.operands) else [0, 1]
        )
    return found


def changed(
    make: Callable[[pb.ExpressionsDef], Any], base: Callable[[], pb.ExpressionsDef] = plain
) -> pb.ExpressionsDef:
    found = base()
    make(found)
    return found


def set_(message: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(message, name, value)


def equation(index: int, **fields: Any) -> Callable[[pb.ExpressionsDef], None]:
    return lambda m: set_(m.main.equations[index], **fields)


def operands(index: int, *numbers: int) -> Callable[[pb.ExpressionsDef], None]:
    def change(m: pb.ExpressionsDef) -> None:
        m.main.equations[index].operands[:] = numbers

    return change


def constant(dtype: str, shape: list[int], data: bytes) -> Callable[[pb.ExpressionsDef], None]:
    return lambda m: m.constants.append(
        pb.ConstantDef(spec=stage_pb2.TensorSpecDef(dtype=dtype, shape=shape), data=data)
    )


def argument(dtype: str, *shape: int) -> Callable[[pb.ExpressionsDef], None]:
    def change(m: pb.ExpressionsDef) -> None:
        m.arguments[0].CopyFrom(stage_pb2.TensorSpecDef(dtype=dtype, shape=shape))

    return change


def broadcast(*shape: int) -> Callable[[], pb.ExpressionsDef]:
    def make() -> pb.ExpressionsDef:
        found = of(lambda a: jnp.broadcast_to(a[0, 0], (3,)))
        integers(found.main.equations[-1], "shape")[:] = shape
        return found

    return make


def many_computations(m: pb.ExpressionsDef) -> None:
    found = attribute(m.main.equations[-1], "jaxpr").computations.values
    found.append(found[0])


def scan() -> pb.ExpressionsDef:
    return of(lambda a: jax.lax.scan(lambda s, x: (s + x, x), a[0], a)[0])


def window() -> pb.ExpressionsDef:
    return of(lambda a: jax.lax.reduce_window(a, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID"))


def empty(dtype: str) -> Callable[[pb.ExpressionsDef], None]:
    """XLA ended the process at a constant of zeros that it has no elements for."""

    def change(m: pb.ExpressionsDef) -> None:
        made = m.main.equations.add(operation="empty", results=1)
        made.attributes.add(name="shape").integers.values.append(3)
        made.attributes.add(name="dtype", word=dtype)

    return change


def long(m: pb.ExpressionsDef) -> None:
    inner(m).equations.extend([inner(m).equations[0]] * (PART + 1))


def branches(count: int) -> pb.ExpressionsDef:
    made = of(lambda a: jax.lax.cond(a[0, 0] > 0, lambda x: x + 1, lambda x: x, a))
    cond = next(e for e in made.main.equations if e.operation == "cond")
    values = attribute(cond, "branches").computations.values
    operands_of = values[0].arguments
    del values[:]
    values.extend([pb.ComputationDef(arguments=operands_of, results=[0])] * count)
    return made


def special(count: int, name: str = "igamma") -> pb.ExpressionsDef:
    made = of(lambda a: jnp.add(a, a))
    made.main.equations[0].operation = name
    made.main.equations.extend([made.main.equations[0]] * (count - 1))
    return made


def unrolled(loops: int, unroll: int) -> pb.ExpressionsDef:
    made = of(lambda a: jax.lax.scan(lambda s, _: (s + s, None), a, None, 64, unroll=unroll)[0])
    inner(made).equations[0].operation = "igamma"
    made.main.equations.extend([made.main.equations[-1]] * (loops - 1))
    return made


def outputs(m: pb.ExpressionsDef) -> None:
    m.main.results.extend([0] * VALUES)


UNREAD: dict[str, tuple[Callable[[], pb.ExpressionsDef], str]] = {
    "an operation that there is not": (
        lambda: changed(equation(0, operation="system")),
        "'system' is not in the table",
    ),
    "an operation with effects": (
        lambda: changed(equation(0, operation="debug_callback")),
        "not in the table",
    ),
    "an operation for several devices": (
        lambda: changed(equation(0, operation="psum")),
        "not in the table",
    ),
    "a foreign function": (lambda: changed(equation(0, operation="ffi_call")), "not in the table"),
    "a kernel of Pallas": (
        lambda: changed(equation(0, operation="pallas_call")),
        "not in the table",
    ),
    "an operation without a name": (
        lambda: changed(equation(0, operation="")),
        "'' is not in the table",
    ),
    "a value that comes later": (lambda: changed(operands(0, 2)), "value 2 of 1 values"),
    "an operation that takes what it gives": (
        lambda: changed(operands(1, 0, 2)),
        "value 2 of 2 values",
    ),
    "two operations that take what the other gives": (
        lambda: changed(operands(0, 2)),
        "come before",
    ),
    "a constant that there is not": (
        lambda: changed(operands(0, -1)),
        "value -1 of 1 values and 0 constants",
    ),
    "a result that there is not": (
        lambda: changed(lambda m: m.main.results.append(3)),
        "a result is value 3",
    ),
    "less than no results": (
        lambda: changed(equation(0, results=-1)),
        "more than 2,097,152 values",
    ),
    "a thousand million results": (lambda: changed(equation(0, results=10**9)), "costs as much as"),
    "too many results of the whole": (lambda: changed(outputs), "more than 2,097,152 values"),
    "ten million arguments": (
        lambda: changed(lambda m: set_(m.main, arguments=10**7)),
        "more than 2,097,152 values",
    ),
    "less than no arguments": (
        lambda: changed(lambda m: set_(m.main, arguments=-1)),
        "more than 2,097,152 values",
    ),
    "other arguments than it describes": (
        lambda: changed(lambda m: set_(m.main, arguments=2)),
        "takes 2 arguments and describes 1",
    ),
    "an argument that is too large": (
        lambda: changed(argument("float32", 1 << 20, 1 << 20)),
        "bytes that are allowed",
    ),
    "an argument whose size overflows": (
        lambda: changed(argument("float32", 1 << 62, 1 << 62, 0)),
        "are allowed",
    ),
    "an argument of many dimensions": (
        lambda: changed(argument("int8", *[1] * 65)),
        "65 dimensions, 64 are allowed",
    ),
    "an argument of strings": (lambda: changed(argument("string")), "is of strings"),
    "an argument of a dtype that there is not": (
        lambda: changed(argument("quaternion")),
        "is not a dtype",
    ),
    "an argument of less than no elements": (
        lambda: changed(argument("int8", -1)),
        "negative dimension",
    ),
    "a constant that is shorter than it says": (
        lambda: changed(constant("float32", [1 << 20], b"1234")),
        "4 bytes is not",
    ),
    "a constant that says that it is huge": (
        lambda: changed(constant("int8", [1 << 40], b"")),
        "are allowed",
    ),
    "a constant of strings": (lambda: changed(constant("string", [1], b"a")), "is of strings"),
    "a truth value that is neither": (
        lambda: changed(constant("bool", [1], b"\x02")),
        "are not of bool",
    ),
    "four bits that are eight": (
        lambda: changed(constant("int4", [1], b"\x7f")),
        "less than a byte",
    ),
    "elements that XLA does not know, in a constant": (
        lambda: changed(constant("float6_e2m3fn", [1], b"\0")),
        "a constant is of float6_e2m3fn, which cannot be computed with",
    ),
    "elements that XLA does not know, from nothing": (
        lambda: changed(empty("float6_e2m3fn")),
        "'empty': float6_e2m3fn cannot be computed with",
    ),
    "an argument of elements that XLA does not know": (
        lambda: changed(argument("int1", 5)),
        # ml_dtypes has it since 0.6
        "an argument is of int1, which cannot be computed with|'int1' is not a dtype",
    ),
    "an attribute that is missing": (
        lambda: changed(lambda m: m.main.equations[-1].attributes.pop(), broadcast(3)),
        "'broadcast_in_dim' needs the attribute",
    ),
    "an attribute that nobody knows": (
        lambda: changed(lambda m: m.main.equations[0].attributes.add(name="sharding", flag=True)),
        "'sin' has no attribute 'sharding'",
    ),
    "an attribute that is there twice": (
        lambda: changed(
            lambda m: m.main.equations[-1].attributes.append(m.main.equations[-1].attributes[0]),
            broadcast(3),
        ),
        "or twice",
    ),
    "a word for numbers": (
        lambda: changed(lambda m: set_(m.main.equations[-1].attributes[0], word="x"), broadcast(3)),
        "is no integers",
    ),
    "a number for a computation": (
        lambda: changed(lambda m: set_(attribute(m.main.equations[-1], "jaxpr"), integer=1), scan),
        "'jaxpr' of 'scan' is no computation",
    ),
    "a dtype that there is not": (
        lambda: changed(
            lambda m: set_(attribute(m.main.equations[0], "new_dtype"), word="O"),
            lambda: of(lambda a: a.astype("int8")),
        ),
        "new_dtype",
    ),
    "a generator that is not JAX's": (
        lambda: changed(
            lambda m: set_(attribute(m.main.equations[0], "impl"), word="evil"),
            lambda: of(lambda a: jax.random.normal(jax.random.key(0))),
        ),
        "'evil' is none of threefry2x32",
    ),
    "a shape of many dimensions": (broadcast(*[1] * 65), "65 numbers, 64 are allowed"),
    "a shape of less than nothing": (broadcast(-1), "-1 is not between 0"),
    "axes that are none": (
        lambda: changed(
            lambda m: integers(m.main.equations[0], "dimension_numbers").append(9),
            lambda: of(lambda a: a @ a),
        ),
        "do not make 4 rows",
    ),
    "a window of 2^40 elements": (
        lambda: changed(
            lambda m: integers(m.main.equations[-1], "window_dimensions").__setitem__(0, 1 << 30),
            window,
        ),
        "window of .* has more than",
    ),
    "a window that never moves": (
        lambda: changed(
            lambda m: integers(m.main.equations[-1], "window_strides").__setitem__(0, 0), window
        ),
        "0 is not between 1",
    ),
    "a loop that runs for years": (
        lambda: changed(
            lambda m: set_(attribute(m.main.equations[-1], "length"), integer=1 << 41), scan
        ),
        "a loop runs more than",
    ),
    "loops that run for years together": (
        lambda: changed(
            lambda m: [
                set_(a, integer=(1 << 31) - 1)
                for e in (
                    m.main.equations[-1],
                    attribute(m.main.equations[-1], "jaxpr").computations.values[0].equations[0],
                )
                for a in e.attributes
                if a.name == "length"
            ],
            lambda: nested(1),
        ),
        "a loop runs more than",
    ),
    "a loop that is unrolled a million times": (
        lambda: changed(
            lambda m: set_(attribute(m.main.equations[-1], "unroll"), integer=10**6), scan
        ),
        "costs as much as .* equations",
    ),
    "elements that are combined by a loop": (
        lambda: changed(
            lambda m: set_(inner(m).equations[0], operation="igamma"),
            lambda: of(lambda a: jax.lax.reduce(a, np.float32(1), lambda x, y: x * y + 1, (0,))),
        ),
        "'igamma' is no operation by which elements are combined",
    ),
    "two bodies for one loop": (lambda: changed(many_computations, scan), "one computation"),
    "loops that lie deep in each other": (lambda: nested(DEPTH + 2), f"more than {DEPTH} deep"),
    "a loop with too many equations": (lambda: changed(long, scan), "more than 1,024 equations"),
    "a thousand empty branches": (lambda: branches(PART // 2), "costs as much as 1,025 equations"),
    "functions that each keep XLA busy, in many parts": (
        lambda: special(17),
        "such as 'igamma' cost more than",
    ),
    "inverse functions, of complex numbers the dearest": (
        lambda: special(65, "acosh"),
        "such as 'acosh' cost more than",
    ),
    "256 logarithms that took XLA 22 seconds": (
        lambda: special(65, "log1p"),
        "such as 'log1p' cost more than",
    ),
    "functions that each keep XLA busy, in loops that are unrolled": (
        lambda: unrolled(2, 9),
        "such as 'igamma' cost more than",
    ),
    "a drawn list that took XLA 82 seconds": (
        lambda: pb.ExpressionsDef.FromString(shaped(3195, 8)),
        "such as 'asinh' cost more than 1,024 equations",
    ),
    "a drawn list that XLA had not compiled after 195 seconds": (
        lambda: pb.ExpressionsDef.FromString(shaped(6950, 8)),
        "such as 'igamma' cost more than 1,024 equations",
    ),
    "a drawn list that XLA had not compiled after 150 seconds": (
        lambda: pb.ExpressionsDef.FromString(shaped(1005, 2708)),
        "such as 'nextafter' cost more than 1,024 equations",
    ),
    "an operation of 10,000 operands": (
        lambda: changed(operands(-1, *[0] * 10_000), lambda: of(lambda a: jnp.concatenate([a, a]))),
        "costs as much as 2,50. equations",
    ),
}
"""What is refused before JAX hears of it."""


@pytest.mark.parametrize("what", UNREAD)
def test_rule_breakers_are_not_read(what: str) -> None:
    """A program that breaks a rule is refused in one line."""
    make, said = UNREAD[what]
    with pytest.raises(rt.InvalidArgumentError, match=said) as caught:
        read_expressions(make().SerializeToString())
    assert "\n" not in str(caught.value)


def test_part_of_special_functions_passes() -> None:
    """A program that costs no more than one part is accepted."""
    for made in (special(16), special(64, "log1p"), unrolled(2, 8)):
        assert read_expressions(made.SerializeToString()).arguments


def test_gamma_draws_have_a_limit() -> None:
    """A program may draw from 16 gamma distributions, and not from 17."""

    def draw(count: int) -> bytes:
        def drawn(a: Any) -> Any:
            return sum(jax.random.gamma(jax.random.key(n), a) for n in range(count))

        return of(drawn).SerializeToString()

    assert read_expressions(draw(16)).arguments
    with pytest.raises(rt.InvalidArgumentError, match="such as 'random_gamma' cost more than"):
        read_expressions(draw(17))


def test_common_functions_have_no_limit() -> None:
    """A program may have thousands of initial draws, logarithms and roots."""
    for name in ("erf_inv", "log", "sqrt"):
        expressions = read_expressions(special(5000, name).SerializeToString())
        assert sum(equation.cost for equation in expressions.main.equations) > 10 * PART


def inner(m: pb.ExpressionsDef) -> Any:
    return attribute(m.main.equations[-1], "jaxpr").computations.values[0]


def two_results(m: pb.ExpressionsDef) -> None:
    m.main.equations[0].results = 2
    m.main.equations[1].operands[:] = [0, 1]


UNTRACED: dict[str, tuple[Callable[[], pb.ExpressionsDef], str]] = {
    "a value of 2^60 bytes on the way": (
        broadcast(1 << 60),
        "a result of 'broadcast_in_dim' is larger",
    ),
    "a value of more elements than there are 64-bit numbers": (
        broadcast(1 << 62, 1 << 62),
        "larger|overflow|too large",
    ),
    "no elements whose other dimensions overflow": (
        broadcast(0, 1 << 62, 1 << 62),
        "larger|overflow|too large",
    ),
    "more results than the operation has": (
        lambda: changed(two_results),
        "gives 1 results, the program says 2",
    ),
    "an operand too few": (lambda: changed(operands(1, 0)), "'add'"),
    "an operand too many": (lambda: changed(operands(0, 0, 0)), "'sin'"),
    "shapes that do not fit": (
        lambda: changed(argument("float32", 5, 4), lambda: of(lambda a: a @ a)),
        "'dot_general'.*contracting",
    ),
    "random numbers of a dtype of which none are drawn": (
        lambda: changed(
            argument("int8", 4, 4),
            lambda: of(lambda a: jax.lax.rng_uniform(a[0, 0], a[0, 0], (3,))),
        ),
        "'rng_uniform': numbers are drawn of float16, .* not of int8",
    ),
    "dtypes that do not fit": (lambda: changed(argument("int32", 4, 4)), "'sin'"),
    "axes that the array does not have": (
        lambda: changed(
            lambda m: integers(m.main.equations[0], "axes").__setitem__(0, 7),
            lambda: of(lambda a: a.sum()),
        ),
        "'reduce_sum'",
    ),
    "a body with other arguments": (
        lambda: changed(lambda m: set_(inner(m), arguments=3), scan),
        "3 arguments is given 2",
    ),
    "a body whose state changes its type": (
        lambda: changed(
            lambda m: inner(m).results.reverse(),
            lambda: of(lambda a: jax.lax.scan(lambda s, x: (s + x, x[0]), a[0], a)),
        ),
        "'scan'",
    ),
}
"""What is refused while JAX infers the shapes, and never compiled."""


@pytest.mark.parametrize("what", UNTRACED)
def test_misfits_are_not_compiled(what: str) -> None:
    """A program whose shapes do not fit is refused before the compiler runs."""
    make, said = UNTRACED[what]
    message = make()
    arguments = tuple(TensorSpec(tuple(a.shape), np.dtype(a.dtype)) for a in message.arguments)
    compiler = Compiler()
    program = Program(message.SerializeToString(), arguments, ())
    with pytest.raises(rt.InvalidArgumentError, match=said) as caught:
        compiler.executable(program, (), jax.local_devices()[0])
    assert "\n" not in str(caught.value)
    assert compiler.compilations == 0


@pytest.mark.parametrize(
    ("arguments", "results", "said"),
    [
        ((TensorSpec((4,), F32),), (TensorSpec((4, 4), F32),), "arguments are not those"),
        (
            (TensorSpec((4, 4), F32),),
            (TensorSpec((4,), F32),),
            r"gives \(float32\[4,4\]\), its stage declares \(float32",
        ),
        ((TensorSpec((4, 4), F32),), (), r"gives \(float32\[4,4\]\), its stage declares \(\)"),
    ],
)
def test_stage_must_declare_its_program(arguments: Any, results: Any, said: str) -> None:
    """A stage that declares other arguments or results than its program has is refused."""
    program = Program(plain().SerializeToString(), arguments, results)
    with pytest.raises(rt.InvalidArgumentError, match=said):
        Compiler().executable(program, (), jax.local_devices()[0])


def test_large_list_is_refused_unread() -> None:
    """A program of too many bytes is refused before the bytes are read."""
    with pytest.raises(
        rt.InvalidArgumentError,
        match="50,331,649 bytes, 50,331,648 are allowed: feed large constants",
    ):
        read_expressions(bytes(LIST_BYTES + 1))


def test_non_message_is_refused() -> None:
    """Bytes that are no program raise InvalidArgumentError in one line."""
    with pytest.raises(rt.InvalidArgumentError, match="not a program that this task can read"):
        read_expressions(b"\xff\xff\xff")
    chance = random.Random(0)
    data = plain().SerializeToString()
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            read_expressions(bytes(damaged))
        except rt.InvalidArgumentError as error:
            assert "\n" not in str(error)


def test_value_limit_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of exactly the limit is allowed, and one byte more is not."""
    data = plain().SerializeToString()
    monkeypatch.setattr(reader, "VALUE_BYTES", 64)
    read_expressions(data)
    monkeypatch.setattr(reader, "VALUE_BYTES", 63)
    with pytest.raises(
        rt.InvalidArgumentError,
        match="larger than the 63 bytes that are allowed; partition a variable",
    ):
        read_expressions(data)


def test_table_reaches_nothing_outside() -> None:
    """No operation of the table reaches outside its program."""
    reaching = "infeed outfeed psum all_gather ppermute pure_callback io_callback debug_callback ffi_call pallas_call"
    assert not set(reaching.split()) & set(TABLE)
