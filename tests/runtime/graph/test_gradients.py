"""Derivatives of graphs against jax.grad, in one place and over two tasks, and what they cost."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.plan.place import Device, DeviceChoices
from runtime.plan.planner import make_plan
from runtime.tensor_spec import TensorSpec
from tests.runtime.kit import TARGET, servers


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@pytest.fixture(scope="module")
def two_workers() -> Iterator[str]:
    with servers(sockets=True, worker=2) as made:
        yield made[TARGET].target


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def run(fetches: Any, feeds: Any = None, target: str = "") -> Any:
    variables = rt.global_variables()
    init = rt.global_variables_initializer() if variables else None
    with rt.Session(target) as session:
        if init is not None:
            session.run(init)
        return session.run(fetches, feeds)


def check(
    fn: Callable[..., Any], values: Sequence[np.ndarray], argnums: Sequence[int] | None = None
) -> None:
    """The graph of ``fn`` has the derivatives of ``fn``."""
    places = tuple(range(len(values))) if argnums is None else tuple(argnums)
    tensors = [rt.constant(v) for v in values]
    found = run(rt.gradients(fn(rt.numpy, *tensors), [tensors[i] for i in places]))
    wanted = jax.grad(lambda *args: jnp.sum(fn(jnp, *args)), places)(*values)
    for value, want in zip(found, wanted, strict=True):
        assert value.dtype == want.dtype
        np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6)


def test_gradients_of_operators_and_functions() -> None:
    """The gradient through operators and functions is that of JAX."""
    check(
        lambda np_, x, y: np_.sum(np_.tanh(x @ y) ** 2 / (1.5 + np_.exp(-x[:, :1]))),
        arrays((3, 4), (4, 2)),
    )


def test_gradient_of_repeated_value() -> None:
    """The gradient of a value that is used many times is that of JAX."""
    check(lambda np_, x: (x * x + x) * x - np_.sum(x), arrays((5,)))


def test_unused_outputs_get_no_cotangent() -> None:
    """An unused output of a call leaves the gradient right."""
    x = rt.constant(arrays((3, 3))[0])
    q, _ = rt.call(jnp.linalg.qr, x)
    found = run(rt.gradients(rt.numpy.sum(q[0]), x))
    want = jax.grad(lambda a: jnp.sum(jnp.linalg.qr(a)[0][0]))(arrays((3, 3))[0])
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_integer_inputs_have_no_gradient() -> None:
    """An integer input has no gradient and does not disturb the other inputs' gradients."""
    table, labels = rt.constant(arrays((5, 4))[0]), rt.constant([1, 4, 1])
    loss = rt.call(lambda t, i: jnp.sum(jnp.sin(t[i])), table, labels)
    by_table, by_labels = rt.gradients(loss, [table, labels])
    assert by_labels is None
    want = jax.grad(lambda t: jnp.sum(jnp.sin(t[np.array([1, 4, 1])])))(arrays((5, 4))[0])
    np.testing.assert_allclose(run(by_table), want, rtol=1e-6)


def test_no_dependence_is_none_not_zero() -> None:
    """An input on which nothing depends has None for its gradient."""
    x, y = rt.constant(1.0), rt.constant(2.0)
    by_x, by_y = rt.gradients(x * 3.0, [x, y])
    assert by_y is None
    assert run(by_x) == 3.0


def test_several_ys_add_up() -> None:
    """The gradients of several ys add up, weighted by grad_ys."""
    x = rt.constant(2.0)
    y, z = x * x, x * 5.0
    assert run(rt.gradients([y, z], x)) == 9.0
    assert run(rt.gradients([y, z], x, [10.0, 1.0])) == 45.0
    assert run(rt.gradients(y, [y, x])) == [1.0, 4.0]


def test_stop_gradients_are_constants() -> None:
    """The tensors of stop_gradients count as constants."""
    x = rt.constant(3.0)
    y = x * x
    z = y * x
    assert run(rt.gradients(z, x)) == 27.0
    assert run(rt.gradients(z, x, stop_gradients=[y])) == 9.0
    assert run(rt.gradients(rt.stop_gradient(y) * x, x)) == 9.0


def test_variable_gradient_sums_all_reads() -> None:
    """The gradient of a variable is the sum over all its reads."""
    v = rt.Variable(2.0, name="v")
    loss = v * v + v.read_value() * 3.0 + rt.identity(v.value()) * 5.0
    assert run(rt.gradients(loss, v)) == 12.0


def test_gradients_of_variable_trees() -> None:
    """The gradient of a tree of variables has the tree's structure and JAX's values."""
    params = rt.variables({"w": arrays((4, 3))[0], "b": (np.zeros(3, np.float32),)}, "net")
    x = rt.constant(arrays((2, 4))[0])

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.softplus(x @ p["w"] + p["b"][0]))

    found = run(rt.gradients(rt.call(loss, params, x), params))
    want = jax.grad(loss)(
        {"w": arrays((4, 3))[0], "b": (np.zeros(3, np.float32),)}, arrays((2, 4))[0]
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, want)


def test_gradients_have_second_derivatives() -> None:
    """A gradient can be differentiated again."""
    x = rt.constant(2.0)
    first = rt.gradients(x**3, x)
    assert run(rt.gradients(first, x)) == pytest.approx(12.0)


def test_gradient_keeps_bfloat16() -> None:
    """The gradient of a bfloat16 tensor is bfloat16."""
    x = rt.constant(np.array([1.0, 2.0], jnp.bfloat16))
    found = run(rt.gradients(rt.numpy.sum(x * x), x))
    assert found.dtype == jnp.bfloat16
    assert found.tolist() == [2.0, 4.0]


def test_gradient_through_loops_and_conditionals() -> None:
    """The gradient passes loops and conditionals inside a call."""

    def powers(x: Any) -> Any:
        _, out = jax.lax.scan(lambda c, _: (c * x, c), x, None, length=4)
        return jnp.where(x > 0, jnp.sum(out), 0.0)

    x = rt.constant(1.5)
    np.testing.assert_allclose(
        run(rt.gradients(rt.call(powers, x), x)), jax.grad(powers)(1.5), rtol=1e-6
    )


def test_gradient_through_print() -> None:
    """The gradient passes rt.Print."""
    x = rt.constant(3.0)
    assert run(rt.gradients(rt.Print(x, [x], "x = ") ** 2, x)) == 6.0


def test_random_gradient_uses_drawn_numbers() -> None:
    """The gradient by the factor of a random tensor is what the same step drew."""
    x = rt.constant(np.ones(8, np.float32))
    noise = rt.random.normal((8,))
    gradient, drawn = run([rt.gradients(rt.numpy.sum(x * noise), x), noise])
    np.testing.assert_array_equal(gradient, drawn)


def test_gradient_of_model_on_two_tasks(two_workers: str) -> None:
    """The gradients of a model on two tasks stand on their variables' tasks and equal JAX's."""
    w1, w2, x = arrays((4, 8), (8, 3), (5, 4))
    with rt.device("/job:worker/task:0"):
        first = rt.Variable(w1, name="w1")
        hidden = rt.nn.relu(rt.constant(x) @ first)
    with rt.device("/job:worker/task:1"):
        second = rt.Variable(w2, name="w2")
        loss = rt.numpy.mean((hidden @ second) ** 2)
    gradients = rt.gradients(loss, [first, second])
    assert [g.device for g in gradients] == ["/job:worker/task:0", "/job:worker/task:1"]
    found = run(gradients, target=two_workers)
    wanted = jax.grad(lambda a, b: jnp.mean((jax.nn.relu(x @ a) @ b) ** 2), (0, 1))(w1, w2)
    for value, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (lambda: rt.constant(3), "int32"),
        (lambda: rt.constant("text"), "string"),
        (lambda: rt.constant(True), "bool"),
    ],
)
def test_only_floats_have_derivatives(y: Callable[[], Any], said: str) -> None:
    """The gradient of an integer, bool or string tensor is refused."""
    with pytest.raises(rt.InvalidArgumentError, match=f"Const:0.*{said}.*floating point"):
        rt.gradients(y(), rt.constant(1.0))


def test_grad_ys_match_ys() -> None:
    """The number of grad_ys must be that of the ys."""
    x = rt.constant(1.0)
    with pytest.raises(rt.InvalidArgumentError, match="2 ys, but 1 grad_ys"):
        rt.gradients([x, x * 2.0], x, [1.0])


@pytest.mark.parametrize("op_by_op", [False, True], ids=["one call", "operation by operation"])
def test_worker_stage_costs_one_gradient(op_by_op: bool) -> None:
    """A worker's stage of a step needs as many operations as jax.value_and_grad."""
    w1, w2, x = arrays((64, 32), (32, 10), (16, 64))
    setter = rt.replica_device_setter(ps_tasks=1, worker_device="/job:worker/task:0")
    with rt.device(setter):
        params = rt.variables([w1, w2], "w")
        inputs = rt.placeholder(np.float32, [None, 64], "x")

        def loss_fn(p: Any, x: Any) -> Any:
            return jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ p[0]) @ p[1])[:, 0])

        if op_by_op:
            loss = rt.numpy.mean(
                rt.nn.log_softmax(rt.numpy.tanh(inputs @ params[0]) @ params[1])[:, 0]
            )
        else:
            loss = rt.call(loss_fn, params, inputs)
        fetches = [loss, *rt.gradients(loss, params)]
    own = Device("worker", 0, is_own=True)
    devices = DeviceChoices((Device("ps", 0), own), ("worker", 0), ("ps", 0))
    plan = make_plan(fetches, {inputs: TensorSpec((16, 64), np.dtype(np.float32))}, devices)
    (stage,) = [c.stage for c in plan.stages if c.stage.device.job == "worker"]
    assert stage.program is not None
    ours = stage.program.jaxpr
    assert ours is not None
    found = (
        jax.jit(jax.extend.core.jaxpr_as_fun(ours)).lower(*ours.in_avals).compile().cost_analysis()
    )
    wanted = jax.jit(jax.value_and_grad(loss_fn)).lower([w1, w2], x).compile().cost_analysis()
    assert found is not None
    assert wanted is not None
    assert found["flops"] == pytest.approx(wanted["flops"], rel=0.01)


def test_many_variables_cost_linear() -> None:
    """Each of many variables is compared with few others, so a large model is made in seconds."""
    compared = 0

    class Counted(str):
        """A name that counts its comparisons."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    params = [rt.Variable(np.float32(i), name=f"v{i}") for i in range(60)]
    loss = rt.call(lambda *xs: sum(x * x for x in xs), *params)
    for param in params:
        object.__setattr__(param.spec, "name", Counted(param.spec.name))
    rt.gradients(loss, params)
    assert compared <= 10 * len(params), compared
