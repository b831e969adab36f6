"""The same step in one plain JAX process: what there would be without any distribution."""

import sys

import jax
import numpy as np
import optax

from benchmarks.systems.protocol import initial, measure
from models.mnist import model


def main(hidden: int) -> None:
    """Measures one process."""
    tx = optax.sgd(0.1)

    def train(params, state, step, images, labels):
        loss, gradients = jax.value_and_grad(model.loss_fn)(params, images, labels)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, step + 1, loss

    compiled = jax.jit(train, donate_argnums=(0, 1, 2))
    params = jax.device_put(initial(hidden))
    held = [params, tx.init(params), np.int32(0)]

    def step(images: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        *held[:], loss = compiled(*held, images, labels)
        return float(loss), int(held[2])

    measure(step, seed=0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
