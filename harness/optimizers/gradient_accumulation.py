"""Gradients of several batches in one step: fewer pulls and pushes for the same data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def accumulated(loss_fn: Callable[..., jax.Array], steps: int) -> Callable[..., jax.Array]:
    """Makes a loss that is the mean over ``steps`` batches.

    The batches are fed as one large batch, and computed one after the other. So a worker pulls
    once, accumulates the gradients of ``steps`` batches at the same parameters, and pushes once.
    The gradient equals the gradient of the large batch, and memory holds the activations of one
    small batch at a time.

        loss = rt.call(harness.accumulated(model.loss_fn, 4), params, images, labels)    # images: [4 * 100, 784]

    Args:
        loss_fn: ``(params, *batch) -> scalar``, a mean over the first axis of each array of the
            batch.
        steps: number of batches; 1 returns ``loss_fn`` itself.

    Returns:
        A function of the same arguments, whose batch arrays have ``steps`` times the length.

    Raises:
        ValueError: ``steps`` is less than 1. When called: a length is not a multiple of ``steps``,
            or an array has no axis.
    """
    if steps < 1:
        raise ValueError(f"accumulated: steps is {steps}, it must be 1 or more")
    if steps == 1:
        return loss_fn

    def mean_loss(params: object, *batch: object) -> jax.Array:
        arrays, structure = jax.tree.flatten(batch)
        for array in arrays:
            if not jnp.ndim(array):
                raise ValueError(
                    "accumulated: a scalar is no batch; let the loss function have it in another "
                    "way"
                )
            if array.shape[0] % steps:
                raise ValueError(
                    f"accumulated: {array.shape[0]} examples are not a multiple of {steps} steps"
                )
        parts = zip(*(jnp.split(array, steps) for array in arrays), strict=True)
        # Unrolled, not scanned: XLA merges the forward passes of loss and gradient, but not those
        # in a loop.
        first, *others = (loss_fn(params, *jax.tree.unflatten(structure, part)) for part in parts)
        return sum(others, start=first) / steps

    return mean_loss
