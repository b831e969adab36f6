"""TensorFlow's own distributed runtime (tf.compat.v1, between-graph, asynchronous, reference variables).

Written as TensorFlow 1's guide says to: `replica_device_setter`, one graph per worker, device
filters, one `run` a step. Runs in an environment with tensorflow-cpu; shares nothing with this
project but the protocol module beside it.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks.systems.protocol import CLASSES, INPUTS, initial, measure  # noqa: E402


def main(job, index, cluster_json, hidden, options_json):
    """Serves as a ps, or measures as a worker."""
    tf.disable_eager_execution()
    tf.disable_resource_variables()
    cluster = tf.train.ClusterSpec(json.loads(cluster_json))
    server = tf.train.Server(cluster, job_name=job, task_index=index)
    if job == "ps":
        server.join()
    worker = f"/job:worker/task:{index}"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=worker)):
        global_step = tf.train.get_or_create_global_step()
        values = initial(hidden)
        w1, b1, w2, b2 = (tf.Variable(values[k], name=k) for k in ("w1", "b1", "w2", "b2"))
        x = tf.placeholder(tf.float32, [None, INPUTS])
        y = tf.placeholder(tf.int32, [None])
        logits = tf.matmul(tf.sigmoid(tf.matmul(x, w1) + b1), w2) + b2
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        )
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=global_step)
        initialise = tf.global_variables_initializer()
        ready = tf.report_uninitialized_variables()
    config = tf.ConfigProto(device_filters=["/job:ps", worker])
    session = tf.Session(server.target, config=config)
    if index == 0:
        session.run(initialise)
    while len(session.run(ready)):
        pass
    run = session.make_callable([train_op, loss, global_step], feed_list=[x, y])
    measure(lambda images, labels: run(images, labels), seed=index)


if __name__ == "__main__":
    assert CLASSES == 10
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
