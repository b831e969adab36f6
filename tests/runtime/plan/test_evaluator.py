"""An evaluated program has the values of the compiled program."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr

from runtime.plan import evaluator
from runtime.plan.evaluator import evaluate, pays
from runtime.tensor_spec import Array

Function = Callable[..., object]

FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x, y, _: (x + y - x * y / (2 + abs(y)), -x, lax.square(x), jnp.sign(x)),
    "powers": lambda x, y, _: (x**3, jnp.power(abs(x), y), lax.rsqrt(2 + x * x), jnp.sqrt(abs(x))),
    "exponentials": lambda x, y, _: (
        (jnp.exp(x), jnp.expm1(x), jnp.log1p(abs(x)), jnp.log(2 + abs(y))),
        (jax.nn.sigmoid(x), jnp.tanh(x)),
    ),
    "not a number": lambda x, y, _: (
        (jnp.log(x), jnp.maximum(jnp.log(x), y), jnp.minimum(y, jnp.log(x)), 1 / (x - x)),
        (jnp.log(x).max(0), jnp.log(x).min(1), jnp.log(x).argmax(0), jnp.log(x) < y),
        (-jnp.log(x - x)).astype(jnp.int32),
    ),
    "angles": lambda x, y, _: (jnp.sin(x), jnp.cos(y), jnp.tan(x)),
    "rounding": lambda x, y, _: (jnp.floor(x), jnp.ceil(y), jnp.round(x), x.astype(jnp.int32)),
    "integers": lambda x, y, n: (
        (n + n, -n, n * 1_000_000_000, n & 1, n | 4, n ^ 5, ~n, n >> 1, n << 30, jnp.sign(n - 2)),
        (n * 500_000_000).sum(),
    ),
    "integer division": lambda x, y, n: ((n - 3) // 2, (n - 3) % 2, lax.rem(n - 3, n - n + 2)),
    "comparisons": lambda x, y, n: (
        (x < y, x <= y, x > y, x >= y, n == 2, n != 2, ~(x < y)),
        (jnp.where(x < y, x, 0.0), lax.clamp(-abs(y), x, abs(y)), jnp.minimum(x, y)),
    ),
    "sums": lambda x, y, n: (x.sum(), x.mean(0), x.max(1), y.min(), x.prod(1), n.sum()),
    "tests": lambda x, y, _: ((x > 0).any(0), (y > 0).all(1), x.argmax(1), y.argmin(0)),
    "running sums": lambda x, y, n: (lax.cumsum(x, 0), lax.cumsum(n, 0, reverse=True)),
    "matrices": lambda x, y, n: (
        (x @ y.T, x.T @ y, jnp.einsum("ni,nj->nij", x, y)),
        jnp.einsum("nij,njk->nik", x[:, :, None] * y[:, None], y[:, :, None] + x[:, None]),
        jnp.einsum("n,m->nm", n, n),
    ),
    "layouts": lambda x, y, _: (
        (
            x.T,
            x.reshape(-1),
            jnp.concatenate([x, y]),
            x[:, None],
            x[:, ::-1],
            lax.slice_in_dim(x, 1, 4, 2, 1),
        ),
        (x[:, None].squeeze(1), lax.rev(x, (0,)), jnp.broadcast_to(y[0], x.shape)),
    ),
    "counts": lambda x, y, _: (jnp.arange(x.shape[0]), x * x.shape[0], jnp.ones(2 * x.shape[0])),
    "gathers": lambda x, y, n: (x[:-1], x[n % 2], jnp.zeros((3, 4)).at[n % 3].add(x), x[::-1]),
    "calls": lambda x, y, _: (jax.nn.relu(x), jax.nn.log_softmax(x), jnp.copy(x)),
    "gradients": lambda x, y, _: jax.grad(
        lambda w: (jax.nn.log_softmax(jax.nn.relu(x @ w)) * y).sum()
    )(jnp.ones((4, 4))),
    "narrow reals": lambda x, y, _: (x.astype(jnp.bfloat16) + 1, y.astype(jnp.float16).sum()),
    "random numbers": lambda x, y, _: jax.random.uniform(jax.random.key(3), x.shape),
    "no elements": lambda x, y, n: (x[:0].sum(0), x[:0] @ y.T, jnp.concatenate([n[:0], n])),
    "wide numbers": lambda x, y, n: (x.astype(jnp.float64) / 3, n.astype(jnp.int64) * 2**40),
}


def _arguments(size: int) -> list[Array]:
    drawn = np.random.default_rng(size).normal(size=(2, size, 4)).astype(np.float32)
    return [drawn[0], drawn[1], np.arange(size, dtype=np.int32)]


def _trace(function: Function, size: int) -> ClosedJaxpr:
    with jax.enable_x64(True):
        flat = lambda *arrays: tuple(jax.tree.leaves(function(*arrays)))  # noqa: E731
        return jax.make_jaxpr(flat)(*_arguments(size))


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_the_compiled_ones(name: str, size: int) -> None:
    """Values and dtypes are those of the compiled function."""
    jaxpr, arguments = _trace(FUNCTIONS[name], size), _arguments(size)
    found = evaluate(jaxpr, jax.local_devices()[0], *arguments)
    with jax.enable_x64(True):
        wanted = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*arguments)
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=1e-5
        )


def test_every_operation_has_a_case() -> None:
    """The functions above use every operation that numpy computes."""
    pending = [_trace(function, 5) for function in FUNCTIONS.values()]
    used = set()
    for jaxpr in pending:
        for equation in jaxpr.jaxpr.eqns:
            pending += [p for p in equation.params.values() if isinstance(p, ClosedJaxpr)]
            if evaluator.fits_numpy(equation):
                used.add(equation.primitive.name)
    assert used == set(evaluator.IN_NUMPY)


def test_results_share_no_memory() -> None:
    """A caller may change an argument when the results are there."""
    x, y, n = _arguments(5)
    jaxpr = _trace(lambda x, y, n: (x.reshape(-1), y), 5)
    found = evaluate(jaxpr, jax.local_devices()[0], x, y, n)
    before = [np.array(value) for value in found]
    x[:] = y[:] = 0
    np.testing.assert_array_equal(found[0], before[0])
    np.testing.assert_array_equal(found[1], before[1])


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (lambda x, y, n: jax.nn.relu(x @ y.T), True),
        (lambda x, y, n: sum(jnp.sin(x * k) for k in range(8)), True),
        (lambda x, y, n: sum(jnp.sin(x * k) for k in range(9)), False),
        (lambda x, y, n: jax.jit(lambda a: lax.fori_loop(0, 3, lambda _, b: b * 2, a))(x), False),
        (lambda x, y, n: jax.pure_callback(lambda a: a, x, x), False),
        (lambda x, y, n: jax.debug.print("{}", x), False),
    ],
)
def test_long_evaluations_do_not_pay(function: Function, answer: bool) -> None:
    """A loop, many operations without a row, and a callback are not evaluated."""
    assert pays(_trace(function, 5)) is answer
