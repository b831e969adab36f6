"""The operations a program says: printing, checking, variables and what there is to say of them, randomness."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from tests.kit.processes import ROOT
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


# -- Print and check -------------------------------------------------------------------------------------------------


def test_print_shows_data_and_returns_input(
    session: rt.Session, capfd: pytest.CaptureFixture[str]
) -> None:
    """rt.Print writes its data once a step and returns its input."""
    x = rt.constant([1.0, 2.0, 3.0, 4.0])
    shown = rt.Print(x, [x, rt.constant("text"), rt.constant([1, 2])], "values: ")
    assert session.run(shown * 2.0).tolist() == [2.0, 4.0, 6.0, 8.0]
    assert capfd.readouterr().err.count("values: [1.0 2.0 3.0...][text][1 2]\n") == 1
    session.run(x * 2.0)
    assert "values" not in capfd.readouterr().err  # it prints only where it is used


def test_print_summarizes_and_stops(session: rt.Session, capfd: pytest.CaptureFixture[str]) -> None:
    """rt.Print shows as many values as summarize says and stops after first_n steps."""
    x = rt.Print(rt.constant([1, 2, 3]), [rt.constant([1, 2, 3])], "few", first_n=2, summarize=1)
    for _ in range(4):
        session.run(x)
    assert capfd.readouterr().err.count("few[1...]\n") == 2


def test_print_moves_no_cursor(session: rt.Session, capfd: pytest.CaptureFixture[str]) -> None:
    """rt.Print escapes control characters and marks every line of a text of several lines."""
    session.run(
        rt.Print(
            rt.constant(1), [rt.constant("\x1b[2J\nWARNING:absl:/job:ps/task:0 stops")], "\x1b[31m"
        )
    )
    shown = [
        line for line in capfd.readouterr().err.splitlines() if "31m" in line or "WARNING" in line
    ]
    assert shown == ["Print: \\x1b[31m[\\x1b[2J", "Print: WARNING:absl:/job:ps/task:0 stops]"]


def test_print_runs_on_its_device(capfd: pytest.CaptureFixture[str]) -> None:
    """rt.Print of a remote variable writes on the variable's task."""
    with servers(sockets=True, ps=1, worker=1) as made, rt.Session(made[TARGET].target) as session:
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(7, name="v")
            loud = rt.Print(v, [v], "v is ")
        session.run(v.initializer)
        assert session.run(loud) == 7
        assert "v is [7]" in capfd.readouterr().err


def test_failed_check_stops_the_step(session: rt.Session) -> None:
    """A failed check stops the step before the updates that depend on the check."""
    x = rt.placeholder(np.float32, [None])
    v = rt.Variable(0, name="guarded")
    session.run(v.initializer)
    check = rt.check(x > 0.0, "x must be positive: ", [x], name="positive")
    with rt.control_dependencies([check]):
        add = v.assign_add(1)
    assert session.run(add, {x: [1.0]}) == 1
    with pytest.raises(
        rt.InvalidArgumentError,
        match=r"check failed at 'positive': x must be positive: \[1.0 -2.0\]",
    ):
        session.run(add, {x: [1.0, -2.0]})
    assert session.run(v) == 1
    with pytest.raises(rt.InvalidArgumentError, match="must be bool"):
        rt.check(rt.constant(1.0), "no")


# -- variables -------------------------------------------------------------------------------------------------------


def test_class_operators_take_both_operands(session: rt.Session) -> None:
    """The operators of the classes work as functions of two operands."""
    three = rt.constant(3.0)
    total = functools.reduce(rt.Tensor.__add__, [three, three, three])
    assert session.run([total, rt.Tensor.__rsub__(three, 1.0), rt.Variable.__lt__(three, 4.0)]) == [
        9.0,
        -2.0,
        True,
    ]


def test_variable_shows_as_its_operations(graph: rt.Graph) -> None:
    """A variable shows as four operations with TensorFlow's names, all on its device."""
    with rt.device("/job:ps/task:1"):
        v = rt.Variable([1.0, 2.0], name="w")
    assert [op.name for op in graph.get_operations()] == [
        "w",
        "w/initial_value",
        "w/Assign",
        "w/read",
    ]
    assert (v.name, v.op.name, v.initializer.name, v.value().name) == (
        "w:0",
        "w",
        "w/Assign",
        "w/read:0",
    )
    assert (v.device, v.shape, v.dtype) == ("/job:ps/task:1", (2,), np.dtype(np.float32))
    assert v.initializer.device == v.value().device == v.initial_value.device == "/job:ps/task:1"
    assert rt.Variable(1, name="w").name == "w_1:0"


def test_initial_values_depend_on_others(session: rt.Session) -> None:
    """A variable's initial value may depend on another variable's initialised value."""
    first = rt.Variable(lambda: rt.random.normal((3,)), name="first")
    second = rt.Variable(first.initialized_value() * 2.0, name="second")
    third = rt.Variable(second.initialized_value() + 1.0, name="third")
    text = rt.Variable("a", name="text")
    copied = rt.Variable(text.initialized_value(), name="copied")
    session.run(rt.global_variables_initializer())
    a, b, c = session.run([first, second, third])
    np.testing.assert_array_equal(b, a * 2.0)
    np.testing.assert_array_equal(c, b + 1.0)
    assert session.run(copied) == b"a"
    session.run([first.assign(np.zeros(3, np.float32)), text.assign("b")])
    assert session.run(first.initialized_value()).tolist() == [0.0, 0.0, 0.0]
    session.run([second.initializer, copied.initializer])
    assert session.run([second, copied])[0].tolist() == [0.0, 0.0, 0.0]
    assert session.run(copied) == b"b"


def test_uninitialised_variables_are_reported(session: rt.Session) -> None:
    """The report has the variables that are not initialised, in their order."""
    a, b, s = rt.Variable(1, name="ra"), rt.Variable(2, name="rb"), rt.Variable("x", name="rs")
    report = rt.report_uninitialized_variables()
    ready = [rt.is_variable_initialized(v) for v in (a, b, s)]
    assert session.run([report, ready])[0].tolist() == [b"ra", b"rb", b"rs"]
    session.run([b.initializer, s.initializer])
    found = session.run({"report": report, "ready": ready})
    assert found["report"].tolist() == [b"ra"]
    assert found["ready"] == [False, True, True]
    assert type(found["ready"][0]) is np.bool_
    session.run(rt.variables_initializer([a]))
    assert session.run(report).tolist() == []
    with rt.Graph().as_default() as empty, rt.Session(graph=empty) as other:
        assert other.run(rt.report_uninitialized_variables()).tolist() == []


def test_local_variables_stay_on_own_task() -> None:
    """A local variable lives on the task of its session, once for each session's task."""
    with servers(sockets=True, ps=1, worker=2) as made:
        local = rt.Variable(0, name="mine", local=True)
        shared = rt.Variable(0, name="ours")
        add = [local.assign_add(1), shared.assign_add(1)]
        report = rt.report_uninitialized_variables()
        assert rt.local_variables() == [local]
        assert rt.global_variables() == [shared]
        assert rt.trainable_variables() == [shared]
        with (
            rt.Session(made["/job:worker/task:0"].target) as first,
            rt.Session(made["/job:worker/task:1"].target) as second,
        ):
            assert first.run(report).tolist() == [b"ours", b"mine"]
            first.run([rt.global_variables_initializer(), rt.local_variables_initializer()])
            assert first.run(report).tolist() == []
            assert second.run(report).tolist() == [b"mine"]
            assert not second.run(rt.is_variable_initialized(local))
            second.run(rt.local_variables_initializer())
            assert first.run(add) == [1, 1]
            assert second.run(add) == [1, 2]
        assert [k for k, _ in made["/job:worker/task:1"].worker.store.variables()] == [("", "mine")]


def test_update_keeps_shape_dtype_and_number() -> None:
    """An update that changes shape, dtype, number of values or device is refused."""
    v, w = rt.Variable([1.0, 2.0], name="v"), rt.Variable(1, name="w")
    with pytest.raises(
        rt.InvalidArgumentError, match=r"'v' has shape \(2,\), but .* has shape \(3,\)"
    ):
        v.assign([1.0, 2.0, 3.0])
    with pytest.raises(rt.InvalidArgumentError, match="'w' holds int32, but .* is float32"):
        w.assign(v.value()[0])
    with pytest.raises(rt.InvalidArgumentError, match="does not become int32"):
        w.assign(1.5)
    with rt.Session() as session:
        session.run(rt.global_variables_initializer())
        with pytest.raises(
            rt.InvalidArgumentError,
            match=r"would change variable 'v' from float32\[2\] to float32\[\]",
        ):
            session.run(v.update(jnp.sum))
        with pytest.raises(
            rt.InvalidArgumentError, match="must give 2 new values and 0 outputs, .* gave 1 arrays"
        ):
            session.run(rt.update([v, w], lambda a, b: ([a], ()), []))
        assert session.run(v).tolist() == [1.0, 2.0]
    with rt.device("/job:ps/task:1"):
        far = rt.Variable(1.0, name="far")
    with pytest.raises(rt.InvalidArgumentError, match="one update works on one device"):
        rt.update([v, far], lambda a, b: ([a, b], ()), [])


def test_unknown_initial_shape_is_refused() -> None:
    """An initial value of unknown shape is refused."""
    with pytest.raises(
        rt.InvalidArgumentError, match="'v': the shape .* of its initial value is not fully known"
    ):
        rt.Variable(rt.placeholder(np.float32, [None]), name="v")


# -- order -----------------------------------------------------------------------------------------------------------


def test_control_dependencies_order_variable_access(session: rt.Session) -> None:
    """Control dependencies order the reads and writes of a variable."""
    v = rt.Variable(1, name="ordered")
    session.run(v.initializer)
    before = v.read_value()
    with rt.control_dependencies([before]):
        add = v.assign_add(10)
    with rt.control_dependencies([add]):
        after = v.read_value()
        passed_on = rt.identity(before)
    assert session.run([before, after, passed_on]) == [1, 11, 1]
    with rt.control_dependencies([rt.group(add)]), rt.control_dependencies(None):
        free = rt.constant(5)
    assert session.run([free, v])[1] == 11  # nothing asked for the addition


# -- randomness ------------------------------------------------------------------------------------------------------


def draws(seed: int | None, op_seed: int | None = None, steps: int = 3) -> list[Any]:
    with rt.Graph().as_default() as graph:
        rt.set_random_seed(seed)
        x, y = rt.random.normal((4,), seed=op_seed), rt.random.uniform((4,))
        with rt.Session(graph=graph) as session:
            return [np.concatenate(session.run([x, y])) for _ in range(steps)]


def test_random_draws_follow_the_seed() -> None:
    """Random operations draw anew every step, alike with the same seed."""
    first, second = draws(3), draws(3)
    np.testing.assert_array_equal(first, second)
    assert len({a.tobytes() for a in first}) == 3
    assert not np.array_equal(first, draws(4))
    assert not np.array_equal(draws(None), draws(None))
    half = [np.array(draws(None, op_seed=7))[:, :4] for _ in range(2)]
    np.testing.assert_array_equal(half[0], half[1])


def test_operations_draw_different_numbers(session: rt.Session) -> None:
    """Two random operations of one graph draw different numbers."""
    rt.set_random_seed(1)
    a, b = session.run([rt.random.normal((4,)), rt.random.normal((4,))])
    assert not np.array_equal(a, b)


def test_given_key_draws_the_same(session: rt.Session) -> None:
    """A random operation with its own key draws the same numbers every step."""
    x = rt.random.normal(rt.constant(jax.random.key_data(jax.random.key(0))), (3,))
    np.testing.assert_array_equal(session.run(x), session.run(x))


# -- devices ---------------------------------------------------------------------------------------------------------

TOWERS = """
import numpy as np, runtime as rt
x = rt.placeholder(np.float32, [None, 4])
w = rt.Variable(np.eye(4, dtype=np.float32), name="w")
towers = []
for i, part in enumerate(rt.numpy.split(x, 2)):
    with rt.device(f"/cpu:{i}"):
        towers.append(rt.numpy.tanh(part @ w))
with rt.device("/cpu:0"):
    y = rt.numpy.concatenate(towers)
with rt.device("/cpu:1"):
    far = rt.Variable([1.0], name="far")
server = rt.Server.create_local_server()
for target in ("", server.target):
    with rt.Session(target) as session:
        session.run(rt.global_variables_initializer())
        value = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
        np.testing.assert_allclose(session.run(y, {x: value}), np.tanh(value), rtol=1e-6)
        assert session.run(far.assign_add([1.0])).tolist() == [2.0]
        assert session.run(far * w[0, 0]).tolist() == [2.0]
        names = [d.name for d in session.list_devices()]
        job = "local" if target else "localhost"
        assert names == [f"/job:{job}/replica:0/task:0/device:CPU:{i}" for i in (0, 1)], names
with rt.Session() as session:
    with rt.device("/cpu:2"):
        z = rt.constant(1.0) + 1.0
    try:
        session.run(z)
    except rt.InvalidArgumentError as error:
        assert "'/cpu:2'" in str(error) and "CPU:1" in str(error)
    else:
        raise AssertionError("no error")
server.stop()
"""


def test_towers_use_local_devices() -> None:
    """Two towers of a model run on the two local devices of one task."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-c", TOWERS],
        env=environment,
        cwd=ROOT,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_names_stay_unique(graph: rt.Graph) -> None:
    """A name that ends in a slash stays as it is, and is refused where an operation has it, as in TF1."""
    with graph.as_default():
        assert rt.constant(1.0, name="whole/").op.name == "whole"
        with pytest.raises(ValueError, match="Duplicate node name in graph: 'whole'"):
            rt.constant(2.0, name="whole/")


def test_first_values_stay_beside_their_variable(graph: rt.Graph) -> None:
    """A GPU of the worker's is not asked for on a ps, where first values and new values are made."""
    gpu = rt.replica_device_setter(ps_tasks=1, worker_device="/job:worker/task:0/gpu:0")
    with rt.device(gpu):
        number = rt.Variable(1.0, name="number")
        rt.Variable(lambda: rt.constant(np.ones(3, np.float32)), name="made")
        number.assign(2.0)
    assert {op.device for op in graph.get_operations()} == {"/job:ps/task:0"}
