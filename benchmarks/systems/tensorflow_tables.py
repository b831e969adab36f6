"""TensorFlow's table on one ps: a step of the worker pulls unique rows, or pushes gradients for Adagrad.

`tf.nn.embedding_lookup` alone would move each row as often as its id comes, so the ids are made
unique first, as `embedding_lookup_sparse` does. TensorFlow has no row-wise Adagrad.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks.systems.protocol import DIM, ROWS, id_batches, measure  # noqa: E402


def main(job, index, cluster_json, options_json):
    """Serves as a ps, or measures as a worker."""
    tf.disable_eager_execution()
    cluster = tf.train.ClusterSpec(json.loads(cluster_json))
    server = tf.train.Server(cluster, job_name=job, task_index=index)
    if job == "ps":
        server.join()
    worker = "/job:worker/task:0"
    with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=worker)):
        first = tf.truncated_normal_initializer(stddev=DIM**-0.5)
        table = tf.get_variable("table", [ROWS, DIM], initializer=first, use_resource=True)
        ids = tf.placeholder(tf.int64, [None])
        gradients = tf.placeholder(tf.float32, [None, DIM])
        unique, places = tf.unique(ids)
        rows = tf.gather(tf.nn.embedding_lookup(table, unique), places)
        count = tf.shape(unique)[0]
        summed = tf.math.unsorted_segment_sum(gradients, places, count)
        slices = tf.IndexedSlices(summed, unique, tf.shape(table, out_type=tf.int64))
        push = tf.train.AdagradOptimizer(0.1).apply_gradients([(slices, table)])
        initialise = tf.global_variables_initializer()
    session = tf.Session(server.target)
    session.run(initialise)
    pull_rows = session.make_callable(rows, feed_list=[ids])
    push_rows = session.make_callable(push, feed_list=[ids, gradients])
    steps = {"pull": lambda i, g: pull_rows(i), "push": push_rows}
    measure(steps[json.loads(options_json)["kind"]], seed=0, data=id_batches())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[5])
