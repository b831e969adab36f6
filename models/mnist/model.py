"""The classifier, as pure functions of (parameters, images): a hidden layer of sigmoid units, the classic recipe.

Initial parameters come from numpy and an integer seed, so every task computes the same ones without
asking JAX.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from models.mnist.data import IMAGE_PIXELS, NUM_CLASSES

Params = Mapping[str, Array]
"""The parameters by name, float32, as ``init`` makes them."""


def init(seed: int, hidden_units: int = 100) -> dict[str, NDArray[np.float32]]:
    """Returns initial parameters: 784 -> ``hidden_units`` -> 10. A seed has the same ones in every process."""
    rng = np.random.default_rng(seed)
    return {
        "w1": _draw_weights(rng, IMAGE_PIXELS, hidden_units),
        "b1": np.zeros(hidden_units, np.float32),
        "w2": _draw_weights(rng, hidden_units, NUM_CLASSES),
        "b2": np.zeros(NUM_CLASSES, np.float32),
    }


def logits(params: Params, images: Array) -> Array:
    """Returns the logits of images float32 [N, 784], as float32 [N, 10]."""
    hidden = jax.nn.sigmoid(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_fn(params: Params, images: Array, labels: Array) -> Array:
    """Returns the mean softmax cross-entropy, in nats, as float32 scalar; `labels` are int32 [N]."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels))


def predictions(params: Params, images: Array) -> Array:
    """Returns the most likely digit of each image, int32 [N]."""
    return jnp.argmax(logits(params, images), axis=-1).astype(jnp.int32)


def accuracy(params: Params, images: Array, labels: Array) -> Array:
    """Returns the share of images whose most likely digit is the right one, as float32 scalar in 0..1."""
    return jnp.mean(predictions(params, images) == labels, dtype=jnp.float32)


def _draw_weights(rng: np.random.Generator, inputs: int, units: int) -> NDArray[np.float32]:
    """Draws normal weights of deviation 1/sqrt(inputs of a unit), again beyond two deviations."""
    values = rng.standard_normal((inputs, units))
    # A weight beyond two deviations would saturate its unit.
    while (outliers := np.abs(values) > 2).any():
        values[outliers] = rng.standard_normal(np.count_nonzero(outliers))
    return np.asarray(values / np.sqrt(inputs), np.float32)
