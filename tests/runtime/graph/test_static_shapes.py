"""Static shapes: what is known of a tensor's shape before a step runs is never more than what is true of every step."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import runtime as rt
from runtime.graph import tracing


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: x[:100], (None, 3)),
        (lambda x: x[:2], (None, 3)),
        (lambda x: x[-7:, :2], (None, 2)),
        (lambda x: jnp.sort(x, axis=0)[: min(x.shape[0], 5000)], (None, 3)),
        (lambda x: x[:100].sum(axis=0), (3,)),
        (lambda x: x[:1], (1, 3)),
        (lambda x: x.reshape(-1, 3, 1), (None, 3, 1)),
        (lambda x: jnp.concatenate([x, x]), (None, 3)),
        (lambda x: x[1:], (None, 3)),
        (lambda x: x + jnp.ones((7, 1, 3)), (7, None, 3)),
        (lambda x: x @ jnp.ones((3, 10)), (None, 10)),
    ],
)
def test_unknown_rows_keep_static_shape(fn: Callable[[Any], Any], shape: Any) -> None:
    """The static shape of a function of unknown rows agrees with every real shape."""
    x = rt.placeholder(np.float32, [None, 3])
    y = rt.call(fn, x, name="y")
    assert y.shape == shape
    with rt.Session() as session:
        for rows in (1, 10, 200):
            found = session.run(y, {x: np.ones((rows, 3), np.float32)}).shape
            assert all(said in (None, real) for said, real in zip(y.shape, found, strict=True))


def test_sliced_tensor_may_be_fed() -> None:
    """A slice of unknown size may be fed with fewer rows."""
    x = rt.placeholder(np.float32, [None])
    y = x[:100]
    total = y.sum() if hasattr(y, "sum") else rt.numpy.sum(y)
    with rt.Session() as session:
        assert session.run(total, {y: np.ones(10, np.float32)}) == 10.0


def test_unknown_size_takes_known_one() -> None:
    """An unknown size that must agree with a known one takes the known size."""
    x = rt.placeholder(np.float32, [None])
    assert (x + np.ones(3, np.float32)).shape == (3,)


@pytest.mark.parametrize(
    ("fn", "shapes", "inferred"),
    [
        (lambda x, y: jnp.convolve(x, y, "valid"), [(None,), (None,)], (None,)),
        (lambda x, y: x.reshape(len(y), -1), [(None,), (None,)], (None, None)),
        (lambda x, y: x.reshape(y.shape[0], -1), [(None,), (None,)], (None, None)),
        (lambda x, y, w: x.reshape(len(y), -1) @ w, [(None,), (None,), (3, 4)], (None, 4)),
        (lambda x, y: x.reshape(-1, 2, len(y)), [(None,), (None,)], (None, 2, None)),
        (lambda x, y: x.reshape(len(y), 2, -1), [(None,), (None,)], (None, 2, None)),
        (lambda x, y: x.reshape(len(y), -1, 8), [(None,), (None,)], (None, None, None)),
        (lambda x: x.reshape(1), [(None,)], (1,)),
        (lambda x, y: x < y, [(1, 4), (None, None)], (None, 4)),
        (lambda x, y: x[len(y) :], [(None,), (None,)], (None,)),
        (lambda x, y, z: (x + y).sum() + z[len(x) :], [(None,), (None,), (None,)], (None,)),
        (lambda x: x[50000:], [(None, 7)], (None, 7)),
        (lambda x: x[::20000], [(None, 7)], (None, 7)),
        (lambda x: jnp.max(x[50000:], 0), [(None, 7)], (7,)),
        (lambda x: jnp.argmax(x[50000:], 0), [(None, 7)], (7,)),
        (lambda x, y: x + y, [(None, 7), (None, 7)], (None, 7)),
        (lambda x, y: x @ y, [(None, None), (None, None)], (None, None)),
        (lambda x: x * 2, [None], None),
    ],
)
def test_unknown_dimensions_are_independent(
    fn: Callable[..., Any], shapes: list[Any], inferred: Any
) -> None:
    """A size is static only if no sizes of the inputs change it."""
    assert rt.call(fn, *(rt.placeholder(np.float32, shape) for shape in shapes)).shape == inferred


def test_mean_by_unknown_size_is_right() -> None:
    """The number of rows is not taken for a constant that it is not."""
    x = rt.placeholder(np.float32, [None, 2])
    mean = rt.call(lambda x: x[::20000].sum() / x[::20000].shape[0], x)
    with rt.Session() as session:
        assert session.run(mean, {x: np.ones((60000, 2), np.float32)}) == 2.0


@pytest.mark.parametrize(
    ("fn", "shapes", "traces"),
    [
        (lambda x, y: x + y, [(3, 7), (3, 7)], 1),
        (lambda x, y: x @ y, [(None, 7), (7, 5)], 2),
        (lambda x: jnp.tanh(x), [(None, 7)], 2),
        (lambda x: x.mean(), [(None, 7)], 2),
        (lambda x, y: x + y, [(None, 7), (None, 7)], 3),
    ],
)
def test_shapes_take_few_traces(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], shapes: list[Any], traces: int
) -> None:
    """An operation is traced a few times for its shapes when a graph is built."""
    counted: list[int] = []
    original = tracing.jax.eval_shape
    monkeypatch.setattr(
        tracing.jax, "eval_shape", lambda *args: counted.append(1) or original(*args)
    )
    inputs = [(shape, np.dtype(np.float32)) for shape in shapes]
    tracing.infer(fn, inputs, "operation")
    assert len(counted) == traces


def test_plan_traces_nothing_anew() -> None:
    """A function whose sizes the graph knows is traced once, when its operation is made."""
    traced = []

    def double(x: jax.Array) -> dict[str, jax.Array]:
        traced.append(x.shape)
        return {"twice": 2 * x}

    with rt.Graph().as_default(), rt.Session() as session:
        known = rt.call(double, rt.constant(np.ones(3, np.float32)))["twice"]
        assert session.run(known).tolist() == [2.0, 2.0, 2.0]
        assert traced == [(3,)]
        # The size of a placeholder is known in the step only.
        fed = rt.placeholder("float32", [None])
        assert session.run(rt.call(double, fed)["twice"], {fed: [1.0]}).tolist() == [2.0]
        assert traced[-1] == (1,)
