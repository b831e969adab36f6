"""TensorFlow's SyncReplicasOptimizer (tf.compat.v1) under a MonitoredTrainingSession, as its guide says to use it.

Runs in an environment with tensorflow-cpu; shares nothing with this project but the protocol module beside it.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks.systems.protocol import INPUTS, initial, measure_steps  # noqa: E402


def main(job, index, cluster_json, hidden, mode):
    """Serves as a ps, or measures as a worker."""
    tf.disable_eager_execution()
    tf.disable_resource_variables()
    addresses = json.loads(cluster_json)
    cluster = tf.train.ClusterSpec(addresses)
    server = tf.train.Server(cluster, job_name=job, task_index=index)
    if job == "ps":
        server.join()
    workers = len(addresses["worker"])
    worker = f"/job:worker/task:{index}"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=worker)):
        global_step = tf.train.get_or_create_global_step()
        values = initial(hidden)
        w1, b1, w2, b2 = (tf.Variable(values[k], name=k) for k in ("w1", "b1", "w2", "b2"))
        x = tf.placeholder(tf.float32, [None, INPUTS])
        y = tf.placeholder(tf.int32, [None])
        logits = tf.matmul(tf.sigmoid(tf.matmul(x, w1) + b1), w2) + b2
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        optimizer = tf.train.SyncReplicasOptimizer(
            tf.train.GradientDescentOptimizer(0.1), replicas_to_aggregate=workers, total_num_replicas=workers
        )
        train_op = optimizer.minimize(loss, global_step=global_step)
    hook = optimizer.make_session_run_hook(index == 0, num_tokens=0)
    config = tf.ConfigProto(device_filters=["/job:ps", worker])
    with tf.train.MonitoredTrainingSession(server.target, index == 0, hooks=[hook], config=config) as session:
        fetches = [train_op, loss, global_step]
        measure_steps(lambda images, labels: session.run(fetches, {x: images, y: labels})[2], seed=index)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
