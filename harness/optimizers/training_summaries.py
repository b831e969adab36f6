"""Summaries of an optimizer for TensorBoard: the learning rate, the norm of the gradients, the averages."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import runtime as rt
from harness.optimizers.optimizer import GradientAndVariable
from harness.tensorboard import summary


def training_summaries(
    grads_and_vars: Sequence[GradientAndVariable],
    *,
    learning_rate: Callable[[jax.Array], jax.typing.ArrayLike] | float | None = None,
    global_step: rt.Variable | None = None,
    averages: object = None,
) -> list[rt.Tensor]:
    """Makes the usual summaries of training; ``harness.summary.merge_all()`` finds them.

        pairs = optimizer.compute_gradients(loss)
        harness.training_summaries(pairs, learning_rate=schedule, global_step=global_step)
        train_op = optimizer.apply_gradients(pairs, global_step)

    ``training/gradient_norm`` is the global norm of this worker's gradients of variables, before
    clipping.
    ``training/learning_rate`` is the schedule at the global step. A schedule inside of an optax
    transformation counts the updates of a variable, which are as many.
    ``training/average_distance`` is the global norm of the difference between the variables and
    their averages.

    Args:
        grads_and_vars: pairs of ``compute_gradients``.
        learning_rate: an optax schedule, or a number; None for no summary of the rate.
        global_step: argument of a schedule.
        averages: the moving averages of the variables of ``grads_and_vars``, a pytree in their
            order.

    Raises:
        InvalidArgumentError: there is no gradient, a schedule comes without ``global_step``, or the
            averages are of other variables.
    """
    gradients = [gradient for gradient, _ in grads_and_vars if isinstance(gradient, rt.Tensor)]
    if not gradients:
        raise rt.InvalidArgumentError("training_summaries: there are no gradients")
    if callable(learning_rate) and global_step is None:
        raise rt.InvalidArgumentError("training_summaries: a schedule needs global_step")
    kept = jax.tree.leaves(averages)
    variables = [variable for _, variable in grads_and_vars]
    if kept and [v.shape for v in kept] != [v.shape for v in variables]:
        raise rt.InvalidArgumentError(
            "training_summaries: the averages are not those of the variables, in their order"
        )
    made: list[rt.Tensor] = []
    with rt.name_scope("training"):
        made.append(summary.scalar("gradient_norm", rt.call(_global_norm, gradients, name="norm")))
        if learning_rate is not None:
            rate = (
                rt.call(learning_rate, global_step, name="rate")
                if callable(learning_rate)
                else learning_rate
            )
            made.append(summary.scalar("learning_rate", rate))
        if kept:
            distance = rt.call(
                lambda values, means: _global_norm(
                    [v - m for v, m in zip(values, means, strict=True)]
                ),
                variables,
                kept,
                name="distance",
            )
            made.append(summary.scalar("average_distance", distance))
    return made


def _global_norm(arrays: Sequence[jax.Array]) -> jax.Array:
    """Computes the global norm, float32."""
    return jnp.sqrt(
        sum((jnp.sum(jnp.square(a.astype(jnp.float32))) for a in arrays), start=jnp.float32(0))
    )
