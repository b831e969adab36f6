"""The classifiers, as pure functions of (parameters, images): a sigmoid MLP, the classic recipe, and a small CNN.

Initial parameters come from numpy and an integer seed, so every task computes the same ones without asking JAX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from models.mnist.data import IMAGE_PIXELS, IMAGE_SIDE, NUM_CLASSES

Params = Mapping[str, Array]
"""Name -> float32 array: what `init` makes and the other functions take. A pytree."""


@dataclass(frozen=True)
class Model:
    """A classifier of 28x28 images into ten digits."""

    init: Callable[[int, int], dict[str, NDArray[np.float32]]]
    """(seed >= 0, hidden units) -> initial parameters; equal arguments give equal parameters in every process."""
    logits: Callable[[Params, Array], Array]
    """(parameters, images float32 [N, 784]) -> float32 [N, 10]."""

    def loss_fn(self, params: Params, images: Array, labels: Array) -> Array:
        """Returns the mean softmax cross-entropy, in nats, as float32 scalar; `labels` are int32 [N]."""
        logits = self.logits(params, images)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def predictions(self, params: Params, images: Array) -> Array:
        """Returns the most likely digit of each image, int32 [N]."""
        return jnp.argmax(self.logits(params, images), axis=-1).astype(jnp.int32)

    def accuracy(self, params: Params, images: Array, labels: Array) -> Array:
        """Returns the share of images whose most likely digit is the right one, as float32 scalar in 0..1."""
        return jnp.mean(jnp.argmax(self.logits(params, images), axis=-1) == labels, dtype=jnp.float32)


def init_mlp(seed: int, hidden_units: int = 100) -> dict[str, NDArray[np.float32]]:
    """Returns parameters for `logits_mlp`: 784 -> hidden_units -> 10."""
    rng = np.random.default_rng(seed)
    return {
        "w1": _weights(rng, IMAGE_PIXELS, hidden_units),
        "b1": np.zeros(hidden_units, np.float32),
        "w2": _weights(rng, hidden_units, NUM_CLASSES),
        "b2": np.zeros(NUM_CLASSES, np.float32),
    }


def logits_mlp(params: Params, images: Array) -> Array:
    """Returns the logits of a hidden layer of sigmoid units; float32 [N, 784] -> [N, 10]."""
    hidden = jax.nn.sigmoid(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def init_cnn(seed: int, hidden_units: int = 100) -> dict[str, NDArray[np.float32]]:
    """Returns parameters for `logits_cnn`: convolutions to 16 and to 32 channels -> hidden_units -> 10."""
    rng = np.random.default_rng(seed)
    pooled = (IMAGE_SIDE // 4) ** 2 * 32  # two poolings halve each side twice
    return {
        "conv1": _weights(rng, 3, 3, 1, 16),
        "conv1_b": np.zeros(16, np.float32),
        "conv2": _weights(rng, 3, 3, 16, 32),
        "conv2_b": np.zeros(32, np.float32),
        "w1": _weights(rng, pooled, hidden_units),
        "b1": np.zeros(hidden_units, np.float32),
        "w2": _weights(rng, hidden_units, NUM_CLASSES),
        "b2": np.zeros(NUM_CLASSES, np.float32),
    }


def logits_cnn(params: Params, images: Array) -> Array:
    """Returns the logits of two 3x3 convolutions with pooling and a hidden layer, all ReLU.

    Images float32 [N, 784] give logits float32 [N, 10].
    """
    maps = jnp.reshape(images, (-1, IMAGE_SIDE, IMAGE_SIDE, 1))
    maps = jax.nn.relu(_max_pool(_conv(maps, params["conv1"])) + params["conv1_b"])
    maps = jax.nn.relu(_max_pool(_conv(maps, params["conv2"])) + params["conv2_b"])
    hidden = jax.nn.relu(maps.reshape(maps.shape[0], -1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


MODELS: Mapping[str, Model] = MappingProxyType(
    {"mlp": Model(init_mlp, logits_mlp), "cnn": Model(init_cnn, logits_cnn)},
)
"""The models by the name that `--model` takes."""


def _weights(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Draws normal weights of deviation 1/sqrt(inputs of a unit), again beyond two deviations.

    The last axis is that of the units.
    """
    values = rng.standard_normal(shape)
    while (outliers := np.abs(values) > 2).any():
        values[outliers] = rng.standard_normal(np.count_nonzero(outliers))
    return np.asarray(values / np.sqrt(np.prod(shape[:-1])), np.float32)


def _conv(maps: Array, kernel: Array) -> Array:
    """Applies a 3x3 convolution that keeps the size; [N, H, W, C] and [3, 3, C, D] -> [N, H, W, D]."""
    return jax.lax.conv_general_dilated(maps, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _max_pool(maps: Array) -> Array:
    """Halves height and width; [N, H, W, C] -> [N, H/2, W/2, C].

    By reshaping: the gradient of `lax.reduce_window`, a select-and-scatter, is slow on CPUs.
    """
    n, height, width, channels = maps.shape
    return maps.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
