"""The classifier: reproducible, right in their gradients, and able to learn the digits they are made for."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.typing import ArrayLike

from models.mnist import data, model
from tests.kit import real_mnist
from tests.kit.changes import SetVariables


def arrays(values: Mapping[str, ArrayLike]) -> dict[str, Array]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def test_parameters_follow_from_seed_and_size() -> None:
    """Parameters follow from the seed and the size."""
    first, again, other = model.init(3, 20), model.init(3, 20), model.init(4, 20)
    assert all(value.dtype == np.float32 for value in first.values())
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    assert any((value != other[name]).any() for name, value in first.items())
    assert first["w2"].shape == (20, 10)
    assert model.init(3, 21)["w1"].shape == (first["w1"].shape[0], 21)


def test_parameters_have_classic_sizes() -> None:
    """Parameters have the sizes of the classic recipe."""
    shapes = {name: value.shape for name, value in model.init(0, 100).items()}
    assert shapes == {"w1": (784, 100), "b1": (100,), "w2": (100, 10), "b2": (10,)}


def test_weights_are_truncated_normal() -> None:
    """Weights are drawn from a truncated normal distribution."""
    weights = model.init(0, 100)["w1"] * np.sqrt(784)
    assert np.abs(weights).max() <= 2
    assert weights.mean() == pytest.approx(0, abs=0.02)
    assert weights.std() == pytest.approx(0.88, abs=0.01)  # a normal cut at two deviations


def test_loss_and_accuracy_match_definitions() -> None:
    """Loss and accuracy match their definitions."""
    rng = np.random.default_rng(0)
    params = arrays(
        {name: rng.normal(scale=0.2, size=value.shape) for name, value in model.init(0, 8).items()}
    )
    images, labels = (
        jnp.asarray(rng.random((7, 784), np.float32)),
        jnp.asarray(rng.integers(0, 10, 7), jnp.int32),
    )
    logits = np.asarray(jax.jit(model.logits)(params, images), np.float64)
    assert logits.shape == (7, 10)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = jax.jit(model.loss_fn)(params, images, labels)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(
        -np.log(probabilities[np.arange(7), labels]).mean(), rel=1e-4
    )
    best = jnp.asarray(logits.argmax(axis=1), jnp.int32)
    assert float(model.accuracy(params, images, best)) == 1
    assert float(model.accuracy(params, images, best.at[:3].add(1))) == pytest.approx(4 / 7)


def test_logits_match_numpy() -> None:
    """The logits match a calculation in NumPy."""
    params = model.init(1, 5)
    images = np.random.default_rng(1).random((4, 784), np.float32)
    hidden = 1 / (1 + np.exp(-(images @ params["w1"] + params["b1"])))
    expected = hidden @ params["w2"] + params["b2"]
    np.testing.assert_allclose(
        model.logits(arrays(params), jnp.asarray(images)), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.cluster  # seconds of compiling
def test_gradient_matches_finite_differences() -> None:
    """The gradient matches finite differences."""
    params = arrays(model.init(0, 6))
    rng = np.random.default_rng(0)
    images, labels = (
        jnp.asarray(rng.random((5, 784), np.float32)),
        jnp.asarray(rng.integers(0, 10, 5), jnp.int32),
    )
    loss, gradient = (
        jax.jit(model.loss_fn),
        jax.jit(jax.grad(model.loss_fn))(params, images, labels),
    )
    length = float(optax.tree.norm(gradient))
    assert length > 0.01

    def loss_at(distance: float) -> float:
        moved = jax.tree.map(
            lambda value, slope: value + distance / length * slope, params, gradient
        )
        return float(loss(moved, images, labels))

    assert (loss_at(0.01) - loss_at(-0.01)) / 0.02 == pytest.approx(length, rel=0.02)


def train(mnist: data.MnistData, tx: optax.GradientTransformation, steps: int) -> float:
    """Returns the test accuracy after `steps` batches of 100 in one plain JAX loop."""
    params = arrays(model.init(0, 100))
    slots = tx.init(params)

    @jax.jit
    def step(
        params: dict[str, Array], slots: optax.OptState, images: Array, labels: Array
    ) -> tuple[dict[str, Array], optax.OptState]:
        updates, slots = tx.update(jax.grad(model.loss_fn)(params, images, labels), slots, params)
        return optax.apply_updates(params, updates), slots

    batches = data.Batches(mnist.train, 100, seed=0)
    for _ in range(steps):
        params, slots = step(params, slots, *batches.next())
    accuracy = jax.jit(model.accuracy)
    right = sum(
        float(accuracy(params, *chunk)) * len(chunk[1]) for chunk in mnist.test.chunks(1000)
    )
    return right / len(mnist.test)


@pytest.mark.chaos
@real_mnist.needed
def test_model_learns_mnist() -> None:
    """The model learns MNIST to 92 % in 300 steps."""
    mnist = data.load(real_mnist.DIRECTORY)
    assert mnist.name == "mnist"
    assert train(mnist, optax.adam(0.01), 300) > 0.92


@pytest.mark.chaos
def test_model_learns_digits(tmp_path: Path, set_variables: SetVariables) -> None:
    """The model learns the digits to 92 % in 300 steps."""
    set_variables(XDG_CACHE_HOME=str(tmp_path), MNIST_DIR=None)
    mnist = data.load(mirrors=[])
    assert mnist.name == "digits"
    assert train(mnist, optax.adam(0.01), 300) > 0.92
