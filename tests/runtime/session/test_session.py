"""Fetches and feeds: every structure in, the same structure out, and a clear error for everything else."""

import collections
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from tests.runtime.kit import KINDS, TARGET, servers, target_of_kind


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


Pair = collections.namedtuple("Pair", ["left", "right"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    left: Any
    right: Any


def test_plan_of_earlier_generation_is_dropped() -> None:
    """A plan that is registered while another thread adopts a generation is registered anew."""
    two = rt.constant(1.0) + 1.0
    with servers(worker=1) as cluster, rt.Session(cluster[TARGET].target) as session:
        worker = cluster[TARGET].worker
        registrar: Any = worker.registrar
        register, run = registrar.register, worker.store.run

        def register_in_fence(*arguments: Any, **options: Any) -> Any:
            registrar.register, registered = register, register(*arguments, **options)
            run.generation += 1
            session.adopt_generations({TARGET: run.generation})
            return registered

        registrar.register = register_in_fence
        with pytest.raises(rt.AbortedError, match="restored"):
            session.run(two)
        assert session.run(two) == 2.0


# -- fetches --------------------------------------------------------------------------------------------------------


def test_fetches_keep_their_structure(session: rt.Session) -> None:
    """Values come in the structure of the fetches."""
    a, b = rt.constant(1, name="a"), rt.constant([2.0, 3.0], name="b")
    nothing = rt.no_op("nothing")
    assert session.run(a) == 1
    assert session.run([a, nothing]) == [1, None]
    assert session.run((a, a)) == (1, 1)
    assert session.run([]) == []
    assert session.run({}) == {}
    assert session.run(()) == ()
    found = session.run({"x": [a, {"y": (nothing, "a:0")}], "z": Pair(a, "nothing")})
    assert found == {"x": [1, {"y": (None, 1)}], "z": Pair(1, None)}
    assert isinstance(found["z"], Pair)
    ordered = session.run(collections.OrderedDict([("second", b), ("first", a)]))
    assert list(ordered) == ["second", "first"]
    record = session.run(Record(a, [b]))
    assert isinstance(record, Record)
    assert record.left == 1
    assert record.right[0].tolist() == [2.0, 3.0]


def test_values_have_numpy_types(session: rt.Session) -> None:
    """A scalar comes as a NumPy scalar and an array as an array."""
    found = session.run(
        [rt.constant(1.5) * 2, rt.constant([1]), rt.constant("text"), rt.constant(True)]
    )
    assert type(found[0]) is np.float32
    assert type(found[1]) is np.ndarray
    assert found[2] == b"text"
    assert type(found[3]) is np.bool_


def test_variables_operations_and_names_are_fetched(session: rt.Session) -> None:
    """Variables, operations and names may be fetched."""
    v = rt.Variable([1, 2], name="v")
    assert session.run(v.initializer) is None
    assert session.run("v/Assign") is None
    assert session.run([v, "v:0", "v", v.value()])[0].tolist() == [1, 2]


def test_repeated_fetch_is_computed_once(session: rt.Session) -> None:
    """A tensor that is fetched twice is computed once."""
    key = rt.random.normal((3,))
    first, second = session.run([key, key])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("fetch", "error", "said"),
    [
        (None, TypeError, "Fetch argument None has invalid type"),
        (3, TypeError, "Fetch argument 3 has invalid type int"),
        ([[None]], TypeError, "Fetch argument None has invalid type"),
        ({"a": 1.5}, TypeError, "Fetch argument 1.5 has invalid type float"),
        (np.zeros(2), TypeError, "Fetch argument .* has invalid type"),
        ({1, 2}, TypeError, "Fetch argument .* has invalid type set"),
        ("missing", ValueError, "no operation 'missing'"),
        ("missing:0", ValueError, "no operation 'missing'"),
        ("there:1", ValueError, "'there' has 1 outputs"),
        ("there:x", ValueError, "'there:x' is not a tensor name"),
    ],
    ids=str,
)
def test_invalid_fetches_are_refused(
    session: rt.Session, fetch: Any, error: type[Exception], said: str
) -> None:
    """A fetch that is no tensor, operation or known name is refused with the reason."""
    rt.constant(1, name="there")
    with pytest.raises(error, match=said):
        session.run(fetch)


def test_foreign_fetches_are_refused(session: rt.Session) -> None:
    """A fetch of another graph is refused by name."""
    with rt.Graph().as_default():
        foreign = rt.constant(1, name="foreign")
    with pytest.raises(ValueError, match="'foreign:0' is not an element of this graph"):
        session.run(foreign)
    with pytest.raises(ValueError, match="'foreign' is not an element of this graph"):
        session.run([foreign.op])


# -- feeds ----------------------------------------------------------------------------------------------------------


def test_any_tensor_can_be_fed(session: rt.Session) -> None:
    """Any tensor can be fed, by itself or by its name."""
    x = rt.placeholder(np.float32, [2], name="x")
    c = rt.constant(2.0, name="c")
    middle = x * c
    y = middle + 1.0
    v = rt.Variable(0.0, name="v")
    assert session.run(y, {x: [1, 2]}).tolist() == [3.0, 5.0]
    assert session.run(y, {"x:0": (1.0, 2.0), "c:0": 10}).tolist() == [11.0, 21.0]
    assert session.run([y, middle], {middle: [5.0, 6.0]})[0].tolist() == [6.0, 7.0]
    assert session.run(v + 1.0, {v: 41.0}) == 42.0  # nor need it be initialised
    assert session.run(x, {x: jnp.array([1.0, 2.0])}).tolist() == [1.0, 2.0]


def test_unneeded_feed_is_harmless(session: rt.Session) -> None:
    """A feed that the fetches do not need changes nothing."""
    x, y = rt.placeholder(np.float32, []), rt.placeholder(np.float32, [])
    assert session.run(x * 1.0, {x: 1.0, y: 2.0}) == 1.0


def feed_errors() -> list[Any]:
    p = pytest.param
    return [
        p("ints", [1.5], TypeError, "float64 does not become int32 by itself", id="float to int"),
        p(
            "ints",
            [2**40],
            TypeError,
            r"ints:0.* does not fit int32: it goes from 1099511627776",
            id="overflow",
        ),
        p("bytes", [-1], TypeError, "does not fit uint8", id="negative to unsigned"),
        p(
            "ints",
            ["a"],
            ValueError,
            "ints:0.* is not numeric, but the placeholder takes int32",
            id="string to int",
        ),
        p(
            "floats",
            [1j, 0.0],
            TypeError,
            "complex128 does not become float32",
            id="complex to float",
        ),
        p("floats", [None, None], TypeError, "is not numeric", id="None"),
        p("floats", [[1.0], [1.0, 2.0]], ValueError, "cannot be made an array", id="ragged"),
        p(
            "floats",
            [1.0, 2.0, 3.0],
            ValueError,
            r"Cannot feed value of shape \(3,\) for 'floats:0', .* \(2\)",
            id="size",
        ),
        p("floats", 1.0, ValueError, r"Cannot feed value of shape \(\)", id="rank"),
        p("flags", [2], TypeError, "int64 does not become bool", id="int to bool"),
        p("texts", [1], TypeError, "but the placeholder takes strings", id="number to string"),
        p(
            "missing:0",
            1,
            TypeError,
            "Cannot interpret feed_dict key as Tensor: .*'missing'",
            id="unknown name",
        ),
        p(
            "operation",
            1,
            TypeError,
            "Cannot interpret feed_dict key as Tensor: 'operation' is an operation",
            id="operation",
        ),
        p(
            3,
            1,
            TypeError,
            "Cannot interpret feed_dict key as Tensor: 3 has invalid type int",
            id="a number as key",
        ),
    ]


@pytest.mark.parametrize(("key", "value", "error", "said"), feed_errors())
def test_wrong_feeds_are_refused(
    session: rt.Session, key: Any, value: Any, error: type[Exception], said: str
) -> None:
    """A feed of another kind or shape is refused in one line."""
    for name, dtype, size in (
        ("ints", np.int32, 1),
        ("bytes", np.uint8, 1),
        ("floats", np.float32, 2),
        ("flags", np.bool_, 1),
        ("texts", str, 1),
    ):
        rt.placeholder(dtype, [size], name=name)
    rt.no_op("operation")
    key = f"{key}:0" if key in ("ints", "bytes", "floats", "flags", "texts") else key
    with pytest.raises(error, match=said) as caught:
        session.run(rt.constant(1), {key: value})
    assert "\n" not in str(caught.value)


def test_harmless_feeds_are_converted(session: rt.Session) -> None:
    """A feed of another dtype is converted if no value changes, and otherwise refused."""
    ints, flags = (
        rt.placeholder(np.int32, [2], name="ints"),
        rt.placeholder(np.bool_, [2], name="flags"),
    )
    reals = rt.placeholder(np.float32, [2], name="reals")
    got = session.run(
        [ints, flags, reals],
        {ints: np.array([1.0, 2.0]), flags: [0, 1], reals: np.array([1 + 0j, 0.1])},
    )
    assert [g.tolist() for g in got[:2]] == [[1, 2], [False, True]] and [g.dtype for g in got] == [
        np.int32,
        np.bool_,
        np.float32,
    ]
    np.testing.assert_array_equal(got[2], np.float32([1, 0.1]))
    for tensor, value in (
        (ints, [np.nan, 1.0]),
        (ints, [3e9, 1.0]),
        (flags, [0.5, 1.0]),
        (reals, [1j, 0]),
    ):
        with pytest.raises(TypeError, match=f"value fed for '{tensor.name}'.*does not become"):
            session.run(tensor, {tensor: value})


def test_tensor_is_no_value(session: rt.Session) -> None:
    """A tensor or variable cannot be the value of a feed."""
    x, v = rt.placeholder(np.float32, [], name="x"), rt.Variable(1.0)
    for value in (rt.constant(1.0), v):
        with pytest.raises(TypeError, match="value fed for 'x:0' cannot be a tensor"):
            session.run(x, {x: value})


def test_feed_names_each_tensor_once(session: rt.Session) -> None:
    """A feed must be a dict that names each tensor once."""
    x = rt.placeholder(np.float32, [], name="x")
    with pytest.raises(TypeError, match="feed_dict must be a dict"):
        session.run(x, [(x, 1.0)])  # type: ignore[arg-type]
    with pytest.raises(rt.InvalidArgumentError, match="'x:0' is fed twice"):
        session.run(x, {x: 1.0, "x:0": 2.0})


def test_feeds_are_looked_up_not_searched(
    session: rt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feeding n placeholders compares each with a few others, where a search would compare n * n / 2 pairs."""
    inputs = [rt.placeholder(np.float32, [], name=f"x{n}") for n in range(100)]
    compared = []

    def is_same(one: object, other: object) -> bool:
        compared.append(one)
        return one is other

    monkeypatch.setattr(rt.Tensor, "__eq__", is_same, raising=False)
    assert session.run(inputs[7], {x: float(n) for n, x in enumerate(inputs)}) == 7.0
    assert len(compared) < 10 * len(inputs)


def test_missing_placeholders_are_named(session: rt.Session) -> None:
    """A step names all placeholders that have no value."""
    x, y = rt.placeholder(np.float32, [], name="x"), rt.placeholder(np.float32, [], name="y")
    with pytest.raises(
        rt.InvalidArgumentError, match="You must feed a value for placeholder tensor 'x:0', 'y:0'"
    ):
        session.run(x + y)


def test_wrong_shapes_name_the_operation(session: rt.Session) -> None:
    """Shapes that do not fit each other are refused with the operation's name."""
    x, y = rt.placeholder(np.float32, [None, 3]), rt.placeholder(np.float32, [None, 2])
    product = rt.call(jnp.matmul, x, y, name="product")
    session.run(product, {x: np.zeros((4, 3)), y: np.zeros((3, 2))})
    with pytest.raises(
        rt.InvalidArgumentError, match=r"'product'\(float32\[4, 3\], float32\[5, 2\]\)"
    ):
        session.run(product, {x: np.zeros((4, 3)), y: np.zeros((5, 2))})


def test_unknown_sizes_and_ranks_work(session: rt.Session) -> None:
    """Tensors of unknown size or rank take any size."""
    x, anything = (
        rt.placeholder(np.float32, [None], name="x"),
        rt.placeholder(np.float32, name="anything"),
    )
    joined = rt.numpy.concatenate([x, x])
    assert joined.shape == (None,)
    assert (x + rt.constant([1.0, 2.0, 3.0])).shape == (3,)
    assert (anything * 2.0).shape is None
    assert rt.numpy.sum(anything).shape == ()
    for size in (0, 1, 5):
        assert session.run(joined, {x: np.ones(size)}).shape == (2 * size,)
    for shape in ((), (2,), (2, 3), (0, 4, 1)):
        assert session.run(anything * 2.0, {anything: np.ones(shape)}).shape == shape


# -- errors while running --------------------------------------------------------------------------------------------


def test_uninitialised_variable_is_named(session: rt.Session) -> None:
    """A step that reads an uninitialised variable names the variable and its task."""
    v = rt.Variable(1.0, name="never_initialised")
    for fetch in (v, v + 1.0, v.assign_add(1.0)):
        with pytest.raises(
            rt.FailedPreconditionError, match="uninitialized value never_initialised"
        ) as caught:
            session.run(fetch)
        assert caught.value.task.startswith("/job:")


def test_failed_stage_writes_nothing(session: rt.Session) -> None:
    """A stage that fails has written no variable."""
    v, missing = rt.Variable(1, name="whole"), rt.Variable(1, name="missing")
    session.run(v.initializer)
    with pytest.raises(rt.FailedPreconditionError, match="missing"):
        session.run([v.assign_add(1), missing])
    assert session.run(v) == 1


@pytest.mark.parametrize("kind", KINDS[1:])  # two sessions of a private engine share nothing
def test_variable_of_other_shape_is_refused(kind: str) -> None:
    """A session whose variable has another shape than the task's is refused."""
    v = rt.Variable([1.0, 2.0], name="shaped")
    with target_of_kind(kind) as target, rt.Session(target) as session:
        session.run(v.initializer)
        with rt.Graph().as_default(), rt.Session(target) as other:
            same_name = rt.Variable([1, 2, 3], name="shaped")
            with pytest.raises(
                rt.InvalidArgumentError, match=r"initialised as float32\[2\].* int32\[3\]"
            ):
                other.run(same_name)


def test_closed_session_runs_nothing(target: str) -> None:
    """A closed session refuses steps and may be closed again."""
    x = rt.constant(1)
    session = rt.Session(target)
    assert session.run(x) == 1
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        session.run(x)


def test_missing_device_is_named(session: rt.Session) -> None:
    """A step names the operation whose device is not there."""
    with rt.device("/job:ghost/task:3"):
        x = rt.placeholder(np.float32, []) + 1.0
    with pytest.raises(
        rt.InvalidArgumentError, match="operation 'add': it asks for '/job:ghost/task:3'.*CPU:0"
    ):
        session.run(x, {x.op.inputs[0]: 1.0})


# -- sessions --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    """A session refuses arguments of another type and text that is no target."""
    with pytest.raises(TypeError, match="pass options as config="):
        rt.Session(rt.SessionConfig())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="graph must be a Graph"):
        rt.Session("", "graph")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be a SessionConfig"):
        rt.Session("", config={"device_filters": []})  # type: ignore[arg-type]
    with pytest.raises(
        rt.NotFoundError,
        match="'http://x' is not a session target: it needs the form grpc://host:port",
    ):
        rt.Session("http://x")


def test_private_sessions_share_nothing() -> None:
    """Two private sessions have their own variables."""
    v = rt.Variable(1, name="own")
    with rt.Session() as first, rt.Session() as second:
        first.run(v.initializer)
        assert first.run(v) == 1
        with pytest.raises(rt.FailedPreconditionError):
            second.run(v)


def test_default_sessions_nest(graph: rt.Graph) -> None:
    """Default sessions nest, and none is the default at the end."""
    x = rt.constant(7)
    with pytest.raises(ValueError, match="there is no default session"):
        x.eval()
    with rt.Session() as outer:
        assert x.eval() == 7
        assert rt.get_default_session() is outer
        with pytest.raises(RuntimeError, match="not re-entrant"), outer:
            pass
        with rt.Session() as inner:
            with outer.as_default():
                assert rt.get_default_session() is outer
            assert rt.get_default_session() is inner
        assert rt.get_default_session() is outer
        x.op.run()
    assert rt.get_default_session() is None


def test_default_graphs_nest() -> None:
    """Default graphs nest."""
    first, second = rt.Graph(), rt.Graph()
    with first.as_default(), second.as_default():
        with first.as_default():
            assert rt.get_default_graph() is first
        assert rt.get_default_graph() is second


def test_interactive_session_is_default_until_closed() -> None:
    """An interactive session and its graph are the default until the session is closed."""
    graph = rt.Graph()
    session = rt.InteractiveSession(graph=graph)
    try:
        assert rt.get_default_graph() is graph
        assert rt.constant(3).eval() == 3
    finally:
        session.close()
    assert rt.get_default_session() is None
    assert rt.get_default_graph() is not graph


def test_callables_take_their_feeds(session: rt.Session) -> None:
    """A callable takes its feeds in order and refuses another number of them."""
    x, y = rt.placeholder(np.float32, []), rt.placeholder(np.float32, [])
    divide = session.make_callable({"q": x / y}, [x, y])
    assert divide(6.0, 3.0) == {"q": 2.0}
    assert session.make_callable(rt.constant(1))() == 1
    with pytest.raises(rt.InvalidArgumentError, match="takes 2 values, 1 were given"):
        divide(1.0)
    with pytest.raises(TypeError, match="feed_list must be a list"):
        session.make_callable(x, x)  # type: ignore[arg-type]


def test_many_threads_share_one_session(session: rt.Session) -> None:
    """Eight threads share one session, and every step has its own values."""
    x = rt.placeholder(np.float32, [None])
    total = rt.Variable(0, name="total", dtype=np.int64)
    session.run(total.initializer)
    y, count = x * 2.0, total.assign_add(1)
    wrong: list[Any] = []

    def work(n: int) -> None:
        for i in range(30):
            value = np.full(1 + (n + i) % 3, n, np.float32)
            try:
                found, _ = session.run([y, count], {x: value})
                if not np.array_equal(found, value * 2):
                    wrong.append((value, found))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert session.run(total) == 240


def test_devices_are_listed(session: rt.Session, target: str) -> None:
    """A session lists the devices of its cluster by name."""
    names = [d.name for d in session.list_devices() if d.type == "CPU"]
    jobs = ["ps", "worker"] if target else ["localhost"]
    assert sorted(names) == [f"/job:{job}/replica:0/task:0/device:CPU:0" for job in jobs]


def test_placement_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A session with log_device_placement logs the device of each operation."""
    with rt.device("/cpu:0"):
        x = rt.call(jnp.sin, rt.constant(0.0), name="sine")
    with (
        rt.Session(config=rt.SessionConfig(log_device_placement=True)) as session,
        caplog.at_level("INFO"),
    ):
        session.run(x)
    assert "sine: (sin): /job:localhost/replica:0/task:0/device:CPU:0" in caplog.text


def test_soft_placement_is_asked_for() -> None:
    """A missing device is replaced only with allow_soft_placement."""
    with rt.device("/gpu:7"):
        x = rt.constant(1.0, name="on_gpu")
    with rt.Session(config=rt.SessionConfig(allow_soft_placement=True)) as session:
        assert session.run(x) == 1.0
    with (
        rt.Session() as session,
        pytest.raises(
            rt.InvalidArgumentError,
            match="'on_gpu': it asks for '/gpu:7'.*there are: /job:localhost.*CPU:0",
        ),
    ):
        session.run(x)
