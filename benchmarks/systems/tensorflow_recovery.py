"""TensorFlow's MonitoredTrainingSession as a task of the recovery benchmark: trains, and writes a ledger of its steps.

Runs in an environment with tensorflow-cpu; shares nothing with this project but the ledger's format.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks.chaos_ledger import Entry  # noqa: E402

INPUTS, HIDDEN, CLASSES, BATCH = 784, 100, 10, 100


def main():
    """Serves as a ps, or trains as a worker."""
    parser = argparse.ArgumentParser()
    for name in ("ps_hosts", "worker_hosts", "job_name", "directory"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--task_index", type=int)
    parser.add_argument("--save_secs", type=float)
    options = parser.parse_args()
    tf.disable_eager_execution()
    tf.disable_resource_variables()
    tf.logging.set_verbosity(tf.logging.INFO)
    cluster = tf.train.ClusterSpec({"ps": options.ps_hosts.split(","), "worker": options.worker_hosts.split(",")})
    server = tf.train.Server(cluster, job_name=options.job_name, task_index=options.task_index)
    if options.job_name == "ps":
        server.join()
    worker = f"/job:worker/task:{options.task_index}"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=worker)):
        global_step = tf.train.get_or_create_global_step()
        random = np.random.default_rng(0)
        w1 = tf.Variable(random.normal(0, 0.03, (INPUTS, HIDDEN)).astype(np.float32), name="w1")
        b1 = tf.Variable(np.zeros(HIDDEN, np.float32), name="b1")
        w2 = tf.Variable(random.normal(0, 0.03, (HIDDEN, CLASSES)).astype(np.float32), name="w2")
        b2 = tf.Variable(np.zeros(CLASSES, np.float32), name="b2")
        x = tf.placeholder(tf.float32, [None, INPUTS])
        y = tf.placeholder(tf.int32, [None])
        logits = tf.matmul(tf.sigmoid(tf.matmul(x, w1) + b1), w2) + b2
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        train_op = tf.train.AdamOptimizer(0.001).minimize(loss, global_step=global_step)
        with tf.control_dependencies([train_op]):
            count = tf.identity(global_step)
    images = random.random((BATCH, INPUTS), np.float32)
    labels = random.integers(0, CLASSES, BATCH)
    attempt = os.environ.get("BELLWETHER_ATTEMPT", "0")
    path = os.path.join(options.directory, f"worker-{options.task_index}-{attempt}.ledger")
    ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    config = tf.ConfigProto(device_filters=["/job:ps", worker])
    with tf.train.MonitoredTrainingSession(
        server.target,
        options.task_index == 0,
        checkpoint_dir=os.path.join(options.directory, "run"),
        save_checkpoint_secs=options.save_secs,
        save_summaries_secs=None,
        log_step_count_steps=None,
        config=config,
    ) as session:
        while not session.should_stop():
            step = int(session.run(count, {x: images, y: labels}))
            os.write(ledger, f"{Entry(time.monotonic(), 'done', step).line()}\n".encode())


if __name__ == "__main__":
    main()
