"""Digits by a convolutional network of Flax with BatchNorm, workers in step: every process runs this program.

python -m harness.launch --ps=1 --workers=2 -- python -m models.images.trainer

In each step every worker computes the gradients of a batch of its own, and the ps applies their mean: two workers with
batches of 32 train as one with batches of 64. The running means of BatchNorm are variables without gradients.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import harness
import runtime as rt
from models.mnist import data

parser = argparse.ArgumentParser()
parser.add_argument("--logdir", help="Directory of checkpoints and TensorBoard events.")
parser.add_argument("--train_steps", type=int, default=800, help="Steps that the workers take together.")
parser.add_argument("--batch_size", type=int, default=32, help="Images of a worker in a step.")

TEST_EVERY = 50
"""Steps between two tests of the chief."""


class Net(nnx.Module):
    """28 x 28 pixels -> 8 x 14 x 14 -> 16 x 7 x 7 -> 10 digits.

    Args:
        rngs: keys of the first values.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.out = nnx.Linear(16 * 7 * 7, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of images float32 [N, 784], as float32 [N, 10]."""
        x = images.reshape(-1, 28, 28, 1)
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.out(x.reshape(len(x), -1))


Tree = dict[str, dict[str, jax.Array]]


@functools.cache
def split_net() -> tuple[nnx.GraphDef[Net], Tree, Tree]:
    """Returns the network without values, and initial parameters and running means."""
    # Jitted, the initial values of all layers are one program to compile.
    net = nnx.jit(lambda: Net(nnx.Rngs(0)))()
    graph, *states = nnx.split(net, nnx.Param, nnx.BatchStat)
    params, means = map(nnx.to_pure_dict, states)
    return graph, params, means


def loss_fn(params: Tree, means: Tree, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Tree]:
    """Returns the mean cross-entropy of a batch, and the new running means."""
    net = nnx.merge(split_net()[0], params, means)
    net.train()
    loss = optax.softmax_cross_entropy_with_integer_labels(net(images), labels).mean()
    return loss, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))


def accuracy_fn(params: Tree, means: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the share of images that are classified correctly, with the running means."""
    net = nnx.merge(split_net()[0], params, means)
    net.eval()
    return (net(images).argmax(-1) == labels).mean()


def main(options: argparse.Namespace, others: list[str]) -> None:
    """Serves variables as a ps, or trains on a share of the images as a worker."""
    with harness.join_cluster(others) as me:
        mnist = data.load()
        batches = data.Batches(mnist.train, options.batch_size, seed=1, shard_index=me.number, num_shards=me.workers)
        harness.checkpointable("data", batches.state, batches.restore)
        with me.device():
            global_step = harness.get_or_create_global_step()
            _, first_params, first_means = split_net()
            params = rt.variables(first_params, name="net")
            means = rt.variables(first_means, name="net", trainable=False)
            images = rt.placeholder(jnp.float32, [None, 784], name="images")
            labels = rt.placeholder(jnp.int32, [None], name="labels")
            loss, new_means = rt.call(loss_fn, params, means, images, labels)
            accuracy = rt.call(accuracy_fn, params, means, images, labels)
            rate = optax.cosine_decay_schedule(1e-2, options.train_steps)
            optimizer = harness.SyncReplicas(
                harness.Optimizer(optax.adam(rate)), replicas_to_aggregate=me.workers, total_num_replicas=me.workers
            )
            learn = optimizer.minimize(loss, global_step=global_step)
            keep = jax.tree.leaves(jax.tree.map(rt.assign, means, new_means))
            train_op = rt.group(learn, *keep)

            tested = rt.placeholder(jnp.float32, [], name="tested")
            curve = harness.summary.scalar("test_accuracy", tested)

        supervisor = harness.Supervisor(
            is_chief=me.is_chief, logdir=options.logdir, global_step=global_step, summary_op=None
        )
        with supervisor.managed_session(me.target) as session:
            step, told = int(session.run(global_step)), 0
            while not supervisor.should_stop() and step < options.train_steps:
                x, y = batches.next()
                _, step = session.run([train_op, global_step], {images: x, labels: y})
                if me.is_chief and step - told >= TEST_EVERY:
                    told = step
                    right = session.run(accuracy, {images: mnist.test.images, labels: mnist.test.labels})
                    print(f"step {step}: accuracy {right:.4f}", flush=True)
                    if options.logdir:
                        supervisor.summary_computed(session, session.run(curve, {tested: right}), int(step))
            if me.is_chief:
                right = session.run(accuracy, {images: mnist.test.images, labels: mnist.test.labels})
                print(f"Test-Accuracy: {np.float32(right):.4f}", flush=True)


if __name__ == "__main__":
    # ``join_cluster`` reads the flags that this parser does not know.
    main(*parser.parse_known_args())
