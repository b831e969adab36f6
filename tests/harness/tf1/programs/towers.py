"""In-graph replication: one client builds a tower for each worker, and averages their gradients on the ps.

The towers share the variables. What they learn together is compared with the same training in one
tower.
"""

import numpy as np
import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "address of the parameter server")
flags.DEFINE_string("worker_hosts", "", "addresses of the workers")
flags.DEFINE_string(
    "job_name", "", "ps, worker, or nothing: the client, which has worker 0 in its process"
)
flags.DEFINE_integer("task_index", 0, "number of this task")
FLAGS = flags.FLAGS

RATE, STEPS, ROWS = 0.1, 25, 8


def tower(x, y):
    with tf.variable_scope("line"):
        w = tf.get_variable("w", [3, 1], initializer=tf.constant_initializer(0.0))
        b = tf.get_variable("b", [1], initializer=tf.constant_initializer(0.0))
    return tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))


def average_gradients(towers):
    averaged = []
    for pairs in zip(*towers, strict=True):
        gradients = [tf.expand_dims(gradient, 0) for gradient, _ in pairs]
        averaged.append((tf.reduce_mean(tf.concat(gradients, 0), 0), pairs[0][1]))
    return averaged


def by_hand(x, y):
    w, b = np.zeros([3, 1]), np.zeros(1)
    for _ in range(STEPS):
        off = x.dot(w) + b - y
        w, b = w - RATE * 2 * x.T.dot(off) / len(x), b - RATE * 2 * off.mean()
    return w, b


def main(_):
    workers = FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": FLAGS.ps_hosts.split(","), "worker": workers})
    server = tf.train.Server(
        cluster, job_name=FLAGS.job_name or "worker", task_index=FLAGS.task_index
    )
    if FLAGS.job_name:
        server.join()

    x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
    opt = tf.train.GradientDescentOptimizer(RATE)
    losses, gradients = [], []
    with tf.variable_scope(tf.get_variable_scope()) as scope:
        shares = zip(tf.split(x, len(workers), 0), tf.split(y, len(workers), 0), strict=True)
        for i, (xs, ys) in enumerate(shares):
            with tf.device(
                tf.train.replica_device_setter(
                    worker_device=f"/job:worker/task:{i}", cluster=cluster
                )
            ):
                with tf.name_scope(f"tower_{i}"):
                    losses.append(tower(xs, ys))
                    gradients.append(opt.compute_gradients(losses[-1]))
                    scope.reuse_variables()
    with tf.device("/job:ps/task:0"):
        loss = tf.add_n(losses) / len(losses)
        train = opt.apply_gradients(average_gradients(gradients))
    assert [v.op.name for v in tf.trainable_variables()] == ["line/w", "line/b"]

    random = np.random.RandomState(0)
    inputs = random.rand(ROWS * len(workers), 3)
    targets = inputs.dot([[1.0], [-2.0], [3.0]]) + 0.5
    metadata = tf.RunMetadata()
    trace = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    with tf.Session(server.target) as sess:
        sess.run(tf.global_variables_initializer())
        found = [sess.run([train, loss], {x: inputs, y: targets})[1] for _ in range(STEPS - 1)]
        found.append(sess.run([train, loss], {x: inputs, y: targets}, trace, metadata)[1])
        w, b = sess.run(tf.trainable_variables())
    wanted_w, wanted_b = by_hand(inputs, targets)
    np.testing.assert_allclose(w, wanted_w, atol=1e-4)
    np.testing.assert_allclose(b, wanted_b, atol=1e-4)
    assert found[-1] < found[0] / 4
    ran = sorted(
        set(stats.device.partition("/device:")[0] for stats in metadata.step_stats.dev_stats)
    )
    print(f"ran on {ran} loss {found[-1]:.4f}")


if __name__ == "__main__":
    tf.app.run()
