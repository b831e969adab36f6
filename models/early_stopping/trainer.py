"""Training that an evaluator ends when the model gets no better, and whose best checkpoint is kept.

python -m harness.launch --ps=1 --workers=2 --evaluators=1 -- python -m models.early_stopping.trainer --logdir=runs/stop

The workers learn 1,000 images by heart, with a model that is large enough for it. The evaluator follows their
checkpoints with images that they do not see. Training ends when six checkpoints have not lowered the loss.
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
parser.add_argument("--logdir", required=True, help="Directory of checkpoints and TensorBoard events.")
parser.add_argument("--train_steps", type=int, default=20_000, help="Steps at the most, of all workers together.")
parser.add_argument("--patience", type=int, default=6, help="Evaluations without a better one that end training.")
parser.add_argument("--save_model_secs", type=float, default=1.0, help="Time between two checkpoints.")

TRAIN_IMAGES, UNSEEN = 1000, 5000
"""How many images the workers see, and how many of the others the evaluator takes."""


def init_params() -> dict[str, np.ndarray]:
    """Returns initial parameters: 784 pixels -> 256 units -> 10 digits."""
    rng = np.random.default_rng(1)
    w1, w2 = rng.normal(0, 784**-0.5, (784, 256)), rng.normal(0, 1 / 16, (256, 10))
    params = {"w1": w1, "b1": np.zeros(256), "w2": w2, "b2": np.zeros(10)}
    return {name: value.astype(np.float32) for name, value in params.items()}


def logits(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Returns the logits of images float32 [N, 784], as float32 [N, 10]."""
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of a batch, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def accuracy_fn(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the share of images that are classified correctly, 0 to 1."""
    return (logits(params, images).argmax(-1) == labels).mean()


def main(options: argparse.Namespace, others: list[str]) -> None:
    """Serves variables as a ps, trains as a worker, or evaluates checkpoints as the evaluator."""
    with harness.join_cluster(others) as me:
        mnist = data.load()
        with me.device():
            global_step = harness.get_or_create_global_step()
            params = rt.variables(init_params(), name="mlp")
            images = rt.placeholder(jnp.float32, [None, 784], name="images")
            labels = rt.placeholder(jnp.int32, [None], name="labels")
            loss = rt.call(loss_fn, params, images, labels)
            accuracy = rt.call(accuracy_fn, params, images, labels)
            train_op = harness.Optimizer(optax.adam(3e-4)).minimize(loss, global_step=global_step)

        if me.job == "evaluator":
            unseen = {images: mnist.test.images[:UNSEEN], labels: mnist.test.labels[:UNSEEN]}

            def evaluate(session: rt.Session, step: int) -> dict[str, float]:
                found, right = session.run([loss, accuracy], unseen)
                print(f"step {step}: loss {found:.4f}, accuracy {right:.4f}", flush=True)
                return {"loss": float(found), "accuracy": float(right)}

            stopping = {"best_by": "loss", "best_mode": "min", "patience": options.patience}
            best = harness.Evaluator(evaluate, options.logdir, master=me.target, **stopping).run().best
            # Every run saves a last checkpoint, which the evaluator evaluates.
            assert best is not None
            kept = harness.latest_checkpoint(f"{options.logdir}/eval/best")
            print(f"Best-Step: {best.step} of accuracy {best.metrics['accuracy']:.4f}, kept as {kept}", flush=True)
            return

        few = data.Split(mnist.train.pixels[:TRAIN_IMAGES], mnist.train.labels[:TRAIN_IMAGES])
        batches = data.Batches(few, 50, seed=1, shard_index=me.number, num_shards=me.workers)
        supervisor = harness.Supervisor(
            is_chief=me.is_chief,
            logdir=options.logdir,
            global_step=global_step,
            save_model_secs=options.save_model_secs,
            summary_op=None,
        )
        with supervisor.managed_session(me.target) as session:
            step = int(session.run(global_step))
            while not supervisor.should_stop() and step < options.train_steps:
                x, y = batches.next()
                _, step = session.run([train_op, global_step], {images: x, labels: y})
            print(f"worker {me.number}: training ended at step {step}", flush=True)


if __name__ == "__main__":
    # ``join_cluster`` reads the flags that this parser does not know.
    main(*parser.parse_known_args())
