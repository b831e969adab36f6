"""What is written as an expression list computes the same, bit for bit, when a task has read it again."""

import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime.expressions.reader import jax_settings, read_expressions
from runtime.expressions.table import TABLE
from runtime.expressions.writer import NotInTableError, write_expressions
from runtime.proto import expressions_pb2 as pb
from runtime.tensor_spec import NUMERIC_DTYPES
from tests.runtime.expressions.samples import SAMPLES, Fn

A = np.random.default_rng(0).uniform(0.1, 0.9, (4, 4)).astype(np.float32)


def written(fn: Fn, *arguments: Any) -> bytes:
    with jax.enable_x64(True):
        return write_expressions(
            jax.make_jaxpr(lambda *a: tuple(jax.tree.leaves(fn(*a))))(*arguments)
        )


def computed(data: bytes, *arguments: Any) -> list[Any]:
    expressions = read_expressions(data)
    with jax.enable_x64(True), jax_settings(expressions):
        return jax.jit(expressions.compute)(*arguments)


def same_bits(found: Any, wanted: Any) -> bool:
    return (found.shape, found.dtype) == (wanted.shape, wanted.dtype) and np.asarray(
        found
    ).tobytes() == np.asarray(wanted).tobytes()


def module(lowered: jax.stages.Lowered) -> str:
    """A module's text in which functions, and the module itself, are called by numbers."""
    names: dict[str, str] = {}
    return re.sub(
        r"@\w+", lambda found: names.setdefault(found[0], f"@{len(names)}"), lowered.as_text()
    )


def check(fn: Fn, *arguments: Any) -> None:
    """What was read is the same module as ``fn``, or, where calls were inlined, gives the same bits."""
    with jax.enable_x64(True):
        wanted = jax.jit(lambda *a: tuple(jax.tree.leaves(fn(*a)))).lower(*arguments)
    expressions = read_expressions(written(fn, *arguments))
    with jax.enable_x64(True), jax_settings(expressions):
        found = jax.jit(expressions.compute).lower(*arguments)
        # compiling both, and running them, is most of the time of this file
        if module(found) == module(wanted):
            return
        results = zip(found.compile()(*arguments), wanted.compile()(*arguments), strict=True)
    assert all(same_bits(f, w) for f, w in results)


@pytest.mark.parametrize("name", SAMPLES)
def test_round_trip_keeps_the_bits(name: str) -> None:
    """A program that was written and read computes the same bits."""
    check(SAMPLES[name], A)


def operations(message: Any) -> set[str]:
    """The operations of an expression list, also those inside others."""
    if isinstance(message, pb.ExpressionsDef):
        return operations(message.main)
    found = {equation.operation for equation in message.equations}
    for equation in message.equations:
        for attribute in equation.attributes:
            found |= {name for inner in attribute.computations.values for name in operations(inner)}
    return found


OF_NEWER_JAX = {"stack", "unstack", "log2", "one_minus_square", "polynomial"}
"""Operations of their own since JAX 0.10.1, or 0.12; before, it makes the same of others."""


def test_every_row_has_a_sample() -> None:
    """Every row of the table has a sample, but those of newer versions of JAX."""
    found: set[str] = set()
    for fn in SAMPLES.values():
        found |= operations(pb.ExpressionsDef.FromString(written(fn, A)))
    assert found <= set(TABLE)
    assert set(TABLE) - found <= OF_NEWER_JAX


def test_equal_functions_give_equal_bytes() -> None:
    """Equal functions of equal shapes are written as equal bytes."""
    assert written(lambda a: a @ a + 1, A) == written(lambda b: b @ b + 1, A)
    assert written(lambda a: a, A) != written(lambda a: a, A[0])


def test_unneeded_operations_are_left_out() -> None:
    """An operation whose result nothing needs is not written."""

    def fn(a: Any) -> Any:
        jnp.linalg.svd(a)
        return jax.jit(lambda x: (jnp.sin(x), jnp.linalg.cholesky(x)))(a)[0]

    assert operations(pb.ExpressionsDef.FromString(written(fn, A))) == {"sin"}


def test_equal_elements_are_one_number() -> None:
    """An array of equal elements is written as one number, and -0.0 is not 0.0."""
    assert len(written(lambda a: a[0, 0] + np.zeros((1000, 1000), np.float32), A)) < 500
    values = np.zeros(1000)
    values[0] = -0.0  # equal to the others as a number
    check(lambda a: values / a[0, 0], A)


@pytest.mark.parametrize(
    "name",
    ["bool", "int4", "uint4", "bfloat16", "float8_e4m3fn", "complex128", "uint64", "float16"],
)
def test_constants_have_any_dtype(name: str) -> None:
    """A constant of any dtype keeps its bits, also where JAX's own way ends the process."""
    values = np.array([0, 1, 2, 3, 1], np.float32).astype(NUMERIC_DTYPES[name])
    (found,) = computed(written(lambda a: values, A), A)
    assert same_bits(found, values)


def test_constant_division_spares_the_process() -> None:
    """A constant divided by zero has XLA's value and does not end the process."""
    ones, zeros = np.array([1, 2, 3], np.int32), np.zeros(3, np.int32)
    data = written(
        lambda a: (jax.lax.rem(ones, zeros), jax.lax.div(ones, zeros), jax.lax.div(ones, ones)), A
    )
    np.testing.assert_array_equal(computed(data, A), [ones, [-1, -1, -1], [1, 1, 1]])


def test_random_numbers_follow_writer_settings() -> None:
    """Random numbers are those of the settings under which the program was written."""

    def fn(a: Any) -> Any:
        return jax.random.normal(jax.random.key(1), (3, 5), jnp.float32) + a[0, 0]

    data = {}
    for partitionable in (False, True):
        with jax.threefry_partitionable(partitionable):
            data[partitionable] = (written(fn, A), jax.jit(fn)(A))
    assert not same_bits(data[False][1], data[True][1])
    for bits, wanted in data.values():
        (found,) = computed(bits, A)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda a: jax.pure_callback(np.sin, a, a), "'pure_callback' is not in the table"),
        (
            lambda a: jax.lax.reduce(a, np.float32(1), jax.lax.igamma, (0,)),
            "jaxpr of 'reduce': 'igamma' is no operation by which elements are combined",
        ),
        (
            lambda a: jax.lax.exp(a, accuracy=jax.lax.AccuracyMode.HIGHEST),
            "accuracy=.* of 'exp' is not in the table",
        ),
        (lambda a: jax.lax.scan(lambda s, x: (jax.lax.psum(s, ()), x), a[0], a), None),
    ],
)
def test_outsiders_of_table_are_named(fn: Fn, said: str | None) -> None:
    """An operation or parameter outside the table is refused by name."""
    if said is None:
        check(fn, A)
        return
    with pytest.raises(NotInTableError, match=said) as caught:
        written(fn, A)
    assert "\n" not in str(caught.value)


@hypothesis.given(
    st.one_of(
        st.complex_numbers(width=64).map(np.complex64),
        st.complex_numbers().map(np.complex128),
        st.floats(width=32).map(np.float32),
        st.integers(-(1 << 63), (1 << 63) - 1).map(np.int64),
        st.booleans().map(np.bool_),
    )
)
def test_any_fill_value_comes_back(value: Any) -> None:
    """Any fill value keeps its bits."""
    data = written(
        lambda a: a.at[np.array([0, 9])].get(mode="fill", fill_value=value),
        np.zeros(3, value.dtype),
    )
    (found,) = computed(data, np.zeros(3, value.dtype))
    np.testing.assert_array_equal(found, np.array([0, value], value.dtype))


def test_effects_do_not_leave_the_process() -> None:
    """A function with effects is refused."""

    def loud(a: Any) -> Any:
        jax.debug.print("{}", a)
        return a

    with pytest.raises(NotInTableError, match="it has effects"):
        written(loud, A)


# -- random functions ------------------------------------------------------------------------------------------------

STEPS = [
    name
    for name, fn in SAMPLES.items()
    if not re.search("binomial|poisson|gamma|bessel|beta|polygamma|zeta|digamma", name)
]


@pytest.mark.cluster  # many compilations
@hypothesis.given(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=3), st.integers(0, 2**32 - 1)
)
def test_random_functions_keep_their_bits(names: list[str], seed: int) -> None:
    """A random composition of samples computes the same bits after its round trip."""

    def fn(a: Any) -> Any:
        for name in names:
            leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(SAMPLES[name](a))]
            sums = [jnp.nan_to_num(jnp.abs(leaf.astype(jnp.complex64))).sum() for leaf in leaves]
            a = (jax.nn.sigmoid(a * 0.5 + sum(sums) % 1) * 0.8 + 0.1).astype(jnp.float32)
        return a, sums

    check(fn, np.random.default_rng(seed).uniform(0.1, 0.9, (4, 4)).astype(np.float32))
