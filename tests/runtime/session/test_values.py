"""Values: every dtype and shape arrives as it left, and nobody's memory is ever shared with anybody's variable."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import runtime as rt
from runtime.wire.codec import aligned_buffer
from tests.runtime.kit import KINDS, TARGET, servers, target_of_kind

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@pytest.fixture(scope="module", params=KINDS)
def target(request: Any) -> Iterator[str]:
    with target_of_kind(request.param) as made:
        yield made


@pytest.fixture
def session(target: str, graph: rt.Graph) -> Iterator[rt.Session]:
    with rt.Session(target) as made:
        yield made


DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint32",
    "int32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
]
DTYPES += ["float64", "complex64", "complex128", "float8_e4m3fn"]


def sample(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_keeps_its_values(
    session: rt.Session, dtype: str, shape: tuple[int, ...]
) -> None:
    """Constants, feeds, computations and variables of every dtype keep their values."""
    value = sample(dtype, shape)
    x = rt.placeholder(value.dtype, shape)
    c = rt.constant(value, value.dtype)
    v = rt.Variable(value, dtype=value.dtype, name=f"v_{dtype}_{len(shape)}")
    assert c.dtype == x.dtype == v.dtype == value.dtype
    session.run(v.initializer)
    computed = rt.call(lambda a, b: jnp.stack([a, b]), x, c)
    found = session.run([c, v, computed, x, v.assign(x)], {x: value})
    for array in (found[0], found[1], found[2][0], found[2][1], found[3], found[4]):
        assert array.dtype == value.dtype
        np.testing.assert_array_equal(array, value)


def test_wide_integers_exceed_32_bits(session: rt.Session) -> None:
    """Integers of 64 bits count beyond 32 bits."""
    v = rt.Variable(2**40, dtype=np.int64, name="wide")
    session.run(v.initializer)
    assert session.run(v.assign_add(1)) == 2**40 + 1
    x = rt.placeholder(np.int64, [])
    assert session.run(x * 2 + v, {x: 2**50}) == 2**51 + 2**40 + 1


def test_python_numbers_have_jax_defaults() -> None:
    """Python numbers get JAX's default dtypes, and a number that does not fit is refused."""
    assert rt.constant(1).dtype == np.int32
    assert rt.constant(1.0).dtype == np.float32
    assert rt.constant(np.zeros(2)).dtype == np.float32
    assert rt.constant(1, np.int64).dtype == np.int64
    with pytest.raises(rt.InvalidArgumentError, match="does not fit int32"):
        rt.constant(2**40)


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (1.5, np.int32, "big: float64 does not become int32"),
        (300, np.uint8, "big does not fit uint8"),
        (1j, np.float32, "complex128 does not become float32"),
        (2, np.bool_, "int64 does not become bool"),
        (1, str, "int64 given for a string tensor"),
        ([1, [2]], None, "cannot be made an array"),
        pytest.param(object(), None, "object is neither a number nor a string", id="object"),
    ],
    ids=str,
)
def test_lossy_constants_are_refused(value: Any, dtype: Any, said: str) -> None:
    """A constant whose dtype would lose something of its value is refused."""
    with pytest.raises(rt.InvalidArgumentError, match=said):
        rt.constant(value, dtype, name="big")


def test_constant_takes_given_shape() -> None:
    """A constant takes the given shape if its values fit."""
    assert rt.constant(1, shape=[2, 3]).shape == (2, 3)
    assert rt.constant([1, 2, 3, 4], shape=[2, 2]).shape == (2, 2)
    with pytest.raises(
        rt.InvalidArgumentError, match=r"odd: a value of shape \(3,\) cannot get the shape \(2, 2\)"
    ):
        rt.constant([1, 2, 3], shape=[2, 2], name="odd")


# -- strings ---------------------------------------------------------------------------------------------------------


def test_strings_work_everywhere(session: rt.Session) -> None:
    """Strings work as constants, feeds, variables and fetches."""
    c = rt.constant(["a", b"\xff\x00", ""])
    x = rt.placeholder(str, [None], name="x")
    v = rt.Variable(["one", "two"], name="text")
    scalar = rt.identity(rt.constant("grüße"))
    session.run(v.initializer)
    found = session.run([c, x, v, scalar, rt.identity(x)], {x: np.array(["p", "qq"])})
    assert found[0].tolist() == [b"a", b"\xff\x00", b""]
    assert found[1].tolist() == [b"p", b"qq"]
    assert found[2].tolist() == [b"one", b"two"]
    assert found[3] == "grüße".encode()
    assert found[4].tolist() == [b"p", b"qq"]
    new = rt.placeholder(str, [2])
    assert session.run(v.assign(new), {new: ["three", "four"]}).tolist() == [b"three", b"four"]
    assert session.run(v).tolist() == [b"three", b"four"]
    assert session.run(v.initialized_value()).tolist() == [b"three", b"four"]


def test_uninitialised_string_variable_is_named(session: rt.Session) -> None:
    """A step that reads an uninitialised string variable names it."""
    v = rt.Variable("x", name="no_text_yet")
    with pytest.raises(rt.FailedPreconditionError, match="uninitialized value no_text_yet"):
        session.run(v)


def test_strings_refuse_arithmetic() -> None:
    """Arithmetic on strings is refused when the operation is made."""
    text, v = rt.constant("a", name="text"), rt.Variable("b", name="words")
    makers: list[Callable[[], Any]] = [
        lambda: text + 1,
        lambda: text[0],
        lambda: -text,
        lambda: v + v,
    ]
    makers.append(lambda: rt.numpy.sum(text))
    for make in makers:
        with pytest.raises(rt.InvalidArgumentError, match="string"):
            make()
    with pytest.raises(
        rt.InvalidArgumentError, match="'words' holds strings: AssignAdd works on numbers only"
    ):
        v.assign_add("c")
    with pytest.raises(rt.InvalidArgumentError, match="'words' holds string, but .* is float32"):
        v.assign(rt.constant(1.0))
    with pytest.raises(rt.InvalidArgumentError, match="given for a string tensor"):
        v.assign(1.0)


# -- memory ----------------------------------------------------------------------------------------------------------


def aligned(count: int, value: float) -> np.ndarray:
    """An array that JAX reads in place when it may."""
    array = aligned_buffer(4 * count).view(np.float32)
    array[:] = value
    return array


def test_changed_feed_changes_nothing(session: rt.Session) -> None:
    """A fed array that changes after the step changes no value."""
    x = rt.placeholder(np.float32, [1000])
    v = rt.Variable(np.zeros(1000, np.float32), name="from_feed")
    for op in (v.assign(x), v.update(lambda old, new: new, x)):
        session.run(v.initializer)
        fed = aligned(1000, 1.0)
        returned, itself, through = session.run([op, x, rt.identity(x)], {x: fed})
        fed[:] = 99.0
        for array in (returned, itself, through, session.run(v)):
            np.testing.assert_array_equal(array, np.ones(1000))


def test_fed_jax_array_stays_whole(session: rt.Session) -> None:
    """A fed array of JAX may be fed again, and what a fetch of it changes is a copy."""
    x = rt.placeholder(np.float32, [3], name="x")
    fed = jnp.arange(3, dtype=np.float32)
    for _ in range(2):
        found, doubled = session.run([x, x * 2.0], {x: fed})
        np.testing.assert_array_equal(doubled, [0, 2, 4])
        found[:] = -1
    np.testing.assert_array_equal(fed, np.arange(3))


def test_fed_tracer_is_refused(session: rt.Session) -> None:
    """A step inside of a traced function fails as numpy does: a tracer has no value."""
    x = rt.placeholder(np.float32, [3], name="x")
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda value: session.run(x * 2.0, {x: value}))(np.ones(3, np.float32))


def test_a_fetched_array_never_changes(session: rt.Session) -> None:
    """A fetched array keeps its values through later steps."""
    v = rt.Variable(np.zeros(1000, np.float32), name="watched")
    session.run(v.initializer)
    add = v.assign_add(np.ones(1000, np.float32))
    kept = []
    for _ in range(5):
        kept.append(session.run([add, v, v + 0.0]))
    kept.append(session.run([v, v.value()]))
    session.run(add)
    for i, arrays in enumerate(kept[:5]):
        np.testing.assert_array_equal(arrays[0], np.full(1000, i + 1.0))
        np.testing.assert_array_equal(arrays[1], np.full(1000, i + 1.0))
    for array in kept[5]:
        np.testing.assert_array_equal(array, np.full(1000, 5.0))


def test_writes_spare_the_variable(session: rt.Session) -> None:
    """A write into a fetched array reaches no variable and no constant."""
    v = rt.Variable(np.zeros(100, np.float32), name="safe")
    text = rt.Variable(["a", "b"], name="safe_text")
    c = rt.constant(np.zeros(1000, np.float32))
    words = rt.constant(["a", "b"])
    session.run([v.initializer, text.initializer])
    for fetch in (
        v,
        c,
        text,
        words,
        v.assign_add(np.zeros(100, np.float32)),
        text.assign(["a", "b"]),
    ):
        before = session.run(fetch)
        want = before.copy()
        if before.flags.writeable:
            before[:] = b"z" if before.dtype.hasobject else 9
        np.testing.assert_array_equal(session.run(fetch), want)
    assert session.run(text).tolist() == [b"a", b"b"]
    np.testing.assert_array_equal(session.run(v), np.zeros(100))


def test_writes_spare_a_call_array(
    session: rt.Session,
) -> None:
    """A write into a fetched array reaches no array of a Python call."""
    kept = np.zeros((3, 100), np.float32)
    words = np.array([b"a", b"b"], object)
    call = rt.lowlevel.python_call(
        lambda session, arrays: [kept, kept[1], words],
        outputs=[((3, 100), np.float32), ((100,), np.float32), ((2,), object)],
        name="keeps",
    )
    for array in session.run(list(call.outputs)):
        array[:] = b"z" if array.dtype.hasobject else 9
    np.testing.assert_array_equal(kept, np.zeros((3, 100)))
    assert words.tolist() == [b"a", b"b"]


def test_changed_array_spares_the_constant(
    session: rt.Session,
) -> None:
    """An array that changes after a constant was made of it changes no constant."""
    small, large = np.ones(3, np.float32), np.ones(1000, np.float32)
    c, d = rt.constant(small), rt.constant(large)
    e, f = rt.call(jnp.add, rt.constant(0.0), small), rt.call(jnp.add, rt.constant(0.0), large)
    v = rt.Variable(large, name="from_array")
    small[:] = large[:] = 9.0
    session.run(v.initializer)
    for array in session.run([c, d, e, f, v]):
        np.testing.assert_array_equal(array, np.ones(array.shape))


def test_value_of_two_variables_is_separate(session: rt.Session) -> None:
    """Two variables that were assigned one value change apart."""
    a, b = (rt.Variable(np.zeros(100, np.float32), name=f"twin_{n}") for n in "ab")
    x = rt.placeholder(np.float32, [100])
    session.run([a.assign(x), b.assign(x)], {x: aligned(100, 1.0)})
    session.run([a.assign(b.value()).op])
    session.run(a.assign_add(np.ones(100, np.float32)))
    np.testing.assert_array_equal(session.run(b), np.ones(100))
    np.testing.assert_array_equal(session.run(a), np.full(100, 2.0))


def test_snapshot_outlives_updates() -> None:
    """A snapshot keeps its values, and updates go back to working in place after its release."""
    with servers(worker=1) as made, rt.Session(made[TARGET].target) as session:
        v = rt.Variable(np.zeros(100_000, np.float32), name="big")
        session.run(v.initializer)
        add = v.assign_add(np.ones(100_000, np.float32)).op
        store = made[TARGET].worker.store
        slot = store.slot("", "big")

        def where() -> int:
            return int(slot.value.unsafe_buffer_pointer())

        session.run(add)
        held = store.snapshot([("", "big")])["", "big"]
        before = where()
        session.run(add)
        session.run(add)
        np.testing.assert_array_equal(held, np.ones(100_000))
        assert where() != before
        del held
        before = where()
        for _ in range(3):
            session.run(add)
        assert where() == before
        assert slot.readers == 0
        assert session.run(v)[0] == 6.0


def test_failed_read_leaves_no_reader() -> None:
    """A read that fails leaves no reader on a variable."""
    with servers(worker=1) as made, rt.Session(made[TARGET].target) as session:
        a, b = rt.Variable(np.zeros(9, np.float32), name="a"), rt.Variable(0.0, name="b")
        session.run(a.initializer)
        with pytest.raises(rt.FailedPreconditionError, match="value b"):
            session.run([a, b])
        assert made[TARGET].worker.store.slot("", "a").readers == 0


def test_update_spares_value_being_read() -> None:
    """An update writes elsewhere while a reader holds the value without a view."""
    with servers(worker=1) as made, rt.Session(made[TARGET].target) as session:
        v = rt.Variable(np.zeros(1000, np.float32), name="v")
        session.run(v.initializer)
        slot = made[TARGET].worker.store.slot("", "v")
        value = slot.value
        slot.readers += 1
        session.run(v.assign_add(np.ones(1000, np.float32)))
        np.testing.assert_array_equal(np.asarray(value), np.zeros(1000))
        made[TARGET].worker.store.release([slot])
        assert session.run(v)[0] == 1.0
