"""A size that is new to a step is compiled only when it returns."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime import concurrency
from runtime.graph.graph import FeedDict
from runtime.session.feeds import COMPILED_AT_STEP, MOST_EVALUATED
from runtime.task.executor import Executor


def _compiled_by(session: rt.Session, fetches: object, feeds: FeedDict) -> int:
    """Runs a step, and returns the number of programs that were compiled for the step."""
    before = Executor.compiler.compilations
    session.run(fetches, feeds)
    return Executor.compiler.compilations - before


def _training(rate: float) -> tuple[rt.Tensor, rt.Tensor, rt.Tensor, rt.Operation]:
    w = rt.Variable(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), name="w")
    x = rt.placeholder(np.float32, [None, 4])
    y = rt.placeholder(np.float32, [None])
    loss = rt.numpy.mean((rt.numpy.sum(rt.numpy.tanh(x @ w), 1) - y) ** 2)
    step = w.assign_sub(rate * rt.gradients(loss, w)).op
    return x, y, loss, step


def test_new_sizes_are_not_compiled() -> None:
    """The first size is compiled at once, another size at its eighth step."""
    with rt.Graph().as_default(), rt.Session() as session:
        x, y, loss, step = _training(0.3)
        session.run(rt.global_variables_initializer())

        def compiled_by(size: int) -> int:
            feeds = {x: np.full((size, 4), 0.3), y: np.ones(size)}
            return _compiled_by(session, [loss, step], feeds)

        assert compiled_by(10) == 1
        assert [compiled_by(size) for size in range(1, 40) if size != 10] == [0] * 38
        assert [compiled_by(7) for _ in range(COMPILED_AT_STEP)] == [0] * (COMPILED_AT_STEP - 2) + [
            1,
            0,
        ]
        assert compiled_by(10) == 0


def test_large_feeds_are_compiled() -> None:
    """A step with many elements is compiled at once."""
    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None])
        y = x * 3.5
        sizes = 3, MOST_EVALUATED, MOST_EVALUATED + 1
        assert [_compiled_by(session, y, {x: np.ones(n)}) for n in sizes] == [1, 0, 1]


def test_loops_and_many_operations_are_compiled() -> None:
    """A program with a loop, or with many operations that numpy does not compute, is compiled."""
    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None])
        loop = rt.call(lambda a: jax.lax.fori_loop(0, 3, lambda _, b: b * 1.5, a), x)
        sines = rt.call(lambda a: sum(jnp.sin(a * n) for n in range(9)), x)
        for fetch in (loop, sines):
            assert [_compiled_by(session, fetch, {x: np.ones(n)}) for n in (4, 5)] == [1, 1]


def test_values_are_those_of_one_size() -> None:
    """Training with many sizes gives the values of a compiled function."""

    def find_loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w).sum(1) - y) ** 2)

    drawn, w = np.random.default_rng(0), np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
    with rt.Graph().as_default(), rt.Session() as session:
        fed_x, fed_y, loss, step = _training(0.2)
        session.run(rt.global_variables_initializer())
        for size in (10, 3, 8, 1, 5, 10, 3, 12):
            x = drawn.normal(size=(size, 4)).astype(np.float32)
            y = drawn.normal(size=size).astype(np.float32)
            found = session.run([loss, step], {fed_x: x, fed_y: y})[0]
            wanted, slope = jax.value_and_grad(find_loss)(w, x, y)
            w = np.asarray(w - 0.2 * slope)
            np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("asks", "sizes"),
    [
        (lambda n: n % 2 == 0, (4, 5, 6, 7)),
        (lambda n: n in {6, 8}, (4, 6, 7, 8)),
        (lambda n: {6: True}.get(n, False), (4, 6, 7)),
        (lambda n: isinstance(n, int) and n > 5, (4, 5, 6, 7)),
    ],
)
def test_questions_about_a_size_are_answered(asks: Callable[[int], bool], sizes: list[int]) -> None:
    """A function may ask for the size in any way."""
    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None])
        sign = rt.call(lambda a: a if asks(a.shape[0]) else -a, x)
        for size in sizes:
            value = 1.0 if asks(size) else -1.0
            assert session.run(sign, {x: np.ones(size)}).tolist() == [value] * size


def _scaled_by_size(x: jax.Array, w: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def multiply(a: jax.Array) -> jax.Array:
        return a

    # The rule asks for the size, and the function does not.
    multiply.defvjp(lambda a: (a, None), lambda _, g: (g if x.shape[0] % 2 else 3 * g,))
    return multiply(x @ w).sum()


LOSSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "broadcasts": lambda x, w: ((x @ w + w[0]) * x.sum(1)[:, None]).sum(),
    "calls": lambda x, w: jax.nn.log_softmax(jax.nn.relu(x @ w)).sum(),
    "means": lambda x, w: jnp.mean(x @ w) + jnp.std(x @ w),
    "questions": lambda x, w: (x @ w).sum() * (2 if x.shape[0] in {3, 6} else -1),
    "powers of a size": lambda x, w: ((abs(x @ w) + 1) ** (x.shape[0] / 4)).sum(),
    "other sizes": lambda x, w: jnp.concatenate([x[:-1] @ w, x @ w]).reshape(-1).prod(),
    "loops": lambda x, w: jnp.cumsum(jnp.sin(x @ w), 0).max(),
    "rules": _scaled_by_size,
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_one_size(name: str) -> None:
    """The gradient of each size is JAX's, also where a size is that of another tensor."""
    find_loss = LOSSES[name]
    w = np.linspace(-0.5, 0.6, 12, dtype=np.float32).reshape(4, 3)
    drawn = np.random.default_rng(1)
    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None, 4])
        weights = rt.placeholder(np.float32, [4, 3])
        slope = rt.gradients(rt.call(lambda a, b: find_loss(a * 1.5, b), x, weights * 2), weights)
        for size in (9, 2, 5, 6, 4, 3, 1, 12, 8):
            fed = drawn.normal(size=(size, 4)).astype(np.float32)
            wanted = jax.grad(lambda b, fed=fed: find_loss(fed * 1.5, b * 2))(w)
            found = session.run(slope, {x: fed, weights: w})
            np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-4)


def test_two_unknown_sizes_differ_or_not() -> None:
    """The gradients are right for equal and for different sizes of two placeholders."""
    with rt.Graph().as_default(), rt.Session() as session:
        x, y = rt.placeholder(np.float32, [None]), rt.placeholder(np.float32, [None])
        total = rt.numpy.sum(rt.numpy.tanh(x[:, None] * y) * y)
        slopes = rt.gradients(total, [x, y])
        for sizes in ((7, 7), (2, 3), (4, 4), (5, 5), (3, 2), (6, 6), (8, 3), (3, 1), (9, 2)):
            a, b = (np.linspace(-1, 2, n, dtype=np.float32) for n in sizes)
            wanted = jax.grad(lambda a, b: (jnp.tanh(a[:, None] * b) * b).sum(), (0, 1))(a, b)
            for found, slope in zip(session.run(slopes, {x: a, y: b}), wanted, strict=True):
                np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-5)


def test_equal_gradients_are_derived_once() -> None:
    """JAX derives the gradient of equal functions of one size once, and other gradients each by itself."""
    called = []

    def make_power(exponent: float) -> Callable[[jax.Array], jax.Array]:
        def power(a: jax.Array) -> jax.Array:
            called.append(exponent)
            return a**exponent

        return power

    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None])
        powers = [rt.call(make_power(e), x) for e in (2.5, 2.5, 3.5)]
        fetches = [powers, [rt.gradients(power, x) for power in powers]]
        session.run(fetches, {x: np.ones(4)})
        called.clear()
        values, slopes = session.run(fetches, {x: np.full(5, 4)})
        assert sorted(called) == [2.5, 2.5, 2.5, 3.5, 3.5]
        assert [v[0] for v in values] == [32, 32, 128]
        assert [s[0] for s in slopes] == [20, 20, 112]


def test_a_new_size_traces_no_gradient() -> None:
    """A function is called once for a new size, and JAX does not differentiate the function again."""
    called = []

    def square(a: jax.Array) -> jax.Array:
        called.append(a.shape)
        return a * a

    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None])
        y = rt.call(square, x)
        fetches = [y, rt.gradients(y, x)]
        for size in (4, 5, 6):
            session.run(fetches, {x: np.ones(size)})
        called.clear()
        value, slope = session.run(fetches, {x: np.full(7, 3)})
        assert called == [(7,)]
        assert (value.tolist(), slope.tolist()) == ([9] * 7, [6] * 7)


def test_results_are_the_callers() -> None:
    """A caller may change a feed after the step, and a fetched value; the variable stays."""
    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None, 2])
        v = rt.Variable(np.zeros(4, np.float32), name="v")
        turned, kept = rt.numpy.transpose(x), v.assign(rt.numpy.reshape(x, [-1])[:4])
        session.run(v.initializer)
        session.run([turned, kept], {x: np.ones((3, 2))})
        fed = np.arange(8, dtype=np.float32).reshape(4, 2)
        found, value = session.run([turned, kept], {x: fed})
        fed[:] = -1
        assert found.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
        found[:] = value[:] = -2
        assert session.run(v).tolist() == [0, 1, 2, 3]


def test_threads_share_a_session() -> None:
    """Steps of many sizes from several threads lose no update."""
    with rt.Graph().as_default(), rt.Session() as session:
        x = rt.placeholder(np.float32, [None])
        total = rt.Variable(np.float32(0), name="total")
        add = total.assign_add(rt.numpy.sum(x)).op
        session.run(total.initializer)

        def work(_: int) -> None:
            for size in range(1, 30):
                session.run(add, {x: np.ones(size)})

        concurrency.call_all(work, range(3), "adds")
        assert session.run(total) == 3 * sum(range(1, 30))
