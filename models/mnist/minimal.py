"""MNIST on parameter servers, in one page: every process of the cluster runs this program.

python -m harness.launch --ps=1 --workers=2 -- python -m models.mnist.minimal --logdir=runs/minimal
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import harness
import runtime as rt
from models.mnist import data

parser = argparse.ArgumentParser()
parser.add_argument("--logdir", help="Directory of checkpoints and TensorBoard events.")
parser.add_argument("--train_steps", type=int, default=2000, help="Steps of all workers together.")


def init_params() -> dict[str, np.ndarray]:
    """Returns initial parameters: 784 pixels -> 100 sigmoid units -> 10 digits."""
    rng = np.random.default_rng(1)
    w1, w2 = rng.normal(0, 784**-0.5, (784, 100)), rng.normal(0, 0.1, (100, 10))
    params = {"w1": w1, "b1": np.zeros(100), "w2": w2, "b2": np.zeros(10)}
    return {name: value.astype(np.float32) for name, value in params.items()}


def logits(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Returns the logits of images float32 [N, 784], as float32 [N, 10]."""
    return jax.nn.sigmoid(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of a batch, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def accuracy_fn(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the share of images that are classified correctly, 0 to 1."""
    return (logits(params, images).argmax(-1) == labels).mean()


def main(options: argparse.Namespace, others: list[str]) -> None:
    """Serves variables as a ps, or trains on a share of the images as a worker."""
    with harness.join_cluster(others) as me:  # a ps stays here until training is over
        mnist = data.load()
        batches = data.Batches(
            mnist.train, 100, seed=1, shard_index=me.number, num_shards=me.workers
        )
        with me.device():
            global_step = harness.get_or_create_global_step()
            # A pytree of variables, spread over the ps.
            params = rt.variables(init_params(), name="mlp")
            images = rt.placeholder(jnp.float32, [None, 784], name="images")
            labels = rt.placeholder(jnp.int32, [None], name="labels")
            loss = rt.call(loss_fn, params, images, labels)  # any JAX function of pytrees
            accuracy = rt.call(accuracy_fn, params, images, labels)
            train_op = harness.Optimizer(optax.adam(0.002)).minimize(loss, global_step=global_step)

        # A ps that dies costs the steps since the last checkpoint.
        supervisor = harness.Supervisor(
            is_chief=me.is_chief, logdir=options.logdir, global_step=global_step, save_model_secs=5
        )
        with supervisor.managed_session(me.target) as session:
            step = int(session.run(global_step))
            while not supervisor.should_stop() and step < options.train_steps:
                x, y = batches.next()
                _, step = session.run([train_op, global_step], {images: x, labels: y})
            if me.is_chief:
                right = session.run(
                    accuracy, {images: mnist.test.images, labels: mnist.test.labels}
                )
                print(f"Test-Accuracy: {right:.4f}", flush=True)


if __name__ == "__main__":
    main(*parser.parse_known_args())  # join_cluster reads the other flags
