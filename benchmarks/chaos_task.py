"""The training program of the chaos run: the MNIST model, and a ledger of every step.

It trains until the file ``end_step`` of the chaos directory tells at which global step to stop.
The learning rate is constant, because the number of steps is not known beforehand.
"""

import os
import sys
import time

import jax.numpy as jnp
import optax
from absl import app, flags, logging

import harness
import runtime as rt
from benchmarks.chaos_ledger import OPENED, Ledger
from harness.launch.tasks import ATTEMPT_VARIABLE
from models.mnist import data, model

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "Comma-separated host:port of the parameter servers.")
flags.DEFINE_list("worker_hosts", [], "Comma-separated host:port of the workers.")
flags.DEFINE_enum("job_name", "worker", ["ps", "worker"], "What this process is.")
flags.DEFINE_integer(
    "task_index", 0, "Which one of its job this process is, from 0. Worker 0 is the chief."
)
flags.DEFINE_string(
    "chaos_dir",
    None,
    "Directory of the ledgers, checkpoints and of the file end_step.",
    required=True,
)
flags.DEFINE_float("save_secs", 5.0, "Seconds between checkpoints, and between summaries.")
flags.DEFINE_integer(
    "ps_backups_lag",
    -1,
    "Backs each ps up on the next one, so many steps behind at most; -1: none.",
)
BATCH_SIZE = 100
LEARNING_RATE = 0.001
_POLL_SECS = 0.2


def main(argv: list[str]) -> None:
    """Serves as a ps, or trains as a worker."""
    del argv
    cluster = {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts}
    # first: "listening" then means ready to train
    mnist = None if FLAGS.job_name == "ps" else data.load(None)
    backed_up = FLAGS.job_name == "ps" and FLAGS.ps_backups_lag >= 0
    backups = {"ps_backups": 1, "ps_backups_lag": FLAGS.ps_backups_lag} if backed_up else {}
    with rt.Server(cluster, FLAGS.job_name, FLAGS.task_index, **backups) as server:
        if mnist is None:
            server.join()
        else:
            work(server, mnist)


def work(server: rt.Server, mnist: data.MnistData) -> None:
    """Trains until the order to stop. Then the chief tests."""
    ledger = Ledger(FLAGS.chaos_dir, f"worker-{FLAGS.task_index}")
    logging.get_absl_logger().addHandler(ledger)
    # Another order in every life: a worker that is killed often would else see the same first
    # batches again and again.
    seed = 1 + 1000 * int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    workers = server.cluster.num_tasks("worker")
    batches = data.Batches(mnist.train, BATCH_SIZE, seed, FLAGS.task_index, workers)
    is_chief = FLAGS.task_index == 0
    here = f"/job:worker/task:{FLAGS.task_index}"
    with rt.device(rt.replica_device_setter(cluster=server.cluster, worker_device=here)):
        global_step = harness.get_or_create_global_step()
        params = rt.variables(model.init(1, 100), name="mlp")
        images = rt.placeholder(jnp.float32, [None, data.IMAGE_PIXELS], name="images")
        labels = rt.placeholder(jnp.int32, [None], name="labels")
        loss = rt.call(model.loss_fn, params, images, labels, name="loss")
        accuracy = rt.call(model.accuracy, params, images, labels, name="accuracy")
        train_op = harness.Optimizer(optax.adam(LEARNING_RATE)).minimize(
            loss, global_step=global_step
        )
        harness.summary.histogram("w1", params["w1"])
    count = next(
        op for op in global_step.graph.get_operations() if op.name.endswith("/count_step")
    ).outputs[0]
    supervisor = harness.Supervisor(
        is_chief=is_chief,
        logdir=os.path.join(FLAGS.chaos_dir, "run"),
        global_step=global_step,
        save_model_secs=FLAGS.save_secs,
        save_summaries_secs=FLAGS.save_secs,
        stop_grace_secs=60,
    )
    right = 0.0
    with supervisor.managed_session(server.target) as session:
        ledger.enter("log", text=OPENED)
        end, look_at = None, 0.0
        while not supervisor.should_stop():
            if (now := time.monotonic()) >= look_at:
                end, look_at = end_step(), now + _POLL_SECS
                if end is not None and int(session.run(global_step)) >= end:
                    break
            batch = batches.next()
            ledger.enter("begin")
            _, step = session.run([train_op, count], {images: batch[0], labels: batch[1]})
            ledger.enter("done", int(step))
            if end is not None and step >= end:
                break
        if is_chief and not supervisor.should_stop():
            for chunk in mnist.test.chunks(1000):
                right += len(chunk[1]) * float(
                    session.run(accuracy, {images: chunk[0], labels: chunk[1]})
                )
    if is_chief:
        print(f"Test-Accuracy: {right / len(mnist.test):.4f}", flush=True)


def end_step() -> int | None:
    """Returns the global step at which training stops; None while it is unknown."""
    try:
        with open(os.path.join(FLAGS.chaos_dir, "end_step"), encoding="utf-8") as file:
            return int(file.read())
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
